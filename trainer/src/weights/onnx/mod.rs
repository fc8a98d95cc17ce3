//! Writes a network as an ONNX model (<https://onnx.ai>), which ONNX Runtime, TensorRT, OpenVINO and browsers read.

mod nodes;
mod proto;

use std::collections::{HashMap, HashSet};

use models::StateTensor;
use models::graph::Graph;
use prost::Message;

use proto::{Entry, Model, OperatorSet, Tensor, ValueInfo};

/// Version of ONNX's operators.
pub const OPSET: i64 = 17;
/// Version of the file format that came with [`OPSET`].
const IR_VERSION: i64 = 8;
/// Name of the input.
pub const IMAGES: &str = "images";
/// Name of the output.
pub const LOGITS: &str = "logits";
/// A protocol buffer has less than 2 GiB.
const LARGEST: usize = (1 << 31) - 1;

/// The description of a model in its file.
#[derive(Debug, Clone, Copy)]
pub struct OnnxDescription<'a> {
    /// Name of the network.
    pub model: &'a str,
    /// How the input is made from pixels.
    pub input: &'a str,
    /// More entries of the metadata: keys and values.
    pub metadata: &'a [(&'a str, String)],
    /// Mean and standard deviation of each channel, `[C]`, if the model normalises its input. `None`: the caller normalises.
    pub normalise: Option<(&'a [f32], &'a [f32])>,
}

/// An encoded model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnnxModel {
    /// The content of the file.
    pub bytes: Vec<u8>,
    /// Number of nodes.
    pub nodes: usize,
}

/// Encodes a network's graph with the weights of `state` as an ONNX model. Its input `images` is `[batch, C, H, W]`, its output
/// `logits` is `[batch, classes]`, both f32, for any batch. The weights have the names of the state dict. Tensors that the graph
/// does not use are left out.
///
/// # Errors
/// When the model is larger than a protocol buffer can be. The error is the model's size in bytes.
///
/// # Panics
/// When `state` is not the state dict of the graph's network.
pub fn encode(graph: &Graph, state: &[StateTensor], description: &OnnxDescription) -> Result<OnnxModel, usize> {
    let nodes::Nodes { nodes, constants } = nodes::convert(graph, description.normalise);
    let tensors: HashMap<&str, &StateTensor> = state.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let used = graph.nodes.iter().flat_map(|node| &node.weights).map(|name| tensors[name.as_str()]);
    // Write a weight once, even if two nodes use it.
    let mut written = HashSet::new();
    let weights = used.filter(|tensor| written.insert(tensor.name.as_str()));
    let weights = weights.map(|tensor| Tensor::floats(&tensor.name, &tensor.shape, &tensor.values));
    let metadata = [("model", description.model.to_owned())];
    let metadata = metadata.iter().chain(description.metadata);
    let count = nodes.len();
    let graph = proto::Graph {
        node: nodes,
        name: description.model.to_owned(),
        initializer: weights.chain(constants).collect(),
        input: vec![ValueInfo::batch(IMAGES, &graph.image_shape, description.input)],
        output: vec![ValueInfo::batch(LOGITS, graph.shape(graph.output), "")],
    };
    let model = Model {
        ir_version: IR_VERSION,
        producer_name: "trainer".to_owned(),
        producer_version: env!("CARGO_PKG_VERSION").to_owned(),
        graph: Some(graph),
        opset_import: vec![OperatorSet { domain: String::new(), version: OPSET }],
        metadata_props: metadata.map(|(key, value)| Entry { key: (*key).to_owned(), value: value.clone() }).collect(),
    };
    match model.encoded_len() {
        ..=LARGEST => Ok(OnnxModel { bytes: model.encode_to_vec(), nodes: count }),
        bytes => Err(bytes),
    }
}
