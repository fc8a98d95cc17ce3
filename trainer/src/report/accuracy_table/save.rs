//! Saves a run's summary for a commit. The summary is small and does not contain paths of the run's machine.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::read::{RunIdentity, RunRecord, without_folders};
use crate::files::{FileError, write_atomic};
use crate::report::RunFolder;

/// The fields of `env.json` to keep: all except the machine's name and the folder.
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

/// Saves the run's summary in a folder of the run's name below `into`: `config.toml`, `summary.csv`, `summary.json`
/// without the confusion matrices, and `env.json` without the names of this machine.
///
/// `config` is the text of `config.toml`. The caller removes the settings that belong to this machine. A run may be saved again,
/// also after the run has continued.
///
/// # Errors
/// When a file cannot be read or written, or when the folder is the run's own folder or holds another run. Two runs of one network
/// that start in the same second in two run folders have the same name.
pub fn save(run: &RunRecord, config: &str, into: &Path) -> Result<PathBuf, FileError> {
    let folder = into.join(&run.name);
    if let (Ok(target), Ok(own)) = (folder.canonicalize(), run.folder.path().canonicalize())
        && target == own
    {
        let cause = "is the run itself: its own files would be overwritten";
        return Err(FileError::input(&folder, cause, "name another folder, such as results: --save DIR"));
    }
    fs::create_dir_all(&folder).map_err(|error| FileError {
        hint: "name a folder that you can write, on a disk with space: --save DIR".to_owned(),
        ..FileError::io(&folder, "create the folder", &error)
    })?;
    let read = |path: PathBuf| fs::read(&path).map_err(|error| FileError::io(&path, "read", &error));
    let json = |path: PathBuf| -> Result<Value, FileError> {
        let bytes = read(path.clone())?;
        serde_json::from_slice(&bytes)
            .map_err(|error| FileError::new(&path, format!("not JSON: {error}"), "the file was damaged or edited"))
    };
    let epochs = read(run.folder.summary_csv())?;
    refuse_another_run(&folder, &run.folder)?;
    let mut summary = json(run.folder.summary_json())?;
    if let Some(summary) = summary.as_object_mut() {
        for matrix in ["confusion", "test_confusion"] {
            summary.remove(matrix);
        }
    }
    let mut env = json(run.folder.env())?;
    remove_machine_fields(&mut env);
    write_atomic(&folder.join("config.toml"), config.as_bytes())?;
    write_atomic(&folder.join("summary.csv"), &epochs)?;
    write_atomic(&folder.join("summary.json"), format!("{summary:#}\n").as_bytes())?;
    write_atomic(&folder.join("env.json"), format!("{env:#}\n").as_bytes())?;
    Ok(folder)
}

/// Fails if `folder` holds the summary of another run. A folder without summary.csv is the rest of an interrupted save.
fn refuse_another_run(folder: &Path, run: &RunFolder) -> Result<(), FileError> {
    let saved = RunIdentity::read(&folder.join("summary.csv"), &folder.join("env.json"))?;
    match saved.is_empty() || saved.is_same(&RunIdentity::read(&run.summary_csv(), &run.env())?) {
        true => Ok(()),
        false => Err(FileError::new(
            folder,
            "another run of this name is saved here: its summary.csv has other epochs",
            "save to another folder, or rename one of the two run folders; to replace the saved run, remove it first",
        )),
    }
}

/// Keeps the fields that matter for the result. Reduces each path in the command line to its file name.
fn remove_machine_fields(env: &mut Value) {
    let Some(env) = env.as_object_mut() else { return };
    env.retain(|key, _| KEPT.contains(&key.as_str()) || key == "resumed");
    if let Some(words) = env.get_mut("command").and_then(Value::as_array_mut) {
        for word in words {
            if let Some(shortened) = word.as_str().map(without_folders) {
                *word = Value::String(shortened);
            }
        }
    }
    for resumed in env.get_mut("resumed").and_then(Value::as_array_mut).into_iter().flatten() {
        remove_machine_fields(resumed);
    }
}
