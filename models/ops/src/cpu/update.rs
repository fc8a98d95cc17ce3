//! CPU kernels of the optimizer's step, the weight average and the gradient norm. Each is one pass over memory.
//!
//! All tensors of a list are divided into chunks, and tasks take runs of chunks. The loops are plain multiplications
//! and additions, each rounded separately, so every instruction set produces the same bits.
//!
//! Checked by `models/tests/update.rs`.

use burn::backend::Flex;
use burn::tensor::{DType, Shape, Tensor};
use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

use super::multiversion::multiversion;
use super::parallel::threads;
use crate::optimizer::{ParameterUpdate, UpdateRule, UpdatedParameter, bias_corrections};

/// Elements per chunk. Sums of squares are computed per chunk, so this size determines their order, and nothing else.
pub(super) const CHUNK: usize = 1 << 14;
/// Elements from which another thread is worth waking: some 20 microseconds of memory traffic.
const TASK: usize = 1 << 16;

/// Runs `work` for all chunks, on several threads if there are enough elements.
pub(super) fn for_each_chunk<T: Send>(elements: usize, chunks: Vec<T>, work: impl Fn(T) + Send + Sync) {
    if elements < 2 * TASK || threads() == 1 {
        chunks.into_iter().for_each(work);
    } else {
        chunks.into_par_iter().with_min_len(TASK / CHUNK).for_each(work);
    }
}

/// Returns the tensor's storage. Callers have checked that its device and element type have kernels.
fn flex(tensor: Tensor<1>) -> FlexTensor {
    tensor.try_into_primitive::<Flex>().expect("a tensor that has kernels is burn-flex's")
}

