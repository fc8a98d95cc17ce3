//! Compares the optimizer's step and the weight average on a GPU with the CPU.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use ops::{ConvOptions, ParameterUpdate, UpdateRule, conv2d, ema_update, square_sum, update};

use super::ops::{numbers, relative_error, values};

/// Lengths of parameters: more parameters than fit into a launch, some not divisible by the vector width, one of many blocks.
fn lengths() -> Vec<usize> {
    (0..37).map(|i| [1, 4, 10, 64, 1023, 4096][i % 6] + i / 30 * 70_000).collect()
}

fn vector(seed: u64, length: usize, device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::new(numbers(seed, length), [length]), device)
}

/// Returns values and state after three steps, then the average of the values.
fn results(rule: impl Fn(u64) -> UpdateRule, state_tensors: usize, device: &Device) -> Result<Vec<f32>, String> {
    let mut state: Vec<_> = lengths().into_iter().map(|n| (vector(1, n, device), [None, None])).collect();
    for step in 1..=3 {
        let parameters = state
            .into_iter()
            .enumerate()
            .map(|(i, (value, state)): (usize, (Tensor<1>, _))| {
                let gradient = vector(10 * step + 2, value.dims()[0], device);
                ParameterUpdate { value, gradient, weight_decay: [0.0, 0.01][i % 2], state }
            })
            .collect();
        state = update(&rule(step), None, None, parameters).into_iter().map(|new| (new.value, new.state)).collect();
    }
    let (new, states): (Vec<_>, Vec<_>) =
        state.into_iter().map(|(v, state)| (v, state.into_iter().take(state_tensors))).unzip();
    let pairs = new.iter().map(|value| (vector(5, value.dims()[0], device), value.clone())).collect();
    let averages = ema_update(0.9, pairs);
    let all = new.into_iter().chain(averages).chain(states.into_iter().flatten().flatten());
    Ok(all.map(values).collect::<Result<Vec<_>, _>>()?.concat())
}

/// Returns the sum of squares of many tensors, several times.
fn square_sums(device: &Device) -> Result<Vec<f32>, String> {
    let tensors: Vec<_> = lengths().into_iter().map(|length| vector(3, length, device)).collect();
    let sum = || values(square_sum(&tensors.iter().collect::<Vec<_>>()).ok_or("no tensors")?);
    Ok((0..4).map(|_| sum()).collect::<Result<Vec<_>, _>>()?.concat())
}

/// Checks the copies in bf16 that the optimizer keeps of weights. A convolution that reads the copy must have the same output, to
/// the bit, as one whose weight is rounded just before it. The weight's memory is shared during step 3, and the weight is
/// replaced before step 4.
fn copies(rule: impl Fn(u64) -> UpdateRule, device: &Device) -> Result<bool, String> {
    let options = ConvOptions { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1, norm_follows: false };
    let images = Tensor::<4>::from_data(TensorData::new(numbers(3, 72), [2, 4, 3, 3]), device).cast(FloatDType::BF16);
    let (mut value, mut state) = (vector(1, 32, device), [2, 3].map(|seed| Some(vector(seed, 32, device).abs())));
    let mut passed = true;
    for step in 1..=5 {
        if step == 4 {
            value = vector(9, 32, device);
        }
        let convolve = |rounded: bool| {
            let weight = ops::parameter::unflatten(value.clone(), [8, 4, 1, 1]);
            let weight = if rounded { weight.cast(FloatDType::BF16) } else { weight };
            values(conv2d(images.clone(), weight, None, options, false).flatten::<1>(0, 3))
        };
        passed &= convolve(false)? == convolve(true)?;
        let shared = (step == 3).then(|| value.clone());
        let gradient = vector(10 * step, 32, device);
        let parameter = ParameterUpdate { value, gradient, weight_decay: 0.01, state };
        let updated = update(&rule(step), None, None, vec![parameter]).remove(0);
        (value, state) = (updated.value, updated.state);
        drop(shared);
        passed &= ops::graph::bf16_copy_addresses().len() == 1;
    }
    Ok(passed)
}

/// Orthogonalizes a wide and a tall matrix, as Muon does.
fn orthogonalized(device: &Device) -> Result<Vec<f32>, String> {
    let one = |shape: [usize; 2]| {
        let length = shape[0] * shape[1];
        values(ops::orthogonalize(vector(7, length, device).reshape(shape)).reshape([length]))
    };
    Ok([one([12, 70])?, one([40, 9])?].concat())
}

/// Prints the relative error of the results of the GPU. Returns whether the error is at most `limit`.
fn compare(name: &str, inputs: &str, limit: f32, ours: &[f32], theirs: &[f32]) -> bool {
    let error = relative_error(ours, theirs);
    let passed = ours.len() == theirs.len() && error <= limit;
    let wrong = if passed { "" } else { "  WRONG" };
    println!("{name:40} {inputs:>18} {:>6} {error:9.1e}     {limit:.0e}{wrong}", "F32");
    passed
}

/// Prints one line per rule. Returns whether all are correct.
pub fn run() -> Result<bool, String> {
    let (gpu, cpu) = (crate::first_gpu()?.inner(), Device::flex());
    let sgd = |nesterov| move |_| UpdateRule::Sgd { lr: 0.1, momentum: 0.9, nesterov };
    let adamw = |step| UpdateRule::AdamW { lr: 0.01, betas: [0.9, 0.999], eps: 1e-8, step };
    let all = [
        ("SGD, momentum", results(sgd(false), 1, &gpu)?, results(sgd(false), 1, &cpu)?),
        ("SGD, Nesterov", results(sgd(true), 1, &gpu)?, results(sgd(true), 1, &cpu)?),
        ("AdamW", results(adamw, 2, &gpu)?, results(adamw, 2, &cpu)?),
        ("sum of squares", square_sums(&gpu)?, square_sums(&cpu)?),
    ];
    // Ranks scale equal gradients by equal factors.
    let mut all_passed = all[3].1.iter().all(|sum| sum.to_bits() == all[3].1[0].to_bits());
    if !all_passed {
        println!("the sum of squares depends on the order of blocks: {:?}  WRONG", all[3].1);
    }
    for (name, ours, theirs) in all {
        all_passed &= compare(name, "37 parameters", 1e-6, &ours, &theirs);
    }
    // The GPU multiplies in TF32 and iterates on the matrix itself, not on its Gram matrix.
    let (ours, theirs) = (orthogonalized(&gpu)?, orthogonalized(&cpu)?);
    all_passed &= compare("Muon's matrices", "[12, 70], [40, 9]", 1e-2, &ours, &theirs);
    for (name, passed) in
        [("SGD, copies in bf16", copies(sgd(true), &gpu)?), ("AdamW, copies in bf16", copies(adamw, &gpu)?)]
    {
        all_passed &= passed;
        println!("{name:40} {:>18} {:>6} {}", "[8, 4, 1, 1]", "BF16", if passed { "the same bits" } else { "  WRONG" });
    }
    Ok(all_passed)
}
