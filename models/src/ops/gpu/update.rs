//! The optimizer's step and the weight average on a GPU: one kernel a parameter, where burn's operations take seven for SGD
//! with momentum and a dozen for AdamW. A launch costs the host microseconds, and a step of small parameters little else.
//!
//! The formulas are those of `update`'s chains; products and sums may be fused, so last bits differ from the CPU's.

use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};
use burn::tensor::{DType, Tensor};
use burn_cubecl::{kernel::into_contiguous, ops::numeric::empty_device_dtype, tensor::CubeTensor};
use cubecl::prelude::*;
use cubecl::std::tensor::layout::linear::{LinearView, LinearViewMut};
use cubecl::{Device, calculate_cube_count_elemwise};

use super::super::update::{UpdateRule, UpdatedParameter, bias_corrections};

/// A flat f32 tensor of an NVIDIA GPU, its elements one behind the other.
pub(super) fn cube(tensor: &Tensor<1>) -> Option<CubeTensor> {
    if tensor.dtype() != DType::F32 {
        return None;
    }
    match tensor.clone().into_dispatch().kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor)) if matches!(tensor.device, Device::Cuda(_)) => {
            Some(into_contiguous(tensor))
        }
        _ => None,
    }
}

fn tensor_of(tensor: CubeTensor) -> Tensor<1> {
    let kind = DispatchTensorKind::Cube(BackendTensor::Float(tensor));
    Tensor::from_dispatch(DispatchTensor { kind, autodiff: Default::default() })
}

/// Tensors of one length, and how a kernel goes over them.
struct Pass<const N: usize> {
    tensors: [CubeTensor; N],
    cubes: CubeCount,
    dim: CubeDim,
    vector: usize,
}

