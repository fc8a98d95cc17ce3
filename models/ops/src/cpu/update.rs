//! The optimizer's step, the weight average and the norm of gradients in one pass over memory each.
//!
//! A list of tensors is cut into pieces that fit the first-level caches many times over; tasks take runs of pieces. The
//! loops are plain multiplications and additions, each rounded for itself, so that every instruction set gives the same
//! bits.

use burn::backend::Flex;
use burn::tensor::{DType, Shape, Tensor};
use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

use super::super::update::{ParameterUpdate, UpdateRule, UpdatedParameter, bias_corrections};
use super::parallel::threads;
use super::simd::multiversion;

/// Elements of a piece. Sums of squares are taken a piece at a time, so it decides their order, and nothing else.
const PIECE: usize = 1 << 14;
/// Elements from which a task is worth waking a thread for: some 20 microseconds of memory traffic.
const TASK: usize = 1 << 16;

/// Runs `work` over all pieces, on several threads where there is enough of it.
fn each<T: Send>(elements: usize, pieces: Vec<T>, work: impl Fn(T) + Send + Sync) {
    if elements < 2 * TASK || threads() == 1 {
        pieces.into_iter().for_each(work);
    } else {
        pieces.into_par_iter().with_min_len(TASK / PIECE).for_each(work);
    }
}

/// The tensor's storage; callers have seen that its device and type have kernels.
fn flex(tensor: Tensor<1>) -> FlexTensor {
    tensor.try_into_primitive::<Flex>().expect("a tensor that has kernels is burn-flex's")
}

