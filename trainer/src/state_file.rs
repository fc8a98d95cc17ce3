//! Named tensors in safetensors files: the tensors of checkpoints.

use std::path::Path;

use burn::tensor::{Device, Tensor};
use models::StateTensor;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// A float32 tensor on the host with its name.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor {
    /// PyTorch's name. For optimizer state, the slot and the parameter's name: `momentum.conv1.weight`.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Row-major values.
    pub values: Vec<f32>,
}

impl NamedTensor {
    /// Copies a device tensor, flattened by [`ops::parameter::flatten`], to the host.
    pub fn from_tensor(name: String, shape: &[usize], tensor: Tensor<1>) -> Self {
        let values = ops::parameter::to_row_major(tensor, shape)
            .try_to_vec_as::<f32>()
            .expect("a device that computed the tensor can copy it back");
        Self { name, shape: shape.to_vec(), values }
    }

    /// Copies the values to a tensor on `device`, flattened as by [`ops::parameter::flatten`].
    pub fn into_tensor(self, device: &Device) -> Tensor<1> {
        ops::parameter::from_row_major(Tensor::from_floats(self.values.as_slice(), device), &self.shape)
    }
}

/// Converts a network's state to a file's tensors.
pub fn named_tensors(tensors: Vec<StateTensor>) -> Vec<NamedTensor> {
    tensors.into_iter().map(|t| NamedTensor { name: t.name, shape: t.shape, values: t.values }).collect()
}

/// Converts a file's tensors to a network's state.
pub fn state_tensors(tensors: Vec<NamedTensor>) -> Vec<StateTensor> {
    tensors.into_iter().map(|t| StateTensor::new(t.name, t.shape, t.values)).collect()
}

/// Returns the bytes of a safetensors file of `tensors`.
///
/// # Errors
/// Two tensors have one name, or a shape disagrees with its values.
pub fn encode(tensors: &[NamedTensor]) -> Result<Vec<u8>, safetensors::SafeTensorError> {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|tensor| tensor.values.iter().flat_map(|v| v.to_le_bytes()).collect()).collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|(tensor, bytes)| Ok((tensor.name.as_str(), TensorView::new(Dtype::F32, tensor.shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    safetensors::serialize(views, None)
}

/// Reads the bytes of a safetensors file; `path` is for error messages. Checkpoints hold f32: f64, f16 and bf16 are refused.
///
/// # Errors
/// The bytes are not a safetensors file, or hold another dtype.
pub fn decode(path: &Path, bytes: &[u8]) -> Result<Vec<NamedTensor>, String> {
    let file = SafeTensors::deserialize(bytes)
        .map_err(|error| format!("{}: not a complete safetensors file: {error}", path.display()))?;
    file.iter()
        .map(|(name, view)| {
            if view.dtype() != Dtype::F32 {
                return Err(format!("{}: tensor `{name}` is {:?}, not F32", path.display(), view.dtype()));
            }
            let values = view
                .data()
                .chunks_exact(4)
                .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
                .collect();
            Ok(NamedTensor { name: name.to_owned(), shape: view.shape().to_vec(), values })
        })
        .collect()
}
