//! The network of a run's checkpoint or of a weight file, for `trainer eval`, `predict` and `export`.

use std::path::{Component, Path, PathBuf};

use burn::tensor::Device;
use models::BuildError;

use crate::config::RunPlan;
use crate::console;
use crate::device::SelectedDevice;
use crate::engine::checkpoint::{self, LoadedCheckpoint};
use crate::failure::Failure;
use crate::report::RunFolder;
use crate::run::memory::{self, MemoryUse};
use crate::run::run_data;
use crate::snapshot::DatasetRecord;
use crate::weights::{self, LoadedWeights, WeightFile, WeightTarget};

/// Builds the network with the weights of `file`, on the CPU if `selected` is `None`. `mistake` is the error for a model that
/// cannot be built.
///
/// # Errors
/// The network does not fit into the memory of the CPU, cannot be built, or has other weights.
pub(super) fn build(
    target: &WeightTarget<'_>,
    file: &WeightFile,
    selected: Option<&SelectedDevice>,
    mistake: impl FnOnce(BuildError) -> Failure,
) -> Result<LoadedWeights, Failure> {
    let on_gpu = selected.is_some_and(|selected| selected.gpu.is_some());
    let refusal = memory::refusal(target.model, &target.spec, MemoryUse::Evaluation);
    if let Some(cause) = refusal.filter(|_| !on_gpu) {
        return Err(Failure::usage(cause, memory::HINT));
    }
    let device = selected.map_or_else(Device::flex, SelectedDevice::device);
    let network = models::build(target.model, &target.spec, 0, &device).map_err(mistake)?;
    Ok(weights::load(network, target, file)?)
}

/// Loads the named checkpoint. Without a name, loads the best one, or the newest complete one if there is no best.
pub(super) fn load(folder: &RunFolder, name: Option<&str>) -> Result<LoadedCheckpoint, Failure> {
    let path = match name {
        None if !folder.best_checkpoint().exists() => {
            if !folder.checkpoints().is_dir() || !checkpoint::exists(&folder.checkpoints())? {
                let message = format!("{}: the run has no checkpoint yet", folder.path().display());
                return Err(Failure::usage(
                    message,
                    "let it train until its first checkpoint, and name this folder then",
                ));
            }
            let newest = checkpoint::load_newest(&folder.checkpoints())?.0;
            if let (Some(best), last) = (newest.progress.best, newest.progress.last)
                && !last.is_some_and(|last| last.is_same(&best))
            {
                let (of, path) = (folder.path().display(), newest.path.display());
                let epoch = best.epoch;
                console::eprint(format_args!(
                    "note: {of} has no checkpoint of its best epoch, {epoch}: the newest checkpoint is used, {path}"
                ));
            }
            return Ok(newest);
        }
        None => folder.best_checkpoint(),
        Some(name) => folder.checkpoints().join(name),
    };
    if name.is_some_and(|name| !is_name(name)) || !path.is_dir() {
        let message = format!("{}: no such checkpoint", path.display());
        return Err(Failure::usage(message, format!("the run has {}", list(&checkpoints(folder)))));
    }
    Ok(checkpoint::load(&path)?)
}

/// Returns whether the text is the name of a checkpoint, not a path.
fn is_name(text: &str) -> bool {
    let mut parts = Path::new(text).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) && !text.starts_with('.')
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

/// Returns the image shape and the classes of the run from the checkpoint. An older checkpoint does not contain them. Then the
/// configuration determines the shape, and the class names are numbers.
pub(super) fn dataset(plan: &RunPlan, loaded: &LoadedCheckpoint) -> Result<DatasetRecord, Failure> {
    if let Some(record) = &loaded.dataset {
        return Ok(record.clone());
    }
    let (mean, _) = run_data::normalisation(plan)?;
    match (plan.model.num_classes, plan.data.image_size) {
        (Some(classes), Some(size)) => Ok(DatasetRecord {
            shape: [mean.len(), size, size],
            classes: (0..classes).map(|class| class.to_string()).collect(),
            multi_label: false,
        }),
        _ => Err(Failure::usage(
            format!(
                "{}: an older version wrote the checkpoint, without the shape of the images",
                loaded.path.display()
            ),
            "continue the run by an epoch with --resume and --epochs, so that it writes a checkpoint that has the shape",
        )),
    }
}