/// A tensor that can be read as one slice.
fn readable(tensor: Tensor<1>) -> FlexTensor {
    let tensor = flex(tensor);
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

fn values(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().expect("made readable: contiguous f32")
}

fn from_vec(values: Vec<f32>) -> FlexTensor {
    let layout = Layout::contiguous(Shape::from([values.len()]));
    FlexTensor::new(Bytes::from_elems(values), layout, DType::F32)
}

/// A tensor that can be written: itself where nobody else holds its memory and it is all of it, otherwise a copy.
fn writable(tensor: Tensor<1>) -> FlexTensor {
    let tensor = readable(tensor);
    let whole = tensor.storage::<f32>().len() == tensor.layout().num_elements();
    if tensor.is_unique() && whole { tensor } else { from_vec(values(&tensor).to_vec()) }
}

fn values_mut(tensor: &mut FlexTensor) -> &mut [f32] {
    tensor.try_storage_mut().expect("made writable: nobody else holds it")
}

/// One parameter as storage.
struct Opened {
    value: FlexTensor,
    gradient: FlexTensor,
    weight_decay: f64,
    slots: [Option<FlexTensor>; 2],
}

impl Opened {
    /// With as many slots as the rule uses; a further one stays as it is.
    fn new(parameter: ParameterUpdate, used: usize) -> Self {
        let ParameterUpdate { value, gradient, weight_decay, slots } = parameter;
        let value = writable(value);
        let len = value.layout().num_elements();
        let mut index = 0;
        let slots = slots.map(|slot| {
            index += 1;
            match slot {
                Some(slot) if index <= used => Some(writable(slot)),
                Some(slot) => Some(flex(slot)),
                // state starts as zeros: `mu 0 + d` is `d`, as PyTorch's first buffer is
                None => (index <= used).then(|| from_vec(vec![0.0; len])),
            }
        });
        Self { value, gradient: readable(gradient), weight_decay, slots }
    }

    fn close(self) -> UpdatedParameter {
        let slots = self.slots.map(|slot| slot.map(Tensor::from_primitive::<Flex>));
        UpdatedParameter { value: Tensor::from_primitive::<Flex>(self.value), slots }
    }
}

/// A piece of one parameter.
struct Piece<'a> {
    value: &'a mut [f32],
    gradient: &'a [f32],
    /// Empty where the rule has no such state.
    slots: [&'a mut [f32]; 2],
    weight_decay: f64,
}

/// See [`update`](super::super::update::update).
pub(in super::super) fn update(
    rule: &UpdateRule,
    scale: f32,
    parameters: Vec<ParameterUpdate>,
) -> Vec<UpdatedParameter> {
    let used = match rule {
        UpdateRule::Sgd { momentum: 0.0, .. } => 0,
        UpdateRule::Sgd { .. } => 1,
        UpdateRule::AdamW { .. } => 2,
    };
    let mut opened: Vec<Opened> = parameters.into_iter().map(|parameter| Opened::new(parameter, used)).collect();
    let mut pieces = Vec::new();
    let mut elements = 0;
    for Opened { value, gradient, weight_decay, slots } in &mut opened {
        let (value, gradient) = (values_mut(value), values(gradient));
        let lengths = slots[..used].iter().flatten().map(|slot| slot.layout().num_elements());
        assert!(
            std::iter::once(gradient.len()).chain(lengths).all(|len| len == value.len()),
            "value, gradient and state of a parameter are of one length"
        );
        elements += value.len();
        let mut slots = slots[..used].iter_mut().flatten().map(|slot| values_mut(slot).chunks_mut(PIECE));
        let mut slots = [slots.next(), slots.next()];
        for (value, gradient) in value.chunks_mut(PIECE).zip(gradient.chunks(PIECE)) {
            let slots = slots.each_mut().map(|slot| slot.as_mut().and_then(Iterator::next).unwrap_or_default());
            pieces.push(Piece { value, gradient, slots, weight_decay: *weight_decay });
        }
    }
    each(elements, pieces, |piece| step(rule, scale, piece));
    opened.into_iter().map(Opened::close).collect()
}

fn step(rule: &UpdateRule, scale: f32, piece: Piece<'_>) {
    let Piece { value, gradient, slots: [first, second], weight_decay } = piece;
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

multiversion!(fn adamw(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], scale: f32, betas: [f32; 2], rest: [f32; 2], factors: [f32; 4]) = adamw_body);

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one slice a tensor")]
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

/// See [`follow`](super::super::update::follow).
pub(in super::super) fn follow(decay: f64, pairs: Vec<(Tensor<1>, Tensor<1>)>) -> Vec<Tensor<1>> {
    let mut opened: Vec<(FlexTensor, FlexTensor)> =
        pairs.into_iter().map(|(average, value)| (writable(average), readable(value))).collect();
    let mut pieces = Vec::new();
    let mut elements = 0;
    for (average, value) in &mut opened {
        let (average, value) = (values_mut(average), values(value));
        assert_eq!(average.len(), value.len(), "an average is as long as what it follows");
        elements += average.len();
        pieces.extend(average.chunks_mut(PIECE).zip(value.chunks(PIECE)));
    }
    let (decay, rest) = (decay as f32, (1.0 - decay) as f32);
    each(elements, pieces, |(average, value)| blend(average, value, decay, rest));
    opened.into_iter().map(|(average, _)| Tensor::from_primitive::<Flex>(average)).collect()
}

multiversion!(fn blend(average: &mut [f32], value: &[f32], decay: f32, rest: f32) = blend_body);

#[inline(always)]
fn blend_body(average: &mut [f32], value: &[f32], decay: f32, rest: f32) {
    for (average, value) in average.iter_mut().zip(value) {
        *average = decay * *average + rest * value;
    }
}

/// See [`square_sum`](super::super::update::square_sum).
pub(in super::super) fn square_sum(tensors: &[&Tensor<1>]) -> f64 {
    let opened: Vec<FlexTensor> = tensors.iter().map(|&tensor| readable(tensor.clone())).collect();
    let pieces: Vec<&[f32]> = opened.iter().flat_map(|tensor| values(tensor).chunks(PIECE)).collect();
    let elements = pieces.iter().map(|piece| piece.len()).sum();
    let mut sums = vec![0.0; pieces.len()];
    each(elements, pieces.into_iter().zip(&mut sums).collect(), |(piece, sum)| squares(piece, sum));
    sums.into_iter().sum()
}

multiversion!(fn squares(x: &[f32], sum: &mut f64) = squares_body);

/// In lanes, whose number is that of the widest registers' and not the processor's.
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
