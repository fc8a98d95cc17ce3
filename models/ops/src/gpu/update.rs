//! The optimizer's step and the weight average on a GPU. One launch updates many parameters; burn's operations need
//! seven launches per parameter for SGD with momentum and a dozen for AdamW. A launch takes microseconds of the host,
//! which is most of a step's time for small parameters.
//!
//! The formulas are those of [`mod@crate::update`]. Products and sums may be fused, so the last bits differ from the
//! CPU's.

use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};
use burn::tensor::{DType, Tensor};
use burn_cubecl::{kernel::into_contiguous, ops::numeric::empty_device_dtype, tensor::CubeTensor};
use cubecl::Device;
use cubecl::prelude::*;

use super::rows::{UNITS, aligned, all};
use crate::optimizer::{ParameterUpdate, UpdateRule, UpdatedParameter, bias_corrections};

/// Returns the storage of a flat f32 tensor on an NVIDIA GPU, contiguous; `None` for other tensors.
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

/// Returns a tensor of burn.
pub(super) fn tensor_of(tensor: CubeTensor) -> Tensor<1> {
    let kind = DispatchTensorKind::Cube(BackendTensor::Float(tensor));
    Tensor::from_dispatch(DispatchTensor { kind, autodiff: Default::default() })
}

/// Parameters per launch: 32 parameters of AdamW have 224 tensors, and a launch can take the addresses of 500. Smaller
/// launches have half as many parameters, repeatedly, so six kernels suffice for any number of parameters.
const MAX_PARAMETERS: usize = 32;

/// Tensors of a launch, in vectors of `N`.
pub(super) type Tensors<N> = Sequence<Box<[Vector<f32, N>]>>;

/// Arguments of one parameter in a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ParameterBlocks {
    /// Number of vectors.
    length: usize,
    /// The parameter's first block, and the next parameter's first block.
    first: usize,
    next: usize,
    weight_decay: f32,
}

/// Parameters of one launch, each with `N` input tensors.
pub(super) struct Batch<const N: usize> {
    tensors: Vec<[CubeTensor; N]>,
    weight_decay: Vec<f64>,
    pub(super) vector: usize,
}

impl<const N: usize> Batch<N> {
    /// Divides the parameters, in order, into as few launches as possible.
    pub(super) fn all(mut parameters: Vec<([CubeTensor; N], f64)>) -> impl Iterator<Item = Self> {
        std::iter::from_fn(move || {
            let vector = vector(&parameters.first()?.0);
            let alike =
                parameters.iter().take(MAX_PARAMETERS).take_while(|(tensors, _)| self::vector(tensors) == vector);
            let rest = parameters.split_off(1 << alike.count().ilog2());
            let (tensors, weight_decay) = std::mem::replace(&mut parameters, rest).into_iter().unzip();
            Some(Self { tensors, weight_decay, vector })
        })
    }

    /// Returns the first parameter's first tensor.
    pub(super) fn tensor(&self) -> &CubeTensor {
        &self.tensors[0][0]
    }

    fn client(&self) -> Client {
        self.tensor().client.clone()
    }

    /// Returns the tensors with an index, of all parameters.
    pub(super) fn args<T: LaunchArg<RuntimeArg = BufferArg>>(&self, index: usize) -> SequenceArg<T> {
        self.tensors.iter().map(|tensors| all(&tensors[index])).collect()
    }

    /// Allocates a tensor of each parameter's length.
    fn outputs(&self) -> Vec<CubeTensor> {
        let new = |tensors: &[CubeTensor; N]| {
            let like = &tensors[0];
            empty_device_dtype(like.client.clone(), like.device.clone(), like.meta.shape().clone(), like.dtype)
        };
        self.tensors.iter().map(new).collect()
    }

    /// Returns the number of vectors of a parameter.
    fn length(&self, tensors: &[CubeTensor; N]) -> usize {
        tensors[0].meta.num_elements() / self.vector
    }

    /// Returns the number of blocks of a launch.
    pub(super) fn blocks(&self) -> usize {
        self.tensors.iter().map(|tensors| self.length(tensors).div_ceil(UNITS)).sum()
    }

    /// Returns each parameter's blocks, and the grid.
    pub(super) fn shares(&self) -> (SequenceArg<ParameterBlocks>, CubeCount) {
        let mut first = 0;
        let share = |(tensors, weight_decay): (&[CubeTensor; N], &f64)| {
            let length = self.length(tensors);
            let next = first + length.div_ceil(UNITS);
            let share = ParameterBlocksLaunch::new(length, first, next, *weight_decay as f32);
            first = next;
            share
        };
        let shares = self.tensors.iter().zip(&self.weight_decay).map(share).collect();
        (shares, CubeCount::Static(first as u32, 1, 1))
    }
}

