//! The optimizer's step and the weight average on a GPU: one launch for many parameters, where burn's operations take seven a
//! parameter for SGD with momentum and a dozen for AdamW. A launch costs the host microseconds, and a step of small
//! parameters little else.
//!
//! The formulas are those of `update`'s chains; products and sums may be fused, so last bits differ from the CPU's.

use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};
use burn::tensor::{DType, Tensor};
use burn_cubecl::{kernel::into_contiguous, ops::numeric::empty_device_dtype, tensor::CubeTensor};
use cubecl::Device;
use cubecl::prelude::*;

use super::super::update::{ParameterUpdate, UpdateRule, UpdatedParameter, bias_corrections};
use super::rows::{UNITS, aligned, all};

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

/// Parameters of a launch: 32 of AdamW's have 224 tensors, of the 500 whose addresses fit into a launch. Others are fewer by
/// halves, so that a network of any number of parameters needs six kernels.
const TOGETHER: usize = 32;

type Tensors<N> = Sequence<Box<[Vector<f32, N>]>>;

/// What a launch is told of each of its parameters.
#[derive(CubeType, CubeLaunch)]
struct Share {
    /// In vectors.
    length: usize,
    /// The first block that is this parameter's, and the next one's first.
    first: usize,
    next: usize,
    weight_decay: f32,
}

/// Parameters of a launch, each with `N` tensors that it reads.
struct Pass<const N: usize> {
    tensors: Vec<[CubeTensor; N]>,
    weight_decay: Vec<f64>,
    vector: usize,
}

impl<const N: usize> Pass<N> {
    /// As few launches as can be, which keep the parameters' order.
    fn all(mut parameters: Vec<([CubeTensor; N], f64)>) -> impl Iterator<Item = Self> {
        std::iter::from_fn(move || {
            let vector = vector(&parameters.first()?.0);
            let alike = parameters.iter().take(TOGETHER).take_while(|(tensors, _)| self::vector(tensors) == vector);
            let rest = parameters.split_off(1 << alike.count().ilog2());
            let (tensors, weight_decay) = std::mem::replace(&mut parameters, rest).into_iter().unzip();
            Some(Self { tensors, weight_decay, vector })
        })
    }

    fn client(&self) -> Client {
        self.tensors[0][0].client.clone()
    }

    /// The tensors with an index, of all parameters.
    fn args<T: LaunchArg<RuntimeArg = BufferArg>>(&self, index: usize) -> SequenceArg<T> {
        self.tensors.iter().map(|tensors| all(&tensors[index])).collect()
    }

    /// New memory of each parameter's length.
    fn outputs(&self) -> Vec<CubeTensor> {
        let new = |tensors: &[CubeTensor; N]| {
            let like = &tensors[0];
            empty_device_dtype(like.client.clone(), like.device.clone(), like.meta.shape().clone(), like.dtype)
        };
        self.tensors.iter().map(new).collect()
    }

    /// Which blocks are whose; and all blocks.
    fn shares(&self) -> (SequenceArg<Share>, CubeCount) {
        let mut first = 0;
        let share = |(tensors, weight_decay): (&[CubeTensor; N], &f64)| {
            let length = tensors[0].meta.num_elements() / self.vector;
            let next = first + length.div_ceil(UNITS);
            let share = ShareLaunch::new(length, first, next, *weight_decay as f32);
            first = next;
            share
        };
        let shares = self.tensors.iter().zip(&self.weight_decay).map(share).collect();
        (shares, CubeCount::Static(first as u32, 1, 1))
    }
}

/// Four elements at a time where all can be read so.
fn vector<const N: usize>(tensors: &[CubeTensor; N]) -> usize {
    let whole = tensors[0].meta.num_elements().is_multiple_of(4) && tensors.iter().all(aligned);
    if whole { 4 } else { 1 }
}

fn args_of<T: LaunchArg<RuntimeArg = BufferArg>>(tensors: &[CubeTensor]) -> SequenceArg<T> {
    tensors.iter().map(all).collect()
}

/// Where a thread is in a parameter, if the block is the parameter's.
#[cube]
fn own(share: &Share) -> (bool, usize) {
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
    shares: &Sequence<Share>,
    lr: f32,
    momentum: f32,
    #[comptime] nesterov: bool,
) {
    #[unroll]
    for index in 0..comptime!(shares.len()) {
        let share = shares.index(index);
        let (inside, at) = own(share);
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
    shares: &Sequence<Share>,
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
        let (inside, at) = own(share);
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
    shares: &Sequence<Share>,
    decay: f32,
) {
    #[unroll]
    for index in 0..comptime!(shares.len()) {
        let (inside, at) = own(shares.index(index));
        if inside {
            let kept = Vector::new(decay) * averages.index(index)[at];
            new_averages.index_mut(index)[at] = kept + Vector::new(1.0 - decay) * values.index(index)[at];
        }
    }
}

/// The parameters' tensors if all have `slots` of state, and all are f32 on a GPU, with something in them.
fn read<const N: usize>(parameters: &[ParameterUpdate], slots: usize) -> Option<Vec<([CubeTensor; N], f64)>> {
    let one = |ParameterUpdate { value, gradient, weight_decay, slots: state }: &ParameterUpdate| {
        let state = state.iter().take(slots).map(Option::as_ref).collect::<Option<Vec<_>>>()?;
        Some((tensors([value, gradient].into_iter().chain(state))?, *weight_decay))
    };
    parameters.iter().map(one).collect()
}

/// Tensors of one parameter.
fn tensors<'a, const N: usize>(of: impl Iterator<Item = &'a Tensor<1>>) -> Option<[CubeTensor; N]> {
    let of: Vec<_> = of.collect();
    let length = of[0].dims()[0];
    assert!(of.iter().all(|tensor| tensor.dims()[0] == length), "the tensors of a parameter differ in length");
    let found = of.into_iter().map(cube).collect::<Option<Vec<_>>>().filter(|_| length > 0)?;
    Some(found.try_into().expect("a value, a gradient and the state"))
}

/// A step of parameters whose state is there, all in f32 on a GPU; `None` for any other.
pub(crate) fn step(rule: &UpdateRule, parameters: &[ParameterUpdate]) -> Option<Vec<UpdatedParameter>> {
    let mut updated = Vec::with_capacity(parameters.len());
    match *rule {
        // without momentum there is no state, and the first step makes it
        UpdateRule::Sgd { lr, momentum, nesterov } => {
            for pass in Pass::<3>::all(read(parameters, 1)?) {
                let (client, (shares, blocks)) = (pass.client(), pass.shares());
                let [new_values, new_buffers] = [0; 2].map(|_| pass.outputs());
                // SAFETY: every tensor has as many elements as its parameter, which the kernel stays within.
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
            for pass in Pass::<4>::all(read(parameters, 2)?) {
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

/// `decay average + (1 - decay) value` of pairs in f32 on a GPU; `None` elsewhere.
pub(crate) fn follow(decay: f64, pairs: &[(Tensor<1>, Tensor<1>)]) -> Option<Vec<Tensor<1>>> {
    let read = pairs.iter().map(|(average, value)| Some((tensors([average, value].into_iter())?, 0.0)));
    let mut moved = Vec::with_capacity(pairs.len());
    for pass in Pass::<2>::all(read.collect::<Option<_>>()?) {
        let (client, (shares, blocks)) = (pass.client(), pass.shares());
        let new = pass.outputs();
        // SAFETY: as in `step`.
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
        moved.extend(new.into_iter().map(tensor_of));
    }
    Some(moved)
}
