//! `trainer bench scaling`: measures a few steps with several numbers of workers, and computes the step times of larger jobs.

use std::fs;
use std::path::Path;

use super::child::{self, ShortRun};
use super::print_json;
use crate::cli::ScalingArgs;
use crate::config::RunPlan;
use crate::console;
use crate::device::{DeviceRequest, DeviceSet, LocalRank};
use crate::failure::Failure;
use crate::files::FileError;
use crate::report::environment::Environment;
use crate::report::metrics::read_metrics;
use crate::report::scaling::{
    self, Algorithm, Interconnect, Link, Measured, Profile, Scaling, ScalingReport, computed, profile,
};
use crate::report::{RunFolder, StepRecord};
use crate::signals::StopFlag;
use launch::cores;

/// Numbers of workers for the computed steps.
const COMPUTED: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// The file with the results, in the folder of the measurement.
const RESULT: &str = "scaling.json";

/// Runs the measurements, and prints the page.
///
/// # Errors
/// A mistake in the configuration or the flags, a run that fails, or a folder that cannot be written.
pub(super) fn run(arguments: &ScalingArgs) -> Result<(), Failure> {
    let workers = workers(arguments)?;
    let network = network(arguments)?;
    let plan = child::plan(&arguments.runs)?;
    let most = workers.iter().copied().max().unwrap_or(1);
    if plan.train.batch_size < most {
        let cause = format!("a batch of {} cannot be shared by {most} workers", plan.train.batch_size);
        return Err(plan.error_at(&["train.batch_size"], cause, "use a larger batch, or fewer workers").into());
    }
    let stop = StopFlag::on_signals()?;
    let (out, _lock) = child::result_folder(arguments.runs.out.as_deref(), "scaling", RESULT)?;
    let report = measure(arguments, &plan, &workers, network, &out, &stop)?;
    let chart = scaling::chart(&report).map_err(|error| Failure::run(error, "please report this"))?;
    child::write_results(&out, RESULT, &report, &chart)?;
    match arguments.runs.json {
        true => print_json(&report)?,
        false => {
            console::print(report.render());
            console::print(format_args!("\nfolder: {}", out.display()));
        }
    }
    Ok(())
}

/// Returns the flag `--cpus` or `--gpus`, and the numbers of workers in its value.
fn devices(arguments: &ScalingArgs) -> (&'static str, &[usize]) {
    match arguments.gpus.as_slice() {
        [] => ("--cpus", &arguments.cpus),
        gpus => ("--gpus", gpus),
    }
}

/// Describes the GPU of rank 0. Returns `None` for a measurement on CPUs.
///
/// # Errors
/// There are fewer GPUs than workers.
fn gpu(arguments: &ScalingArgs) -> Result<Option<String>, Failure> {
    let Some(&most) = arguments.gpus.last() else { return Ok(None) };
    let ranks = LocalRank { local_world_size: most, oversubscribe: arguments.oversubscribe, ..LocalRank::ALONE };
    let mut found = DeviceSet::of(DeviceRequest::Gpus(most))?.all(&ranks)?;
    Ok(Some(found.swap_remove(0).description))
}

/// Returns the numbers of workers. Checks that the numbers rise, and that each worker has a GPU if GPUs are measured.
fn workers(arguments: &ScalingArgs) -> Result<Vec<usize>, Failure> {
    let (flag, list) = devices(arguments);
    let rises = list.windows(2).all(|pair| pair[0] < pair[1]);
    if !rises || list.first().is_none_or(|first| *first == 0) {
        let shown = list.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        return Err(Failure::usage(
            format!("{flag} {shown}: expected rising numbers of workers"),
            format!("such as {flag} 1,2,4"),
        ));
    }
    if arguments.runs.steps < 4 {
        return Err(Failure::usage(format!("--steps {}: too few to measure", arguments.runs.steps), "4 or more"));
    }
    gpu(arguments)?;
    Ok(list.to_vec())
}

/// Reads the flags that describe the network of the computed steps.
fn network(arguments: &ScalingArgs) -> Result<Interconnect, Failure> {
    let link = |flag: &str, text: &str| {
        Link::parse(text).ok_or_else(|| {
            let hint = "write latency and bandwidth, such as 100us,10Gbit; units: us, ms and Mbit, Gbit per second";
            Failure::usage(format!("{flag} {text}: expected a latency and a bandwidth"), hint)
        })
    };
    if arguments.per_host == 0 {
        return Err(Failure::usage("--per-host 0: a host has at least one worker", "such as --per-host 8"));
    }
    Ok(Interconnect {
        link: link("--link", &arguments.link)?,
        local: link("--local-link", &arguments.local_link)?,
        per_host: arguments.per_host,
    })
}