/// Returns 4 if all tensors can be accessed in vectors of four elements, else 1.
fn vector<const N: usize>(tensors: &[CubeTensor; N]) -> usize {
    let whole = tensors[0].meta.num_elements().is_multiple_of(4) && tensors.iter().all(aligned);
    if whole { 4 } else { 1 }
}

fn args_of<T: LaunchArg<RuntimeArg = BufferArg>>(tensors: &[CubeTensor]) -> SequenceArg<T> {
    tensors.iter().map(all).collect()
}

/// Returns whether the thread belongs to the parameter, and its vector.
#[cube]
pub(super) fn thread_vector(share: &ParameterBlocks) -> (bool, usize) {
    let block = CUBE_POS_X as usize;
    let at = (block - min(share.first, block)) * UNITS + UNIT_POS as usize;
    (block >= share.first && block < share.next && at < share.length, at)
}

#[cube(launch_unchecked)]
fn sgd<N: Size>(
    values: &Tensors<N>,
    gradients: &Tensors<N>,
    buffers: &Tensors<N>,
    new_values: &mut Tensors<N>,
    new_buffers: &mut Tensors<N>,
    shares: &Sequence<ParameterBlocks>,
    lr: f32,
    momentum: f32,
    #[comptime] nesterov: bool,
) {
    #[unroll]
    for index in 0..comptime!(shares.len()) {
        let share = shares.index(index);
        let (inside, at) = thread_vector(share);
        if inside {
            let p = values.index(index)[at];
            let d = gradients.index(index)[at] + Vector::new(share.weight_decay) * p;
            let b = Vector::new(momentum) * buffers.index(index)[at] + d;
            new_buffers.index_mut(index)[at] = b;
            let direction = if comptime!(nesterov) { d + Vector::new(momentum) * b } else { b };
            new_values.index_mut(index)[at] = p - Vector::new(lr) * direction;
        }
    }
}

#[cube(launch_unchecked)]
fn adamw<N: Size>(
    values: &Tensors<N>,
    gradients: &Tensors<N>,
    means: &Tensors<N>,
    variances: &Tensors<N>,
    new_values: &mut Tensors<N>,
    new_means: &mut Tensors<N>,
    new_variances: &mut Tensors<N>,
    shares: &Sequence<ParameterBlocks>,
    lr: f32,
    rate: f32,
    beta1: f32,
    beta2: f32,
    root: f32,
    eps: f32,
) {
    #[unroll]
    for index in 0..comptime!(shares.len()) {
        let share = shares.index(index);
        let (inside, at) = thread_vector(share);
        if inside {
            let g = gradients.index(index)[at];
            let m = Vector::new(beta1) * means.index(index)[at] + Vector::new(1.0 - beta1) * g;
            let v = Vector::new(beta2) * variances.index(index)[at] + Vector::new(1.0 - beta2) * g * g;
            new_means.index_mut(index)[at] = m;
            new_variances.index_mut(index)[at] = v;
            let denominator = v.sqrt() / Vector::new(root) + Vector::new(eps);
            let kept = Vector::new(1.0 - lr * share.weight_decay) * values.index(index)[at];
            new_values.index_mut(index)[at] = kept - Vector::new(rate) * (m / denominator);
        }
    }
}

#[cube(launch_unchecked)]
fn average<N: Size>(
    averages: &Tensors<N>,
    values: &Tensors<N>,
    new_averages: &mut Tensors<N>,
    shares: &Sequence<ParameterBlocks>,
    decay: f32,
) {
    #[unroll]
    for index in 0..comptime!(shares.len()) {
        let (inside, at) = thread_vector(shares.index(index));
        if inside {
            let kept = Vector::new(decay) * averages.index(index)[at];
            new_averages.index_mut(index)[at] = kept + Vector::new(1.0 - decay) * values.index(index)[at];
        }
    }
}

/// Returns the parameters' tensors if all have `slots` tensors of state, and all are non-empty f32 tensors on a GPU.
fn read<const N: usize>(parameters: &[ParameterUpdate], slots: usize) -> Option<Vec<([CubeTensor; N], f64)>> {
    let one = |ParameterUpdate { value, gradient, weight_decay, slots: state }: &ParameterUpdate| {
        let state = state.iter().take(slots).map(Option::as_ref).collect::<Option<Vec<_>>>()?;
        Some((tensors([value, gradient].into_iter().chain(state))?, *weight_decay))
    };
    parameters.iter().map(one).collect()
}

