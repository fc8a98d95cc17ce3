//! Golden values: `torch.optim` in float64.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::*;

fn optimizers() -> serde_json::Value {
    serde_json::from_str(include_str!("../../tests/reference/optimizers.json")).expect("golden file")
}

pub(super) fn numbers(value: &serde_json::Value) -> Vec<f64> {
    value.as_array().expect("array").iter().map(|v| v.as_f64().expect("number")).collect()
}

/// Makes a flat tensor. In float64, the type of the golden values, burn's operations run; in float32 the kernels run, whose
/// rounding adds up over six steps.
fn tensor(values: Vec<f64>, dtype: DType) -> Tensor<1> {
    let count = values.len();
    Tensor::from_data(TensorData::new(values, [count]), (&Device::flex(), dtype))
}

/// Takes one step of one parameter.
fn update(optimizer: &mut Optimizer, shape: &[usize], value: Tensor<1>, gradient: Tensor<1>, lr: f64) -> Tensor<1> {
    optimizer.update(vec![((parameter(shape), value), Some(gradient))], None, lr, None).remove(0)
}

fn parameter(shape: &[usize]) -> ParameterInfo {
    ParameterInfo { name: "weight".into(), shape: shape.to_vec(), id: burn::module::ParamId::new(), of_norm: false }
}

/// Takes six steps with the golden file's gradients and compares each with PyTorch's.
fn follow(key: &str, config: &OptimizerConfig) {
    follow_in(DType::F64, 1e-6, key, config);
    follow_in(DType::F32, 2e-6, key, config);
}

fn follow_in(dtype: DType, tolerance: f64, key: &str, config: &OptimizerConfig) {
    let golden = optimizers();
    let start = numbers(&golden["start"]);
    let count = start.len();
    let mut value = tensor(start, dtype);
    let mut optimizer = Optimizer::new(config);
    let lr = golden["lr"].as_f64().expect("lr");
    for (step, expected) in golden[key].as_array().expect(key).iter().enumerate() {
        let gradient: Vec<f64> = (0..count).map(|i| (1.0 + 0.7 * step as f64 + 1.3 * i as f64).sin()).collect();
        value = update(&mut optimizer, &[count, 1], value, tensor(gradient, dtype), lr);
        let got = value.try_to_vec_as::<f64>().expect("f64");
        for (got, expected) in got.iter().zip(numbers(expected)) {
            assert!((got - expected).abs() < tolerance, "{key} {dtype:?} step {step}: {got} against {expected}");
        }
    }
}

fn sgd(momentum: f64, nesterov: bool, weight_decay: f64) -> OptimizerConfig {
    OptimizerConfig { kind: OptimizerKind::Sgd, momentum, nesterov, weight_decay, ..OptimizerConfig::default() }
}

#[test]
fn sgd_equals_pytorch() {
    follow("sgd", &sgd(0.0, false, 0.0));
    follow("sgd_momentum_0.9_wd_5e-4", &sgd(0.9, false, 5e-4));
    follow("sgd_nesterov_0.9_wd_5e-4", &sgd(0.9, true, 5e-4));
}

#[test]
fn adamw_equals_pytorch() {
    let kind = OptimizerKind::AdamW;
    let config =
        OptimizerConfig { kind, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 1e-2, ..OptimizerConfig::default() };
    follow("adamw_wd_1e-2", &config);
}

