//! Applies the autotuning result of an earlier start of the run. All ranks use rank 0's result.

use std::fs;
use std::io::ErrorKind;

use crate::config::RunPlan;
use crate::failure::Failure;
use crate::files::{FileError, read_or_empty};
use crate::report::RunFolder;
use crate::strategy::{StepSettings, TuningReport};
use comm::Communicator;

/// Replaces `parallel.autotune` by the settings that autotuning has chosen in rank 0's run, if the run was tuned. The plans of
/// the ranks may still ask for tuning. Rank 0 writes the choice only to the config.toml of its own node, and after a restart the
/// flag `--autotune` applies again. `folder` is the run folder, on rank 0. `again` is set if the job was restarted. All ranks
/// call this function.
///
/// # Errors
/// The file with the choice is damaged, or a rank has left the job.
pub(super) fn apply(
    plan: &mut RunPlan,
    folder: Option<&RunFolder>,
    again: bool,
    comm: &Communicator,
) -> Result<(), Failure> {
    let mut own = Vec::new();
    if let (Some(folder), 0) = (folder, comm.rank()) {
        match plan.parallel.autotune.is_empty() || again {
            true => own = read(folder)?.map_or_else(Vec::new, |chosen| json(&chosen)),
            // A resumed run with `--autotune` must choose again.
            false => delete(folder)?,
        }
    }
    let gathered = comm.all_gather_v(&own)?;
    let chosen = gathered.parts().next().unwrap_or_default();
    if chosen.is_empty() || plan.parallel.autotune.is_empty() {
        return Ok(());
    }
    let chosen: StepSettings =
        serde_json::from_slice(chosen).map_err(|error| Failure::run(error, "please report this"))?;
    chosen.write_to(plan);
    Ok(())
}

fn json(chosen: &StepSettings) -> Vec<u8> {
    serde_json::to_vec(chosen).expect("numbers and words are valid JSON")
}

/// Reads the chosen settings of a run. Returns `None` for a run that was not tuned.
fn read(folder: &RunFolder) -> Result<Option<StepSettings>, FileError> {
    let path = folder.autotune();
    let bytes = read_or_empty(&path)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let hint = "delete the file: a run that is started again then chooses again";
    let report: TuningReport =
        serde_json::from_slice(&bytes).map_err(|error| FileError::input(&path, error.to_string(), hint))?;
    Ok(Some(report.chosen))
}

fn delete(folder: &RunFolder) -> Result<(), FileError> {
    let path = folder.autotune();
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(FileError::io(&path, "remove", &error)),
        _ => Ok(()),
    }
}
