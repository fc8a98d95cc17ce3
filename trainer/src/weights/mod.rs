//! Weights from other programs and from checkpoints: PyTorch's `.pth`, safetensors, and the export to PyTorch and ONNX.
//!
//! Names, shapes and types are compared with the network first. From a PyTorch file only the matching tensors are then read. A
//! safetensors file and a checkpoint are read whole, so they need memory of the size of the file. No code in a pickle is ever run.

mod export;
mod fit;
mod names;
pub mod onnx;
mod pytorch;
mod safetensors_file;
mod values;

pub use export::{encode, encode_folded};
pub use fit::{LoadedWeights, NewHead, Purpose, WeightTarget, load};

use std::{
    fmt::Display,
    fs, io,
    path::{Path, PathBuf},
};

use data::open_regular;
use models::StateTensor;

use crate::engine::checkpoint;
use crate::files::{FileError, USAGE};

/// The supported formats, for hints.
const FORMATS: &str = "a PyTorch state dict (.pth, .pt), a safetensors file, or a checkpoint's folder";

/// Data type of a tensor's elements (`torch.dtype`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightDType {
    /// IEEE double.
    F64,
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Any other type, by PyTorch's name: counters, masks, quantised values.
    Other(&'static str),
}

/// Reads a tensor's bytes: row-major, and little-endian like the host.
type ReadTensor = Box<dyn Fn() -> io::Result<Vec<u8>> + Send + Sync>;

/// Location of a tensor's elements.
enum TensorSource {
    File(ReadTensor),
    Memory(Vec<f32>),
}

/// A tensor of a weight file. Its elements are converted to f32 on demand.
pub struct FileTensor {
    name: String,
    shape: Vec<usize>,
    dtype: WeightDType,
    source: TensorSource,
}

impl FileTensor {
    /// Returns the elements as f32.
    fn values(&self) -> Result<Vec<f32>, String> {
        match &self.source {
            TensorSource::Memory(values) => Ok(values.clone()),
            TensorSource::File(read) => {
                let bytes = read().map_err(|error| error.to_string())?;
                values::to_f32(self.dtype, &bytes).map_err(|cause| format!("tensor `{}` {cause}", self.name))
            }
        }
    }
}

/// An open file of weights: name, shape and type of every tensor, and a way to read its elements.
pub struct WeightFile {
    path: PathBuf,
    tensors: Vec<FileTensor>,
}

impl WeightFile {
    /// Opens a PyTorch file, a safetensors file or the folder of a checkpoint. The content decides the format, not the
    /// name.
    ///
    /// From a checkpoint, takes the averaged weights if there are any, as `trainer eval --run` does.
    ///
    /// # Errors
    /// There is no such file or folder, the format is unknown, or the content is damaged.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let metadata = fs::metadata(path).map_err(|error| bad(path, error, format!("name {FORMATS}")))?;
        if metadata.is_dir() {
            return Self::of_checkpoint(path);
        }
        let tensors = match WeightFormat::of(path)? {
            WeightFormat::PyTorch => pytorch::open(path)?,
            WeightFormat::Safetensors => safetensors_file::open(path)?,
        };
        Ok(Self { path: path.to_owned(), tensors })
    }

    /// Wraps weights that are already in memory. `path` is their origin.
    pub fn of_state(path: &Path, state: Vec<StateTensor>) -> Self {
        let tensors = state
            .into_iter()
            .map(|t| FileTensor {
                name: t.name,
                shape: t.shape,
                dtype: WeightDType::F32,
                source: TensorSource::Memory(t.values),
            })
            .collect();
        Self { path: path.to_owned(), tensors }
    }

    /// Returns the path of the file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn of_checkpoint(path: &Path) -> Result<Self, FileError> {
        if path.join("config.toml").is_file() {
            let hint = format!("name a checkpoint of the run: {}/checkpoints/best", path.display());
            return Err(bad(path, "is a run folder, not a file of weights", hint));
        }
        let is_checkpoint = path.join(checkpoint::MANIFEST).is_file();
        if !is_checkpoint {
            let cause = format!("is a folder without {}, so it is not a checkpoint", checkpoint::MANIFEST);
            return Err(bad(path, cause, format!("name {FORMATS}")));
        }
        let loaded = checkpoint::load(path).map_err(|error| FileError { code: USAGE, ..error })?;
        Ok(Self::of_state(path, loaded.snapshot.ema.unwrap_or(loaded.snapshot.model)))
    }
}

/// Format of a file, detected from its first bytes.
enum WeightFormat {
    PyTorch,
    Safetensors,
}

impl WeightFormat {
    fn of(path: &Path) -> Result<Self, FileError> {
        use io::Read;
        let mut head = Vec::with_capacity(16);
        open_regular(path)
            .and_then(|(file, _)| file.take(16).read_to_end(&mut head))
            .map_err(|error| bad(path, error, format!("name {FORMATS}")))?;
        match head.as_slice() {
            // The length of a JSON header (less than 4 GiB), then the header. Test this pattern before the pickle's: a length may
            // start with the same two bytes as a pickle.
            [_, _, _, _, 0, 0, 0, 0, b'{', ..] => Ok(Self::Safetensors),
            // A zip archive, or a pickle of protocol 2 or later, which PyTorch wrote before 1.6.
            [b'P', b'K', 3, 4, ..] | [0x80, 2..=5, ..] => Ok(Self::PyTorch),
            [] => Err(bad(path, "the file is empty", "take another copy")),
            _ => Err(bad(path, "not a file of weights that this program knows", format!("give {FORMATS}"))),
        }
    }
}

/// Returns an exit-code-2 error for weights that cannot be read or do not fit the network.
fn bad(path: &Path, cause: impl Display, hint: impl Into<String>) -> FileError {
    FileError::input(path, cause.to_string(), hint)
}

fn damaged(path: &Path, cause: impl Display) -> FileError {
    bad(path, cause, "the file is damaged or was cut short: take another copy")
}

#[cfg(test)]
mod tests;
