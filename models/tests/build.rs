//! The registry, errors of building, initial weights and image sizes.

use burn::tensor::{Device, Tensor};
use models::{BuildError, Context, Spec, StateKind, StateTensor, state_dict};

const SPEC: Spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };

fn build(name: &str, spec: Spec, seed: u64) -> models::Network {
    models::build(name, &spec, seed, &Device::flex()).unwrap()
}

/// Formats the error as a user sees it.
fn rejection(name: &str, spec: Spec) -> String {
    let error = models::build(name, &spec, 1, &Device::flex()).unwrap_err();
    format!("{}: {error}\nhint: {}", error.key(), error.hint())
}

#[test]
fn parameter_counts_are_the_published_ones() {
    // PyTorch's counts for pytorch-cifar's definitions. `golden.rs` checks the models that have a reference file.
    for (name, parameters) in
        [("vgg11", 9_231_114), ("vgg13", 9_416_010), ("vgg19", 20_040_522), ("resnet34", 21_282_122)]
    {
        let network = build(name, SPEC, 1);
        assert_eq!(models::parameters(&network).iter().map(|p| p.len()).sum::<usize>(), parameters, "{name}");
    }
    let deepest = models::parameters(&build("resnet152", SPEC, 1));
    assert_eq!(deepest.iter().map(|p| p.len()).sum::<usize>(), 58_156_618);
    assert!(deepest.iter().any(|p| p.name == "layer3.35.bn3.bias" && p.shape == [1024]));
}

#[test]
fn the_table_is_the_published_one() {
    let published: Vec<_> = models::entries().iter().filter_map(|e| Some((e.name, e.published_top1?))).collect();
    let table = [
        ("vgg16", 92.64),
        ("resnet18", 93.02),
        ("resnet50", 93.62),
        ("resnet101", 93.75),
        ("regnetx_200mf", 94.24),
        ("regnety_400mf", 94.29),
        ("mobilenetv2", 94.43),
        ("resnext29_32x4d", 94.73),
        ("resnext29_2x64d", 94.82),
        ("simple_dla", 94.89),
        ("densenet121", 95.04),
        ("preact_resnet18", 95.11),
        ("dpn92", 95.16),
        ("dla", 95.47),
    ];
    assert_eq!(published, table);
    for entry in models::entries() {
        assert_eq!(models::find(entry.name).unwrap().name, entry.name);
    }
}

#[test]
fn parameters_and_activations_are_estimated_for_images_of_any_size() {
    for name in ["lenet", "resnet18", "densenet121"] {
        let spec = Spec { image_size: [96, 160], ..SPEC };
        let network = models::skip_init(name, &spec).unwrap();
        let parameters: usize = models::parameters(&network).iter().map(|parameter| parameter.len()).sum();
        let exact = [parameters as f64, models::cost(&network, &spec).activations as f64];
        let estimate = models::estimate_size(name, &spec).unwrap();
        // LeNet's convolutions cut a border off, whose share of the image falls with its size: the estimate is too low.
        for (estimate, exact) in estimate.into_iter().zip(exact) {
            assert!((0.75..1.02).contains(&(estimate / exact)), "{name}: {estimate} for {exact}");
        }
    }
}

#[test]
fn unknown_names_get_similar_names() {
    let ask = |name| rejection(name, SPEC);
    assert_eq!(ask("ResNet-18"), "model.name: there is no model `ResNet-18`\nhint: did you mean `resnet18`?");
    assert_eq!(ask("letnet"), "model.name: there is no model `letnet`\nhint: did you mean `lenet`?");
    assert_eq!(
        ask("vgg12"),
        "model.name: there is no model `vgg12`\nhint: did you mean `vgg11` or `vgg13` or `vgg16`?"
    );
    assert_eq!(
        ask("ShuffleNet-V2"),
        "model.name: there is no model `ShuffleNet-V2`\n\
         hint: did you mean `shufflenetv2_x1` or `shufflenetv2_x2` or `shufflenetv2_x0_5`?"
    );
    assert_eq!(
        ask("ResNeXt29(32x4d)"),
        "model.name: there is no model `ResNeXt29(32x4d)`\nhint: did you mean `resnext29_32x4d`?"
    );
    let all = ask("transformer");
    for entry in models::entries() {
        assert!(all.contains(entry.name), "{all}");
    }
    assert!(ask("").contains("the models are"));
}

