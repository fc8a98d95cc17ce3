//! The optimizer's step and the weight average on a GPU. One launch updates many parameters; burn's operations need
//! seven launches per parameter for SGD with momentum and a dozen for AdamW. A launch takes microseconds of the host,
//! which is most of a step's time for small parameters.
//!
//! The formulas are those of [`mod@crate::update`]. Products and sums may be fused, so the last bits differ from the
//! CPU's.
//!
//! The kernels write in place, and read the scalars that change from step to step ([`StepScalars`]) from device memory: a captured
//! graph can then run them again.
//!
//! A thread updates one vector of up to four elements of one parameter (`parameter_batch.rs`). Checked by `gpu_check --ops`
//! (`benches/gpu_check/updates.rs`).

use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use half::bf16;

use super::bf16_weights;
use super::parameter_batch::{ParameterBlocks, ParameterLaunch, Tensors, thread_vector};
use super::rows::{THREADS_PER_BLOCK, all};
use super::storage::{storage_of, storages_of, tensor_of_storage, writable_storage};
use crate::optimizer::{ParameterUpdate, StepScalars, UpdateRule, UpdatedParameter};

/// Copies of values in bf16, in vectors of `N`.
type Copies<N> = Sequence<Box<[Vector<bf16, N>]>>;

/// [`UpdateRule::Sgd`] with momentum. `scalars`: see [`StepScalars`]. With `copied`, also writes the values in bf16.
#[cube(launch_unchecked)]
fn sgd<N: Size>(
    values: &mut Tensors<N>,
    gradients: &Tensors<N>,
    buffers: &mut Tensors<N>,
    copies: &mut Copies<N>,
    blocks: &Sequence<ParameterBlocks>,
    scalars: &[f32],
    scale: &[f32],
    loss: &[f32],
    momentum: f32,
    #[comptime] scaled: bool,
    #[comptime] nesterov: bool,
    #[comptime] copied: bool,
) {
    if !is_finite(loss[0]) {
        terminate!();
    }
    let lr = scalars[0];
    #[unroll]
    for index in 0..comptime!(blocks.len()) {
        let of_parameter = blocks.index(index);
        let (inside, at) = thread_vector(of_parameter);
        if inside {
            let p = values.index(index)[at];
            let g = scale_of::<N>(gradients.index(index)[at], scale, scaled);
            let d = g + Vector::new(of_parameter.weight_decay) * p;
            let b = Vector::new(momentum) * buffers.index(index)[at] + d;
            buffers.index_mut(index)[at] = b;
            let direction = if comptime!(nesterov) { d + Vector::new(momentum) * b } else { b };
            let new = p - Vector::new(lr) * direction;
            values.index_mut(index)[at] = new;
            if comptime!(copied) {
                copies.index_mut(index)[at] = Vector::cast_from(new);
            }
        }
    }
}

/// [`UpdateRule::AdamW`]. `means` and `variances` are the first and second moments; otherwise as [`sgd`].
#[cube(launch_unchecked)]
fn adamw<N: Size>(
    values: &mut Tensors<N>,
    gradients: &Tensors<N>,
    means: &mut Tensors<N>,
    variances: &mut Tensors<N>,
    copies: &mut Copies<N>,
    blocks: &Sequence<ParameterBlocks>,
    scalars: &[f32],
    scale: &[f32],
    loss: &[f32],
    beta1: f32,
    beta2: f32,
    eps: f32,
    #[comptime] scaled: bool,
    #[comptime] copied: bool,
) {
    if !is_finite(loss[0]) {
        terminate!();
    }
    let lr = scalars[0];
    let rate = scalars[1];
    let root = scalars[2];
    #[unroll]
    for index in 0..comptime!(blocks.len()) {
        let of_parameter = blocks.index(index);
        let (inside, at) = thread_vector(of_parameter);
        if inside {
            let g = scale_of::<N>(gradients.index(index)[at], scale, scaled);
            let m = Vector::new(beta1) * means.index(index)[at] + Vector::new(1.0 - beta1) * g;
            let v = Vector::new(beta2) * variances.index(index)[at] + Vector::new(1.0 - beta2) * g * g;
            means.index_mut(index)[at] = m;
            variances.index_mut(index)[at] = v;
            let denominator = v.sqrt() / Vector::new(root) + Vector::new(eps);
            let kept = Vector::new(1.0 - lr * of_parameter.weight_decay) * values.index(index)[at];
            let new = kept - Vector::new(rate) * (m / denominator);
            values.index_mut(index)[at] = new;
            if comptime!(copied) {
                copies.index_mut(index)[at] = Vector::cast_from(new);
            }
        }
    }
}

/// Returns false for infinities and NaN.
#[cube]
pub(super) fn is_finite(value: f32) -> bool {
    value.abs() <= f32::new(f32::MAX)
}