fn measure(
    arguments: &ScalingArgs,
    plan: &RunPlan,
    workers: &[usize],
    network: Interconnect,
    out: &Path,
    stop: &StopFlag,
) -> Result<ScalingReport, Failure> {
    let most = workers.iter().copied().max().unwrap_or(1);
    let (cores, batch_size) = (cores::quota(), plan.train.batch_size);
    // Each worker has the same number of threads in all runs. Otherwise a single worker would use all cores, and the efficiency
    // of the larger runs would be wrong
    let threads = (cores / most).max(1);
    let (mut measured, mut found): (Vec<Measured>, Option<Profile>) = (Vec::new(), None);
    for scaling in [Scaling::Weak, Scaling::Strong] {
        for &count in workers {
            console::eprint(format_args!("{} scaling: {count} workers", scaling.name()));
            let folder = out.join("runs").join(format!("{}-{count}", scaling.name()));
            let measurement = Measurement { scaling, workers: count, threads };
            let (run, steps) = run_workers(arguments, plan, measurement, &folder, stop)?;
            let share = if scaling == Scaling::Weak { batch_size } else { batch_size.div_ceil(count) };
            if found.is_none() && count > 1 {
                let bytes = fs::read(run.timeline()).map_err(|error| FileError::io(run.timeline(), "read", &error))?;
                let timeline = serde_json::from_slice(&bytes).unwrap_or_default();
                found = profile(&timeline, &steps, share);
            }
            let first =
                measured.iter().find(|row| row.scaling == scaling).map(|row| row.images_per_s / row.workers as f64);
            measured.push(row(scaling, count, &steps, first));
        }
    }
    let mut rows = Vec::new();
    for scaling in [Scaling::Weak, Scaling::Strong] {
        for algorithm in Algorithm::ALL {
            let of = |profile: &Profile| {
                COMPUTED
                    .iter()
                    .filter_map(|&count| computed(profile, scaling, algorithm, count, batch_size, &network))
                    .collect::<Vec<_>>()
            };
            rows.extend(found.as_ref().map(of).unwrap_or_default());
        }
    }
    let processor = Environment::detect("").cpu.unwrap_or_else(|| "unknown processor".to_owned());
    let device = gpu(arguments)?.map(|gpu| format!("{gpu}, ")).unwrap_or_default();
    let oversubscribed =
        if most > cores { ", more workers than cores: efficiency is limited by the machine" } else { "" };
    Ok(ScalingReport {
        model: plan.model.name.clone(),
        data: plan.data.name.clone(),
        batch_size,
        machine: format!("{device}{processor}, {cores} cores, {threads} threads for each worker{oversubscribed}"),
        steps: measured.iter().map(|row| row.steps).max().unwrap_or_default(),
        measured,
        profile: found,
        network,
        computed: rows,
    })
}

/// The settings of one measured run.
struct Measurement {
    scaling: Scaling,
    workers: usize,
    /// Threads of each worker.
    threads: usize,
}

/// Trains the steps of one measurement. Returns the run folder and the steps after the warm-up.
fn run_workers(
    arguments: &ScalingArgs,
    plan: &RunPlan,
    Measurement { scaling, workers, threads }: Measurement,
    folder: &Path,
    stop: &StopFlag,
) -> Result<(RunFolder, Vec<StepRecord>), Failure> {
    let scope = if scaling == Scaling::Weak { "per_worker" } else { "global" };
    let mut set: Vec<String> =
        [&format!("train.batch_scope={scope}"), "train.accumulate=1", "log.timeline=true"].map(str::to_owned).into();
    if workers > 1 {
        set.extend(child::set_threads(plan, threads));
    }
    let (flag, _) = devices(arguments);
    // The measured workers are processes, whatever mode the file has.
    let mode = if workers > 1 { "ddp" } else { "single" };
    let mut flags = vec![flag.to_owned(), workers.to_string(), "--mode".to_owned(), mode.to_owned()];
    if arguments.oversubscribe {
        flags.push("--oversubscribe".to_owned());
    }
    if let (Some(backend), 2..) = (&arguments.backend, workers) {
        flags.extend(["--backend".to_owned(), backend.clone()]);
    }
    let run = ShortRun { arguments: &arguments.runs, set, flags, plan };
    let failed = |message: String| {
        let lines: Vec<_> = message.lines().map(|line| format!("  {line}")).collect();
        Failure::run(format!("the run with {workers} workers failed:\n{}", lines.join("\n")), "see the lines above")
    };
    let run = run.run(folder, &[(cores::RAYON_NUM_THREADS, threads.to_string())], stop)?.map_err(failed)?;
    let steps = read_metrics(&run.metrics())?;
    let steps = steps.get(child::warmup(arguments.runs.steps)..).unwrap_or_default().to_vec();
    if steps.len() < 2 {
        let hint = "increase train.epochs or data.limit_train";
        return Err(Failure::run(format!("the run with {workers} workers had too few steps to measure"), hint));
    }
    Ok((run, steps))
}

/// Returns the row of a run. `first` is the number of images per second per worker of the smallest run; `None` for this run
/// itself.
fn row(scaling: Scaling, workers: usize, steps: &[StepRecord], first: Option<f64>) -> Measured {
    let middle = |value: fn(&StepRecord) -> f64| scaling::median(steps.iter().map(value).collect()).unwrap_or_default();
    let images_per_s = middle(|step| step.images_per_s);
    Measured {
        scaling,
        workers,
        steps: steps.len(),
        images_per_s,
        efficiency: first.map_or(1.0, |first| images_per_s / workers as f64 / first),
        step_ms: middle(|step| step.step_ms),
        exposed_ms: middle(|step| step.communication_ms),
        hidden_ms: middle(|step| step.communication_hidden_ms),
    }
}
