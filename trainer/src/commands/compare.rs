//! `trainer compare`: runs the same steps of the same configuration in each mode, one mode after the other.

use std::{fs, path::Path};

use serde_json::Value;

use super::child::{self, ShortRun, warmup};
use super::print_json;
use crate::cli::CompareArgs;
use crate::config::{Devices, Keyword, Mode, RunPlan};
use crate::console;
use crate::device::{DeviceRequest, DeviceSet, LocalRank};
use crate::failure::{FAILED, Failure};
use crate::files::FileError;
use crate::report::comparison;
use crate::report::comparison::{Comparison, ModeResult, ModeStats, Round};
use crate::report::environment::Environment;
use crate::report::metrics::read_metrics;
use crate::signals::StopFlag;

/// The file with the results, in the folder of the comparison.
const RESULT: &str = "compare.json";

/// Runs all modes, prints the page and returns the exit code: 1 if a mode failed.
///
/// # Errors
/// A mistake in the configuration or the flags, or a folder that cannot be written. A mode that fails is a row of the page.
pub(super) fn run(arguments: &CompareArgs) -> Result<u8, Failure> {
    let modes = modes(&arguments.modes)?;
    let (flag, workers) = workers(arguments);
    for (flag, value, least) in
        [(flag, workers, 2), ("--steps", arguments.runs.steps, 3), ("--rounds", arguments.rounds, 1)]
    {
        if value < least {
            return Err(Failure::usage(format!("{flag} {value}: too few to compare"), format!("{least} or more")));
        }
    }
    if workers > Devices::MOST {
        return Err(Failure::usage(format!("{flag} {workers}"), format!("use a number from 2 to {}", Devices::MOST)));
    }
    let target = DeviceSet::of(arguments.gpus.map_or(DeviceRequest::Cpu, DeviceRequest::Gpus))?;
    let plan = child::plan(&arguments.runs)?;
    let local_rank =
        LocalRank { local_world_size: workers, oversubscribe: arguments.oversubscribe, ..LocalRank::ALONE };
    let device = target.all(&local_rank)?.remove(0).description;
    let stop = StopFlag::on_signals()?;
    let (out, _lock) = child::result_folder(arguments.runs.out.as_deref(), "compare", RESULT)?;
    let mut runs: Vec<(Mode, Vec<Round>, Option<String>)> =
        modes.iter().map(|&mode| (mode, Vec::new(), None)).collect();
    for round in 1..=arguments.rounds {
        for (mode, rounds, error) in &mut runs {
            if error.is_some() {
                continue;
            }
            // Print progress on stderr: stdout holds only the page.
            console::eprint(format_args!("round {round} of {}: {mode}", arguments.rounds));
            match run_mode(arguments, &plan, *mode, &out.join("runs").join(format!("{mode}-{round}")), &stop)? {
                Ok(measured) => rounds.push(measured),
                Err(message) => *error = Some(message),
            }
        }
    }
    let comparison = comparison(arguments, &plan, &runs, &device);
    let chart = comparison::chart(&comparison).map_err(|error| Failure::run(error, "please report this"))?;
    child::write_results(&out, RESULT, &comparison, &chart)?;
    if arguments.runs.json {
        print_json(&comparison)?;
    } else {
        console::print(comparison.render());
        console::print(format_args!("\nfolder: {}", out.display()));
    }
    Ok(if comparison.modes.iter().any(|mode| mode.error.is_some()) { FAILED } else { 0 })
}

/// Returns the flag that sets the number of workers, and that number.
fn workers(arguments: &CompareArgs) -> (&'static str, usize) {
    match (arguments.gpus, arguments.cpus) {
        (Some(count), _) => ("--gpus", count),
        (None, count) => ("--cpus", count.unwrap_or_default()),
    }
}

/// Returns a mode's number of workers. `single` has one worker, whose threads use all cores. In the other modes the workers
/// divide the same cores, so all modes have the same number of threads.
fn workers_of(mode: Mode, arguments: &CompareArgs) -> usize {
    if mode == Mode::Single { 1 } else { workers(arguments).1 }
}

