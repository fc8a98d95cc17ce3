//! What a run needs before its first step: the network, what ranks compare, the checkpoint to go on from, the first screen.

use std::path::Path;

use data::Splits;
use models::{Network, Spec};

use super::resolve;
use crate::config::{RunPlan, Setting};
use crate::device::{DeviceSet, Selected};
use crate::engine::{Lengths, checkpoint};
use crate::failure::Failure;
use crate::report::screen::start_table;
use crate::report::{RunFolder, Section};
use crate::snapshot::{RunProgress, Snapshot};
use crate::text::thousands;

/// Builds the network that the plan and the images ask for.
pub(super) fn build(plan: &RunPlan, spec: &Spec, selected: &Selected) -> Result<Network, Failure> {
    models::build(&plan.model.name, spec, plan.train.seed, &selected.device)
        .map_err(|error| plan.mistake(&[error.key(), "model.name"], error.to_string(), error.hint()).into())
}

/// What all ranks of a job must have in common: the plan but for this machine's paths, the data, and what they compute on.
pub(super) fn facts(plan: &RunPlan, splits: &Splits, target: &DeviceSet) -> Vec<String> {
    let device = format!("device = {}", if target.is_gpu() { "GPU" } else { "CPU" });
    let shared = |setting: &Setting| setting.section != "log" && (setting.section, setting.key) != ("data", "dir");
    let settings = plan.settings().into_iter().filter(shared).map(|setting| setting.to_string());
    let mut facts: Vec<String> = std::iter::once(device).chain(settings).collect();
    let sets = [("training", Some(&splits.train)), ("validation", splits.val.as_ref()), ("test", Some(&splits.test))];
    for (name, set) in sets.into_iter().filter_map(|(name, set)| Some((name, set?))) {
        let labels = crc32c::crc32c(bytemuck::cast_slice(&set.labels));
        facts.push(format!(
            "{name} set = {} images {}, checksum {:08x} {labels:08x}",
            thousands(set.len() as u64),
            set.shape,
            crc32c::crc32c(&set.images)
        ));
    }
    facts
}

/// Loads the newest complete checkpoint; `None` of a run killed before its first one: it starts from the beginning.
pub(super) fn restore(plan: &RunPlan, folder: &RunFolder) -> Result<Option<(Snapshot, RunProgress)>, Failure> {
    if !checkpoint::any(&folder.checkpoints())? {
        eprintln!("{}: no checkpoint yet, starting from the beginning", folder.path().display());
        return Ok(None);
    }
    let (loaded, damaged) = checkpoint::load_newest(&folder.checkpoints())?;
    for error in &damaged {
        eprintln!("warning: {error}");
    }
    if !damaged.is_empty() {
        eprintln!("warning: continuing from {}, the newest complete checkpoint", loaded.path.display());
    }
    if loaded.seed != plan.train.seed {
        return Err(Failure::usage(
            format!("{}: was trained with seed {}, not {}", loaded.path.display(), loaded.seed, plan.train.seed),
            "a run keeps its seed: leave --seed out",
        ));
    }
    Ok(Some((loaded.snapshot, loaded.progress)))
}

pub(super) fn overview(
    plan: &RunPlan,
    lengths: &Lengths,
    parameters: usize,
    data: &str,
    source: &str,
    device: &str,
    folder: &Path,
) -> Section {
    Section::new("run")
        .row("model", format!("{}, {} parameters", plan.model.name, thousands(parameters as u64)))
        .row("data", format!("{data} ({source})"))
        .row("device", device)
        .row("length", format!("{} epochs of {} steps", lengths.epochs, thousands(lengths.steps_per_epoch)))
        .row("folder", folder.display())
}

/// Resolves everything that needs no data, builds the network, prints the plan.
pub(super) fn dry_run(plan: &RunPlan, selected: &Selected) -> Result<u8, Failure> {
    let mut section = Section::new("dry run").row("device", &selected.description);
    if let Some(facts) = resolve::known_facts(&plan.data.name) {
        let side = plan.data.image_size;
        let spec = Spec {
            num_classes: plan.model.num_classes.unwrap_or(facts.classes),
            in_channels: facts.channels,
            image_size: [side.unwrap_or(facts.height), side.unwrap_or(facts.width)],
        };
        let network = build(plan, &spec, selected)?;
        section = section.row(
            "model",
            format!(
                "{}, {} parameters, {} multiply-adds an image",
                plan.model.name,
                thousands(count_parameters(&network) as u64),
                thousands(models::cost(&network, &spec).macs)
            ),
        );
    } else {
        models::find(&plan.model.name).map_err(|error| Failure::usage(&error, error.hint()))?;
        section = section.row("model", format!("{}, built once the images are read", plan.model.name));
    }
    let mut sections = vec![section];
    sections.extend(resolve::sections(plan));
    print!("{}", start_table(&sections));
    println!("dry run: the plan is valid; nothing was read, trained or written");
    Ok(0)
}

pub(super) fn count_parameters(network: &Network) -> usize {
    models::parameters(network).iter().map(|parameter| parameter.len()).sum()
}
