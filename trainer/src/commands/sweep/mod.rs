//! `trainer sweep`: trains all combinations of some values, several at a time.
//!
//! Each run is a separate process of this program with normal command line flags. A run with several workers has its own
//! launcher, which supervises the workers. This file only decides when a run starts and on which cores or GPUs ([`slots`]),
//! and records its result ([`runs`]).

mod grid;
mod runs;
mod slots;

use std::{path::Path, thread};

use clap::Parser;

use self::grid::Grid;
use self::runs::Running;
use self::slots::DeviceSlots;
use super::{child, print_json};
use crate::cli::{Cli, Command, SweepArgs};
use crate::config::{BestBy, ConfigSource, Devices};
use crate::console;
use crate::device::{DeviceRequest, DeviceSet, LocalRank};
use crate::failure::{FAILED, Failure, exit_code_of_signal};
use crate::files::{FileError, read_or_empty, write_atomic};
use crate::report::sweep::{Metric, RunState, Sweep, SweepRun};
use crate::run;
use crate::signals::StopFlag;
use launch::signals;

/// Name of the copy of the configuration in the sweep's folder.
const CONFIG: &str = "config.toml";
/// Name of the file with the state of all runs.
const STATE: &str = "sweep.json";

/// Trains all runs and returns the exit code: 0 if all runs are complete, 1 if a run is not complete, 128 + n after signal n.
///
/// # Errors
/// The configuration or a flag is wrong, or a file of the sweep's folder cannot be read or written. A run that fails is a row of
/// the table.
pub(super) fn run(arguments: &SweepArgs) -> Result<u8, Failure> {
    let stop = StopFlag::on_signals()?;
    let (mut sweep, source) = match &arguments.resume {
        Some(folder) => (load(arguments, folder)?, None),
        None => {
            let (sweep, source) = plan(arguments)?;
            (sweep, Some(source))
        }
    };
    let mut slots = find_slots(&sweep)?;
    let (out, _lock) = match &arguments.resume {
        Some(folder) => (folder.clone(), child::lock(folder)?),
        None => child::result_folder(arguments.out.as_deref(), "sweep", STATE)?,
    };
    if let Some(source) = source {
        write_atomic(&out.join(CONFIG), source.text.as_bytes())?;
    }
    save(&out, &sweep)?;
    let stopped = train(&out, &mut sweep, &mut slots, &stop)?;
    let csv = sweep.csv().map_err(|error| Failure::run(error, "please report this"))?;
    write_atomic(&out.join("sweep.csv"), &csv)?;
    match arguments.json {
        true => print_json(&sweep)?,
        false => {
            console::print(sweep.render());
            console::print(format_args!("folder: {}", out.display()));
        }
    }
    if let Some(signal) = stopped {
        let name = signals::name(signal);
        let resume = run::shell_command(["sweep".into(), "--resume".into(), out.display().to_string()]);
        console::eprint(format_args!("stopped by {name}; continue with: {resume}"));
        return Ok(exit_code_of_signal(signal));
    }
    // A run may be interrupted although the sweep was not: the user can send a signal to a single run
    Ok(if sweep.runs.iter().all(|run| run.state == RunState::Done) { 0 } else { FAILED })
}

/// Reads the flags and checks the plan of every run, before any starts.
fn plan(arguments: &SweepArgs) -> Result<(Sweep, ConfigSource), Failure> {
    let Some(config) = &arguments.config else {
        return Err(Failure::usage("nothing says what to train", "name a TOML file: --config configs/quickstart.toml"));
    };
    let grid = Grid::parse(&arguments.set)?;
    let workers = arguments.workers_per_run.unwrap_or(1);
    let (kind, count) = match (arguments.gpus, arguments.cpus) {
        (Some(count), _) => ("gpus", count),
        (None, Some(count)) => ("cpus", count),
        (None, None) => {
            return Err(Failure::usage("nothing says where to train", "say how many slots the runs share: --cpus 6"));
        }
    };
    if !(1..=Devices::MOST).contains(&count) {
        return Err(Failure::usage(format!("--{kind} {count}"), format!("use a number from 1 to {}", Devices::MOST)));
    }
    if workers == 0 || workers > count {
        return Err(Failure::usage(
            format!("--workers-per-run {workers}: expected 1 to {count}, the number of --{kind}"),
            format!("use a number from 1 to {}", count.max(1)),
        ));
    }
    let source = ConfigSource::read(config).map_err(crate::config::ConfigErrors::from)?;
    let data_dir = arguments.data_dir.as_ref().map(|dir| dir.path.to_string_lossy().into_owned());
    let run = |(index, values)| SweepRun {
        number: index + 1,
        values,
        state: RunState::Waiting,
        folder: None,
        best: None,
        best_epoch: None,
        last: None,
        test: None,
        seconds: None,
        exit_code: None,
        message: None,
    };
    let mut sweep = Sweep {
        config: config.display().to_string(),
        fixed: grid.fixed,
        keys: grid.keys,
        slots: format!("{kind}:{count}"),
        metric: Metric::default(),
        workers_per_run: workers,
        data_dir,
        runs: grid.runs.into_iter().enumerate().map(run).collect(),
    };
    let mut metrics = Vec::new();
    for one in &sweep.runs {
        // Parse the command line of the run exactly as the process of the run will
        let words = ["trainer".to_owned()].into_iter().chain(runs::arguments(&sweep, one, config, Path::new("runs")));
        let cli = Cli::try_parse_from(words).map_err(|error| Failure::run(error, "please report this"))?;
        let Some(Command::Train(train)) = cli.command else {
            return Err(Failure::run("a run of the sweep is not a training", "please report this"));
        };
        let plan = run::check_plan(&train, Some(&source), workers > 1)?;
        if one.number == 1 {
            run::plan::print_notes(&plan);
        }
        let metric = |best_by| Metric::of(best_by, plan.is_multi_label());
        metrics.push((metric(plan.best_by()), metric(BestBy::Accuracy)));
    }
    // Runs that differ in `checkpoint.best` are compared by their accuracy.
    let (own, accuracy) = metrics[0];
    sweep.metric = if metrics.iter().all(|(metric, _)| *metric == own) { own } else { accuracy };
    Ok((sweep, source))
}

