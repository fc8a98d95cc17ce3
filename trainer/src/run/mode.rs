//! Checks that the mode of a plan fits the number of processes and machines.

use super::{
    job_flags,
    plan::{FolderAccess, PlanSource, PlannedRun},
};
use crate::{
    cli::TrainArgs,
    config::{BatchScope, ConfigSource, Devices, Mode, RunPlan},
    failure::Failure,
};

/// Checks a plan without reading data or printing notes, for a run that other processes start. `source` is the text of `--config`,
/// if it was read before.
///
/// # Errors
/// Flags or the plan are wrong.
pub(crate) fn check_plan(
    arguments: &TrainArgs,
    source: Option<&ConfigSource>,
    has_several_workers: bool,
) -> Result<RunPlan, Failure> {
    let source = match source {
        Some(text) => PlanSource::of_text(arguments, text.clone()),
        None => PlanSource::find(arguments, FolderAccess::Read)?,
    };
    let PlannedRun { plan, .. } = source.read(has_several_workers)?;
    let nodes = arguments.job.nnodes.unwrap_or(1);
    if uses_ddp(&plan, has_several_workers, nodes)? {
        check_batch_size(&plan, plan.parallel.devices.map_or(1, Devices::count))?;
    } else {
        job_flags::check_one_process(&arguments.job)?;
    }
    Ok(plan)
}

/// Returns whether the plan trains in several processes (DDP). `has_several_workers` is set if the run has several workers.
pub(super) fn uses_ddp(plan: &RunPlan, has_several_workers: bool, nodes: usize) -> Result<bool, Failure> {
    let mistake = |cause: &str, hint: &str| Err(plan.error_at(&["parallel.mode"], cause, hint).into());
    match plan.parallel.mode {
        // A job of one process is possible, as with torchrun, where a flag or the file asks for one.
        Mode::Ddp if !has_several_workers && plan.parallel.devices.is_none() => mistake(
            "mode ddp needs the number of processes",
            "say how many: --cpus N or --gpus N; or train without other processes: --mode single",
        ),
        Mode::Single if has_several_workers => {
            mistake("single is one process on one device", "leave --cpus and --gpus out, or use --mode ddp or dp")
        }
        Mode::Dp if nodes > 1 => mistake("dp is one process", "use --mode ddp for several machines"),
        Mode::Dp if plan.parallel.devices.is_none() => {
            mistake("mode dp needs the number of devices", "say how many: --cpus N or --gpus N")
        }
        _ if !has_several_workers && !plan.parallel.autotune.is_empty() => Err(nothing_to_tune(plan)),
        mode => Ok(mode == Mode::Ddp),
    }
}

/// Returns the error for autotuning with a single worker.
pub(super) fn nothing_to_tune(plan: &RunPlan) -> Failure {
    let cause = "`parallel.autotune`: one worker has no other to exchange gradients with, so there is nothing to tune";
    let hint = "train in several processes, --cpus N or --gpus N; or leave `autotune` and --autotune out";
    plan.error_at(&["parallel.autotune"], cause, hint).into()
}

/// Checks that each of `workers` gets at least one sample of a step.
pub(super) fn check_batch_size(plan: &RunPlan, workers: usize) -> Result<(), Failure> {
    let batch = plan.train.batch_size;
    if plan.train.batch_scope == BatchScope::PerWorker || batch >= workers {
        return Ok(());
    }
    let cause = format!("a batch of {batch} cannot be shared by {workers} workers");
    Err(plan.error_at(&["train.batch_size"], cause, "use a larger batch, or fewer workers").into())
}
