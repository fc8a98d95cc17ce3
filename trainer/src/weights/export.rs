//! Exports weights for PyTorch's `load_state_dict(strict=True)`.

use std::collections::HashMap;

use models::StateTensor;
use models::graph::FoldedNorm;
use safetensors::{Dtype, SafeTensorError, tensor::TensorView};

/// Key of the metadata of a file with folded batch norms.
pub(super) const FOLDED: &str = "folded";

/// Encodes `state` as the bytes of a safetensors file. Adds the counter `num_batches_tracked`, which PyTorch keeps beside
/// the statistics of each batch norm. `batches` is the number of training batches that updated the statistics.
///
/// The metadata has `format: pt`, as PyTorch's writer does. Equal states result in equal bytes.
///
/// # Errors
/// When two tensors have the same name, or a shape disagrees with its values.
pub fn encode(state: &[StateTensor], batches: u64) -> Result<Vec<u8>, SafeTensorError> {
    encode_with(state, batches, ("format", "pt".to_owned()))
}

/// Encodes a state with folded batch norms ([`Graph::fold_batch_norms`](models::Graph::fold_batch_norms)) as [`encode`]. The
/// metadata has `folded` alone: a JSON list of the pairs `["conv1", "bn1"]` of convolutions and batch norms.
///
/// # Errors
/// As [`encode`].
pub fn encode_folded(state: &[StateTensor], batches: u64, folded: &[FoldedNorm]) -> Result<Vec<u8>, SafeTensorError> {
    let pairs: Vec<[&str; 2]> = folded.iter().map(|pair| [pair.conv.as_str(), &pair.norm]).collect();
    // One entry: safetensors writes several entries in any order, but equal states must result in equal bytes.
    encode_with(state, batches, (FOLDED, serde_json::json!(pairs).to_string()))
}

/// Encodes a state with one entry of metadata.
fn encode_with(state: &[StateTensor], batches: u64, (key, value): (&str, String)) -> Result<Vec<u8>, SafeTensorError> {
    let counter = batches.to_le_bytes();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for tensor in state {
        let bytes = tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        tensors.push((tensor.name.clone(), Dtype::F32, tensor.shape.clone(), bytes));
        if let Some(norm) = tensor.name.strip_suffix("running_var") {
            tensors.push((format!("{norm}num_batches_tracked"), Dtype::I64, Vec::new(), counter.to_vec()));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, SafeTensorError>>()?;
    safetensors::serialize(views, Some(HashMap::from([(key.to_owned(), value)])))
}
