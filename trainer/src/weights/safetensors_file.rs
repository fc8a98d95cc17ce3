//! Safetensors files: a JSON header, followed by the tensors.

use std::{path::Path, sync::Arc};

use data::read_regular;
use safetensors::{Dtype, SafeTensors};

use super::export::FOLDED;
use super::{FileTensor, TensorSource, WeightDType, bad, damaged};
use crate::files::FileError;

/// Returns the tensors of a file, sorted by name. The whole file is read.
pub(super) fn open(path: &Path) -> Result<Vec<FileTensor>, FileError> {
    let bytes = read_regular(path, u64::MAX).map_err(|error| damaged(path, error))?;
    let damaged = |error| damaged(path, format!("not a complete safetensors file: {error}"));
    // Checks that the tensors are within the file, back to back, and as long as their shapes say.
    SafeTensors::deserialize(&bytes).map_err(damaged)?;
    let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(damaged)?;
    if metadata.metadata().as_ref().is_some_and(|entries| entries.contains_key(FOLDED)) {
        let cause = "batch norms of these weights are folded into convolutions, for inference elsewhere";
        return Err(bad(path, cause, "name a file that `trainer export` wrote without --fold"));
    }
    let start = 8 + header;
    let bytes = Arc::new(bytes);
    let mut tensors: Vec<_> = metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let (bytes, range) = (Arc::clone(&bytes), start + info.data_offsets.0..start + info.data_offsets.1);
            FileTensor {
                name,
                shape: info.shape.clone(),
                dtype: weight_dtype(info.dtype),
                source: TensorSource::File(Box::new(move || Ok(bytes[range.clone()].to_vec()))),
            }
        })
        .collect();
    if tensors.is_empty() {
        return Err(bad(path, "a safetensors file without a tensor", "take another copy"));
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(tensors)
}

fn weight_dtype(dtype: Dtype) -> WeightDType {
    match dtype {
        Dtype::F64 => WeightDType::F64,
        Dtype::F32 => WeightDType::F32,
        Dtype::F16 => WeightDType::F16,
        Dtype::BF16 => WeightDType::Bf16,
        Dtype::I64 => WeightDType::Other("int64"),
        Dtype::I32 => WeightDType::Other("int32"),
        Dtype::I16 => WeightDType::Other("int16"),
        Dtype::I8 => WeightDType::Other("int8"),
        Dtype::U64 => WeightDType::Other("uint64"),
        Dtype::U32 => WeightDType::Other("uint32"),
        Dtype::U16 => WeightDType::Other("uint16"),
        Dtype::U8 => WeightDType::Other("uint8"),
        Dtype::BOOL => WeightDType::Other("bool"),
        _ => WeightDType::Other("another type"),
    }
}
