//! The optimizer's step and the weight average against their formulas in f64, and their guarantees about memory and
//! bits.

use burn::backend::Flex;
use burn::tensor::{Device, Tensor, TensorData};
use ops::{ParameterUpdate, UpdateRule, UpdatedParameter};
use proptest::prelude::*;

const SGD: UpdateRule = UpdateRule::Sgd { lr: 0.1, momentum: 0.9, nesterov: false };
const NESTEROV: UpdateRule = UpdateRule::Sgd { lr: 0.1, momentum: 0.9, nesterov: true };
const PLAIN: UpdateRule = UpdateRule::Sgd { lr: 0.1, momentum: 0.0, nesterov: false };

fn adamw(step: u64) -> UpdateRule {
    UpdateRule::AdamW { lr: 0.01, betas: [0.9, 0.999], eps: 1e-8, step }
}

fn tensor(values: &[f32]) -> Tensor<1> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), &Device::flex())
}

fn numbers(tensor: &Tensor<1>) -> Vec<f32> {
    tensor.clone().into_data().try_into_vec().unwrap()
}

/// Returns pseudo-random values of both signs, none zero.
fn wave(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + seed * 13 + 1) as f32 * 0.37).sin() + 0.001).collect()
}

/// One value and its state.
#[derive(Clone, Copy)]
struct Exact {
    p: f64,
    state: [f64; 2],
}

fn exact(rule: &UpdateRule, Exact { p, state: [a, b] }: Exact, g: f64, decay: f64) -> Exact {
    match *rule {
        UpdateRule::Sgd { lr, momentum, nesterov } => {
            let d = g + decay * p;
            let buffer = momentum * a + d;
            let direction = if nesterov { d + momentum * buffer } else { buffer };
            Exact { p: p - lr * direction, state: [buffer, 0.0] }
        }
        UpdateRule::AdamW { lr, betas, eps, step } => {
            let (m, v) = (betas[0] * a + (1.0 - betas[0]) * g, betas[1] * b + (1.0 - betas[1]) * g * g);
            let corrected = betas.map(|beta| 1.0 - beta.powi(step as i32));
            let moved = lr / corrected[0] * m / (v.sqrt() / corrected[1].sqrt() + eps);
            Exact { p: p * (1.0 - lr * decay) - moved, state: [m, v] }
        }
    }
}

/// Takes three steps of parameters with these lengths. Returns values and states.
fn steps(rule: impl Fn(u64) -> UpdateRule, lengths: &[usize], scale: Option<f32>) -> Vec<Vec<f32>> {
    let fresh =
        |(index, &len): (usize, &usize)| UpdatedParameter { value: tensor(&wave(len, index)), state: [None, None] };
    let mut parameters: Vec<_> = lengths.iter().enumerate().map(fresh).collect();
    let scale = scale.map(|scale| tensor(&[scale]));
    for step in 1..=3 {
        // Gradients are views of one tensor, like views of a gradient bucket.
        let bucket = tensor(&wave(lengths.iter().sum(), 100 + step as usize));
        let mut start = 0;
        let updates = parameters.into_iter().zip(lengths).enumerate().map(|(index, (parameter, len))| {
            let gradient = bucket.clone().slice(start..start + len);
            start += len;
            one(parameter, gradient, if index % 2 == 0 { 0.01 } else { 0.0 })
        });
        let updates = updates.collect();
        parameters = ops::update(&rule(step), None, scale.as_ref(), updates);
    }
    let tensors = parameters.iter().flat_map(|p| [Some(&p.value), p.state[0].as_ref(), p.state[1].as_ref()]);
    tensors.flatten().map(numbers).collect()
}

fn one(UpdatedParameter { value, state }: UpdatedParameter, gradient: Tensor<1>, weight_decay: f64) -> ParameterUpdate {
    ParameterUpdate { value, gradient, weight_decay, state }
}

fn check(rule: impl Fn(u64) -> UpdateRule, state: usize, lengths: &[usize], scale: Option<f32>) {
    let found = steps(&rule, lengths, scale);
    assert_eq!(found.len(), lengths.len() * (1 + state));
    let mut start = 0;
    for (index, (&len, found)) in lengths.iter().zip(found.chunks(1 + state)).enumerate() {
        for (i, p) in wave(len, index).into_iter().enumerate() {
            let mut value = Exact { p: p.into(), state: [0.0; 2] };
            for step in 1..=3 {
                let bucket = wave(lengths.iter().sum(), 100 + step as usize);
                let g = f64::from(bucket[start + i]) * f64::from(scale.unwrap_or(1.0));
                value = exact(&rule(step), value, g, if index % 2 == 0 { 0.01 } else { 0.0 });
            }
            let close = |found: f32, exact: f64| (f64::from(found) - exact).abs() < 1e-6 * exact.abs().max(1.0);
            assert!(close(found[0][i], value.p), "{index}, {i}: {} against {}", found[0][i], value.p);
            for (found, exact) in found[1..].iter().zip(value.state) {
                assert!(close(found[i], exact), "state of {index}, {i}: {} against {exact}", found[i]);
            }
        }
        start += len;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn steps_follow_their_formulas(lengths in prop::collection::vec(1usize..400, 1..6), scale in prop::option::of(0.1f32..1.0)) {
        check(|_| PLAIN, 0, &lengths, scale);
        check(|_| SGD, 1, &lengths, scale);
        check(|_| NESTEROV, 1, &lengths, scale);
        check(adamw, 2, &lengths, scale);
    }
}

#[test]
fn bits_depend_neither_on_threads_nor_on_the_list() {
    // More than one task of several chunks, with odd lengths.
    let lengths = [100_001, 3, 70_013, 16_384, 1];
    let many: Vec<Tensor<1>> = lengths.iter().enumerate().map(|(i, &len)| tensor(&wave(len, i))).collect();
    let square = || numbers(&ops::square_sum(&many.iter().collect::<Vec<_>>()).unwrap())[0];
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| (steps(|_| NESTEROV, &lengths, Some(0.3)), steps(adamw, &lengths, None), square().to_bits()))
    };
    let one = with(1);
    assert!(one == with(2) && one == with(5));
    // A parameter's step does not depend on the other parameters of the list.
    assert!(steps(adamw, &lengths, None)[0] == steps(adamw, &lengths[..1], None)[0]);
}