/// Returns the tensor's storage as one contiguous slice; copies it if necessary.
pub(super) fn contiguous(tensor: Tensor<1>) -> FlexTensor {
    let tensor = flex(tensor);
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

pub(super) fn values(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().expect("contiguous f32")
}

pub(super) fn from_vec(values: Vec<f32>) -> FlexTensor {
    let layout = Layout::contiguous(Shape::from([values.len()]));
    FlexTensor::new(Bytes::from_elems(values), layout, DType::F32)
}

/// Returns storage that can be written in place: the tensor's own if no other tensor shares it and the tensor is all of
/// it, else a copy.
pub(super) fn exclusive(tensor: Tensor<1>) -> FlexTensor {
    let tensor = contiguous(tensor);
    let whole = tensor.storage::<f32>().len() == tensor.layout().num_elements();
    if tensor.is_unique() && whole { tensor } else { from_vec(values(&tensor).to_vec()) }
}

pub(super) fn values_mut(tensor: &mut FlexTensor) -> &mut [f32] {
    tensor.try_storage_mut().expect("made exclusive: nobody else holds it")
}

/// Storage of one parameter's tensors.
struct ParameterStorage {
    value: FlexTensor,
    gradient: FlexTensor,
    weight_decay: f64,
    state: [Option<FlexTensor>; 2],
}

impl ParameterStorage {
    /// Makes the first `used` state tensors writable. A further state tensor is kept as it is.
    fn new(parameter: ParameterUpdate, used: usize) -> Self {
        let ParameterUpdate { value, gradient, weight_decay, state } = parameter;
        let value = exclusive(value);
        let len = value.layout().num_elements();
        let mut index = 0;
        let state = state.map(|slot| {
            index += 1;
            match slot {
                Some(slot) if index <= used => Some(exclusive(slot)),
                Some(slot) => Some(flex(slot)),
                // The state starts with zeros: `momentum · 0 + d` is `d`, as in PyTorch's first buffer.
                None => (index <= used).then(|| from_vec(vec![0.0; len])),
            }
        });
        Self { value, gradient: contiguous(gradient), weight_decay, state }
    }

    fn into_tensors(self) -> UpdatedParameter {
        let state = self.state.map(|slot| slot.map(Tensor::from_primitive::<Flex>));
        UpdatedParameter { value: Tensor::from_primitive::<Flex>(self.value), state }
    }
}

/// A chunk of one parameter's storage.
struct ParameterChunk<'a> {
    value: &'a mut [f32],
    gradient: &'a [f32],
    /// Empty if the rule has no such state.
    state: [&'a mut [f32]; 2],
    weight_decay: f64,
}

/// See [`update`](crate::update).
pub(crate) fn update(rule: &UpdateRule, scale: f32, parameters: Vec<ParameterUpdate>) -> Vec<UpdatedParameter> {
    let used = match rule {
        UpdateRule::Sgd { momentum: 0.0, .. } => 0,
        UpdateRule::Sgd { .. } => 1,
        UpdateRule::AdamW { .. } => 2,
    };
    let mut storage: Vec<ParameterStorage> =
        parameters.into_iter().map(|parameter| ParameterStorage::new(parameter, used)).collect();
    let mut chunks = Vec::new();
    let mut elements = 0;
    for ParameterStorage { value, gradient, weight_decay, state } in &mut storage {
        let (value, gradient) = (values_mut(value), values(gradient));
        let lengths = state[..used].iter().flatten().map(|slot| slot.layout().num_elements());
        assert!(
            std::iter::once(gradient.len()).chain(lengths).all(|len| len == value.len()),
            "value, gradient and state of a parameter differ in length"
        );
        elements += value.len();
        let mut state = state[..used].iter_mut().flatten().map(|slot| values_mut(slot).chunks_mut(CHUNK));
        let mut state = [state.next(), state.next()];
        for (value, gradient) in value.chunks_mut(CHUNK).zip(gradient.chunks(CHUNK)) {
            let state = state.each_mut().map(|slot| slot.as_mut().and_then(Iterator::next).unwrap_or_default());
            chunks.push(ParameterChunk { value, gradient, state, weight_decay: *weight_decay });
        }
    }
    for_each_chunk(elements, chunks, |chunk| step(rule, scale, chunk));
    storage.into_iter().map(ParameterStorage::into_tensors).collect()
}

fn step(rule: &UpdateRule, scale: f32, chunk: ParameterChunk<'_>) {
    let ParameterChunk { value, gradient, state: [first, second], weight_decay } = chunk;
    match *rule {
        UpdateRule::Sgd { lr, momentum, nesterov } => {
            let coefficients = [scale, weight_decay as f32, momentum as f32, lr as f32];
            match (momentum != 0.0, nesterov) {
                (false, _) => sgd(value, gradient, coefficients),
                (true, false) => sgd_momentum(value, gradient, first, coefficients),
                (true, true) => sgd_nesterov(value, gradient, first, coefficients),
            }
        }
        UpdateRule::AdamW { lr, betas, eps, step } => {
            let [correction1, correction2] = bias_corrections(betas, step);
            let rest = betas.map(|beta| (1.0 - beta) as f32);
            let factors = [1.0 - lr * weight_decay, lr / correction1, correction2.sqrt(), eps].map(|x| x as f32);
            adamw(value, gradient, first, second, scale, betas.map(|beta| beta as f32), rest, factors);
        }
    }
}

multiversion!(fn sgd(p: &mut [f32], g: &[f32], coefficients: [f32; 4]) = sgd_body);

#[inline(always)]
fn sgd_body(p: &mut [f32], g: &[f32], [scale, decay, _, lr]: [f32; 4]) {
    for (p, g) in p.iter_mut().zip(g) {
        *p -= lr * (g * scale + decay * *p);
    }
}

multiversion!(fn sgd_momentum(p: &mut [f32], g: &[f32], b: &mut [f32], coefficients: [f32; 4]) = sgd_momentum_body);

#[inline(always)]
fn sgd_momentum_body(p: &mut [f32], g: &[f32], b: &mut [f32], [scale, decay, momentum, lr]: [f32; 4]) {
    for ((p, g), b) in p.iter_mut().zip(g).zip(b) {
        *b = momentum * *b + (g * scale + decay * *p);
        *p -= lr * *b;
    }
}

multiversion!(fn sgd_nesterov(p: &mut [f32], g: &[f32], b: &mut [f32], coefficients: [f32; 4]) = sgd_nesterov_body);

#[inline(always)]
fn sgd_nesterov_body(p: &mut [f32], g: &[f32], b: &mut [f32], [scale, decay, momentum, lr]: [f32; 4]) {
    for ((p, g), b) in p.iter_mut().zip(g).zip(b) {
        let d = g * scale + decay * *p;
        *b = momentum * *b + d;
        *p -= lr * (d + momentum * *b);
    }
}

multiversion!(fn adamw(
    p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], scale: f32, betas: [f32; 2], rest: [f32; 2],
    factors: [f32; 4]
) = adamw_body);

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one slice per tensor")]
fn adamw_body(
    p: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    scale: f32,
    betas: [f32; 2],
    rest: [f32; 2],
    [kept, lr, root, eps]: [f32; 4],
) {
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let g = g * scale;
        *m = betas[0] * *m + rest[0] * g;
        *v = betas[1] * *v + rest[1] * (g * g);
        *p = kept * *p - lr * (*m / (v.sqrt() / root + eps));
    }
}

