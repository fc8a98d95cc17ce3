//! Frozen weights: no gradient, no update, and the same gradients for all other weights. `golden.rs` compares a frozen network with
//! PyTorch.

use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use models::{Context, Network, Spec, StateKind, StateTensor, state_dict};

const SPEC: Spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };

fn build(name: &str, frozen: &[&str]) -> Network {
    let frozen: Vec<String> = frozen.iter().map(|name| (*name).to_owned()).collect();
    models::build_frozen(name, &SPEC, 5, &Device::flex().autodiff(), &frozen).unwrap()
}

fn images() -> Tensor<4> {
    let device = Device::flex().autodiff();
    device.seed(3);
    Tensor::random([4, 3, 32, 32], Distribution::Normal(0.0, 1.0), &device)
}

/// Returns name and gradient of each trained parameter after one training pass.
fn gradients(network: &Network, images: Tensor<4>, bf16: bool) -> Vec<(String, Option<Vec<f32>>)> {
    let loss = network.forward(images, &Context::train().autocast_bf16(bf16)).powf_scalar(2.0).mean();
    let gradients = models::take_gradients(&mut loss.backward(), network);
    let values = |tensor: Tensor<1>| tensor.into_data().try_into_vec_as::<f32>().unwrap();
    models::parameters(network).into_iter().map(|p| p.name).zip(gradients.into_iter().map(|g| g.map(values))).collect()
}

#[test]
fn freezing_changes_no_value_and_no_other_gradient() {
    let images = images();
    // Convolutions and linear layers: a frozen batch norm computes something else.
    for (name, frozen) in [
        ("lenet", vec!["conv1.weight", "fc2"]),
        ("resnet18", vec!["layer2.0.conv1", "linear.bias"]),
        ("resnet18_imagenet", vec!["conv1", "layer3.1.conv2", "fc.weight"]),
        ("mobilenet_v2_imagenet", vec!["features.3.conv.1.0", "classifier"]),
        ("efficientnet_b0_imagenet", vec!["features.2.0.block.2", "features.0.0"]),
        ("shufflenetv2_x0_5", vec!["layer2.0.conv2"]),
    ] {
        let (free, part) = (build(name, &[]), build(name, &frozen));
        let same = |a: &StateTensor, b: &StateTensor| a.name == b.name && a.values == b.values;
        assert!(state_dict(&free).iter().zip(&state_dict(&part)).all(|(a, b)| same(a, b)), "{name}");
        let is_frozen = |name: &str| frozen.iter().any(|module| models::state::is_within(name, module));
        for bf16 in [false, true] {
            let (all, rest) = (gradients(&free, images.clone(), bf16), gradients(&part, images.clone(), bf16));
            let expected: Vec<_> = all.into_iter().filter(|(name, _)| !is_frozen(name)).collect();
            assert!(!expected.is_empty() && expected.len() == rest.len(), "{name}");
            for ((weight, free), (of, part)) in expected.into_iter().zip(rest) {
                assert_eq!(weight, of);
                assert!(free.is_some() && free == part, "{name} {weight}, bf16: {bf16}");
            }
        }
    }
}

#[test]
fn frozen_batch_norms_keep_their_statistics_and_pass_gradients_on() {
    for name in ["resnet18", "resnet18_imagenet"] {
        for bf16 in [false, true] {
            // Every batch norm, with trained layers on both sides of most.
            let norms: Vec<String> = {
                let all = state_dict(&build(name, &[])).into_iter().map(|t| t.name);
                all.filter_map(|name| name.strip_suffix(".running_var").map(str::to_owned)).collect()
            };
            let network = build(name, &norms.iter().map(String::as_str).collect::<Vec<_>>());
            let before = state_dict(&network);
            let gradients = gradients(&network, images(), bf16);
            assert_eq!(state_dict(&network), before, "no statistic has moved");
            assert!(gradients.iter().all(|(_, gradient)| gradient.as_ref().unwrap().iter().any(|g| *g != 0.0)));
            assert!(before.iter().all(|t| t.kind != StateKind::Buffer), "the statistics belong to frozen layers");
            // Training mode then computes what evaluation does.
            let [train, eval] = [Context::train(), Context::eval()].map(|cx| {
                let logits = network.valid().forward(images().without_autodiff(), &cx.autocast_bf16(bf16));
                logits.into_data().try_into_vec_as::<f32>().unwrap()
            });
            assert_eq!(train, eval, "{name}");
        }
    }
}

