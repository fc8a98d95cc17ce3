//! The formats of `torch.save`: a zip archive around a pickle, or the streams of PyTorch before 1.6.
//!
//! `pytorch-reader` interprets only the calls that rebuild tensors, limits the size that a pickle may grow to, checks
//! every offset and stride, and verifies the checksums of the archive.

use std::path::Path;

use pytorch_reader::{DType, PickleError, PytorchError, PytorchReader};

use super::{FileTensor, TensorSource, WeightDType, bad, damaged};
use crate::files::FileError;

/// Returns the tensors of a file, sorted by name. A name is the path through the file's dictionaries:
/// `net.module.conv1.weight`.
pub(super) fn open(path: &Path) -> Result<Vec<FileTensor>, FileError> {
    let reader = PytorchReader::new(path).map_err(|error| refused(path, &error))?;
    let mut tensors: Vec<_> = reader
        .into_tensors()
        .into_values()
        .map(|tensor| {
            let (name, dtype, shape, read) = tensor.into_parts();
            FileTensor { name, shape, dtype: weight_dtype(dtype), source: TensorSource::File(Box::new(read)) }
        })
        .collect();
    if tensors.is_empty() {
        let hint = "save the weights in it: torch.save(model.state_dict(), FILE)";
        return Err(bad(path, "a PyTorch file without a tensor", hint));
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(tensors)
}

fn refused(path: &Path, error: &PytorchError) -> FileError {
    let saved_anew = "load it in PyTorch and save the weights alone: torch.save(model.state_dict(), FILE)";
    match error {
        PytorchError::Io(error) => damaged(path, error),
        PytorchError::Zip(error) => damaged(path, format!("not a complete PyTorch file: {error}")),
        PytorchError::Pickle(PickleError::UnsupportedType(_)) => bad(path, error, saved_anew),
        PytorchError::Pickle(PickleError::NoDataSource) => {
            bad(path, "a pickle, but not one that torch.save wrote", saved_anew)
        }
        // Before PyTorch 1.6, the classes of a saved model had 4-tuples in the pickle: "module", class, source file, source code.
        PytorchError::Pickle(PickleError::InvalidData(cause)) if cause.contains("persistent id has 4 fields") => {
            bad(path, "a PyTorch file that holds a whole model, not its weights", saved_anew)
        }
        PytorchError::InvalidFormat(cause) if cause.contains("No data.pkl") => {
            bad(path, "a zip archive, but not one that torch.save wrote", saved_anew)
        }
        PytorchError::InvalidFormat(cause) if cause.contains("Expected a dictionary") => {
            bad(path, "a PyTorch file that holds no dictionary of weights", saved_anew)
        }
        other => damaged(path, other),
    }
}

fn weight_dtype(dtype: DType) -> WeightDType {
    match dtype {
        DType::F64 => WeightDType::F64,
        DType::F32 => WeightDType::F32,
        DType::F16 => WeightDType::F16,
        DType::BF16 => WeightDType::Bf16,
        DType::I64 => WeightDType::Other("int64"),
        DType::I32 => WeightDType::Other("int32"),
        DType::I16 => WeightDType::Other("int16"),
        DType::I8 => WeightDType::Other("int8"),
        DType::U64 => WeightDType::Other("uint64"),
        DType::U32 => WeightDType::Other("uint32"),
        DType::U16 => WeightDType::Other("uint16"),
        DType::U8 => WeightDType::Other("uint8"),
        DType::Bool => WeightDType::Other("bool"),
    }
}
