//! A network in evaluation mode as a graph of operations, for the export to other programs.
//!
//! [`Graph::trace`] runs one forward pass and connects the recorded operations of `ops`. Networks need no code for this. An
//! operation that is not recorded is an error, never a wrong graph.

mod fold;

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::{Context, Network, Spec, state};
use ops::Activation;
use ops::trace::{self, Call, TensorId};

pub use fold::FoldedNorm;
pub use ops::trace::Operation;

/// A network in evaluation mode: images `[B, C, H, W]` to logits `[B, classes]`, for any `B`.
#[derive(Debug, Clone, PartialEq)]
pub struct Graph {
    /// Shape of an image, `[C, H, W]`.
    pub image_shape: [usize; 3],
    /// The operations. Each comes after those whose results are its inputs.
    pub nodes: Vec<Node>,
    /// The logits.
    pub output: Value,
}

/// An operation of a [`Graph`].
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// What is computed.
    pub operation: Operation,
    /// The activations that are the operands.
    pub inputs: Vec<Value>,
    /// The weights that are the operands, by their names in the state dict. They come after the activations.
    pub weights: Vec<String>,
    /// Shape of the result without the batch: `[C, H, W]` or `[features]`.
    pub shape: Vec<usize>,
}

/// An activation of a [`Graph`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// The network's input.
    Images,
    /// The result of the node with this index.
    Node(usize),
}

/// Error of [`Graph::trace`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// An operand is neither an activation nor a weight of the network.
    #[error("{operation} after {place} has an operand that no operation of `ops` has computed")]
    UnknownOperand {
        /// The operation.
        operation: String,
        /// The last module before the operation.
        place: String,
    },
    /// An operand is a weight where the operation takes an activation, or the reverse.
    #[error("{operation} after {place} has {activations} activations and {weights} weights as operands")]
    Operands {
        /// The operation.
        operation: String,
        /// The last module before the operation.
        place: String,
        /// Number of activations.
        activations: usize,
        /// Number of weights.
        weights: usize,
    },
    /// The logits are not the result of a recorded operation.
    #[error("the logits are not the result of an operation of `ops`")]
    UnknownLogits,
}

impl Node {
    /// Returns the path of the module whose weights the node has; `None` without weights.
    pub fn module(&self) -> Option<&str> {
        self.weights.first().map(|weight| weight.rsplit_once('.').map_or("", |(module, _)| module))
    }

    /// Returns whether the node has as many activations and weights as its operation takes.
    fn has_its_operands(&self) -> bool {
        let (activations, weights) = (self.inputs.len(), self.weights.len());
        match self.operation {
            Operation::Conv2d(_) | Operation::Linear => activations == 1 && (1..=2).contains(&weights),
            Operation::BatchNorm { .. } => (activations, weights) == (1, 4),
            Operation::Add | Operation::Interleave | Operation::ScaleChannels => (activations, weights) == (2, 0),
            Operation::Concat => activations > 0 && weights == 0,
            Operation::MaxPool(_)
            | Operation::AvgPool { .. }
            | Operation::GlobalAvgPool
            | Operation::Activation(_)
            | Operation::SliceChannels(_)
            | Operation::Flatten
            | Operation::Unflatten
            | Operation::Divide(_) => (activations, weights) == (1, 0),
        }
    }
}

impl Graph {
    /// Returns the graph of a network's evaluation.
    ///
    /// # Errors
    ///
    /// As [`Graph::trace`].
    ///
    /// # Panics
    ///
    /// As [`Graph::trace`].
    pub fn from_network(network: &Network, spec: &Spec) -> Result<Self, GraphError> {
        let [height, width] = spec.image_size;
        let network = network.valid();
        let forward = |images| network.forward(images, &Context::eval());
        Self::trace(&network, [spec.in_channels, height, width], forward)
    }

    /// Runs `forward`, the evaluation of `network`, on one black image `[1, C, H, W]`, and returns the graph of its operations.
    ///
    /// # Errors
    ///
    /// `forward` uses operations that are not of the crate `ops`, or weights that are not of `network`.
    ///
    /// # Panics
    ///
    /// When the network is not on the CPU.
    pub fn trace<M: Module>(
        network: &M,
        image_shape: [usize; 3],
        forward: impl FnOnce(Tensor<4>) -> Tensor<2>,
    ) -> Result<Self, GraphError> {
        let [channels, height, width] = image_shape;
        let images = Tensor::zeros([1, channels, height, width], &Device::flex());
        let mut tracer = Tracer::new(network, &images);
        let (logits, recording) = trace::record(|| forward(images));
        for call in &recording.calls {
            tracer.add(call)?;
        }
        let output = tracer.activations.get(&TensorId::of(&logits)).copied();
        Ok(Self { image_shape, nodes: tracer.nodes, output: output.ok_or(GraphError::UnknownLogits)? })
    }

