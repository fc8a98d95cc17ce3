//! Which tensors have custom kernels.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::extension::{ConvOptions, LayerOps};
use crate::shape::ConvShape;

/// Returns true if the CPU kernels accept this image or this vector of features.
pub(crate) fn has_cpu_kernels<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(tensor.dtype(), DType::F32 | DType::BF16) && tensor.device().inner() == Device::flex()
}

/// Returns true if the CPU kernels accept this parameter, statistic or optimizer state.
pub(crate) fn has_cpu_parameter_kernels<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.dtype() == DType::F32 && tensor.device().inner() == Device::flex()
}

/// Returns true if all tensors have CPU kernels and the same element type.
pub(crate) fn all_have_cpu_kernels<'a, const D: usize>(mut tensors: impl Iterator<Item = &'a Tensor<D>>) -> bool {
    let Some(first) = tensors.next() else { return false };
    has_cpu_kernels(first) && tensors.all(|tensor| has_cpu_kernels(tensor) && tensor.dtype() == first.dtype())
}

/// Casts a parameter to the element type that is required for `input`: f32 for the CPU kernels, the input's type for burn's
/// operations. The GPU kernels take f32 parameters, which need no cast.
pub(crate) fn parameter_for<const D: usize, const I: usize>(parameter: Tensor<D>, input: &Tensor<I>) -> Tensor<D> {
    parameter.cast(if has_cpu_kernels(input) { DType::F32 } else { input.dtype() })
}

/// Returns true if the GPU kernels accept this tensor.
#[cfg(feature = "cuda")]
pub(crate) fn has_gpu_kernels<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16)
        && matches!(D, 2 | 4)
        // The kernels count elements in 32 bits.
        && (1..1 << 31).contains(&tensor.shape().num_elements())
        && matches!(
            tensor.device().inner().as_dispatch(),
            burn::backend::DispatchDevice::Cube(cubecl::Device::Cuda(_))
        )
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn has_gpu_kernels<const D: usize>(_: &Tensor<D>) -> bool {
    false
}

/// Hint for a batch that is too large for the GPU kernels. Their panic messages end with this text, by which the program recognises
/// the panics.
pub const SMALLER_BATCH: &str =
    "use a smaller batch: train.batch_size with train.accumulate, or --batch-size of eval and predict";

/// Checks a convolution of a GPU, whose kernels check no shapes and count elements in 32 bits.
///
/// # Panics
///
/// When the shapes do not fit, as on the CPU, or the output has 2^31 elements or more.
pub(crate) fn check_gpu_convolution(input: [usize; 4], weight: [usize; 4], options: &ConvOptions) {
    let elements = ConvShape::new(input, weight, options).output_len();
    assert!(
        elements < 1 << 31,
        "convolution of {input:?} with weights {weight:?}: an output of {elements} elements, the kernels count up to 2^31: \
         {SMALLER_BATCH}"
    );
}

/// Returns true if convolutions, batch norm and activations of this tensor have custom kernels.
pub(crate) fn has_image_kernels<const D: usize>(tensor: &Tensor<D>) -> bool {
    has_cpu_kernels(tensor) || has_gpu_kernels(tensor)
}

/// Casts the second operand of an elementwise kernel, which checks neither types nor shapes, to the type of the first.
///
/// # Panics
///
/// When the shapes differ.
pub(crate) fn cast_like<const D: usize>(tensor: Tensor<D>, first: &Tensor<D>) -> Tensor<D> {
    assert_eq!(tensor.dims(), first.dims(), "two images to add differ in shape");
    if tensor.dtype() == first.dtype() { tensor } else { tensor.cast(first.dtype()) }
}

/// Casts a 16-bit tensor to f32; other tensors are returned as they are. Long sums and inputs of a loss need at least f32.
pub fn upcast<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::BF16 if has_cpu_kernels(&tensor) => convert(tensor, DType::F32),
        DType::BF16 | DType::F16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}

/// Casts a tensor to bf16, as `tensor.to(torch.bfloat16)`. Ties are rounded to even.
pub fn to_bf16<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F32 if has_cpu_kernels(&tensor) => convert(tensor, DType::BF16),
        _ => tensor.cast(FloatDType::BF16),
    }
}

/// Casts between f32 and bf16 with the CPU's kernel.
fn convert<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::convert(tensor.into_dispatch(), dtype))
}