/// Takes six steps with each matrix of the golden file. A second weight follows it, since AdamW updates the last one.
#[test]
fn muon_equals_pytorch() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("../../tests/reference/muon.json")).unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let shape: Vec<usize> = numbers(&case["shape"]).into_iter().map(|n| n as usize).collect();
        let count = shape[0] * shape[1];
        let kind = OptimizerKind::Muon;
        let nesterov = case["nesterov"].as_bool().unwrap();
        let config =
            OptimizerConfig { kind, nesterov, momentum: 0.95, weight_decay: 0.1, ..OptimizerConfig::default() };
        // PyTorch's own values, which it orthogonalizes in bfloat16, and the values of the same code in float64.
        for (key, dtype, tolerance) in
            [("steps", DType::F64, 1e-9), ("steps", DType::F32, 2e-4), ("bf16", DType::F32, 4e-3)]
        {
            let mut optimizer = Optimizer::new(&config);
            let mut value = tensor((0..count).map(|i| (0.5 * i as f64).cos()).collect(), dtype);
            for (step, expected) in case[key].as_array().unwrap().iter().enumerate() {
                let gradient = |i: f64| (1.0 + 0.7 * step as f64 + 1.3 * i).sin() + (0.3 * i * i).cos();
                let gradient = tensor((0..count).map(|i| gradient(i as f64)).collect(), dtype);
                value = update(&mut optimizer, &shape, value, gradient, 0.1);
                let got = value.try_to_vec_as::<f64>().unwrap();
                for (got, expected) in got.iter().zip(numbers(expected)) {
                    let what = format!("{shape:?}, nesterov {nesterov}, {key} in {dtype:?}, step {step}");
                    assert!((got - expected).abs() < tolerance, "{what}: {got} against {expected}");
                }
            }
        }
    }
}

/// A convolution's weight is a matrix with a row per output channel. A factor of the gradients, as clipping sets it, is applied.
#[test]
fn muon_takes_a_convolution_as_a_matrix_and_applies_the_gradients_factor() {
    let config = OptimizerConfig { kind: OptimizerKind::Muon, ..OptimizerConfig::default() };
    let values = |shape: &[usize], factor: f32| {
        let ramp = |seed: f64| tensor((0..72).map(|i| (seed * i as f64).sin()).collect(), DType::F32);
        let scale = Tensor::from_floats([factor], &Device::flex());
        let parameters = vec![((parameter(shape), ramp(0.7)), Some(ramp(1.3) / factor))];
        let updated = Optimizer::new(&config).update(parameters, Some(scale), 0.01, None);
        updated.into_iter().flat_map(|value| value.try_to_vec_as::<f32>().unwrap()).collect::<Vec<_>>()
    };
    let matrix = values(&[2, 36], 1.0);
    assert_eq!(values(&[2, 4, 3, 3], 1.0), matrix);
    assert_eq!(values(&[2, 4, 3, 3], 4.0), matrix);
}

#[test]
fn muon_updates_the_weights_of_hidden_layers_only() {
    let device = Device::flex();
    let others = |model: &str, frozen: &[String]| {
        let spec = models::find(model).unwrap().spec;
        let network = models::build_frozen(model, &spec, 0, &device, frozen).unwrap();
        let last = muon::last_weight(&network);
        let weights = models::state::parameters(&network).into_iter().filter(|info| info.shape.len() > 1);
        weights.filter(|info| !muon::is_updated_by_muon(info, &last)).map(|info| info.name).collect::<Vec<_>>()
    };
    assert_eq!(others("resnet18", &[]), ["conv1.weight", "linear.weight"]);
    assert_eq!(others("lenet", &[]), ["conv1.weight", "fc3.weight"]);
    assert_eq!(others("lenet", &["fc3".to_owned()]), ["conv1.weight"], "fc2 is a hidden layer");
    let of_mobilenet = others("mobilenetv2", &[]);
    assert_eq!(of_mobilenet.len(), 1 + 17 + 1, "the first convolution, the depthwise ones and the classifier");
    assert!(of_mobilenet[1..18].iter().all(|name| name.ends_with("conv2.weight")), "{of_mobilenet:?}");
}

