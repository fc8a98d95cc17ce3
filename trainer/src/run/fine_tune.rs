//! Fine-tuning: initial weights from a file, frozen layers, factors of the learning rate.

use burn::tensor::Device;
use data::Splits;
use models::{Network, Spec, StateKind, StateTensor, state};

use super::setup::network_spec;
use crate::config::{self, RunPlan, SetBy};
use crate::engine::checkpoint;
use crate::failure::Failure;
use crate::files::FileError;
use crate::report::RunFolder;
use crate::strategy::dp::scatter::chunks;
use crate::text::thousands;
use crate::weights::{self, LoadedWeights, Purpose, WeightFile, WeightTarget};

/// Rows of the start-up table.
pub(super) type Rows = Vec<(&'static str, String)>;

/// Checks a plan's weights and layers before processes are started, so that a mistake is reported once. `resumed` is the run to
/// continue.
///
/// # Errors
/// Those of [`check_layers`] and [`load_weights`].
pub(super) fn check(plan: &RunPlan, splits: &Splits, resumed: Option<&RunFolder>) -> Result<(), Failure> {
    if plan.model.weights.is_none() && plan.model.freeze.is_empty() && plan.optimizer.lr_factors.is_empty() {
        return Ok(());
    }
    let spec = network_spec(plan, splits);
    // Use the CPU, since the launcher must not use a GPU.
    let network = models::build_frozen(&plan.model.name, &spec, plan.train.seed, &Device::flex(), &plan.model.freeze)
        .map_err(|error| super::plan::model_mistake(plan, &error))?;
    check_layers(plan, &network)?;
    initial_weights(network, plan, spec, resumed, false, true).map(|_| ())
}

/// Loads `model.weights` if `reads` is set. It is set on rank 0, which later broadcasts its network to the other ranks. A run
/// that continues from a checkpoint does not read the file again. `restarted`: the launcher has started the same command again.
///
/// # Errors
/// Those of [`load_weights`]; or `--set` names a file, and a user continues the run from a checkpoint.
pub(super) fn initial_weights(
    network: Network,
    plan: &RunPlan,
    spec: Spec,
    resumed: Option<&RunFolder>,
    restarted: bool,
    reads: bool,
) -> Result<(Network, Rows), Failure> {
    let continues = match resumed {
        Some(folder) => checkpoint::exists(&folder.checkpoints())?,
        None => false,
    };
    if continues && !restarted && plan.set_by("model", "weights") == SetBy::Flag {
        let cause = "a resumed run continues with the weights of its checkpoint";
        let hint = "leave it out to continue, or start a new run: --config instead of --resume";
        return Err(plan.error_at(&["model.weights"], cause, hint).into());
    }
    match reads && !continues {
        true => load_weights(network, plan, spec),
        false => Ok((network, Rows::new())),
    }
}

/// Checks the names of layers in the plan against its network, which was built with the plan's frozen layers.
///
/// # Errors
/// The network has no layer with a name, a factor applies to frozen layers only, or no weight is trained.
pub(super) fn check_layers(plan: &RunPlan, network: &Network) -> Result<(), Failure> {
    let mut weights: Vec<(String, StateKind)> = Vec::new();
    state::visit(network, |info, kind, _| {
        if !is_statistic(&info.name) {
            weights.push((info.name, kind));
        }
    });
    let names: Vec<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
    let check = |key: &str, layer: &str| match names.iter().any(|name| state::is_within(name, layer)) {
        true => Ok(()),
        false => {
            let cause = format!("`{key}`: {} has no layer {layer:?}", plan.model.name);
            Err(plan.error_at(&[key], cause, config::layer_hint(layer, &names)))
        }
    };
    for layer in &plan.model.freeze {
        check("model.freeze", layer)?;
    }
    let trained = |layer: Option<&str>| {
        let within = |name: &str| layer.is_none_or(|layer| state::is_within(name, layer));
        weights.iter().any(|(name, kind)| *kind == StateKind::Parameter && within(name))
    };
    for layer in plan.optimizer.lr_factors.keys() {
        check("optimizer.lr_factors", layer)?;
        if !trained(Some(layer)) {
            let cause = format!("`optimizer.lr_factors`: all of {layer:?} is frozen");
            let hint = format!("remove the factor of {layer:?}, or remove the layer from `model.freeze`");
            return Err(plan.error_at(&["optimizer.lr_factors"], cause, hint).into());
        }
    }
    if !trained(None) {
        let cause = format!("`model.freeze`: every weight of {} is frozen, nothing is left to train", plan.model.name);
        let hint = format!("leave out the classifier, `{}`", state::head(network));
        return Err(plan.error_at(&["model.freeze"], cause, hint).into());
    }
    Ok(())
}

/// Loads the weights of `model.weights`, if the plan names a file. The rows describe their source.
///
/// # Errors
/// The file is damaged, or does not fit the network.
pub(super) fn load_weights(network: Network, plan: &RunPlan, spec: Spec) -> Result<(Network, Rows), Failure> {
    let Some(path) = &plan.model.weights else { return Ok((network, Rows::new())) };
    let target = WeightTarget { model: &plan.model.name, spec, data: &plan.data.name, purpose: Purpose::Training };
    let blame = |error: FileError| {
        let code = error.code;
        let mistake = plan.error_at(&["model.weights"], format!("`model.weights`: {error}"), error.hint);
        Failure { code, ..mistake.into() }
    };
    let file = WeightFile::open(path).map_err(blame)?;
    let LoadedWeights { network, origin, new_head } = weights::load(network, &target, &file).map_err(blame)?;
    let mut rows = vec![("weights", origin)];
    if let Some(head) = new_head {
        let [file, own] = [head.file_classes, spec.num_classes].map(|classes| thousands(classes as u64));
        rows.push((
            "new head",
            format!("{}: {own} classes, the file has {file}; its initial weights are random", head.name),
        ));
    }
    Ok((network, rows))
}

/// Describes the frozen layers for the start-up table. Returns no row if there are none.
pub(super) fn frozen_rows(plan: &RunPlan, network: &Network) -> Rows {
    if plan.model.freeze.is_empty() {
        return Rows::new();
    }
    let state = models::state_dict(network);
    let (statistics, weights): (Vec<_>, Vec<_>) =
        state.iter().filter(|tensor| tensor.kind != StateKind::Buffer).partition(|tensor| is_statistic(&tensor.name));
    let values = |kinds: &[StateKind]| -> u64 {
        weights.iter().filter(|tensor| kinds.contains(&tensor.kind)).map(|tensor| tensor.values.len() as u64).sum()
    };
    let (held, all) = (values(&[StateKind::Frozen]), values(&[StateKind::Frozen, StateKind::Parameter]));
    let norms = statistics.iter().filter(|tensor| tensor.name.ends_with("running_var")).count();
    let mut text = format!("{} of {} parameters", thousands(held), thousands(all));
    if norms > 0 {
        text += &format!("; {norms} batch norms keep their statistics");
    }
    vec![("frozen", text)]
}

/// Returns whether the tensor is a running statistic of a batch norm. The name decides, since the kind of a frozen layer's
/// statistics is `Frozen`.
fn is_statistic(name: &str) -> bool {
    StateTensor::new(name, Vec::new(), Vec::new()).kind == StateKind::Buffer
}

/// Checks that no device gets a batch that is too small for the network's batch norms. Example: a single image of 32x32 pixels,
/// which the network reduces to a single pixel, so batch norm has one value per channel. `devices` share `samples` images per
/// epoch. The error is about `key` and has the hint `hint`.
///
/// # Errors
/// A step of the run has a batch that is too small.
pub(super) fn check_batches(
    plan: &RunPlan,
    network: &Network,
    spec: &Spec,
    [samples, devices]: [usize; 2],
    (key, hint): (&str, &str),
) -> Result<(), Failure> {
    let least = network.smallest_batch(spec.image_size);
    if least <= 1 || smallest_share(plan, samples, devices).is_none_or(|share| share >= least) {
        return Ok(());
    }
    let [height, width] = spec.image_size;
    let cause = format!(
        "a step has a single image on a device, and {} reduces {height}x{width} pixels to one: batch norm needs two values",
        plan.model.name
    );
    Err(plan.error_at(&[key], cause, hint).into())
}

/// Returns the smallest number of images in a step that batch norm normalises together: those of a device, or with synchronised
/// batch norm those of all devices. Returns `None` for several processes with synchronised batch norm, because each of them has at
/// least one image in every step.
fn smallest_share(plan: &RunPlan, samples: usize, devices: usize) -> Option<usize> {
    let together = plan.parallel.batch_norm == config::BatchNormPolicy::Sync;
    if together && plan.parallel.mode == config::Mode::Ddp && devices > 1 {
        return None;
    }
    let batch = plan.train.global_batch(devices);
    let last = if plan.train.drop_last { 0 } else { samples % batch };
    let counts = [batch.min(samples), last].into_iter().filter(|count| *count > 0);
    let together = together && plan.parallel.mode == config::Mode::Dp;
    counts.map(|count| if together { count } else { share(count, batch, devices, plan) }).min()
}

/// Returns the smallest number of images on a device that gets images, of a step with `count` images. A full step has `batch`.
fn share(count: usize, batch: usize, devices: usize, plan: &RunPlan) -> usize {
    match plan.parallel.mode {
        // The last chunk may be smaller.
        config::Mode::Dp => chunks(count, devices).last().map_or(0, |chunk| chunk.len()),
        // The loader fills the last batch up, so that all ranks have equally many images.
        _ => (count.next_multiple_of(devices).min(batch) / devices).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{BatchNormPolicy, Mode};

    /// The last batch of 9 images has one image.
    #[test]
    fn one_process_with_synchronised_batch_norm_has_no_images_of_other_processes() {
        let mut plan = RunPlan::default();
        (plan.train.batch_size, plan.parallel.batch_norm) = (8, BatchNormPolicy::Sync);
        for (mode, devices, expected) in
            [(Mode::Single, 1, Some(1)), (Mode::Dp, 2, Some(1)), (Mode::Ddp, 1, Some(1)), (Mode::Ddp, 2, None)]
        {
            plan.parallel.mode = mode;
            assert_eq!(smallest_share(&plan, 9, devices), expected, "{mode} x{devices}");
        }
    }
}
