//! Loads the checkpoint from which a run continues, and fits it to settings that have changed since.

use models::state;

use crate::config::RunPlan;
use crate::console;
use crate::engine::checkpoint::{self, LoadedCheckpoint};
use crate::failure::Failure;
use crate::optim;
use crate::report::RunFolder;
use crate::snapshot::DatasetRecord;
use crate::strategy::RESUME_MISMATCH_HINT;
use crate::text::counted;

/// Loads the newest complete checkpoint. Returns `None` for a run that was killed before its first checkpoint.
///
/// # Errors
/// A checkpoint cannot be read, has more epochs than the plan, or was trained with another seed, another optimizer or other
/// classes than `data`'s.
pub(super) fn load_newest_checkpoint(
    plan: &RunPlan,
    folder: &RunFolder,
    data: Option<&DatasetRecord>,
) -> Result<Option<LoadedCheckpoint>, Failure> {
    if !checkpoint::exists(&folder.checkpoints())? {
        console::eprint(format_args!("{}: no checkpoint yet, starting from the beginning", folder.path().display()));
        return Ok(None);
    }
    let (mut loaded, damaged) = checkpoint::load_newest(&folder.checkpoints())?;
    for error in &damaged {
        console::eprint(format_args!("warning: {error}"));
    }
    if !damaged.is_empty() {
        console::eprint(format_args!(
            "warning: continuing from {}, the newest complete checkpoint",
            loaded.path.display()
        ));
    }
    if loaded.seed != plan.train.seed {
        return Err(Failure::usage(
            format!("{}: was trained with seed {}, not {}", loaded.path.display(), loaded.seed, plan.train.seed),
            "a run keeps its seed: leave --seed out",
        ));
    }
    check_epochs(plan, &loaded)?;
    let (step, limit) = (loaded.progress.step, plan.train.max_steps as u64);
    if limit > 0 && step > limit {
        let cause = format!("{}: the run has taken {step} steps, more than {limit}", loaded.path.display());
        return Err(plan
            .error_at(&["train.max_steps"], cause, format!("continue it with {step} steps or more"))
            .into());
    }
    if let (Some(trained), Some(data)) = (&loaded.dataset, data) {
        let hint = "a run keeps its classes: give it the images that it had, or start a new run from its weights: \
                    model.weights = \"RUN/checkpoints/last\"";
        if let Some((_, cause)) = trained.class_difference(data) {
            return Err(Failure::usage(format!("{}: {cause}", loaded.path.display()), hint));
        }
        // With data.image_size, images are resized or padded to the plan's size.
        if let (None, Some(cause)) = (plan.data.image_size, trained.shape_difference(data)) {
            return Err(Failure::usage(format!("{}: {cause}", loaded.path.display()), hint));
        }
    }
    fit_optimizer_state(plan, &mut loaded)?;
    fit_weight_average(plan, &mut loaded);
    Ok(Some(loaded))
}

/// Checks that the checkpoint was not trained for longer than the plan's epochs.
///
/// # Errors
/// The checkpoint has more epochs than the plan, or is inside the epoch after the plan's last one.
fn check_epochs(plan: &RunPlan, loaded: &LoadedCheckpoint) -> Result<(), Failure> {
    let (trained, planned) = (loaded.progress.epoch - 1, plan.train.epochs);
    let is_inside = loaded.progress.batch > 0;
    if planned == 0 || trained + usize::from(is_inside) <= planned {
        return Ok(());
    }
    let (epochs, path) = (counted(trained as u64, "epoch"), loaded.path.display());
    let part = if is_inside { " and a part of the next one" } else { "" };
    let cause = format!("{path}: the run has trained {epochs}{part}, more than {planned}");
    let least = counted((trained + usize::from(is_inside)) as u64, "epoch");
    let hint = format!("continue it with {least} or more, or leave --epochs out");
    Err(plan.error_at(&["train.epochs"], cause, hint).into())
}

/// Removes the optimizer state of layers that `model.freeze` freezes now.
///
/// # Errors
/// The checkpoint has the state of another optimizer than `optimizer.kind`.
fn fit_optimizer_state(plan: &RunPlan, loaded: &mut LoadedCheckpoint) -> Result<(), Failure> {
    let path = loaded.path.display();
    let tensors = &mut loaded.snapshot.optimizer;
    let kind = plan.optimizer.kind;
    if let Some(tensor) = tensors.iter().find(|tensor| optim::is_of_another_optimizer(kind, tensor)) {
        let cause = format!("{path}: `{}` is state of another optimizer, which {kind} cannot continue", tensor.name);
        return Err(plan.error_at(&["optimizer.kind"], cause, RESUME_MISMATCH_HINT).into());
    }
    let count = tensors.len();
    let is_frozen = |name: &str| plan.model.freeze.iter().any(|layer| state::is_within(name, layer));
    tensors.retain(|tensor| !is_frozen(optim::parameter_of(tensor)));
    if tensors.len() < count {
        console::eprint(format_args!(
            "note: `model.freeze` has layers that were trained before: {} of the optimizer's state in {path} not used",
            counted((count - tensors.len()) as u64, "tensor"),
        ));
    }
    Ok(())
}

/// Starts or ends the weight average, if `train.ema` was off or on when the checkpoint was saved.
fn fit_weight_average(plan: &RunPlan, loaded: &mut LoadedCheckpoint) {
    let path = loaded.path.display();
    let snapshot = &mut loaded.snapshot;
    match (plan.train.ema > 0.0, &snapshot.ema) {
        (true, None) => {
            console::eprint(format_args!("note: {path} has no weight average: `train.ema` starts from its weights"));
            snapshot.ema = Some(snapshot.model.clone());
        }
        (false, Some(_)) => {
            console::eprint(format_args!("note: `train.ema` is off: the weight average in {path} is not used"));
            snapshot.ema = None;
        }
        _ => {}
    }
}
