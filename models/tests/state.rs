//! The state dict: loading, mapping, copies.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use models::{Context, LoadError, Network, Spec, StateKind, StateTensor, state_dict};

const SPEC: Spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };

fn network(name: &str, seed: u64, device: &Device) -> Network {
    models::build(name, &SPEC, seed, device).unwrap()
}

/// Returns different images, `[batch, 3, 32, 32]`.
fn images(batch: usize, device: &Device) -> Tensor<4> {
    Tensor::<1>::from_floats((0..batch * 3072).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>().as_slice(), device)
        .reshape([batch, 3, 32, 32])
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().unwrap()
}

#[test]
fn a_state_survives_loading_into_another_network() {
    let device = Device::flex().autodiff();
    let trained = network("resnet18", 1, &device);
    trained.forward(images(2, &device), &Context::train()); // Updates the running statistics.
    let mut state = state_dict(&trained);
    // PyTorch's files contain such entries. Their order is not guaranteed.
    state.push(StateTensor::new("bn1.num_batches_tracked", vec![], vec![1.0]));
    state.reverse();

    let loaded = models::load_state_dict(network("resnet18", 2, &Device::flex()), &state).unwrap();
    assert_eq!(state_dict(&loaded), state_dict(&trained));
    let (x, cx) = (images(2, &Device::flex()), Context::eval());
    assert_eq!(values(loaded.forward(x.clone(), &cx)), values(trained.valid().forward(x, &cx)));
}

#[test]
fn loading_names_every_mismatch_and_loads_nothing() {
    let device = Device::flex();
    let target = network("lenet", 1, &device);
    let mut state = state_dict(&target);
    state[0].name = "conv9.weight".to_owned();
    state[1].values.pop();
    state[9].shape = vec![5, 2];
    let error = models::load_state_dict(target, &state).unwrap_err();
    assert_eq!(error.missing, ["conv1.weight"]);
    assert_eq!(error.unexpected, ["conv9.weight"]);
    assert_eq!(
        error.to_string(),
        "the weights are not this network's: missing conv1.weight; unexpected conv9.weight; \
         wrong shape: conv1.bias holds 5 values for shape [6], fc3.bias is [5, 2], the network's is [10]"
    );
    assert_eq!(error.hint(), "the file is damaged or was cut short: take another copy");
}

#[test]
fn loading_rejects_a_duplicate_name() {
    let target = network("lenet", 1, &Device::flex());
    let mut state = state_dict(&target);
    state.push(state[3].clone());
    assert_eq!(models::load_state_dict(target, &state).unwrap_err().unexpected, ["conv2.bias"]);
}

#[test]
fn hints_distinguish_common_mistakes() {
    let device = Device::flex();
    let rejected = |name: &str, state: &[StateTensor]| -> LoadError {
        models::load_state_dict(network(name, 1, &device), state).unwrap_err()
    };

    let hundred = models::build("vgg11", &Spec { num_classes: 100, ..SPEC }, 1, &device).unwrap();
    let error = rejected("vgg11", &state_dict(&hundred));
    assert_eq!(error.hint(), "they were trained on 100 classes: set `model.num_classes = 100`");

    let mut parallel = state_dict(&network("lenet", 1, &device));
    parallel.iter_mut().for_each(|t| t.name = format!("module.{}", t.name));
    let error = rejected("lenet", &parallel);
    assert!(error.hint().contains("model.module.state_dict()"), "{}", error.hint());
    assert!(error.to_string().contains("conv1.weight, conv1.bias, conv2.weight, conv2.bias and 6 more"), "{error}");

    let error = rejected("resnet34", &state_dict(&network("resnet18", 1, &device)));
    assert!(error.hint().contains("model.name"), "{}", error.hint());
}

#[test]
fn mapping_parameters_is_an_optimizer_step() {
    step_of("vgg11");
    step_of("airbench94");
}