#[test]
fn impossible_specifications_are_rejected() {
    assert_eq!(
        rejection("vgg16", Spec { image_size: [28, 28], in_channels: 1, ..SPEC }),
        "data.image_size: vgg16 needs images of at least 32x32 pixels, these are 28x28\n\
         hint: set `data.image_size = 32` to enlarge the images, or choose lenet or a resnet"
    );
    assert_eq!(
        rejection("lenet", Spec { image_size: [15, 64], ..SPEC }),
        "data.image_size: lenet needs images of at least 16x16 pixels, these are 15x64\n\
         hint: set `data.image_size = 16` to enlarge the images"
    );
    assert!(matches!(
        models::build("resnet18", &Spec { image_size: [0, 0], ..SPEC }, 1, &Device::flex()),
        Err(BuildError::ImageTooSmall { .. })
    ));
    assert!(rejection("lenet", Spec { num_classes: 0, ..SPEC }).starts_with("model.num_classes: "));
    assert!(rejection("lenet", Spec { in_channels: 0, ..SPEC }).contains("at least one input channel"));
}

#[test]
fn every_family_runs_on_the_sizes_it_accepts() {
    // The smallest images that each model accepts, and MNIST's size.
    let mut cases = vec![
        ("lenet", Spec { num_classes: 3, in_channels: 3, image_size: [16, 40] }),
        ("vgg11", Spec { num_classes: 100, in_channels: 1, image_size: [32, 70] }),
    ];
    for entry in models::entries() {
        if entry.name.starts_with("resnet1") && entry.name != "resnet18" || entry.name == "dpn92" {
            continue; // Deeper networks of the same blocks.
        }
        let accepts = |side: usize| models::skip_init(entry.name, &Spec { image_size: [side, 48], ..SPEC }).is_ok();
        let least = (1..33).find(|&side| accepts(side));
        let image_size = [least.unwrap(), 48];
        cases.push((entry.name, Spec { num_classes: 7, in_channels: 3, image_size }));
        if !entry.name.starts_with("vgg") {
            // MNIST's images, padded where the model needs larger ones.
            let side = least.unwrap().max(28);
            cases.push((entry.name, Spec { num_classes: 10, in_channels: 1, image_size: [side; 2] }));
        }
    }
    for (name, spec) in cases {
        let network = build(name, spec, 1);
        let [height, width] = spec.image_size;
        let batch = network.smallest_batch(spec.image_size);
        let images = Tensor::<4>::ones([batch, spec.in_channels, height, width], &Device::flex());
        for cx in [Context::train(), Context::eval()] {
            let logits = network.forward(images.clone(), &cx);
            assert_eq!(logits.dims(), [batch, spec.num_classes], "{name}");
            assert!(logits.into_data().try_into_vec::<f32>().unwrap().iter().all(|v| v.is_finite()), "{name}");
        }
    }
    let shape_of = |image_size, in_channels| {
        let state = state_dict(&build("lenet", Spec { num_classes: 10, in_channels, image_size }, 1));
        state.into_iter().find(|t| t.name == "fc1.weight").unwrap().shape
    };
    assert_eq!(shape_of([28, 28], 1), [120, 256]);
    assert_eq!(shape_of([32, 32], 3), [120, 400]);
}

#[test]
fn initial_weights_depend_on_seed_and_name_alone() {
    let reference = state_dict(&build("resnet18", SPEC, 7));
    assert_eq!(state_dict(&build("resnet18", SPEC, 7)), reference);
    assert_ne!(state_dict(&build("resnet18", SPEC, 8)), reference);

    // An autodiff device, threads that build at the same time, and other states of burn's generator.
    let others: Vec<Vec<StateTensor>> = std::thread::scope(|scope| {
        let spawn = |burn_seed| {
            scope.spawn(move || {
                let device = Device::flex().autodiff();
                device.seed(burn_seed);
                state_dict(&models::build("resnet18", &SPEC, 7, &device).unwrap())
            })
        };
        [spawn(1), spawn(2)].map(|thread| thread.join().unwrap()).into()
    });
    assert!(others.iter().all(|other| *other == reference));

    // Layers of the same shape differ.
    let find = |name: &str| &reference.iter().find(|t| t.name == name).unwrap().values;
    assert_ne!(find("layer1.0.conv1.weight"), find("layer1.0.conv2.weight"));
    // The name is the full path, so modules with the same path have equal weights in all models.
    let deeper = state_dict(&build("resnet34", SPEC, 7));
    let same = deeper.iter().find(|t| t.name == "layer2.0.shortcut.0.weight").unwrap();
    assert_eq!(&same.values, find("layer2.0.shortcut.0.weight"));
}

