//! Gradient hooks: they report each parameter's gradient during the backward pass, as soon as the gradient is ready.
//!
//! Each layer applies an identity operation to its parameters. In the backward pass, the operation's step hands the gradient
//! to the sink of [`Context::train_with`](crate::Context::train_with) while the rest of the pass is still to run. Models need
//! no code for this. PyTorch does the same by hooks on its gradient accumulators
//! (`torch.Tensor.register_post_accumulate_grad_hook`).
//!
//! burn runs the steps of a backward pass by their depth in the graph, deepest first; it does not wait for a gradient to
//! become ready. An operation on a parameter alone has depth one, so its step would run after everything else. The operation
//! therefore has the layer's input as a second parent, to which it sends no gradient. Its depth is then one less than that of
//! the layer's operation, and its step runs right after the layer's.

use std::fmt::Debug;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use burn::backend::Cube;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::module::{Param, ParamId};
use burn::tensor::{Shape, Tensor};

/// Receives the gradients of backward passes, on the thread that runs the pass.
pub trait GradientSink: Debug + Send + Sync {
    /// Reports that a forward pass uses the parameter. Each use yields one gradient, and the sink must add them.
    fn used(&self, parameter: ParamId);

    /// Passes on the gradient of one use, flattened by [`ops::parameter::flatten`], without autodiff. The sink has the only
    /// copy: the result of `backward` has no gradient for this parameter.
    fn ready(&self, parameter: ParamId, gradient: Tensor<1>);
}

/// State of a hook: the parameter, and the sink of its gradient.
#[derive(Debug, Clone)]
struct HookState {
    parameter: ParamId,
    sink: Arc<dyn GradientSink>,
}

/// Converts a backend's gradients to burn's user-facing tensors.
trait IntoFlatTensor: Backend {
    /// Flattens `gradient` as [`ops::parameter::flatten`].
    fn into_flat_tensor(gradient: FloatTensor<Self>) -> Tensor<1>;
}

impl IntoFlatTensor for Flex {
    fn into_flat_tensor(gradient: FloatTensor<Self>) -> Tensor<1> {
        let flat = Shape::from([gradient.shape().num_elements()]);
        Tensor::from_primitive::<Self>(Self::float_reshape(gradient, flat))
    }
}

#[cfg(feature = "cuda")]
impl IntoFlatTensor for Cube {
    fn into_flat_tensor(gradient: FloatTensor<Self>) -> Tensor<1> {
        if gradient.rank() == 4 {
            return ops::parameter::flatten(Tensor::<4>::from_primitive::<Self>(gradient));
        }
        let flat = Shape::from([gradient.shape().num_elements()]);
        Tensor::from_primitive::<Self>(Self::float_reshape(gradient, flat))
    }
}

#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cuda"))]
trait GradientHook: Backend {
    /// Returns `parameter`. In the backward pass its gradient goes to the sink of `state`. The depth of this operation is that of
    /// `input` plus one.
    fn hook(parameter: FloatTensor<Self>, input: FloatTensor<Self>, state: HookState) -> FloatTensor<Self>;
}

impl GradientHook for Flex {
    fn hook(parameter: FloatTensor<Self>, _: FloatTensor<Self>, _: HookState) -> FloatTensor<Self> {
        parameter
    }
}

#[cfg(feature = "cuda")]
impl GradientHook for Cube {
    fn hook(parameter: FloatTensor<Self>, _: FloatTensor<Self>, _: HookState) -> FloatTensor<Self> {
        parameter
    }
}

#[derive(Debug)]
struct HookStep;

impl<B: IntoFlatTensor> Backward<B, 2> for HookStep {
    type State = HookState;

    fn backward(self, ops: Ops<HookState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        ops.state.sink.ready(ops.state.parameter, B::into_flat_tensor(gradient));
    }
}

impl<B: GradientHook + IntoFlatTensor, C: CheckpointStrategy> GradientHook for Autodiff<B, C> {
    fn hook(parameter: FloatTensor<Self>, input: FloatTensor<Self>, state: HookState) -> FloatTensor<Self> {
        let ((parameter, node), (_, input)) = (parameter.into_parts(), input.into_parts());
        match HookStep.prepare::<C>([node, input]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, parameter),
            OpsKind::UnTracked(prep) => prep.finish(parameter),
        }
    }
}

/// Returns the value of `parameter` for the layer's operation on `input`, hooked to `sink` where the parameter requires a
/// gradient.
pub(crate) fn parameter<const D: usize, const I: usize>(
    parameter: &Param<Tensor<D>>,
    input: &Tensor<I>,
    sink: Option<&Arc<dyn GradientSink>>,
) -> Tensor<D> {
    let value = parameter.val();
    let Some(sink) = sink.filter(|_| value.is_require_grad()) else { return value };
    sink.used(parameter.id);
    let state = HookState { parameter: parameter.id, sink: Arc::clone(sink) };
    Tensor::from_dispatch(Dispatch::hook(value.into_dispatch(), input.clone().into_dispatch(), state))
}
