//! Copies between devices, always through host memory.
//!
//! burn's own copy between GPUs is not safe here. If `libnccl.so` exists (NVIDIA's development package installs it), burn uses
//! NCCL's send and receive. cubecl enqueues the send on a stream for which the tensor's own stream never waits. So memory that
//! is dropped after the call may be overwritten before it is sent. Without `libnccl.so`, cubecl copies through host memory,
//! tensor by tensor.
//!
//! The functions here always copy through host memory. Their results do not depend on the source afterwards, and they wait only
//! once for many tensors.

use burn::tensor::{Device, Tensor, TensorData, Transaction};

/// Returns a tensor on `device` (a device without autodiff). A tensor that is already on the device is not copied.
pub(super) fn to_device<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<D> {
    if tensor.device() == *device {
        return tensor;
    }
    let dtype = tensor.dtype();
    Tensor::from_data(tensor.into_data(), (device, dtype))
}

/// Moves flat tensors, all of one device, to `device`, as [`to_device`] does.
pub(super) fn all_to_device(tensors: Vec<Tensor<1>>, device: &Device) -> Vec<Tensor<1>> {
    match tensors.first() {
        Some(first) if first.device() != *device => from_host(to_host(tensors), device).collect(),
        _ => tensors,
    }
}

/// Copies tensors to host memory, with one wait for all of them.
pub(super) fn to_host(tensors: Vec<Tensor<1>>) -> Vec<TensorData> {
    tensors.into_iter().fold(Transaction::default(), Transaction::register).execute()
}

/// Makes tensors on `device` from the values that [`to_host`] returned.
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
