//! Recording of a forward pass: which operation read and wrote which tensors, as `torch.jit.trace` does.
//!
//! While [`record`] runs, each operation of this crate adds a [`Call`]. A tensor is recognised by its memory. The recording keeps
//! the memory of all operands and results alive, so no other tensor can have the same address, and no operation writes in place.
//! The result of an operation that is not recorded therefore has an address that no call has written.

use std::cell::RefCell;
use std::ops::Range;

use burn::backend::Flex;
use burn::tensor::Tensor;
use burn_flex::FlexTensor;

use crate::extension::{Activation, ConvOptions, PoolOptions};

/// An operation of evaluation. Its operands are the tensors that the function of this crate takes, in its order.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// [`conv2d`](crate::conv2d); the bias is optional.
    Conv2d(ConvOptions),
    /// [`linear`](crate::linear); the bias is optional.
    Linear,
    /// [`batch_norm_eval`](crate::batch_norm_eval) of input, weight, bias, mean and variance.
    BatchNorm {
        /// Added to the variance before the square root.
        epsilon: f64,
    },
    /// [`max_pool2d`](crate::max_pool2d).
    MaxPool(PoolOptions),
    /// [`avg_pool2d`](crate::avg_pool2d).
    AvgPool {
        /// Side of a window in pixels.
        kernel: usize,
    },
    /// [`global_avg_pool`](crate::global_avg_pool).
    GlobalAvgPool,
    /// [`relu`](crate::relu) and the other activations.
    Activation(Activation),
    /// [`add`](crate::add).
    Add,
    /// [`concat`](crate::concat).
    Concat,
    /// [`interleave`](crate::interleave).
    Interleave,
    /// [`slice_channels`](crate::slice_channels) with this range.
    SliceChannels(Range<usize>),
    /// [`scale_channels`](crate::scale_channels).
    ScaleChannels,
    /// [`flatten`](crate::flatten).
    Flatten,
    /// [`unflatten`](crate::unflatten).
    Unflatten,
    /// [`divide`](crate::divide) by this number.
    Divide(f32),
}

/// Identity of a tensor: the memory that it views.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorId {
    /// Address of the first element.
    address: usize,
    shape: Vec<usize>,
    /// In elements. Zero for an axis of length one, whose stride has no effect.
    strides: Vec<isize>,
}

impl TensorId {
    /// Returns the identity of a tensor, which stays unique only while the tensor is alive.
    ///
    /// # Panics
    ///
    /// When the tensor is not on burn's CPU backend.
    pub fn of<const D: usize>(tensor: &Tensor<D>) -> Self {
        Self::of_primitive(&primitive(tensor))
    }

    fn of_primitive(tensor: &FlexTensor) -> Self {
        let layout = tensor.layout();
        let shape = layout.shape().to_vec();
        let strides =
            layout.strides().iter().zip(&shape).map(|(&stride, &length)| if length == 1 { 0 } else { stride });
        let first = layout.start_offset() * tensor.dtype().size();
        Self { address: tensor.bytes().as_ptr() as usize + first, strides: strides.collect(), shape }
    }

    /// Returns the tensor's shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the identity of the same elements as a vector `[N]`; `None` if they are not in row-major order.
    pub fn flat(&self) -> Option<Self> {
        let mut next = 1;
        for (&length, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if length != 1 && stride != next as isize {
                return None;
            }
            next *= length;
        }
        Some(Self { address: self.address, shape: vec![next], strides: vec![if next == 1 { 0 } else { 1 }] })
    }
}

/// Returns burn's CPU tensor.
fn primitive<const D: usize>(tensor: &Tensor<D>) -> FlexTensor {
    let tensor = tensor.clone().without_autodiff();
    tensor.try_into_primitive::<Flex>().expect("a recorded network is on the CPU")
}

/// An operation with its operands and its result.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The operation.
    pub operation: Operation,
    /// The operands, in the operation's order.
    pub inputs: Vec<TensorId>,
    /// Added to the operation's result.
    pub residual: Option<TensorId>,
    /// Applied last.
    pub activation: Activation,
    /// The result.
    pub output: TensorId,
}

/// The calls of a forward pass. Their tensors stay alive with the recording, so that their identities are unique.
#[derive(Debug, Default)]
pub struct Recording {
    /// The calls in their order.
    pub calls: Vec<Call>,
    alive: Vec<FlexTensor>,
    /// Operations in progress: an operation that another one uses is not recorded.
    depth: usize,
}

thread_local! {
    /// The recording of this thread, in [`record`].
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Ends the recording of this thread, after a panic too.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        RECORDING.with_borrow_mut(Option::take);
    }
}

/// Runs `forward` on this thread and records its calls of this crate's operations. All tensors must be on burn's CPU backend.
///
/// Operations of training mode are not recorded.
///
/// # Panics
///
/// When `forward` records too.
pub fn record<R>(forward: impl FnOnce() -> R) -> (R, Recording) {
    RECORDING.with_borrow_mut(|recording| {
        assert!(recording.is_none(), "a recording within a recording");
        *recording = Some(Recording::default());
    });
    let end = End;
    let result = forward();
    let recording = RECORDING.with_borrow_mut(Option::take).expect("`forward` does not end the recording");
    drop(end);
    (result, recording)
}

/// Returns whether this thread's operations are recorded.
pub(crate) fn is_recording() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// A tensor of any rank, as an operand.
pub(crate) trait Operand {
    fn primitive(&self) -> FlexTensor;
}

impl<const D: usize> Operand for Tensor<D> {
    fn primitive(&self) -> FlexTensor {
        primitive(self)
    }
}

/// An operation in progress; `None` where nothing is recorded.
#[must_use = "the result belongs to the call"]
pub(crate) struct Started(Option<(Call, Vec<FlexTensor>)>);

/// Starts an operation with these operands.
pub(crate) fn start(operation: Operation, inputs: &[&dyn Operand]) -> Started {
    start_fused(operation, inputs, None, Activation::Identity)
}

/// Starts an operation that is followed by a sum with `residual` and an activation.
pub(crate) fn start_fused(
    operation: Operation,
    inputs: &[&dyn Operand],
    residual: Option<&Tensor<4>>,
    activation: Activation,
) -> Started {
    let recorded = RECORDING.with_borrow_mut(|recording| {
        let Some(recording) = recording else { return false };
        recording.depth += 1;
        true
    });
    Started(recorded.then(|| {
        let residual = residual.map(primitive);
        let mut alive: Vec<FlexTensor> = inputs.iter().map(|input| input.primitive()).collect();
        let id = TensorId::of_primitive;
        let call = Call {
            operation,
            inputs: alive.iter().map(id).collect(),
            residual: residual.as_ref().map(id),
            activation,
            // The result is not known yet.
            output: TensorId { address: 0, shape: Vec::new(), strides: Vec::new() },
        };
        alive.extend(residual);
        (call, alive)
    }))
}

impl Started {
    /// Records the call with its result, and returns the result.
    pub(crate) fn end<const D: usize>(self, output: Tensor<D>) -> Tensor<D> {
        let Some((mut call, mut alive)) = self.0 else { return output };
        RECORDING.with_borrow_mut(|recording| {
            let recording = recording.as_mut().expect("an operation ends before its recording");
            recording.depth -= 1;
            let output = primitive(&output);
            if recording.depth == 0 {
                call.output = TensorId::of_primitive(&output);
                recording.calls.push(call);
            }
            alive.push(output);
            recording.alive.append(&mut alive);
        });
        output
    }
}
