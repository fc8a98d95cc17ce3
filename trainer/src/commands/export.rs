//! `trainer export`: writes a run's weights to a file that PyTorch loads.

use std::path::{Path, PathBuf};

use crate::cli::ExportArgs;
use crate::config::Overrides;
use crate::console;
use crate::engine::checkpoint;
use crate::engine::checkpoint::Loaded;
use crate::failure::Failure;
use crate::files::write_atomic;
use crate::report::RunFolder;
use crate::run::plan;
use crate::text::thousands;
use crate::weights;

/// Writes the file and prints its content.
///
/// # Errors
/// A run or checkpoint cannot be read, or the file exists already or cannot be written.
pub(super) fn run(arguments: &ExportArgs) -> Result<(), Failure> {
    let to = &arguments.to;
    check_target(to, arguments.force)?;
    let folder = RunFolder::open(&arguments.run).map_err(|error| Failure::usage(&error, &error.hint))?;
    let plan = plan::load(&folder.config(), &Overrides::default())?;
    let loaded = chosen(&folder, arguments.checkpoint.as_deref())?;
    let snapshot = loaded.snapshot;
    let (state, which) = match (arguments.ema, snapshot.ema) {
        (false, _) => (snapshot.model, "weights"),
        (true, Some(ema)) => (ema, "averaged weights"),
        (true, None) => {
            let message = format!("--ema: {} has no averaged weights", loaded.path.display());
            return Err(Failure::usage(message, "leave --ema out, or train with train.ema = 0.999"));
        }
    };
    // Each step has `accumulate` batches, but the last step of an epoch may have had fewer. The difference is harmless: no
    // result of PyTorch depends on this counter.
    let batches = loaded.progress.step * plan.train.accumulate as u64;
    let failed =
        |error| Failure::run(format!("{}: cannot write the weights: {error}", to.display()), "please report this");
    let bytes = weights::encode(&state, batches).map_err(failed)?;
    write_atomic(to, &bytes).map_err(|error| {
        Failure::run(&error, "name a file in a folder that exists, is writable and has space: --to FILE")
    })?;
    console::print(format_args!(
        "{}: {which} of {} after {} steps, {} tensors, {} bytes\n\
         in PyTorch: model.load_state_dict(safetensors.torch.load_file({:?}))",
        to.display(),
        loaded.path.display(),
        thousands(loaded.progress.step),
        state.len(),
        thousands(bytes.len() as u64),
        to.display().to_string(),
    ));
    Ok(())
}

/// Refuses a misleading file name, and a file that may not be written.
fn check_target(to: &Path, force: bool) -> Result<(), Failure> {
    if to.extension().is_none_or(|extension| extension != "safetensors") {
        let message = format!("--to {}: weights are written as safetensors", to.display());
        let hint = format!("name the file {}", to.with_extension("safetensors").display());
        return Err(Failure::usage(message, hint));
    }
    check_free(to, force)
}

/// Refuses a folder, and without `force` a file that exists already.
pub(super) fn check_free(to: &Path, force: bool) -> Result<(), Failure> {
    if to.is_dir() {
        return Err(Failure::usage(format!("--to {}: is a folder", to.display()), "name a file"));
    }
    if !force && to.symlink_metadata().is_ok() {
        return Err(Failure::usage(
            format!("--to {}: the file is there already", to.display()),
            "choose another name, or add --force to replace it",
        ));
    }
    Ok(())
}

/// Loads the named checkpoint. Without a name, loads the best one, or the newest complete one if there is no best.
pub(super) fn chosen(folder: &RunFolder, name: Option<&str>) -> Result<Loaded, Failure> {
    let path = match name {
        None if !folder.best_checkpoint().exists() => return Ok(checkpoint::load_newest(&folder.checkpoints())?.0),
        None => folder.best_checkpoint(),
        Some(name) => folder.checkpoints().join(name),
    };
    if !path.is_dir() {
        let message = format!("{}: no such checkpoint", path.display());
        return Err(Failure::usage(message, format!("the run has {}", list(&checkpoints(folder)))));
    }
    Ok(checkpoint::load(&path)?)
}

/// Returns the names of a run's checkpoints, including `best` and `last`.
fn checkpoints(folder: &RunFolder) -> Vec<String> {
    let entries = std::fs::read_dir(folder.checkpoints()).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| PathBuf::from(entry.file_name()).display().to_string())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort();
    names
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "no checkpoint".to_owned() } else { names.join(", ") }
}
