//! Parameters as flat tensors, in the memory order of the device's kernels.
//!
//! The convolutions on a GPU read weights as `[out, height, width, in]`, depthwise convolutions as `[height, width, out]`. On a
//! GPU, weights, their gradients and their optimizer state are flattened in this order, so that a training step copies none of
//! them. Files and the host have PyTorch's order.

use burn::tensor::{Device, Tensor};

/// Axes of a tensor with four dimensions.
type Axes = [usize; 4];

/// Returns the axes of a convolution's weight `[out, in, height, width]` in the memory order of the GPU's kernels, and the axes
/// that restore PyTorch's order. A weight with one input channel is assumed to be depthwise.
fn axes(inputs: usize) -> [Axes; 2] {
    if inputs == 1 { [[2, 3, 0, 1]; 2] } else { [[0, 2, 3, 1], [0, 3, 1, 2]] }
}

/// Returns true if weights of convolutions have the order of the GPU's kernels on this device.
#[cfg(feature = "cuda")]
fn kernel_order(device: &Device) -> bool {
    matches!(device.clone().inner().as_dispatch(), burn::backend::DispatchDevice::Cube(cubecl::Device::Cuda(_)))
}

#[cfg(not(feature = "cuda"))]
fn kernel_order(_: &Device) -> bool {
    false
}

/// Flattens a parameter, its gradient or its state to `[N]`, in the order of the device's memory.
pub fn flatten<const D: usize>(parameter: Tensor<D>) -> Tensor<1> {
    let count = parameter.shape().num_elements();
    if D == 4 && kernel_order(&parameter.device()) {
        let [to_memory, _] = axes(parameter.dims()[1]);
        let to_memory: [isize; D] = std::array::from_fn(|axis| to_memory[axis] as isize);
        return parameter.permute(to_memory).reshape([count]);
    }
    parameter.reshape([count])
}

/// Returns the parameter of this shape that [`flatten`] made flat.
///
/// # Panics
///
/// When the shape has another number of elements.
pub fn unflatten<const D: usize>(flat: Tensor<1>, shape: [usize; D]) -> Tensor<D> {
    if D == 4 && kernel_order(&flat.device()) {
        let [to_memory, back] = axes(shape[1]);
        let in_memory: [usize; D] = std::array::from_fn(|axis| shape[to_memory[axis]]);
        let back: [isize; D] = std::array::from_fn(|axis| back[axis] as isize);
        return flat.reshape(in_memory).permute(back);
    }
    flat.reshape(shape)
}

/// Converts a flattened parameter of this shape to PyTorch's order: row-major.
///
/// # Panics
///
/// When the shape has another number of elements.
pub fn to_row_major(flat: Tensor<1>, shape: &[usize]) -> Tensor<1> {
    match *shape {
        [a, b, c, d] => {
            let count = a * b * c * d;
            unflatten(flat, [a, b, c, d]).reshape([count])
        }
        _ => flat,
    }
}

/// Converts row-major values of a parameter of this shape to those of [`flatten`].
///
/// # Panics
///
/// When the shape has another number of elements.
pub fn from_row_major(values: Tensor<1>, shape: &[usize]) -> Tensor<1> {
    match *shape {
        [a, b, c, d] => flatten(values.reshape([a, b, c, d])),
        _ => values,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_order_undoes_the_first() {
        for inputs in [1, 2, 64] {
            let [to_memory, back] = axes(inputs);
            // Axis `i` of the memory is axis `to_memory[i]` of the weight.
            assert_eq!(back.map(|axis| to_memory[axis]), [0, 1, 2, 3], "{inputs} inputs");
        }
    }
}