#[test]
fn the_state_of_muon_is_that_of_both_optimizers() {
    let config = OptimizerConfig { kind: OptimizerKind::Muon, ..OptimizerConfig::default() };
    let info = |name: &str, shape: &[usize]| ParameterInfo { name: name.into(), ..parameter(shape) };
    let infos = [info("conv.weight", &[2, 4, 1, 1]), info("bn.bias", &[2]), info("fc.weight", &[2, 2])];
    let step = |optimizer: &mut Optimizer, values: Vec<Tensor<1>>| {
        let gradient = |info: &ParameterInfo| tensor((0..info.len()).map(|i| 1.0 + i as f64).collect(), DType::F32);
        let all = infos.iter().cloned().zip(values).map(|(info, value)| {
            let gradient = gradient(&info);
            ((info, value), Some(gradient))
        });
        optimizer.update(all.collect(), None, 0.01, None)
    };
    let host =
        |values: &[Tensor<1>]| values.iter().map(|v| v.clone().try_into_vec_as::<f32>().unwrap()).collect::<Vec<_>>();
    let last_weight = || "fc.weight".to_owned();
    let mut optimizer = Optimizer { last_weight: last_weight(), ..Optimizer::new(&config) };
    let start = infos.iter().map(|info| tensor(vec![1.0; info.len()], DType::F32)).collect();
    let values = step(&mut optimizer, start);
    let (state, steps) = optimizer.state(&infos);
    let names: Vec<_> = state.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(
        names,
        ["momentum.conv.weight", "exp_avg.bn.bias", "exp_avg_sq.bn.bias", "exp_avg.fc.weight", "exp_avg_sq.fc.weight"]
    );
    let mut resumed = Optimizer { last_weight: last_weight(), ..Optimizer::new(&config) };
    resumed.load_state(state, steps, &infos, &Device::flex()).unwrap();
    assert_eq!(host(&step(&mut resumed, values.clone())), host(&step(&mut optimizer, values)));
}

/// PyTorch counts the steps of each parameter: one that is trained later, for example after a resume that unfreezes it, takes the
/// same steps as with an optimizer that has just started. So does one that a checkpoint between these steps interrupts.
#[test]
fn the_bias_correction_of_adamw_counts_the_steps_of_each_parameter() {
    let config = OptimizerConfig { kind: OptimizerKind::AdamW, weight_decay: 0.0, ..OptimizerConfig::default() };
    let infos = ["early", "late"].map(|name| ParameterInfo { name: name.into(), ..parameter(&[2]) });
    let gradient = |step: i32| tensor(vec![0.5 - f64::from(step), 0.25], DType::F32);
    let host = |value: &Tensor<1>| value.clone().try_into_vec_as::<f32>().unwrap();
    let (mut optimizer, mut fresh) = (Optimizer::new(&config), Optimizer::new(&config));
    let mut values = infos.each_ref().map(|_| tensor(vec![1.0, -2.0], DType::F32));
    let mut expected = values[1].clone();
    for step in 0..12 {
        if step == 5 || step == 8 {
            let (state, steps) = optimizer.state(&infos);
            let counts: Vec<_> = state.iter().filter(|t| t.name.starts_with("step.")).map(|t| &t.values[0]).collect();
            assert_eq!(counts, if step == 5 { vec![] } else { vec![&3.0] }, "only of the late parameter");
            optimizer = Optimizer::new(&config);
            optimizer.load_state(state, steps, &infos, &Device::flex()).unwrap();
        }
        let gradients = [Some(gradient(step)), (step >= 5).then(|| gradient(step))];
        let all = infos.iter().cloned().zip(values).zip(gradients);
        values = optimizer.update(all.collect(), None, 0.01, None).try_into().unwrap();
        if step >= 5 {
            expected = update(&mut fresh, &[2], expected, gradient(step), 0.01);
        }
        assert_eq!(host(&values[1]), host(&expected), "step {step}");
    }
}

