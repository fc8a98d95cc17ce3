//! Compares what a GPU does with a batch before and after the network: the images of a data set in its memory, and the loss.

use burn::tensor::{DType, Device, Tensor, TensorData, activation::softmax};
use ops::{GatherLines, cross_entropy, gather_images};

use super::ops::{numbers, relative_error, values};

/// A line of an image: the source row or column, and whether it is cut out.
type Line = (Option<usize>, bool);

/// Returns a batch's images on the GPU, and those that the host computes.
fn images(batch: usize, [channels, height, width]: [usize; 3], gpu: &Device) -> Result<[Vec<f32>; 2], String> {
    let (plane, count) = (height * width, 11);
    let pixels: Vec<u8> = (0..count * channels * plane).map(|i| (i * 197 + i / 7 + 3) as u8).collect();
    let table = numbers(6, 1 + 256 * channels);
    // Shifted, some of them mirrored; every third line is in the cut.
    let line = |image: usize, at: usize, length: usize| -> Line {
        let shifted = if image.is_multiple_of(2) { at + image % 3 } else { length + image % 4 - at - 1 };
        (shifted.checked_sub(1).filter(|source| *source < length), (at + image).is_multiple_of(3))
    };
    let (mut lines, mut expected) = (GatherLines::new([channels, height, width]), Vec::new());
    for image in 0..batch {
        let first = image * 7 % count * channels * plane;
        lines.push(first, (0..height).map(|y| line(image, y, height)), (0..width).map(|x| line(image, x, width)));
        for at in 0..channels * plane {
            let (channel, y, x) = (at / plane, line(image, at % plane / width, height), line(image, at % width, width));
            let pixel = match (y.0, x.0) {
                (Some(y), Some(x)) => usize::from(pixels[first + channel * plane + y * width + x]),
                _ => 0,
            };
            expected.push(table[if y.1 && x.1 { 0 } else { 1 + 256 * channel + pixel }]);
        }
    }
    let length = pixels.len();
    let pixels = Tensor::from_data(TensorData::new(pixels, [length]), (gpu, DType::U8));
    let table = Tensor::from_floats(table.as_slice(), gpu);
    let values_of_lines = TensorData::new(lines.values().to_vec(), [lines.values().len()]);
    let on_gpu = Tensor::from_data(values_of_lines, (gpu, DType::I32));
    let found = gather_images(&pixels, &table, &on_gpu, lines.shape())
        .ok_or("there is no kernel for the images of a data set")?;
    Ok([values(found.reshape([batch * channels * plane]))?, expected])
}

/// Returns the loss, and the gradient of `3 * loss`: both on the GPU and on the CPU.
fn loss(rows: usize, classes: usize, gpu: &Device) -> Result<[[Vec<f32>; 2]; 2], String> {
    let shape = [rows, classes];
    let data = |seed, factor: f32| -> Vec<f32> { numbers(seed, rows * classes).iter().map(|x| x * factor).collect() };
    // Logits of up to about 100, so that the largest one has to be subtracted first.
    let logits = TensorData::new(data(7, 20.0), shape);
    let targets = softmax(Tensor::<2>::from_data(TensorData::new(data(8, 1.0), shape), &Device::flex()), 1).into_data();
    let on = |device: &Device| -> Result<[Vec<f32>; 2], String> {
        let logits = Tensor::<2>::from_data(logits.clone(), device).require_grad();
        let loss = cross_entropy(logits.clone(), Tensor::from_data(targets.clone(), &device.clone().inner()), 0.25);
        let gradients = (loss.clone() * 3.0).backward();
        let gradient = logits.grad(&gradients).ok_or("the logits have no gradient")?;
        Ok([values(loss.inner())?, values(gradient.reshape([rows * classes]))?])
    };
    let ([loss, gradient], [expected_loss, expected]) = (on(gpu)?, on(&Device::flex().autodiff())?);
    Ok([[loss, expected_loss], [gradient, expected]])
}

/// Prints one line per case. Returns whether all are correct.
pub fn run() -> Result<bool, String> {
    let gpu = crate::first_gpu()?;
    let mut all_passed = true;
    let mut line = |name: &str, shape: String, [ours, theirs]: [Vec<f32>; 2], limit: f32| {
        let error = relative_error(&ours, &theirs);
        let passed = ours.len() == theirs.len() && error <= limit;
        all_passed &= passed;
        println!("{name:40} {shape:>18} {:>6} {error:9.1e} {limit:9.0e}{}", "F32", if passed { "" } else { "  WRONG" });
    };
    for (batch, shape) in [(5, [3, 9, 7]), (2, [1, 28, 28]), (130, [3, 32, 32]), (1, [4, 1, 1])] {
        line("images of a data set", format!("{batch} of {shape:?}"), images(batch, shape, &gpu.clone().inner())?, 0.0);
    }
    for (rows, classes) in [(128, 10), (5, 3), (7, 1000), (1, 33), (9, 1)] {
        let [loss, gradient] = loss(rows, classes, &gpu)?;
        line("cross-entropy", format!("[{rows}, {classes}]"), loss, 2e-5);
        line("cross-entropy's gradient", format!("[{rows}, {classes}]"), gradient, 2e-5);
    }
    Ok(all_passed)
}
