//! A run's summary, small and free of its machine's paths, to be committed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::RunRecord;
use crate::files::{FileError, write_atomic};

/// What `env.json` keeps: all but the machine's name and the folder.
const KEPT: [&str; 12] = [
    "started",
    "command",
    "trainer",
    "burn",
    "git_commit",
    "device",
    "os",
    "kernel",
    "arch",
    "cpu",
    "cores",
    "memory_bytes",
];

/// Writes `config.toml` (given by the caller, who knows what of it is this machine's), `summary.csv`, `summary.json`
/// without the confusion matrix, and `env.json` without names of this machine to a folder of the run's name below `into`.
///
/// # Errors
/// A file that cannot be read or written.
pub fn save(run: &RunRecord, config: &str, into: &Path) -> Result<PathBuf, FileError> {
    let folder = into.join(&run.name);
    fs::create_dir_all(&folder).map_err(|error| FileError::io(&folder, "create the folder", &error))?;
    let read = |path: PathBuf| fs::read(&path).map_err(|error| FileError::io(&path, "read", &error));
    let json = |path: PathBuf| -> Result<Value, FileError> {
        let bytes = read(path.clone())?;
        serde_json::from_slice(&bytes)
            .map_err(|error| FileError::new(&path, format!("not JSON: {error}"), "the file was damaged or edited"))
    };
    let mut summary = json(run.folder.result())?;
    if let Some(summary) = summary.as_object_mut() {
        summary.remove("confusion");
    }
    let mut env = json(run.folder.env())?;
    forget_machine(&mut env);
    write_atomic(&folder.join("config.toml"), config.as_bytes())?;
    write_atomic(&folder.join("summary.csv"), &read(run.folder.summary())?)?;
    write_atomic(&folder.join("summary.json"), format!("{summary:#}\n").as_bytes())?;
    write_atomic(&folder.join("env.json"), format!("{env:#}\n").as_bytes())?;
    Ok(folder)
}

/// Keeps what tells of the result; of each path in the command line, the file's name.
fn forget_machine(env: &mut Value) {
    let Some(env) = env.as_object_mut() else { return };
    env.retain(|key, _| KEPT.contains(&key.as_str()) || key == "resumed");
    if let Some(words) = env.get_mut("command").and_then(Value::as_array_mut) {
        for word in words {
            let name = word.as_str().and_then(|word| word.rsplit('/').find(|part| !part.is_empty())).map(str::to_owned);
            if let Some(name) = name {
                *word = Value::String(name);
            }
        }
    }
    for resumed in env.get_mut("resumed").and_then(Value::as_array_mut).into_iter().flatten() {
        forget_machine(resumed);
    }
}