/// Reads `sweep.json` of the sweep to continue. `--cpus` or `--gpus` replaces the saved slots.
fn load(arguments: &SweepArgs, folder: &Path) -> Result<Sweep, Failure> {
    let path = folder.join(STATE);
    let bytes = read_or_empty(&path)?;
    if bytes.is_empty() {
        let hint = "name the folder that `trainer sweep` has printed";
        return Err(FileError::input(folder, format!("is not the folder of a sweep: it has no {STATE}"), hint).into());
    }
    let mut sweep: Sweep = serde_json::from_slice(&bytes)
        .map_err(|error| FileError::input(&path, error.to_string(), "the file is damaged: start the sweep again"))?;
    if let Some(count) = arguments.cpus {
        sweep.slots = format!("cpus:{count}");
    }
    if let Some(count) = arguments.gpus {
        sweep.slots = format!("gpus:{count}");
    }
    Ok(sweep)
}

/// Divides the cores or GPUs of this machine into the slots that the runs share.
fn find_slots(sweep: &Sweep) -> Result<DeviceSlots, Failure> {
    let hint = format!("say how many, from 1 to {}: --cpus 6 or --gpus 4", Devices::MOST);
    let damaged = || Failure::usage(format!("{}: no slots", sweep.slots), hint.clone());
    let (kind, count) = sweep.slots.split_once(':').ok_or_else(damaged)?;
    let count = count.parse().ok().filter(|count| (1..=Devices::MOST).contains(count)).ok_or_else(damaged)?;
    if sweep.workers_per_run > count {
        return Err(Failure::usage(
            format!("each run of this sweep needs {} workers, more than --{kind} {count}", sweep.workers_per_run),
            format!("--{kind} {} or more", sweep.workers_per_run),
        ));
    }
    if kind == "cpus" {
        return Ok(DeviceSlots::cpus(count));
    }
    let found = DeviceSet::of(DeviceRequest::Gpus(count))?;
    found.all(&LocalRank { local_world_size: count, ..LocalRank::ALONE })?;
    match found {
        DeviceSet::Gpus(gpus) => Ok(DeviceSlots::gpus(count, gpus.visible.as_deref())),
        DeviceSet::Cpu(_) => Err(damaged()),
    }
}

/// Starts runs while slots are free, until all runs have ended. After a signal, starts no more runs, sends the signal to the
/// running ones and waits for them. Returns the signal.
fn train(out: &Path, sweep: &mut Sweep, slots: &mut DeviceSlots, stop: &StopFlag) -> Result<Option<i32>, Failure> {
    let mut running: Vec<Running> = Vec::new();
    let mut waiting: Vec<usize> =
        (0..sweep.runs.len()).filter(|&index| sweep.runs[index].state != RunState::Done).rev().collect();
    let mut passed_on = false;
    loop {
        while let (None, Some(&index)) = (stop.signal(), waiting.last()) {
            let Some(own) = slots.take(sweep.workers_per_run) else { break };
            waiting.pop();
            match Running::start(out, sweep, index, own, slots) {
                Ok(started) => running.push(started),
                Err((own, failure)) => {
                    slots.put_back(&own);
                    let run = &mut sweep.runs[index];
                    (run.state, run.message) = (RunState::Failed, Some(failure.to_string()));
                }
            }
            save(out, sweep)?;
        }
        let mut still = Vec::new();
        for mut one in running {
            match child::try_wait(&mut one.child)? {
                None => still.push(one),
                Some(status) => {
                    slots.put_back(&one.slots);
                    one.finish(out, sweep, status)?;
                    save(out, sweep)?;
                }
            }
        }
        running = still;
        if let (Some(signal), false) = (stop.signal(), passed_on) {
            running.iter().for_each(|one| child::signal(&one.child, signal));
            passed_on = true;
        }
        if running.is_empty() && (waiting.is_empty() || stop.signal().is_some()) {
            return Ok(stop.signal());
        }
        thread::sleep(child::POLL_INTERVAL);
    }
}

/// Writes the state of all runs.
fn save(out: &Path, sweep: &Sweep) -> Result<(), Failure> {
    let json = serde_json::to_vec_pretty(sweep).map_err(|error| Failure::run(error, "please report this"))?;
    Ok(write_atomic(&out.join(STATE), &json)?)
}
