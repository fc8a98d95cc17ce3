//! Maps the paths in a file to the names in a network.
//!
//! `DataParallel` and `DistributedDataParallel` put `module` in front of the wrapped names, and `torch.compile` puts
//! `_orig_mod`. A training script puts the weights below `net`, `state_dict`, `model`, …, beside its optimizer. This
//! module does not list all those keys. Instead, it searches for the network's own names at the end of the file's paths.
//! The prefix of most matches is the wrapper.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashSet},
};

/// Segments that wrappers add anywhere in a path. No network has a module with such a name.
const WRAPPERS: [&str; 2] = ["module", "_orig_mod"];

/// Returns `path` without the segments that wrappers add.
pub(super) fn strip_wrappers(path: &str) -> String {
    path.split('.').filter(|segment| !WRAPPERS.contains(segment)).collect::<Vec<_>>().join(".")
}

/// Returns the prefix of the network's names in a file: empty, or the wrapper's keys with a trailing dot.
///
/// `paths` are results of [`strip_wrappers`]. If several prefixes fit equally well, plain weights are preferred to averaged ones
/// (`model` to `model_ema`), then the shorter prefix, then the first in alphabetical order. If no name is found, the prefix is
/// empty.
pub(super) fn find_wrapper_prefix(expected: &HashSet<&str>, paths: &[String]) -> String {
    let mut votes: BTreeMap<&str, usize> = BTreeMap::new();
    for path in paths {
        let starts = std::iter::once(0).chain(path.match_indices('.').map(|(dot, _)| dot + 1));
        for start in starts.filter(|&start| expected.contains(&path[start..])) {
            *votes.entry(&path[..start]).or_default() += 1;
        }
    }
    let Some(&most) = votes.values().max() else { return String::new() };
    // If the weights do not fit, a block may match more names than the whole network does: `layer1.0.conv1.weight`, ….
    let below = |prefix: &str| paths.iter().filter(|path| path.starts_with(prefix)).count();
    let rank = |prefix: &str, votes: usize| match most == expected.len() {
        true => votes,
        false if votes >= most.div_ceil(2) => below(prefix),
        false => 0,
    };
    let averaged =
        |prefix: &str| prefix.to_ascii_lowercase().split(['.', '_']).any(|word| word == "ema" || word == "swa");
    votes
        .into_iter()
        .min_by_key(|&(prefix, votes)| (Reverse(rank(prefix, votes)), averaged(prefix), prefix.len(), prefix))
        .map(|(prefix, _)| prefix.to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: [&str; 4] = ["conv1.weight", "conv1.bias", "layer1.0.conv1.weight", "fc.weight"];

    fn found(paths: &[&str]) -> String {
        let paths: Vec<_> = paths.iter().map(|path| strip_wrappers(path)).collect();
        find_wrapper_prefix(&EXPECTED.into(), &paths)
    }

    #[test]
    fn the_prefix_of_a_wrapper_is_found_under_any_name() {
        let below = |prefix: &str| EXPECTED.map(|name| format!("{prefix}{name}"));
        for (wrapper, expected) in [
            ("", ""),
            ("module.", ""),
            ("_orig_mod.module.", ""),
            ("net.", "net."),
            ("net.module.", "net."),
            ("state_dict.model._orig_mod.", "state_dict.model."),
            ("checkpoint.weights.", "checkpoint.weights."),
        ] {
            let mut paths = below(wrapper).to_vec();
            paths.push("optimizer.state.0.momentum_buffer".to_owned());
            let paths: Vec<_> = paths.iter().map(String::as_str).collect();
            assert_eq!(found(&paths), expected, "{wrapper}");
        }
    }

    #[test]
    fn plain_weights_are_preferred_to_averaged_ones() {
        let both: Vec<String> = EXPECTED.iter().flat_map(|n| [format!("model.{n}"), format!("ema.{n}")]).collect();
        let both: Vec<_> = both.iter().map(String::as_str).collect();
        assert_eq!(found(&both), "model.");
        assert_eq!(found(&["model_ema.fc.weight", "model_ema.module.conv1.weight"]), "model_ema.");
    }

    #[test]
    fn a_block_whose_names_match_is_not_taken_for_the_network() {
        let paths =
            ["conv1.weight", "layer1.0.conv1.weight", "layer1.0.conv1.bias", "layer1.0.bn1.weight", "linear.bias"];
        assert_eq!(found(&paths), "");
        assert_eq!(found(&paths.map(|path| format!("net.{path}")).each_ref().map(String::as_str)), "net.");
    }

    #[test]
    fn a_name_at_the_end_of_another_name_does_not_decide_the_prefix() {
        assert_eq!(found(&["conv1.weight", "conv1.bias", "layer1.0.conv1.weight"]), "");
        assert_eq!(found(&["features.0.weight"]), "");
        assert_eq!(found(&[]), "");
        assert_eq!(strip_wrappers("features.module.0.weight"), "features.0.weight");
        assert_eq!(strip_wrappers("module.submodule.weight"), "submodule.weight");
    }

    #[test]
    fn no_network_has_a_module_of_a_wrappers_name() {
        let spec = models::Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };
        for entry in models::entries() {
            let network = models::skip_init(entry.name, &spec).unwrap();
            for parameter in models::parameters(&network) {
                assert_eq!(strip_wrappers(&parameter.name), parameter.name, "{}", entry.name);
            }
        }
    }
}
