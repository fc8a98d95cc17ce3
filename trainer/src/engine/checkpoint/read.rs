//! Reads checkpoints. Damaged checkpoints are skipped with a message.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use data::{open_regular, read_regular};

use super::store::REPLACED_PREFIX;
use super::{EMA, MANIFEST, MODEL, Manifest, OPTIMIZER, STATE, StateFile, VERSION, sha256};
use crate::files::FileError;
use crate::snapshot::{DatasetRecord, RunProgress, Snapshot};
use crate::state_file;

/// Largest manifest or state file in bytes: 65,536 class names of 255 bytes each, and some more.
const LARGEST_JSON: u64 = 1 << 25;

/// A complete checkpoint.
#[derive(Debug)]
pub struct LoadedCheckpoint {
    /// The folder of the checkpoint.
    pub path: PathBuf,
    /// The strategy's state.
    pub snapshot: Snapshot,
    /// The engine's state.
    pub progress: RunProgress,
    /// The seed of the run that wrote the checkpoint.
    pub seed: u64,
    /// The data set of the run; older checkpoints have none.
    pub dataset: Option<DatasetRecord>,
}

/// Loads the newest complete checkpoint of a `checkpoints` folder. The second item has the errors of the newer checkpoints that
/// were skipped.
///
/// # Errors
/// The folder has no checkpoint, or none is complete.
pub fn load_newest(folder: &Path) -> Result<(LoadedCheckpoint, Vec<FileError>), FileError> {
    let mut damaged = Vec::new();
    for path in newest_first(folder)? {
        match load(&path) {
            Ok(loaded) => return Ok((loaded, damaged)),
            Err(error) => damaged.push(error),
        }
    }
    let cause = match damaged.as_slice() {
        [] => "holds no checkpoint".to_owned(),
        all => format!(
            "holds no complete checkpoint:{}",
            all.iter().map(|error| format!("\n    {error}")).collect::<String>()
        ),
    };
    Err(FileError::new(folder, cause, "start the run again with --config; it left nothing to continue from"))
}

/// Returns whether the folder has a checkpoint, complete or not.
///
/// # Errors
/// The folder cannot be read.
pub fn exists(folder: &Path) -> Result<bool, FileError> {
    Ok(!newest_first(folder)?.is_empty())
}

/// Loads one checkpoint and compares every file with the manifest.
///
/// # Errors
/// Names the file that is missing, truncated or altered.
pub fn load(path: &Path) -> Result<LoadedCheckpoint, FileError> {
    let damaged = |file: &Path, cause: String| {
        FileError::new(file, cause, "use another checkpoint: this one was truncated or altered after it was written")
    };
    let manifest_path = path.join(MANIFEST);
    let bytes =
        read_regular(&manifest_path, LARGEST_JSON).map_err(|error| damaged(&manifest_path, error.to_string()))?;
    let manifest: Manifest = serde_json::from_slice(&bytes)
        .map_err(|error| damaged(&manifest_path, format!("not a checkpoint's manifest: {error}")))?;
    if manifest.version != VERSION {
        return Err(FileError::new(
            &manifest_path,
            format!("layout version {}, this program reads {VERSION}", manifest.version),
            "use the version of the program that wrote it",
        ));
    }
    let read = |name: &str| -> Result<Option<Vec<u8>>, FileError> {
        let Some(entry) = manifest.files.iter().find(|file| file.name == name) else { return Ok(None) };
        let file = path.join(name);
        let unreadable = |error: io::Error| damaged(&file, error.to_string());
        let (mut open, len) = open_regular(&file).map_err(unreadable)?;
        if len != entry.bytes {
            return Err(damaged(&file, format!("{len} bytes, {} were written", entry.bytes)));
        }
        let mut bytes = Vec::new();
        open.read_to_end(&mut bytes).map_err(unreadable)?;
        if sha256(&bytes) != entry.sha256 {
            return Err(damaged(&file, "its contents differ from what was written (SHA-256)".into()));
        }
        Ok(Some(bytes))
    };
    let required = |name: &str| read(name)?.ok_or_else(|| damaged(&manifest_path, format!("names no {name}")));
    let tensors = |name: &str, bytes: &[u8]| {
        let file = path.join(name);
        state_file::decode(&file, bytes).map_err(|error| damaged(&file, error))
    };
    let state: StateFile = serde_json::from_slice(&required(STATE)?)
        .map_err(|error| damaged(&path.join(STATE), format!("not a checkpoint's state: {error}")))?;
    let model = state_file::state_tensors(tensors(MODEL, &required(MODEL)?)?);
    let optimizer = tensors(OPTIMIZER, &required(OPTIMIZER)?)?;
    let ema = match read(EMA)? {
        Some(bytes) => Some(state_file::state_tensors(tensors(EMA, &bytes)?)),
        None => None,
    };
    Ok(LoadedCheckpoint {
        path: path.to_owned(),
        snapshot: Snapshot { model, optimizer, optimizer_steps: state.optimizer_steps, ema },
        progress: state.progress,
        seed: state.seed,
        dataset: state.dataset,
    })
}

/// The position of a checkpoint in its run: step, epoch and batch of the next step.
type Position = (u64, usize, usize);

/// Returns the checkpoints of a folder, newest first: by step, epoch and batch in the state file. If the state file cannot be
/// read, the folder's name decides, so a damaged checkpoint keeps its position in the order: `step-N` has taken N steps, and
/// `epoch-N` follows the newest readable checkpoint of the epochs up to N.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn newest_first(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let entries = fs::read_dir(folder).map_err(|error| {
        FileError::new(folder, error.to_string(), "name a run folder that has a checkpoints folder")
    })?;
    let mut readable: Vec<(Position, PathBuf)> = Vec::new();
    let (mut damaged_steps, mut damaged_epochs) = (Vec::new(), Vec::new());
    for entry in entries.flatten() {
        let path = entry.path();
        let mut name = entry.file_name().to_string_lossy().into_owned();
        if let Some(old) = name.strip_prefix(REPLACED_PREFIX).filter(|old| !folder.join(old).exists()) {
            // The program was killed while it replaced this checkpoint.
            name = old.to_owned();
        }
        let named = name.strip_prefix("epoch-").or(name.strip_prefix("step-")).and_then(|n| n.parse::<u64>().ok());
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if let (Some(number), true) = (named, is_folder) {
            match state(&path) {
                Some(StateFile { progress: RunProgress { step, epoch, batch, .. }, .. }) => {
                    readable.push(((step, epoch, batch), path));
                }
                None if name.starts_with("step-") => damaged_steps.push(((number, 0, 0), path)),
                // The next step of `epoch-N` is the first one of epoch N + 1.
                None => damaged_epochs.push(((number as usize).saturating_add(1), path)),
            }
        }
    }
    let steps_before = |epoch| {
        let before = readable.iter().filter(|((_, other, batch), _)| (*other, *batch) <= (epoch, 0));
        before.map(|((step, ..), _)| *step).max().unwrap_or(0)
    };
    let damaged_epochs: Vec<_> =
        damaged_epochs.into_iter().map(|(epoch, path)| ((steps_before(epoch), epoch, 0), path)).collect();
    let mut found: Vec<_> = readable.into_iter().chain(damaged_steps).chain(damaged_epochs).collect();
    found.sort_by(|a, b| b.cmp(a));
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Reads the state file of a checkpoint without a comparison with the manifest. Returns `None` if it cannot be read.
pub(super) fn state(checkpoint: &Path) -> Option<StateFile> {
    let bytes = read_regular(&checkpoint.join(STATE), LARGEST_JSON).ok()?;
    serde_json::from_slice(&bytes).ok()
}