fn address(tensor: &Tensor<1>) -> *const u8 {
    tensor.clone().try_into_primitive::<Flex>().unwrap().bytes().as_ptr()
}

#[test]
fn a_step_is_in_place_unless_the_tensor_is_shared() {
    let step = |rule: &UpdateRule, parameter: UpdatedParameter, gradient: [f32; 2]| {
        ops::update(rule, None, None, vec![one(parameter, tensor(&gradient), 0.0)]).remove(0)
    };
    let addresses = |p: &UpdatedParameter| (address(&p.value), address(p.state[0].as_ref().unwrap()));
    let parameter = UpdatedParameter { value: tensor(&[1.0, 2.0]), state: [Some(tensor(&[0.0, 0.0])), None] };
    let before = addresses(&parameter);
    let parameter = step(&SGD, parameter, [1.0, -1.0]);
    assert_eq!(addresses(&parameter), before);
    assert_eq!(numbers(&parameter.value), [0.9, 2.1]);

    let held = parameter.value.clone();
    let parameter = step(&SGD, parameter, [0.0, 0.0]);
    assert_eq!(numbers(&held), [0.9, 2.1], "the clone keeps its values");
    assert_ne!(numbers(&parameter.value), [0.9, 2.1]);

    // A rule without momentum does not change an existing momentum buffer.
    let buffer = numbers(parameter.state[0].as_ref().unwrap());
    let parameter = step(&PLAIN, parameter, [1.0, 1.0]);
    assert_eq!(numbers(parameter.state[0].as_ref().unwrap()), buffer);

    // A step must not write into a view's parent.
    let owner = tensor(&[1.0, 2.0, 3.0, 4.0]);
    let view = UpdatedParameter { value: owner.clone().slice(1..3), state: [None, None] };
    assert_eq!(numbers(&step(&PLAIN, view, [1.0, 1.0]).value), [1.9, 2.9]);
    assert_eq!(numbers(&owner), [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn a_network_is_changed_in_place() {
    let spec = models::find("lenet").unwrap().spec;
    let network = models::build("lenet", &spec, 0, &Device::flex().autodiff()).unwrap();
    let mut addresses = Vec::new();
    let step = |parameters: Vec<(models::ParameterInfo, Tensor<1>)>, addresses: &mut Vec<*const u8>| {
        let update = |(_, value): (_, Tensor<1>)| {
            let gradient = Tensor::ones_like(&value);
            one(UpdatedParameter { value, state: [None, None] }, gradient, 0.0)
        };
        let updated = ops::update(&PLAIN, None, None, parameters.into_iter().map(update).collect());
        *addresses = updated.iter().map(|parameter| address(&parameter.value)).collect();
        updated.into_iter().map(|parameter| parameter.value).collect()
    };
    let before = models::state_dict(&network);
    let network = models::update_parameters(network, |parameters| step(parameters, &mut addresses));
    let first = addresses.clone();
    let network = models::update_parameters(network, |parameters| step(parameters, &mut addresses));
    assert_eq!(addresses, first, "the second step reuses the memory of the first");
    for (old, new) in before.iter().zip(models::state_dict(&network)) {
        assert_eq!((&old.name, &old.shape), (&new.name, &new.shape));
        assert!(old.values.iter().zip(&new.values).all(|(old, new)| (old - 0.2 - new).abs() < 1e-6), "{}", old.name);
    }
}

#[test]
fn ema_update_is_in_place_unless_the_average_is_shared() {
    let pairs = vec![(tensor(&[1.0, 2.0]), tensor(&[2.0, 0.0])), (tensor(&[4.0]), tensor(&[4.0]))];
    let before: Vec<_> = pairs.iter().map(|(average, _)| address(average)).collect();
    let mut averages = ops::ema_update(0.75, pairs);
    assert_eq!(averages.iter().map(address).collect::<Vec<_>>(), before);
    assert_eq!(numbers(&averages[0]), [1.25, 1.5]);
    assert_eq!(numbers(&averages[1]), [4.0]);
    // Another tensor shares the average, as in evaluation.
    let held = averages[0].clone();
    let averages = ops::ema_update(0.5, vec![(averages.remove(0), tensor(&[0.0, 0.0]))]);
    assert_eq!((numbers(&held), numbers(&averages[0])), (vec![1.25, 1.5], vec![0.625, 0.75]));
}

#[test]
fn squares_are_summed_in_f64() {
    // In f32 the small values would be lost beside the large one.
    let mut values = vec![1.0f32; 40_000];
    values[0] = 8192.0;
    let sum = numbers(&ops::square_sum(&[&tensor(&values), &tensor(&[2.0])]).unwrap())[0];
    assert_eq!(sum, (8192.0f64 * 8192.0 + 39_999.0 + 4.0) as f32);
    assert!(ops::square_sum(&[]).is_none());
}
