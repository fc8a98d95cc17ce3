//! Learning rates that decrease from the classifier to the first layer (`optimizer.layer_decay`; timm's
//! `param_groups_layer_decay`).

use std::collections::HashMap;

use models::{
    Network, StateKind,
    state::{self, is_within},
};

/// Returns the factor of the learning rate of each weight. The classifier has the factor 1. Each group before has `decay` times
/// the factor of the next group. Frozen weights count as layers too.
pub(super) fn factors(network: &Network, decay: f64) -> HashMap<String, f64> {
    let mut names = Vec::new();
    state::visit(network, |info, kind, _| {
        if kind != StateKind::Buffer {
            names.push(info.name);
        }
    });
    let groups = groups(&names, &state::head(network));
    let last = groups.iter().copied().max().unwrap_or(0);
    let factor = |group: usize| decay.powi((last - group) as i32);
    names.into_iter().zip(groups).map(|(name, group)| (name, factor(group))).collect()
}

/// Returns the number of each weight's group of layers, from 0. The groups are those of timm's ResNets: the layers before the
/// first block (the stem), each block, and the classifier `head`. A block's name is the first two parts of a weight's name if
/// the second part is a number (`layer1.0`), otherwise the first part (`trans1` of `trans1.conv`). A layer outside of blocks
/// belongs to the group before it. In a network without blocks each layer is a group.
fn groups(names: &[String], head: &str) -> Vec<usize> {
    let block = |name: &str| -> Option<String> {
        let (module, _) = name.rsplit_once('.')?;
        let mut parts = module.split('.');
        let (first, second) = (parts.next()?, parts.next()?);
        let is_number = second.bytes().all(|byte| byte.is_ascii_digit());
        Some(if is_number { format!("{first}.{second}") } else { first.to_owned() })
    };
    let of_head = |name: &String| is_within(name, head);
    let has_blocks = names.iter().any(|name| !of_head(name) && block(name).is_some());
    let layer = |name: &str| name.rsplit_once('.').map_or(name, |(module, _)| module).to_owned();
    let (mut group, mut current) = (0, None);
    let mut numbers = Vec::with_capacity(names.len());
    for name in names {
        let key = match has_blocks {
            _ if of_head(name) => Some(head.to_owned()),
            true => block(name),
            false => Some(layer(name)),
        };
        // Group 0 starts with the first layer, even if this layer is a block.
        if let Some(key) = key
            && current.as_ref() != Some(&key)
        {
            group += usize::from(!numbers.is_empty());
            current = Some(key);
        }
        numbers.push(group);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use models::Spec;

    use super::*;

    fn of(model: &str, decay: f64) -> impl Fn(&str) -> f64 {
        let spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };
        let network = models::skip_init(model, &spec).expect(model);
        let factors = factors(&network, decay);
        move |name: &str| factors[name]
    }

    /// The scales of timm 1.0.31: `param_groups_layer_decay(create_model("resnet18"), layer_decay=0.5)`.
    #[test]
    fn the_groups_of_a_resnet_are_timms() {
        let factor = of("resnet18_imagenet", 0.5);
        for (name, steps) in [
            ("fc.weight", 0),
            ("fc.bias", 0),
            ("layer4.1.conv1.weight", 1),
            ("layer4.1.bn2.bias", 1),
            ("layer4.0.downsample.0.weight", 2),
            ("layer3.1.conv2.weight", 3),
            ("layer3.0.conv2.weight", 4),
            ("layer2.0.conv1.weight", 6),
            ("layer1.1.conv1.weight", 7),
            ("layer1.0.conv1.weight", 8),
            ("bn1.weight", 9),
            ("conv1.weight", 9),
        ] {
            assert_eq!(factor(name), 0.5f64.powi(steps), "{name}");
        }
    }

    #[test]
    fn the_classifier_of_every_network_has_the_whole_rate_and_the_first_layer_the_least() {
        for entry in models::entries() {
            let network = models::skip_init(entry.name, &entry.spec).expect(entry.name);
            let (factors, head) = (factors(&network, 0.9), state::head(&network));
            let mut names = Vec::new();
            state::visit(&network, |info, kind, _| {
                if kind == StateKind::Parameter {
                    names.push(info.name);
                }
            });
            let least = factors.values().copied().fold(1.0, f64::min);
            assert_eq!((factors[&names[0]], factors[&format!("{head}.weight")]), (least, 1.0), "{}", entry.name);
            assert!(names.is_sorted_by(|a, b| factors[a] <= factors[b]), "{}: the rates rise", entry.name);
            assert!(least < 0.9, "{}: there are three groups or more", entry.name);
        }
    }

    #[test]
    fn layers_without_blocks_are_groups_and_others_join_the_block_before() {
        let numbers =
            |names: &[&str], head| groups(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), head);
        assert_eq!(numbers(&["conv1.weight", "conv1.bias", "fc1.weight", "fc2.weight"], "fc2"), [0, 0, 1, 2]);
        let mixed =
            ["conv.weight", "bn.weight", "a.0.x.weight", "a.0.y.weight", "b.x.weight", "bn2.weight", "fc.weight"];
        assert_eq!(numbers(&mixed, "fc"), [0, 0, 1, 1, 2, 2, 3]);
        assert_eq!(numbers(&["f.0.weight", "f.1.weight", "c.1.weight", "c.1.bias"], "c.1"), [0, 1, 2, 2]);
    }
}