/// Returns the tensors of one parameter; `None` if one of them is no f32 tensor on a GPU, or is empty.
pub(super) fn tensors<'a, const N: usize>(of: impl Iterator<Item = &'a Tensor<1>>) -> Option<[CubeTensor; N]> {
    let of: Vec<_> = of.collect();
    let length = of[0].dims()[0];
    assert!(of.iter().all(|tensor| tensor.dims()[0] == length), "the tensors of a parameter differ in length");
    let found = of.into_iter().map(cube).collect::<Option<Vec<_>>>().filter(|_| length > 0)?;
    Some(found.try_into().expect("a value, a gradient and the state"))
}

/// Takes a step of parameters whose state exists, all in f32 on a GPU; returns `None` for others.
pub(crate) fn update(rule: &UpdateRule, parameters: &[ParameterUpdate]) -> Option<Vec<UpdatedParameter>> {
    let mut updated = Vec::with_capacity(parameters.len());
    match *rule {
        // Without momentum there is no state, and the first step makes the state.
        UpdateRule::Sgd { lr, momentum, nesterov } => {
            for pass in Batch::<3>::all(read(parameters, 1)?) {
                let (client, (shares, blocks)) = (pass.client(), pass.shares());
                let [new_values, new_buffers] = [0; 2].map(|_| pass.outputs());
                // SAFETY: every tensor has its parameter's number of elements, which the kernel stays within.
                unsafe {
                    sgd::launch_unchecked(
                        &client,
                        blocks,
                        CubeDim::new_1d(UNITS as u32),
                        pass.vector,
                        pass.args(0),
                        pass.args(1),
                        pass.args(2),
                        args_of(&new_values),
                        args_of(&new_buffers),
                        shares,
                        lr as f32,
                        momentum as f32,
                        nesterov,
                    );
                }
                updated.extend(new_values.into_iter().zip(new_buffers).map(|(value, buffer)| UpdatedParameter {
                    value: tensor_of(value),
                    slots: [Some(tensor_of(buffer)), None],
                }));
            }
        }
        UpdateRule::AdamW { lr, betas, eps, step } => {
            let [correction1, correction2] = bias_corrections(betas, step);
            for pass in Batch::<4>::all(read(parameters, 2)?) {
                let (client, (shares, blocks)) = (pass.client(), pass.shares());
                let [new_values, new_means, new_variances] = [0; 3].map(|_| pass.outputs());
                // SAFETY: as above.
                unsafe {
                    adamw::launch_unchecked(
                        &client,
                        blocks,
                        CubeDim::new_1d(UNITS as u32),
                        pass.vector,
                        pass.args(0),
                        pass.args(1),
                        pass.args(2),
                        pass.args(3),
                        args_of(&new_values),
                        args_of(&new_means),
                        args_of(&new_variances),
                        shares,
                        lr as f32,
                        (lr / correction1) as f32,
                        betas[0] as f32,
                        betas[1] as f32,
                        correction2.sqrt() as f32,
                        eps as f32,
                    );
                }
                let moments = new_means.into_iter().zip(new_variances);
                updated.extend(new_values.into_iter().zip(moments).map(|(value, (mean, variance))| UpdatedParameter {
                    value: tensor_of(value),
                    slots: [Some(tensor_of(mean)), Some(tensor_of(variance))],
                }));
            }
        }
    }
    Some(updated)
}

/// Computes `decay average + (1 - decay) value` of pairs in f32 on a GPU; returns `None` for others.
pub(crate) fn ema_update(decay: f64, pairs: &[(Tensor<1>, Tensor<1>)]) -> Option<Vec<Tensor<1>>> {
    let read = pairs.iter().map(|(average, value)| Some((tensors([average, value].into_iter())?, 0.0)));
    let mut averages = Vec::with_capacity(pairs.len());
    for pass in Batch::<2>::all(read.collect::<Option<_>>()?) {
        let (client, (shares, blocks)) = (pass.client(), pass.shares());
        let new = pass.outputs();
        // SAFETY: as in `update`.
        unsafe {
            average::launch_unchecked(
                &client,
                blocks,
                CubeDim::new_1d(UNITS as u32),
                pass.vector,
                pass.args(0),
                pass.args(1),
                args_of(&new),
                shares,
                decay as f32,
            );
        }
        averages.extend(new.into_iter().map(tensor_of));
    }
    Some(averages)
}