/// Returns the gradient, multiplied by `scale` if `scaled` is true.
#[cube]
fn scale_of<N: Size>(gradient: Vector<f32, N>, scale: &[f32], #[comptime] scaled: bool) -> Vector<f32, N> {
    if comptime!(scaled) { gradient * Vector::new(scale[0]) } else { gradient }
}

/// `average = decay · average + (1 - decay) · value`.
#[cube(launch_unchecked)]
fn ema<N: Size>(averages: &mut Tensors<N>, values: &Tensors<N>, blocks: &Sequence<ParameterBlocks>, decay: f32) {
    #[unroll]
    for index in 0..comptime!(blocks.len()) {
        let (inside, at) = thread_vector(blocks.index(index));
        if inside {
            let kept = Vector::new(decay) * averages.index(index)[at];
            averages.index_mut(index)[at] = kept + Vector::new(1.0 - decay) * values.index(index)[at];
        }
    }
}

/// Returns true if the parameters' state exists, and all tensors are non-empty and f32 on a GPU.
pub(crate) fn supports(rule: &UpdateRule, parameters: &[ParameterUpdate]) -> bool {
    // SGD without momentum has no state, and the first step makes the state.
    parameters.iter().all(|ParameterUpdate { value, gradient, state, .. }| {
        let state = state.iter().take(rule.state_tensors()).map(Option::as_ref).collect::<Option<Vec<_>>>();
        let state = state.filter(|state| !state.is_empty());
        state.is_some_and(|state| match *state {
            [one] => storages_of::<3>([value, gradient, one].into_iter()).is_some(),
            [one, two] => storages_of::<4>([value, gradient, one, two].into_iter()).is_some(),
            _ => false,
        })
    })
}

/// Tensors of a parameter, the value first, and its weight decay.
type Owned<const N: usize> = ([CubeTensor; N], f64);

/// Calls `launch` for all parameters in as few launches as possible, and returns the tensors in the parameters' order. Parameters
/// with a bf16 copy are in separate launches, together with the copies.
fn launch_all<const N: usize>(
    parameters: Vec<(Option<CubeTensor>, Owned<N>)>,
    launch: impl Fn(&ParameterLaunch<N>, &[CubeTensor]),
) -> impl Iterator<Item = [CubeTensor; N]> {
    let mut updated: Vec<Option<[CubeTensor; N]>> = parameters.iter().map(|_| None).collect();
    let numbered = parameters.into_iter().enumerate();
    let (copied, others): (Vec<_>, Vec<_>) = numbered.partition(|(_, (copy, _))| copy.is_some());
    for group in [copied, others] {
        let (places, group): (Vec<_>, Vec<_>) = group.into_iter().unzip();
        let (copies, group): (Vec<_>, Vec<_>) = group.into_iter().unzip();
        let copies: Vec<_> = copies.into_iter().flatten().collect();
        let mut done = 0;
        for launched in ParameterLaunch::<N>::divide(group) {
            let end = done + launched.tensors.len();
            let copies = copies.get(done..end).unwrap_or_default();
            launch(&launched, copies);
            for (tensors, copy) in launched.tensors.iter().zip(copies) {
                bf16_weights::keep(&tensors[0], copy.clone());
            }
            for (tensors, place) in launched.tensors.into_iter().zip(&places[done..end]) {
                updated[*place] = Some(tensors);
            }
            done = end;
        }
    }
    bf16_weights::drop_unused();
    updated.into_iter().map(|tensors| tensors.expect("every parameter is in one launch"))
}

/// Tensors of a step that all parameters share.
struct StepTensors {
    scalars: CubeTensor,
    /// The factor of the gradients. If `scaled` is false, any tensor: the kernel does not read it.
    scale: CubeTensor,
    scaled: bool,
    loss: CubeTensor,
}

/// Takes a step of parameters that [`supports`] supports, in place.
pub(crate) fn update(
    rule: &UpdateRule,
    StepScalars { scalars, loss }: &StepScalars,
    scale: Option<&Tensor<1>>,
    parameters: Vec<ParameterUpdate>,
) -> Vec<UpdatedParameter> {
    let vector = |tensor: &Tensor<1>| storage_of(tensor).expect("scalars and loss are f32 on the parameters' GPU");
    let step = StepTensors {
        scalars: vector(scalars),
        scale: vector(scale.unwrap_or(scalars)),
        scaled: scale.is_some(),
        loss: vector(loss),
    };
    match *rule {
        UpdateRule::Sgd { momentum, nesterov, .. } => update_sgd(&step, momentum as f32, nesterov, parameters),
        UpdateRule::AdamW { betas, eps, .. } => {
            update_adamw(&step, betas.map(|beta| beta as f32), eps as f32, parameters)
        }
    }
}

/// Message for tensors that [`supports`] refuses.
const CHECKED: &str = "`supports` has checked the tensors";

fn owned(tensor: Tensor<1>) -> CubeTensor {
    writable_storage(tensor).expect(CHECKED)
}

fn owned_state(slot: Option<Tensor<1>>) -> CubeTensor {
    owned(slot.expect(CHECKED))
}