impl<const N: usize> Pass<N> {
    /// `None` unless all are on one GPU, in f32, and there is something in them.
    fn over(tensors: [&Tensor<1>; N]) -> Option<Self> {
        let len = tensors[0].dims()[0];
        assert!(tensors.iter().all(|tensor| tensor.dims()[0] == len), "the tensors of a parameter differ in length");
        let cubes = tensors.map(cube);
        if len == 0 || cubes.iter().any(Option::is_none) {
            return None;
        }
        let tensors = cubes.map(|tensor| tensor.expect("there are all of them"));
        // 16 bytes at a time, unless a view begins between two of these
        let aligned = |tensor: &CubeTensor| tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16);
        let vector = if len.is_multiple_of(4) && tensors.iter().all(aligned) { 4 } else { 1 };
        let client = &tensors[0].client;
        let dim = CubeDim::new(client, len / vector);
        let cubes = calculate_cube_count_elemwise(client, len / vector, dim);
        Some(Self { tensors, cubes, dim, vector })
    }

    /// New memory of the tensors' length.
    fn output(&self) -> CubeTensor {
        let like = &self.tensors[0];
        empty_device_dtype(like.client.clone(), like.device.clone(), like.meta.shape().clone(), like.dtype)
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments are bound one by one")]
fn sgd<N: Size>(
    value: LinearView<'_, Vector<f32, N>>,
    gradient: LinearView<'_, Vector<f32, N>>,
    buffer: LinearView<'_, Vector<f32, N>>,
    mut new_value: LinearViewMut<'_, Vector<f32, N>>,
    mut new_buffer: LinearViewMut<'_, Vector<f32, N>>,
    lr: f32,
    momentum: f32,
    weight_decay: f32,
    #[comptime] nesterov: bool,
) {
    if !new_value.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let p = value.read(ABSOLUTE_POS);
    let d = gradient.read(ABSOLUTE_POS) + Vector::new(weight_decay) * p;
    let b = Vector::new(momentum) * buffer.read(ABSOLUTE_POS) + d;
    new_buffer.write(ABSOLUTE_POS, b);
    let direction = if comptime!(nesterov) { d + Vector::new(momentum) * b } else { b };
    new_value.write(ABSOLUTE_POS, p - Vector::new(lr) * direction);
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel's arguments are bound one by one")]
fn adamw<N: Size>(
    value: LinearView<'_, Vector<f32, N>>,
    gradient: LinearView<'_, Vector<f32, N>>,
    mean: LinearView<'_, Vector<f32, N>>,
    variance: LinearView<'_, Vector<f32, N>>,
    mut new_value: LinearViewMut<'_, Vector<f32, N>>,
    mut new_mean: LinearViewMut<'_, Vector<f32, N>>,
    mut new_variance: LinearViewMut<'_, Vector<f32, N>>,
    keep: f32,
    rate: f32,
    beta1: f32,
    beta2: f32,
    root: f32,
    eps: f32,
) {
    if !new_value.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let g = gradient.read(ABSOLUTE_POS);
    let m = Vector::new(beta1) * mean.read(ABSOLUTE_POS) + Vector::new(1.0 - beta1) * g;
    let v = Vector::new(beta2) * variance.read(ABSOLUTE_POS) + Vector::new(1.0 - beta2) * g * g;
    new_mean.write(ABSOLUTE_POS, m);
    new_variance.write(ABSOLUTE_POS, v);
    let denominator = v.sqrt() / Vector::new(root) + Vector::new(eps);
    new_value.write(ABSOLUTE_POS, Vector::new(keep) * value.read(ABSOLUTE_POS) - Vector::new(rate) * (m / denominator));
}

#[cube(launch_unchecked)]
fn average<N: Size>(
    average: LinearView<'_, Vector<f32, N>>,
    value: LinearView<'_, Vector<f32, N>>,
    mut new: LinearViewMut<'_, Vector<f32, N>>,
    decay: f32,
) {
    if !new.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let kept = Vector::new(decay) * average.read(ABSOLUTE_POS);
    new.write(ABSOLUTE_POS, kept + Vector::new(1.0 - decay) * value.read(ABSOLUTE_POS));
}

/// A step of one parameter whose state is there, in f32 on a GPU; `None` for any other.
pub(crate) fn step(
    rule: &UpdateRule,
    value: &Tensor<1>,
    gradient: &Tensor<1>,
    weight_decay: f64,
    slots: &[Option<Tensor<1>>; 2],
) -> Option<UpdatedParameter> {
    match (*rule, slots) {
        (UpdateRule::Sgd { lr, momentum, nesterov }, [Some(buffer), _]) => {
            let pass = Pass::over([value, gradient, buffer])?;
            let (new_value, new_buffer) = (pass.output(), pass.output());
            let Pass { tensors: [value, gradient, buffer], cubes, dim, vector } = pass;
            let client = value.client.clone();
            // SAFETY: every tensor has as many elements as the output, whose bounds the kernel looks at.
            unsafe {
                sgd::launch_unchecked(
                    &client,
                    cubes,
                    dim,
                    vector,
                    value.into_linear_view(),
                    gradient.into_linear_view(),
                    buffer.into_linear_view(),
                    new_value.clone().into_linear_view(),
                    new_buffer.clone().into_linear_view(),
                    lr as f32,
                    momentum as f32,
                    weight_decay as f32,
                    nesterov,
                );
            }
            Some(UpdatedParameter { value: tensor_of(new_value), slots: [Some(tensor_of(new_buffer)), None] })
        }
        (UpdateRule::AdamW { lr, betas, eps, step }, [Some(mean), Some(variance)]) => {
            let pass = Pass::over([value, gradient, mean, variance])?;
            let [new_value, new_mean, new_variance] = [pass.output(), pass.output(), pass.output()];
            let Pass { tensors: [value, gradient, mean, variance], cubes, dim, vector } = pass;
            let client = value.client.clone();
            let [correction1, correction2] = bias_corrections(betas, step);
            // SAFETY: as above.
            unsafe {
                adamw::launch_unchecked(
                    &client,
                    cubes,
                    dim,
                    vector,
                    value.into_linear_view(),
                    gradient.into_linear_view(),
                    mean.into_linear_view(),
                    variance.into_linear_view(),
                    new_value.clone().into_linear_view(),
                    new_mean.clone().into_linear_view(),
                    new_variance.clone().into_linear_view(),
                    (1.0 - lr * weight_decay) as f32,
                    (lr / correction1) as f32,
                    betas[0] as f32,
                    betas[1] as f32,
                    correction2.sqrt() as f32,
                    eps as f32,
                );
            }
            let slots = [Some(tensor_of(new_mean)), Some(tensor_of(new_variance))];
            Some(UpdatedParameter { value: tensor_of(new_value), slots })
        }
        _ => None,
    }
}

/// `decay average + (1 - decay) value` in f32 on a GPU; `None` elsewhere.
pub(crate) fn follow(decay: f64, averaged: &Tensor<1>, value: &Tensor<1>) -> Option<Tensor<1>> {
    let pass = Pass::over([averaged, value])?;
    let new = pass.output();
    let Pass { tensors: [averaged, value], cubes, dim, vector } = pass;
    let client = value.client.clone();
    // SAFETY: as in `step`.
    unsafe {
        average::launch_unchecked(
            &client,
            cubes,
            dim,
            vector,
            averaged.into_linear_view(),
            value.into_linear_view(),
            new.clone().into_linear_view(),
            decay as f32,
        );
    }
    Some(tensor_of(new))
}
