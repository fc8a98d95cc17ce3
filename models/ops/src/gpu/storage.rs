//! Flat f32 tensors of burn on an NVIDIA GPU, and the memory of CubeCL behind them.

use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};
use burn::tensor::{DType, Tensor};
use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};
use cubecl::Device;

/// Returns the storage of a flat f32 tensor on an NVIDIA GPU, contiguous; `None` for other tensors.
pub(super) fn storage_of(tensor: &Tensor<1>) -> Option<CubeTensor> {
    into_storage(tensor.clone())
}

/// Returns storage that can be written: that of [`storage_of`], or a copy if another tensor shares the memory.
pub(super) fn writable_storage(tensor: Tensor<1>) -> Option<CubeTensor> {
    let tensor = into_storage(tensor)?;
    Some(if tensor.can_mut() { tensor } else { tensor.copy() })
}

fn into_storage(tensor: Tensor<1>) -> Option<CubeTensor> {
    if tensor.dtype() != DType::F32 {
        return None;
    }
    match tensor.into_dispatch().kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor)) if matches!(tensor.device, Device::Cuda(_)) => {
            Some(into_contiguous(tensor))
        }
        _ => None,
    }
}

/// Makes a burn tensor of the storage.
pub(super) fn tensor_of_storage(tensor: CubeTensor) -> Tensor<1> {
    let kind = DispatchTensorKind::Cube(BackendTensor::Float(tensor));
    Tensor::from_dispatch(DispatchTensor { kind, autodiff: Default::default() })
}

/// Returns the storage of the tensors of one parameter; `None` if one of them is not an f32 tensor on a GPU, or is empty.
pub(super) fn storages_of<'a, const N: usize>(of: impl Iterator<Item = &'a Tensor<1>>) -> Option<[CubeTensor; N]> {
    let of: Vec<_> = of.collect();
    let length = of[0].dims()[0];
    assert!(of.iter().all(|tensor| tensor.dims()[0] == length), "the tensors of a parameter differ in length");
    let found = of.into_iter().map(storage_of).collect::<Option<Vec<_>>>().filter(|_| length > 0)?;
    Some(found.try_into().expect("as many tensors as the caller names"))
}