#[test]
fn initial_weights_have_pytorchs_distribution() {
    // airbench94 starts with other weights: see the test below.
    for name in models::entries().iter().map(|entry| entry.name).filter(|name| *name != "airbench94") {
        let state = state_dict(&build(name, SPEC, 3));
        for (index, tensor) in state.iter().enumerate() {
            let uniform = |fan_in: usize| {
                let bound = 1.0 / (fan_in as f64).sqrt();
                let n = tensor.values.len() as f64;
                let mean = tensor.values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
                let variance = tensor.values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
                let expected = bound * bound / 3.0;
                let what = format!("{name} {}", tensor.name);
                assert!(tensor.values.iter().all(|&v| f64::from(v).abs() <= bound * 1.000_001), "{what}");
                // Six standard errors, because the test checks thousands of tensors.
                assert!(mean.abs() < 6.0 * (expected / n).sqrt(), "{what}: mean {mean}");
                assert!((variance / expected - 1.0).abs() < 6.0 * (0.8 / n).sqrt(), "{what}: variance {variance}");
            };
            let all = |value: f32| assert!(tensor.values.iter().all(|v| *v == value), "{name} {}", tensor.name);
            match (tensor.kind, tensor.shape.as_slice()) {
                (_, [_, slice @ ..]) if !slice.is_empty() => uniform(slice.iter().product()),
                (StateKind::Buffer, _) => all(if tensor.name.ends_with("running_mean") { 0.0 } else { 1.0 }),
                (_, _) if tensor.name.ends_with("weight") => all(1.0),
                // A bias follows its layer's weight and has the same fan-in. A batch norm's bias is 0.
                (_, _) => match state[index - 1].shape.as_slice() {
                    [_] => all(0.0),
                    weight => uniform(weight[1..].iter().product()),
                },
            }
        }
    }
}

#[test]
fn convolutions_of_airbench_start_as_the_identity() {
    let find = |network: &models::Network, name: &str| {
        state_dict(network).into_iter().find(|tensor| tensor.name == name).expect("the tensor exists")
    };
    let network = build("airbench94", SPEC, 3);
    for (name, [output, input]) in [("layer1.conv1", [64, 24]), ("layer2.conv2", [256, 256])] {
        let tensor = find(&network, &format!("{name}.weight"));
        assert_eq!(tensor.shape, [output, input, 3, 3]);
        for (index, value) in tensor.values.iter().enumerate().take(9 * input * input) {
            let (out, tap) = (index / (9 * input), index % (9 * input));
            assert_eq!(*value, f32::from(u8::from(tap == 9 * out + 4)), "{name} {index}");
        }
        let bound = 1.0 / (9.0 * input as f32).sqrt();
        assert!(tensor.values[9 * input * input..].iter().all(|v| v.abs() <= bound && *v != 0.0), "{name}");
    }

    // Data-dependent weights change with the images, and nothing else changes.
    let count = 4;
    let shape = [count, 3, 32, 32];
    let images: Vec<f32> =
        (0..shape.iter().product()).map(|i: usize| (i as f32 * 0.37).sin() + (i as f32).cos()).collect();
    let whitened = build("airbench94", SPEC, 3).initialised_from(&images, shape);
    for (before, after) in state_dict(&network).into_iter().zip(state_dict(&whitened)) {
        assert_eq!(before == after, after.name != "whiten.weight", "{}", after.name);
    }
    assert_eq!(find(&whitened, "whiten.weight").kind, StateKind::Frozen);
    let frozen = |tensor: &StateTensor| tensor.kind == StateKind::Frozen;
    assert_eq!(state_dict(&network).iter().filter(|tensor| frozen(tensor)).count(), 7, "whiten and six scales");
    assert!(models::parameters(&network).iter().all(|info| info.of_norm == info.name.contains("norm")));
    assert_eq!(build("lenet", SPEC, 3).init_image_count(), 0);
}

#[test]
fn dropout_depends_on_the_sample_key() {
    let spec = models::find("mnist_net").unwrap().spec;
    let network = build("mnist_net", spec, 1);
    let images = Tensor::<1>::from_floats(
        (0..3 * 784).map(|i| (i as f32).sin()).collect::<Vec<_>>().as_slice(),
        &Device::flex(),
    )
    .reshape([3, 1, 28, 28]);
    let logits = |images: Tensor<4>, cx: Context| -> Vec<f32> {
        network.forward(images, &cx).into_data().try_into_vec().unwrap()
    };
    let with = |keys: &[u64]| logits(images.clone(), Context::train().with_dropout(keys.to_vec()));
    let first = with(&[5, 6, 7]);
    assert_eq!(with(&[5, 6, 7]), first);
    assert_ne!(with(&[5, 6, 8])[20..], first[20..], "another key draws another mask");
    assert_eq!(with(&[5, 6, 8])[..20], first[..20], "the other samples keep their masks");
    // A part of the batch, as another rank sees it.
    let last = logits(images.clone().slice([2..3, 0..1, 0..28, 0..28]), Context::train().with_dropout(vec![7]));
    assert!(last.iter().zip(&first[20..]).all(|(a, b)| (a - b).abs() < 1e-5), "{last:?}");

    let plain = logits(images.clone(), Context::eval());
    assert_ne!(first, plain);
    assert_eq!(logits(images.clone(), Context::eval().with_dropout(vec![5, 6, 7])), plain);
    assert_eq!(logits(images.clone(), Context::train()), plain, "no keys, no dropout");
}