fn step_of(name: &str) {
    let device = Device::flex().autodiff();
    let network = network(name, 1, &device);
    let before = state_dict(&network);
    let infos = models::parameters(&network);
    let loss = network.forward(images(2, &device), &Context::train()).powf_scalar(2.0).mean();
    let gradients = models::take_gradients(&mut loss.backward(), &network);
    let expected: Vec<Vec<f32>> = gradients.iter().map(|gradient| values(gradient.clone().unwrap())).collect();
    let mut gradients = gradients.into_iter().flatten();
    let statistics = state_dict(&network);

    let mut seen = Vec::new();
    let network = models::map_parameters(network, |info, value| {
        assert!(!value.is_autodiff());
        seen.push(info.clone());
        value - gradients.next().unwrap() * 0.5
    });
    assert!(gradients.next().is_none());
    assert_eq!(seen, infos);
    assert_eq!(models::parameters(&network), infos, "names, shapes and ids are kept");

    let after = state_dict(&network);
    let mut parameter = 0;
    for ((before, after), statistics) in before.iter().zip(&after).zip(&statistics) {
        assert_eq!(before.name, after.name);
        match after.kind {
            StateKind::Buffer | StateKind::Frozen => {
                assert_eq!(after, statistics, "a step changes neither the statistics nor frozen weights");
            }
            StateKind::Parameter => {
                for ((b, a), g) in before.values.iter().zip(&after.values).zip(&expected[parameter]) {
                    assert_eq!(*a, b - g * 0.5);
                }
                parameter += 1;
            }
        }
    }

    // The new values are leaves with gradients.
    let loss = network.forward(images(2, &device), &Context::train()).powf_scalar(2.0).mean();
    let gradients = models::take_gradients(&mut loss.backward(), &network);
    assert_eq!(gradients.iter().flatten().count(), infos.len());
}

#[test]
fn frozen_parameters_stay_frozen() {
    let network = network("lenet", 1, &Device::flex().autodiff()).no_grad();
    let network = models::map_parameters(network, |_, value| value * 2.0);
    let loss = network.forward(images(1, &Device::flex().autodiff()).require_grad(), &Context::train()).sum();
    let gradients = models::take_gradients(&mut loss.backward(), &network);
    assert_eq!(gradients.len(), models::parameters(&network).len());
    assert!(gradients.iter().all(Option::is_none));
}

#[test]
fn mapping_the_state_reaches_buffers_in_order() {
    let network = network("resnet50", 1, &Device::flex());
    let expected: Vec<_> = state_dict(&network).into_iter().map(|t| (t.name, t.kind)).collect();
    let mut seen = Vec::new();
    let network = models::map_state(network, |info, kind, value| {
        seen.push((info.name.clone(), kind));
        value * 0.0 + 3.0
    });
    assert_eq!(seen, expected);
    assert!(state_dict(&network).iter().all(|t| t.values.iter().all(|v| *v == 3.0)));
}

#[test]
fn copies_do_not_share_statistics() {
    let device = Device::flex().autodiff();
    let original = network("resnet18", 1, &device);
    let (clone, inference) = (original.clone(), original.valid());
    let before = state_dict(&original);
    original.forward(images(2, &device), &Context::train());
    assert_ne!(state_dict(&original), before);
    assert_eq!(state_dict(&clone), before);
    assert_eq!(state_dict(&inference), before);
}

#[test]
fn only_the_context_sets_training_mode() {
    let (plain, autodiff) = (Device::flex(), Device::flex().autodiff());
    let network = network("resnet18", 1, &autodiff);
    let before = state_dict(&network);
    let eval = network.forward(images(2, &autodiff), &Context::eval());
    assert_eq!(state_dict(&network), before, "evaluation on an autodiff device does not change the statistics");

    let inference = network.valid();
    let train = inference.forward(images(2, &plain), &Context::train());
    assert_ne!(state_dict(&inference), before, "training mode needs no autodiff");
    assert_ne!(values(eval), values(train));
}