/// The first step of AdamW without weight decay has the length of the learning rate.
#[test]
fn adamw_may_have_a_learning_rate_of_its_own_beside_muon() {
    let kind = OptimizerKind::Muon;
    let plain = OptimizerConfig { kind, lr: 0.1, weight_decay: 0.0, eps: 1e-12, ..OptimizerConfig::default() };
    let moved = |config: &OptimizerConfig, shape: &[usize]| {
        let (zeros, ones) = (tensor(vec![0.0; 4], DType::F64), tensor(vec![1.0; 4], DType::F64));
        // Half of the schedule's highest learning rate.
        let updated = update(&mut Optimizer::new(config), shape, zeros, ones, 0.05);
        updated.try_to_vec_as::<f64>().unwrap()
    };
    let config = OptimizerConfig { adamw_lr: Some(0.02), ..plain.clone() };
    for (config, expected) in [(&plain, 0.05), (&config, 0.01)] {
        assert!(moved(config, &[4]).iter().all(|x| (x + expected).abs() < 1e-9), "{:?}", moved(config, &[4]));
    }
    assert_eq!(moved(&config, &[2, 2]), moved(&plain, &[2, 2]), "Muon's own learning rate");
}

#[test]
fn norm_and_bias_can_be_exempt_from_weight_decay() {
    let config = OptimizerConfig { decay_norm_and_bias: false, ..sgd(0.0, false, 0.5) };
    let (zero, one) = (|| tensor(vec![0.0; 2], DType::F64), || tensor(vec![1.0; 2], DType::F64));
    let mut optimizer = Optimizer::new(&config);
    let bias = update(&mut optimizer, &[2], one(), zero(), 0.1).try_to_vec_as::<f64>().expect("f64");
    let weight = update(&mut optimizer, &[2, 1], one(), zero(), 0.1).try_to_vec_as::<f64>().expect("f64");
    assert_eq!(bias, [1.0, 1.0]);
    assert_eq!(weight, [0.95, 0.95]);
}

/// The reference: PyTorch's parameter groups, the biases with `lr = 64 * lr` and `weight_decay = wd / 64`.
#[test]
fn biases_of_batch_norms_may_have_a_learning_rate_of_their_own() {
    let plain = sgd(0.9, true, 0.064);
    let config = OptimizerConfig { norm_bias_lr_factor: 64.0, ..plain.clone() };
    let group = OptimizerConfig { weight_decay: 0.001, ..plain.clone() };
    let parameters = ["conv.weight", "norm.weight", "norm.bias", "linear.bias"];
    let info = |name: &str| ParameterInfo { name: name.into(), of_norm: name.starts_with("norm"), ..parameter(&[2]) };
    let (mut optimizer, mut plain, mut group) =
        (Optimizer::new(&config), Optimizer::new(&plain), Optimizer::new(&group));
    let start = || tensor(vec![1.0, -2.0], DType::F32);
    let (mut values, mut expected, mut biases) = ([(); 4].map(|()| start()), start(), start());
    for step in 0..3 {
        let gradient = || tensor(vec![0.5 - step as f64, 0.25], DType::F32);
        let all =
            values.into_iter().zip(parameters).map(|(value, name)| ((info(name), value), Some(gradient()))).collect();
        values = optimizer.update(all, None, 0.01, None).try_into().unwrap();
        expected = update(&mut plain, &[2], expected, gradient(), 0.01);
        biases = update(&mut group, &[2], biases, gradient(), 0.64);
        let host = |value: &Tensor<1>| value.clone().try_into_vec_as::<f32>().unwrap();
        for (value, name) in values.iter().zip(parameters) {
            let expected = if name == "norm.bias" { &biases } else { &expected };
            assert_eq!(host(value), host(expected), "{name}, step {step}");
        }
    }
    assert_eq!(optimizer.steps, 3);
}

