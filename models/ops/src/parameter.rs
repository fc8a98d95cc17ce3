//! Parameters as flat tensors, in the memory order of the device's kernels.
//!
//! The convolutions of [`mod@crate::gpu`] read weights as `[out, height, width, in]`. On a GPU, such weights, their gradients and
//! their optimizer state are flattened in this order, so that a training step copies none of them. Files and the host have PyTorch's
//! order.

use burn::tensor::{Device, Tensor};

/// The axes of a convolution's weight `[out, in, height, width]` in the memory order of the GPU's kernels, and those that turn it
/// back.
const LAST: [isize; 4] = [0, 2, 3, 1];
const BACK: [isize; 4] = [0, 3, 1, 2];

/// Returns true if weights of convolutions have their input channels last in this device's memory.
#[cfg(all(feature = "cuda", not(feature = "fusion")))]
fn channels_last(device: &Device) -> bool {
    matches!(device.clone().inner().as_dispatch(), burn::backend::DispatchDevice::Cube(cubecl::Device::Cuda(_)))
}

#[cfg(not(all(feature = "cuda", not(feature = "fusion"))))]
fn channels_last(_: &Device) -> bool {
    false
}

/// Flattens a parameter, its gradient or its state to `[N]`, in the order of the device's memory.
pub fn flatten<const D: usize>(parameter: Tensor<D>) -> Tensor<1> {
    let count = parameter.shape().num_elements();
    if D == 4 && channels_last(&parameter.device()) {
        let axes: [isize; D] = std::array::from_fn(|axis| LAST[axis]);
        return parameter.permute(axes).reshape([count]);
    }
    parameter.reshape([count])
}

/// Returns the parameter of this shape that [`flatten`] made flat.
///
/// # Panics
///
/// When the shape has another number of elements.
pub fn unflatten<const D: usize>(flat: Tensor<1>, shape: [usize; D]) -> Tensor<D> {
    if D == 4 && channels_last(&flat.device()) {
        let in_memory: [usize; D] = std::array::from_fn(|axis| shape[LAST[axis] as usize]);
        let back: [isize; D] = std::array::from_fn(|axis| BACK[axis]);
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