/// Parses the modes to compare. Each mode may occur once.
fn modes(words: &[String]) -> Result<Vec<Mode>, Failure> {
    let mut modes = Vec::new();
    for word in words {
        let mode = Mode::from_name(word.trim()).ok_or_else(|| {
            let all: Vec<_> = Mode::ALL.iter().map(|mode| mode.name()).collect();
            Failure::usage(format!("--modes: there is no mode `{word}`"), format!("choices: {}", all.join(", ")))
        })?;
        if modes.contains(&mode) {
            return Err(Failure::usage(format!("--modes: `{mode}` is named twice"), "name each mode once"));
        }
        modes.push(mode);
    }
    Ok(modes)
}

/// Runs one mode once. The inner error is the output of a process that failed.
fn run_mode(
    arguments: &CompareArgs,
    plan: &RunPlan,
    mode: Mode,
    folder: &Path,
    stop: &StopFlag,
) -> Result<Result<Round, String>, Failure> {
    let (flag, _) = workers(arguments);
    let mut flags = ["--mode", mode.name(), flag, &workers_of(mode, arguments).to_string()].map(str::to_owned).to_vec();
    if arguments.oversubscribe && mode != Mode::Single {
        flags.push("--oversubscribe".to_owned());
    }
    // All modes take the same batches with the same number of threads in all.
    let share = (rayon::current_num_threads() / workers_of(mode, arguments)).max(1);
    let mut set = vec!["train.batch_scope=global".to_owned()];
    set.extend(child::set_threads(plan, share).filter(|_| mode == Mode::Ddp));
    let run = ShortRun { arguments: &arguments.runs, set, flags, plan };
    let run = match run.run(folder, &[], stop)? {
        Ok(run) => run,
        Err(message) => return Ok(Err(message)),
    };
    let steps = read_metrics(&run.metrics())?;
    let result = fs::read(run.summary_json()).map_err(|error| FileError::io(run.summary_json(), "read", &error))?;
    let result: Value = serde_json::from_slice(&result)
        .map_err(|error| FileError::new(run.summary_json(), error.to_string(), "please report this"))?;
    let numbers =
        |key: &str| -> Vec<u64> { result[key].as_array().into_iter().flatten().filter_map(Value::as_u64).collect() };
    let count = steps.len();
    Ok(Round::new(&steps, warmup(arguments.runs.steps), numbers("peak_bytes"), numbers("device_bytes")).ok_or_else(
        || {
            format!(
                "the run ended after {count} steps, before there was anything to measure\n\
                     hint: increase train.epochs or data.limit_train"
            )
        },
    ))
}

fn comparison(
    arguments: &CompareArgs,
    plan: &RunPlan,
    runs: &[(Mode, Vec<Round>, Option<String>)],
    device: &str,
) -> Comparison {
    let single = runs.iter().find(|(mode, ..)| *mode == Mode::Single).and_then(|(_, rounds, _)| rounds.first());
    let reference = single.map(|round| round.losses.as_slice());
    let environment = Environment::detect("");
    let row = |(mode, rounds, error): &(Mode, Vec<Round>, Option<String>)| ModeResult {
        mode: mode.to_string(),
        workers: workers_of(*mode, arguments),
        figures: ModeStats::of(rounds, reference),
        error: error.clone(),
    };
    Comparison {
        model: plan.model.name.clone(),
        data: plan.data.name.clone(),
        batch_size: plan.train.batch_size,
        steps: runs
            .iter()
            .filter_map(|(_, rounds, _)| rounds.first())
            .map(|round| round.losses.len())
            .max()
            .unwrap_or(0),
        warmup: warmup(arguments.runs.steps),
        rounds: arguments.rounds,
        machine: match arguments.gpus {
            Some(_) => device.to_owned(),
            None => format!(
                "{}, {} threads in all in each mode",
                environment.cpu.as_deref().unwrap_or("unknown processor"),
                rayon::current_num_threads()
            ),
        },
        modes: runs.iter().map(row).collect(),
    }
}
