//! Copies between devices, through the host.
//!
//! burn moves a tensor between GPUs by NCCL's send and receive where `libnccl.so` exists, as NVIDIA's development package
//! installs it. cubecl enqueues the send on a stream that the tensor's own stream never waits for: memory that is dropped after
//! the call may be written again before it is sent. Without that file, cubecl copies through the host, tensor by tensor. These
//! functions always do. What they return does not depend on the source any more, and they wait once for many tensors.

use burn::tensor::{Device, Tensor, TensorData, Transaction};

/// Returns a tensor on `device` (one without autodiff). A tensor that is there already is not copied.
pub(super) fn to_device<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<D> {
    if tensor.device() == *device {
        return tensor;
    }
    let dtype = tensor.dtype();
    Tensor::from_data(tensor.into_data(), (device, dtype))
}

/// Returns flat tensors of one device on `device`, as [`to_device`].
pub(super) fn all_to_device(tensors: Vec<Tensor<1>>, device: &Device) -> Vec<Tensor<1>> {
    match tensors.first() {
        Some(first) if first.device() != *device => from_host(to_host(tensors), device).collect(),
        _ => tensors,
    }
}

/// Reads tensors.
pub(super) fn to_host(tensors: Vec<Tensor<1>>) -> Vec<TensorData> {
    tensors.into_iter().fold(Transaction::default(), Transaction::register).execute()
}

/// Makes tensors of values that [`to_host`] has read.
pub(super) fn from_host(values: Vec<TensorData>, device: &Device) -> impl Iterator<Item = Tensor<1>> {
    values.into_iter().map(move |values| {
        let dtype = values.dtype();
        Tensor::from_data(values, (device, dtype))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_have_the_same_values_in_the_same_order() {
        let device = Device::flex();
        let tensors: Vec<Tensor<1>> = (1..5).map(|n| Tensor::full([n], n as f32, &device)).collect();
        let copies: Vec<Tensor<1>> = from_host(to_host(tensors.clone()), &device).collect();
        for (tensor, copy) in tensors.iter().zip(&copies) {
            copy.to_data().assert_eq(&tensor.to_data(), true);
        }
        assert_eq!(copies.len(), tensors.len());
    }
}