#[test]
fn a_batch_norm_with_one_trained_weight_is_trained() {
    let network = build("resnet18", &["bn1.weight"]);
    let before = state_dict(&network);
    let gradients = gradients(&network, images(), false);
    let after = state_dict(&network);
    let changed = |name: &str| {
        let of = |state: &[StateTensor]| state.iter().find(|t| t.name == name).unwrap().values.clone();
        of(&before) != of(&after)
    };
    assert!(changed("bn1.running_mean") && changed("bn1.running_var") && !changed("bn1.weight"));
    assert!(gradients.iter().any(|(name, _)| name == "bn1.bias"));
    assert!(gradients.iter().all(|(name, _)| name != "bn1.weight"));
}

#[test]
fn names_are_whole_segments_of_a_path() {
    let frozen = |names: &[&str]| -> Vec<String> {
        let state = state_dict(&build("resnet18", names));
        state.into_iter().filter(|t| t.kind == StateKind::Frozen).map(|t| t.name).collect()
    };
    assert_eq!(frozen(&["conv1"]), ["conv1.weight"], "not layer1.0.conv1");
    assert_eq!(frozen(&["layer"]), [] as [String; 0]);
    assert_eq!(frozen(&["layer1.0.conv"]), [] as [String; 0]);
    assert_eq!(frozen(&["bn1"]), ["bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"]);
    // airbench94's own frozen weights stay frozen.
    let airbench = state_dict(&build("airbench94", &["layer1.norm1"]));
    let frozen: Vec<_> = airbench.iter().filter(|t| t.kind == StateKind::Frozen).map(|t| t.name.as_str()).collect();
    assert!(frozen.contains(&"whiten.weight") && frozen.contains(&"layer1.norm1.running_var"), "{frozen:?}");
    assert!(frozen.contains(&"layer1.norm2.weight") && !frozen.contains(&"layer1.norm2.running_var"), "{frozen:?}");
}

#[test]
fn the_head_is_the_classifier() {
    for entry in models::entries() {
        let network = models::skip_init(entry.name, &SPEC);
        let network = network.unwrap_or_else(|_| models::skip_init(entry.name, &entry.spec).unwrap());
        let head = models::state::head(&network);
        let weight = state_dict(&network).into_iter().find(|t| t.name == format!("{head}.weight")).expect(entry.name);
        assert_eq!(weight.shape[0], 10, "{}: {head}", entry.name);
    }
    assert_eq!(models::state::head(&build("resnet18_imagenet", &[])), "fc");
    assert_eq!(models::state::head(&build("mobilenet_v2_imagenet", &[])), "classifier.1");
}

/// torchvision's `StochasticDepth(p, "row")`: the branch of a sample is dropped as a whole, and scaled otherwise.
#[test]
fn stochastic_depth_drops_whole_samples() {
    let layer = models::layers::StochasticDepth::new(0.25);
    let device = Device::flex().autodiff();
    let (branch, input) = (Tensor::<4>::ones([400, 3, 2, 2], &device), Tensor::<4>::zeros([400, 3, 2, 2], &device));
    let keys: Vec<u64> = (0..400).collect();
    let run = |cx: Context| {
        let output = layer.add(branch.clone(), input.clone(), &cx).into_data().try_into_vec::<f32>().unwrap();
        output.chunks_exact(12).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    let rows = run(Context::train().with_dropout(keys.clone()));
    assert!(rows.iter().all(|row| row.iter().all(|value| *value == row[0])), "a sample at a time");
    assert!(rows.iter().all(|row| row[0] == 0.0 || (row[0] - 4.0 / 3.0).abs() < 1e-6));
    let dropped = rows.iter().filter(|row| row[0] == 0.0).count();
    // Five standard deviations of a binomial.
    assert!((dropped as f64 - 100.0).abs() < 5.0 * (400.0_f64 * 0.25 * 0.75).sqrt(), "{dropped} of 400");
    assert!(run(Context::eval().with_dropout(keys)).iter().flatten().all(|value| *value == 1.0));
}