/// Takes the bf16 copy of a value out of the table. The table's entry also holds the value, so the value cannot be written in place
/// before.
fn take_copy(value: &Tensor<1>) -> Option<CubeTensor> {
    storage_of(value).and_then(|value| bf16_weights::take(&value))
}

/// Takes a step of SGD with momentum.
fn update_sgd(
    step: &StepTensors,
    momentum: f32,
    nesterov: bool,
    parameters: Vec<ParameterUpdate>,
) -> Vec<UpdatedParameter> {
    let tensors = |ParameterUpdate { value, gradient, weight_decay, state: [buffer, _] }: ParameterUpdate| {
        let gradient = storage_of(&gradient).expect(CHECKED);
        (take_copy(&value), ([owned(value), gradient, owned_state(buffer)], weight_decay))
    };
    let updated = launch_all::<3>(parameters.into_iter().map(tensors).collect(), |launched, copies| {
        let (blocks, grid) = launched.blocks_and_grid();
        // SAFETY: every tensor has its parameter's number of elements, which the kernel stays within. Nobody else has the memory of
        // a value, a copy or a state.
        unsafe {
            sgd::launch_unchecked(
                &launched.client(),
                grid,
                CubeDim::new_1d(THREADS_PER_BLOCK as u32),
                launched.vector,
                launched.args(0),
                launched.args(1),
                launched.args(2),
                copies.iter().map(all).collect(),
                blocks,
                all(&step.scalars),
                all(&step.scale),
                all(&step.loss),
                momentum,
                step.scaled,
                nesterov,
                !copies.is_empty(),
            );
        }
    });
    let result = |[value, _, buffer]: [CubeTensor; 3]| UpdatedParameter {
        value: tensor_of_storage(value),
        state: [Some(tensor_of_storage(buffer)), None],
    };
    updated.map(result).collect()
}

/// Takes a step of AdamW.
fn update_adamw(
    step: &StepTensors,
    betas: [f32; 2],
    eps: f32,
    parameters: Vec<ParameterUpdate>,
) -> Vec<UpdatedParameter> {
    let tensors = |ParameterUpdate { value, gradient, weight_decay, state }: ParameterUpdate| {
        let [mean, variance] = state.map(owned_state);
        let gradient = storage_of(&gradient).expect(CHECKED);
        (take_copy(&value), ([owned(value), gradient, mean, variance], weight_decay))
    };
    let updated = launch_all::<4>(parameters.into_iter().map(tensors).collect(), |launched, copies| {
        let (blocks, grid) = launched.blocks_and_grid();
        // SAFETY: as in `update_sgd`.
        unsafe {
            adamw::launch_unchecked(
                &launched.client(),
                grid,
                CubeDim::new_1d(THREADS_PER_BLOCK as u32),
                launched.vector,
                launched.args(0),
                launched.args(1),
                launched.args(2),
                launched.args(3),
                copies.iter().map(all).collect(),
                blocks,
                all(&step.scalars),
                all(&step.scale),
                all(&step.loss),
                betas[0],
                betas[1],
                eps,
                step.scaled,
                !copies.is_empty(),
            );
        }
    });
    let result = |[value, _, mean, variance]: [CubeTensor; 4]| UpdatedParameter {
        value: tensor_of_storage(value),
        state: [Some(tensor_of_storage(mean)), Some(tensor_of_storage(variance))],
    };
    updated.map(result).collect()
}

/// Computes `decay average + (1 - decay) value` of pairs in f32 on a GPU, in place. Returns other pairs unchanged, as `Err`.
pub(crate) fn ema_update(
    decay: f64,
    pairs: Vec<(Tensor<1>, Tensor<1>)>,
) -> Result<Vec<Tensor<1>>, Vec<(Tensor<1>, Tensor<1>)>> {
    if !pairs.iter().all(|(average, value)| storages_of::<2>([average, value].into_iter()).is_some()) {
        return Err(pairs);
    }
    let owned = |(average, value): (Tensor<1>, Tensor<1>)| {
        let both = writable_storage(average).zip(storage_of(&value)).expect("both are f32 on a GPU");
        (<[CubeTensor; 2]>::from(both), 0.0)
    };
    let mut averages = Vec::with_capacity(pairs.len());
    for launched in ParameterLaunch::<2>::divide(pairs.into_iter().map(owned).collect()) {
        let (client, (blocks, grid)) = (launched.client(), launched.blocks_and_grid());
        // SAFETY: as in `update_sgd`.
        unsafe {
            ema::launch_unchecked(
                &client,
                grid,
                CubeDim::new_1d(THREADS_PER_BLOCK as u32),
                launched.vector,
                launched.args(0),
                launched.args(1),
                blocks,
                decay as f32,
            );
        }
        averages.extend(launched.tensors.into_iter().map(|[average, _]| tensor_of_storage(average)));
    }
    Ok(averages)
}
