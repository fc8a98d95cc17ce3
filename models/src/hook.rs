//! Learning of each gradient during the backward pass, as soon as it is complete.
//!
//! Each layer puts an identity operation behind its parameters ([`Context::train_with`](crate::Context::train_with) says
//! to whom they report); its step in the backward pass takes the gradient out while the rest of the pass is still to come.
//! No model knows of it. PyTorch does the same by hooks on its gradient accumulators
//! (`torch.Tensor.register_post_accumulate_grad_hook`).
//!
//! burn runs the steps of a backward pass by their depth in the graph, the deepest first, not as their gradients become
//! complete. An operation on a parameter alone has depth one: its step would run when all else is done. So the operation
//! has the layer's input as a second parent, to which it sends nothing: it then lies directly below the layer's own
//! operation, and its step comes right after that.

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

/// Takes gradients out of backward passes. Called on the thread that runs the pass.
pub trait GradientSink: Debug + Send + Sync {
    /// A forward pass uses the parameter. One that is used several times reports as many gradients, to be added up.
    fn used(&self, parameter: ParamId);

    /// The gradient of one use, flattened, without autodiff. Nobody else holds it: what `backward` returns has no
    /// gradient for this parameter.
    fn ready(&self, parameter: ParamId, gradient: Tensor<1>);
}

/// Where a watched parameter's gradient goes.
#[derive(Debug, Clone)]
struct Slot {
    parameter: ParamId,
    sink: Arc<dyn GradientSink>,
}

/// Backends whose gradients leave as tensors of the user's.
trait HandOut: Backend {
    fn hand_out(gradient: FloatTensor<Self>) -> Tensor<1>;
}

impl HandOut for Flex {
    fn hand_out(gradient: FloatTensor<Self>) -> Tensor<1> {
        let flat = Shape::from([gradient.shape().num_elements()]);
        Tensor::from_primitive::<Self>(Self::float_reshape(gradient, flat))
    }
}

#[cfg(feature = "cuda")]
impl HandOut for Cube {
    fn hand_out(gradient: FloatTensor<Self>) -> Tensor<1> {
        let flat = Shape::from([gradient.shape().num_elements()]);
        Tensor::from_primitive::<Self>(Self::float_reshape(gradient, flat))
    }
}

#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "cuda"))]
trait GradientHook: Backend {
    /// The parameter; in the backward pass its gradient goes to the slot, behind all that comes after `anchor`.
    fn watch(parameter: FloatTensor<Self>, anchor: FloatTensor<Self>, slot: Slot) -> FloatTensor<Self>;
}

impl GradientHook for Flex {
    fn watch(parameter: FloatTensor<Self>, _: FloatTensor<Self>, _: Slot) -> FloatTensor<Self> {
        parameter
    }
}

#[cfg(feature = "cuda")]
impl GradientHook for Cube {
    fn watch(parameter: FloatTensor<Self>, _: FloatTensor<Self>, _: Slot) -> FloatTensor<Self> {
        parameter
    }
}

#[derive(Debug)]
struct WatchStep;

impl<B: HandOut> Backward<B, 2> for WatchStep {
    type State = Slot;

    fn backward(self, ops: Ops<Slot, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        ops.state.sink.ready(ops.state.parameter, B::hand_out(gradient));
    }
}

impl<B: GradientHook + HandOut, C: CheckpointStrategy> GradientHook for Autodiff<B, C> {
    fn watch(parameter: FloatTensor<Self>, anchor: FloatTensor<Self>, slot: Slot) -> FloatTensor<Self> {
        let ((parameter, node), (_, anchor)) = (parameter.into_parts(), anchor.into_parts());
        match WatchStep.prepare::<C>([node, anchor]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(slot, parameter),
            OpsKind::UnTracked(prep) => prep.finish(parameter),
        }
    }
}

/// A layer's parameter as it goes into the layer's operation on `input`.
pub(crate) fn parameter<const D: usize, const I: usize>(
    parameter: &Param<Tensor<D>>,
    input: &Tensor<I>,
    sink: Option<&Arc<dyn GradientSink>>,
) -> Tensor<D> {
    let value = parameter.val();
    let Some(sink) = sink.filter(|_| value.is_require_grad()) else { return value };
    sink.used(parameter.id);
    let slot = Slot { parameter: parameter.id, sink: Arc::clone(sink) };
    Tensor::from_dispatch(Dispatch::watch(value.into_dispatch(), input.clone().into_dispatch(), slot))
}