/// The reference: PyTorch's parameter groups with separate learning rates and a common weight decay.
#[test]
fn layers_may_have_learning_rates_of_their_own() {
    for kind in [OptimizerKind::Sgd, OptimizerKind::AdamW] {
        let plain = OptimizerConfig { kind, ..sgd(0.9, true, 0.064) };
        let factors = [("layer1", 0.1), ("layer1.1", 4.0), ("fc", 10.0), ("layer1.1.bn.bias", 0.5)];
        let config = OptimizerConfig {
            lr_factors: factors.map(|(layer, factor)| (layer.to_owned(), factor)).into(),
            norm_bias_lr_factor: 2.0,
            ..plain.clone()
        };
        let parameters = [
            ("conv1.weight", 1.0),
            ("layer1.0.weight", 0.1),
            ("layer1.1.weight", 4.0),
            ("layer10.weight", 1.0),
            ("layer1.1.bn.bias", 2.0 * 0.5),
            ("fc.bias", 10.0),
        ];
        let info = |name: &str| ParameterInfo { name: name.into(), of_norm: name.contains("bn"), ..parameter(&[2]) };
        let start = || tensor(vec![1.0, -2.0], DType::F32);
        let mut optimizer = Optimizer::new(&config);
        let mut values = parameters.map(|_| start());
        let decay = |name: &str| if name.contains("bn") { 0.032 } else { 0.064 };
        let mut groups = parameters.map(|(name, _)| {
            (Optimizer::new(&OptimizerConfig { weight_decay: decay(name), ..plain.clone() }), start())
        });
        for step in 0..3 {
            let gradient = || tensor(vec![0.5 - step as f64, 0.25], DType::F32);
            let all = values.into_iter().zip(parameters).map(|(v, (name, _))| ((info(name), v), Some(gradient())));
            values = optimizer.update(all.collect(), None, 0.01, None).try_into().unwrap();
            for ((value, (name, factor)), (group, expected)) in values.iter().zip(parameters).zip(&mut groups) {
                *expected = update(group, &[2], expected.clone(), gradient(), 0.01 * factor);
                let host = |value: &Tensor<1>| value.clone().try_into_vec_as::<f32>().unwrap();
                assert_eq!(host(value), host(expected), "{kind:?} {name}, step {step}");
            }
        }
    }
}

/// `layer_decay` multiplies the factors of layers.
#[test]
fn the_layer_decay_and_the_factors_of_layers_multiply() {
    let spec = models::find("lenet").unwrap().spec;
    let network = models::build("lenet", &spec, 0, &Device::flex()).unwrap();
    let plain = OptimizerConfig { weight_decay: 0.0, ..sgd(0.0, false, 0.0) };
    let config = OptimizerConfig { layer_decay: Some(0.5), lr_factors: [("conv2".to_owned(), 3.0)].into(), ..plain };
    let mut optimizer = Optimizer::new(&config).for_layers_of(&network);
    let steps = [("conv1", 0.0625), ("conv2", 3.0 * 0.125), ("fc1", 0.25), ("fc2", 0.5), ("fc3", 1.0)];
    let update = |(layer, _): &(&str, f64)| {
        let info = ParameterInfo { name: format!("{layer}.weight"), ..parameter(&[1]) };
        ((info, tensor(vec![0.0], DType::F32)), Some(tensor(vec![1.0], DType::F32)))
    };
    let values = optimizer.update(steps.iter().map(update).collect(), None, 1.0, None);
    for (value, (layer, factor)) in values.into_iter().zip(steps) {
        assert_eq!(f64::from(value.into_scalar::<f32>()), -factor, "{layer}");
    }
}

#[test]
fn clipping_takes_the_norm_of_all_gradients_together() {
    let device = Device::flex();
    let tensor = |values: &[f32]| Some(Tensor::<1>::from_floats(values, &device));
    let mut gradients = FlatGradients::from_tensors(vec![tensor(&[3.0, 0.0]), None, tensor(&[0.0, 4.0, 0.0])]);
    assert!((clip_grad_norm(&mut gradients, 10.0) - 5.0).abs() < 1e-6, "below the limit nothing changes");
    assert!((clip_grad_norm(&mut gradients, 1.0) - 5.0).abs() < 1e-6);
    let clipped = gradients.into_inner();
    let values = |i: usize| clipped[i].clone().expect("gradient").try_to_vec_as::<f32>().expect("f32");
    assert!((values(0)[0] - 0.6).abs() < 1e-6 && (values(2)[1] - 0.8).abs() < 1e-6);
}
