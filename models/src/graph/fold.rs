//! Folding of batch norms into the convolutions in front of them, `torch.nn.utils.fusion.fuse_conv_bn_eval`.
//!
//! In evaluation mode a batch norm multiplies each channel by a factor and adds a constant. The convolution's weight and bias can
//! contain both. The folded network computes the same function with fewer operations, and rounds differently.

use std::collections::{HashMap, HashSet};

use super::{Graph, Node, Operation, Value};
use crate::{StateKind, StateTensor};

/// A batch norm that is now part of a convolution. Both are paths in the state dict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoldedNorm {
    /// The convolution. After folding it has a bias.
    pub conv: String,
    /// The batch norm. Its tensors are no longer in the state dict.
    pub norm: String,
}

impl Graph {
    /// Folds each batch norm that directly follows a convolution, in the graph and in the network's state dict. The convolution's
    /// weight and bias are computed in f64.
    ///
    /// A batch norm stays where another operation also reads the convolution's result, or where a module is used twice.
    ///
    /// # Panics
    ///
    /// When `state` is not the state dict of the graph's network.
    pub fn fold_batch_norms(self, state: Vec<StateTensor>) -> (Self, Vec<StateTensor>, Vec<FoldedNorm>) {
        let pairs = self.foldable();
        let mut tensors: HashMap<String, StateTensor> =
            state.iter().map(|tensor| (tensor.name.clone(), tensor.clone())).collect();
        let mut folded = Vec::new();
        let mut biases: HashMap<String, String> = HashMap::new();
        let Self { image_shape, mut nodes, output } = self;
        for &(conv, norm) in &pairs {
            let Operation::BatchNorm { epsilon } = nodes[norm].operation else { unreachable!("a pair's batch norm") };
            let module = |node: &Node| node.module().expect("a weight is in a module").to_owned();
            let pair = FoldedNorm { conv: module(&nodes[conv]), norm: module(&nodes[norm]) };
            let affine = std::mem::take(&mut nodes[norm].weights).into_iter().map(|name| remove(&mut tensors, &name));
            let [scale, shift, mean, variance]: [Vec<f32>; 4] = affine
                .map(|tensor| tensor.values)
                .collect::<Vec<_>>()
                .try_into()
                .expect("a batch norm has four tensors");
            let bias = nodes[conv].weights.get(1).cloned().unwrap_or_else(|| {
                let weight = &nodes[conv].weights[0];
                format!("{}bias", weight.strip_suffix("weight").unwrap_or(weight))
            });
            let old_bias = tensors.get(&bias).map_or_else(|| vec![0.0; scale.len()], |tensor| tensor.values.clone());
            let weight = tensors.get_mut(&nodes[conv].weights[0]).expect("the state has the graph's weights");
            let filter = weight.values.len() / scale.len();
            let mut new_bias = Vec::with_capacity(scale.len());
            for (channel, weights) in weight.values.chunks_exact_mut(filter).enumerate() {
                let [scale, shift, mean, variance, bias] =
                    [&scale, &shift, &mean, &variance, &old_bias].map(|values| f64::from(values[channel]));
                let factor = scale / (variance + epsilon).sqrt();
                weights.iter_mut().for_each(|weight| *weight = (f64::from(*weight) * factor) as f32);
                new_bias.push(((bias - mean) * factor + shift) as f32);
            }
            let tensor = StateTensor {
                name: bias.clone(),
                kind: StateKind::Parameter,
                shape: vec![new_bias.len()],
                values: new_bias,
            };
            tensors.insert(bias.clone(), tensor);
            biases.insert(nodes[conv].weights[0].clone(), bias.clone());
            nodes[conv].weights.truncate(1);
            nodes[conv].weights.push(bias);
            folded.push(pair);
        }
        // The order of the state dict: a bias after its weight.
        let names = state.into_iter().flat_map(|tensor| {
            let bias = biases.get(&tensor.name).cloned();
            [Some(tensor.name), bias].into_iter().flatten()
        });
        let state = names.filter_map(|name| tensors.remove(&name)).collect();
        (Self { image_shape, nodes, output }.without(&pairs), state, folded)
    }

    /// Returns the indices of each convolution and the batch norm that can be folded into it.
    fn foldable(&self) -> Vec<(usize, usize)> {
        let mut readers: HashMap<Value, usize> = HashMap::from([(self.output, 1)]);
        let mut users: HashMap<&str, usize> = HashMap::new();
        for node in &self.nodes {
            node.inputs.iter().for_each(|&input| *readers.entry(input).or_default() += 1);
            node.weights.iter().for_each(|weight| *users.entry(weight).or_default() += 1);
        }
        let used_once = |node: &Node| node.weights.iter().all(|weight| users[weight.as_str()] == 1);
        let pair = |(norm, node): (usize, &Node)| {
            let Operation::BatchNorm { .. } = node.operation else { return None };
            let Value::Node(conv) = node.inputs[0] else { return None };
            let of_conv = &self.nodes[conv];
            let follows = matches!(of_conv.operation, Operation::Conv2d(_)) && readers[&node.inputs[0]] == 1;
            (follows && used_once(node) && used_once(of_conv)).then_some((conv, norm))
        };
        self.nodes.iter().enumerate().filter_map(pair).collect()
    }

    /// Removes the batch norms of `pairs`. Nodes that read a batch norm's result then read the convolution's result.
    fn without(self, pairs: &[(usize, usize)]) -> Self {
        let removed: HashSet<usize> = pairs.iter().map(|&(_, norm)| norm).collect();
        let mut renumbered: HashMap<Value, Value> = HashMap::from([(Value::Images, Value::Images)]);
        let mut nodes = Vec::with_capacity(self.nodes.len() - removed.len());
        for (index, node) in self.nodes.into_iter().enumerate() {
            let inputs: Vec<Value> = node.inputs.iter().map(|input| renumbered[input]).collect();
            if removed.contains(&index) {
                renumbered.insert(Value::Node(index), inputs[0]);
            } else {
                renumbered.insert(Value::Node(index), Value::Node(nodes.len()));
                nodes.push(Node { inputs, ..node });
            }
        }
        Self { image_shape: self.image_shape, nodes, output: renumbered[&self.output] }
    }
}

fn remove(tensors: &mut HashMap<String, StateTensor>, name: &str) -> StateTensor {
    tensors.remove(name).expect("the state has the graph's weights")
}
