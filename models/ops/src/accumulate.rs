//! Sums of gradients of tensors that several operations read, as `InputBuffer` of PyTorch's autograd engine.

use std::cell::RefCell;
use std::collections::VecDeque;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::tensor::FloatTensor;

use crate::extension::NormKernels;

thread_local! {
    /// Nodes whose gradient this thread's steps have recently registered, the newest last.
    static REGISTERED: RefCell<VecDeque<NodeId>> = const { RefCell::new(VecDeque::new()) };
}

/// Records that the calling step registers a gradient for the node. Returns true if an earlier step of this thread has registered
/// one, which is then in burn's table. After false, the calling step must register a gradient.
pub(crate) fn mark_registered(node: NodeId) -> bool {
    /// Exceeds the number of images that are used between two uses of the same image.
    const RECORDED: usize = 256;
    REGISTERED.with_borrow_mut(|nodes| {
        let exists = nodes.contains(&node);
        if !exists {
            if nodes.len() == RECORDED {
                nodes.pop_front();
            }
            nodes.push_back(node);
        }
        exists
    })
}

/// Adds `grad` to the gradient of a parent node, as PyTorch's `InputBuffer::add`.
///
/// burn's own sum processes channels-last images pixel by pixel on one thread and returns another memory order, so this
/// function sums images with the backend's kernel. burn's table of gradients cannot be queried. The function therefore records
/// the nodes that it has registered a gradient for. burn adds up the gradients of all other nodes: those that are no longer
/// recorded, and those that got their gradient from a step of burn's.
///
/// `consume` removes the node's existing gradient from the table.
pub(crate) fn accumulate<B: NormKernels>(
    grads: &mut Gradients,
    node: NodeId,
    is_leaf: bool,
    consume: impl FnOnce(&mut Gradients) -> FloatTensor<B>,
    grad: FloatTensor<B>,
) {
    // The gradient of a leaf may be removed during the pass, so burn adds these up. The gradient of an inner node exists until the
    // node's own step.
    if grad.rank() != 4 || is_leaf {
        return grads.register::<B>(node, grad);
    }
    let grad = if mark_registered(node) { B::elementwise_add(consume(grads), grad) } else { grad };
    grads.register::<B>(node, grad);
}

/// Calls [`accumulate`] for each parent that needs a gradient, with its gradient in `$found`, if there is one.
/// burn does not export the parents' type.
macro_rules! accumulate_all {
    ($backend:ty, $grads:expr, $parents:expr, $found:expr) => {
        for (node, grad) in $parents.iter().zip($found) {
            if let (Some(node), Some(grad)) = (node, Option::<FloatTensor<$backend>>::from(grad)) {
                let is_leaf = node.parents.is_empty();
                accumulate::<$backend>($grads, node.id, is_leaf, |grads| grads.consume::<$backend>(node), grad);
            }
        }
    };
}
pub(crate) use accumulate_all;

/// Takes the gradient that other steps have registered for a parent, so that this step's kernel adds it to its own. Returns `None`
/// if no step has. Only images of inner nodes have one. The step must then register the sum. This is a macro because burn does not
/// export the parent's type.
macro_rules! take_addend {
    ($backend:ty, $grads:expr, $parent:expr) => {
        $parent
            .filter(|node| !node.parents.is_empty() && mark_registered(node.id))
            .map(|node| $grads.consume::<$backend>(node))
    };
}
pub(crate) use take_addend;