    /// Returns the number of batch norms.
    pub fn batch_norms(&self) -> usize {
        self.nodes.iter().filter(|node| matches!(node.operation, Operation::BatchNorm { .. })).count()
    }

    /// Returns the shape of an activation without the batch.
    pub fn shape(&self, value: Value) -> &[usize] {
        match value {
            Value::Images => &self.image_shape,
            Value::Node(index) => &self.nodes[index].shape,
        }
    }
}

/// Connects the calls of a recording.
struct Tracer {
    nodes: Vec<Node>,
    activations: HashMap<TensorId, Value>,
    /// Name and shape of each weight. The key is the id of the weight flattened to one dimension.
    weights: HashMap<TensorId, (String, Vec<usize>)>,
    /// Keeps the memory of the weights and the images alive: an id contains an address, so no activation may get the same one.
    _alive: (Vec<Tensor<1>>, Tensor<4>),
}

impl Tracer {
    fn new<M: Module>(network: &M, images: &Tensor<4>) -> Self {
        let (mut weights, mut alive) = (HashMap::new(), Vec::new());
        state::visit(network, |info, _, tensor| {
            weights.insert(TensorId::of(&tensor), (info.name, info.shape));
            alive.push(tensor);
        });
        let activations = HashMap::from([(TensorId::of(images), Value::Images)]);
        Self { nodes: Vec::new(), activations, weights, _alive: (alive, images.clone()) }
    }

    /// Adds the nodes of a call: the operation, then the residual sum and the activation that are fused behind it.
    fn add(&mut self, call: &Call) -> Result<(), GraphError> {
        let (mut inputs, mut weights) = (Vec::new(), Vec::new());
        for input in &call.inputs {
            match (self.activations.get(input), self.weight(input)) {
                (Some(&value), _) => inputs.push(value),
                (None, Some(name)) => weights.push(name),
                (None, None) => return Err(self.unknown(&call.operation)),
            }
        }
        // All results of a call have one shape.
        let shape = call.output.shape()[1..].to_vec();
        let mut last = self.push(Node { operation: call.operation.clone(), inputs, weights, shape: shape.clone() })?;
        let follow = |operation, inputs| Node { operation, inputs, weights: Vec::new(), shape: shape.clone() };
        if let Some(residual) = &call.residual {
            let Some(&residual) = self.activations.get(residual) else { return Err(self.unknown(&Operation::Add)) };
            last = self.push(follow(Operation::Add, vec![last, residual]))?;
        }
        if call.activation != Activation::Identity {
            last = self.push(follow(Operation::Activation(call.activation), vec![last]))?;
        }
        self.activations.insert(call.output.clone(), last);
        Ok(())
    }

    /// Returns the name of a weight that is the operand. `None` for other tensors and for a weight in another shape.
    fn weight(&self, operand: &TensorId) -> Option<String> {
        let (name, shape) = self.weights.get(&operand.flat()?)?;
        (operand.shape() == shape).then(|| name.clone())
    }

    fn push(&mut self, node: Node) -> Result<Value, GraphError> {
        if !node.has_its_operands() {
            let (activations, weights) = (node.inputs.len(), node.weights.len());
            let (operation, place) = (format!("{:?}", node.operation), self.last_module());
            return Err(GraphError::Operands { operation, place, activations, weights });
        }
        self.nodes.push(node);
        Ok(Value::Node(self.nodes.len() - 1))
    }

    fn unknown(&self, operation: &Operation) -> GraphError {
        GraphError::UnknownOperand { operation: format!("{operation:?}"), place: self.last_module() }
    }

    /// Returns the last module that was recorded, for messages.
    fn last_module(&self) -> String {
        let module = self.nodes.iter().rev().find_map(Node::module);
        module.map_or_else(|| "the images".to_owned(), |module| format!("`{module}`"))
    }
}
