//! Compares a training pass of whole networks on a GPU with the CPU: logits and gradients of all parameters.

use burn::tensor::{Device, Tensor, TensorData};
use models::{Context, Network, Spec, build, parameters, take_gradients};

use super::ops::{numbers, values};

const BATCH: usize = 8;

/// Returns the logits, and all gradients concatenated.
fn pass(network: &Network, spec: &Spec, device: &Device) -> Result<[Vec<f32>; 2], String> {
    let [height, width] = spec.image_size;
    let shape = [BATCH, spec.in_channels, height, width];
    let images = Tensor::<4>::from_data(TensorData::new(numbers(1, shape.iter().product()), shape), device);
    let logits = network.forward(images, &Context::train());
    let grad_output = TensorData::new(numbers(2, BATCH * spec.num_classes), logits.dims());
    let loss = (logits.clone() * Tensor::<2>::from_data(grad_output, device)).sum();
    let gradients = take_gradients(&mut loss.backward(), network);
    let in_order = parameters(network).into_iter().zip(gradients).filter_map(|(info, gradient)| {
        gradient.map(|gradient| values(ops::parameter::to_row_major(gradient, &info.shape)))
    });
    let gradients = in_order.collect::<Result<Vec<_>, _>>()?.concat();
    Ok([values(logits.reshape([BATCH * spec.num_classes]))?, gradients])
}

/// Returns `‖a − b‖ / ‖b‖`.
fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let norm = |squares: &mut dyn Iterator<Item = f64>| squares.sum::<f64>().sqrt();
    let error = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)));
    error / norm(&mut b.iter().map(|b| f64::from(*b).powi(2)))
}

/// Prints one line per network. Returns whether all gradients are within `near` of the CPU's. A GPU multiplies in TF32, with
/// 11 bits, and a random network amplifies rounding errors. A GPU of compute capability 7.5 has no TF32; only the order of
/// sums differs there.
pub fn run(names: &[String], near: f64) -> Result<bool, String> {
    let (gpu, cpu) = (crate::first_gpu()?, Device::flex().autodiff());
    println!("{:24} {:>12} {:>12} {:>9}", "network", "logits", "gradients", "limit");
    let mut all_passed = true;
    for name in names {
        let entry = models::find(name).map_err(|e| e.to_string())?;
        let network = |device| build(name, &entry.spec, 1, device).map_err(|e| e.to_string());
        let ours = pass(&network(&gpu)?, &entry.spec, &gpu)?;
        let theirs = pass(&network(&cpu)?, &entry.spec, &cpu)?;
        if ours[1].len() != theirs[1].len() {
            return Err(format!("{name}: the number of gradients differs from the CPU"));
        }
        let [logits, gradients] = [0, 1].map(|i| relative_error(&ours[i], &theirs[i]));
        // False for NaN.
        let passed = logits <= near && gradients <= near;
        all_passed &= passed;
        println!("{name:24} {logits:12.1e} {gradients:12.1e} {near:9.0e}{}", if passed { "" } else { "  WRONG" });
    }
    Ok(all_passed)
}
