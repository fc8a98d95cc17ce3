//! Weights as PyTorch's `load_state_dict(strict=True)` wants them.

use std::collections::HashMap;

use models::StateTensor;
use safetensors::{Dtype, SafeTensorError, tensor::TensorView};

/// The bytes of a safetensors file of `state`, with the counter `num_batches_tracked` that PyTorch keeps beside each
/// batch norm's statistics: `batches` is the number of training batches that moved them.
///
/// The metadata says `format: pt`, as PyTorch's own writer does. Equal states give equal bytes.
///
/// # Errors
/// Two tensors of one name, or a shape that disagrees with its values.
pub fn encode(state: &[StateTensor], batches: u64) -> Result<Vec<u8>, SafeTensorError> {
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
    safetensors::serialize(views, Some(HashMap::from([("format".to_owned(), "pt".to_owned())])))
}