/// See [`ema_update`](crate::ema_update).
pub(crate) fn ema_update(decay: f64, pairs: Vec<(Tensor<1>, Tensor<1>)>) -> Vec<Tensor<1>> {
    let mut storage: Vec<(FlexTensor, FlexTensor)> =
        pairs.into_iter().map(|(average, value)| (exclusive(average), contiguous(value))).collect();
    let mut chunks = Vec::new();
    let mut elements = 0;
    for (average, value) in &mut storage {
        let (average, value) = (values_mut(average), values(value));
        assert_eq!(average.len(), value.len(), "an average and its value differ in length");
        elements += average.len();
        chunks.extend(average.chunks_mut(CHUNK).zip(value.chunks(CHUNK)));
    }
    let (decay, rest) = (decay as f32, (1.0 - decay) as f32);
    for_each_chunk(elements, chunks, |(average, value)| lerp(average, value, decay, rest));
    storage.into_iter().map(|(average, _)| Tensor::from_primitive::<Flex>(average)).collect()
}

multiversion!(fn lerp(average: &mut [f32], value: &[f32], decay: f32, rest: f32) = lerp_body);

#[inline(always)]
fn lerp_body(average: &mut [f32], value: &[f32], decay: f32, rest: f32) {
    for (average, value) in average.iter_mut().zip(value) {
        *average = decay * *average + rest * value;
    }
}

/// See [`square_sum`](crate::square_sum).
pub(crate) fn square_sum(tensors: &[&Tensor<1>]) -> f64 {
    let storage: Vec<FlexTensor> = tensors.iter().map(|&tensor| contiguous(tensor.clone())).collect();
    let chunks: Vec<&[f32]> = storage.iter().flat_map(|tensor| values(tensor).chunks(CHUNK)).collect();
    let elements = chunks.iter().map(|chunk| chunk.len()).sum();
    let mut sums = vec![0.0; chunks.len()];
    for_each_chunk(elements, chunks.into_iter().zip(&mut sums).collect(), |(chunk, sum)| squares(chunk, sum));
    sums.into_iter().sum()
}

multiversion!(fn squares(x: &[f32], sum: &mut f64) = squares_body);

/// Sums in 32 lanes on every processor, as many as the widest registers need, so that all instruction sets produce the
/// same bits.
#[inline(always)]
fn squares_body(x: &[f32], sum: &mut f64) {
    let mut lanes = [0.0f64; 32];
    let (rows, rest) = x.as_chunks::<32>();
    for row in rows {
        for (lane, &x) in lanes.iter_mut().zip(row) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(x) * f64::from(x);
    }
    *sum = lanes.iter().sum();
}
