//! One run of a sweep: builds its command, starts its process and reads its result.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::Instant;

use serde_json::Value;

use super::CONFIG;
use super::slots::DeviceSlots;
use crate::commands::child;
use crate::console;
use crate::failure::Failure;
use crate::files::read_or_empty;
use crate::report::RunFolder;
use crate::report::sweep::{Metric, RunState, Sweep, SweepRun};
use crate::text::duration;

/// A run whose process has been started.
pub(super) struct Running {
    pub(super) child: Child,
    /// The slots of the run.
    pub(super) slots: Vec<usize>,
    index: usize,
    log: PathBuf,
    since: Instant,
}

/// Returns the folder of a run: `runs/003`. The folder contains the run folder and `output.log`.
fn folder(out: &Path, run: &SweepRun) -> PathBuf {
    out.join("runs").join(format!("{:03}", run.number))
}

/// Returns the command line arguments of a new run. The run creates its run folder in `runs`.
pub(super) fn arguments(sweep: &Sweep, run: &SweepRun, config: &Path, runs: &Path) -> Vec<String> {
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let mut words = child::TRAIN_ARGS.map(str::to_owned).to_vec();
    words.extend(["--config".into(), path(config), "--run-dir".into(), path(runs)]);
    let own = sweep.keys.iter().zip(&run.values).map(|(key, value)| format!("{key}={value}"));
    words.extend(sweep.fixed.iter().cloned().chain(own).flat_map(|setting| ["--set".into(), setting]));
    words.extend(sweep.data_dir.iter().flat_map(|dir| ["--data-dir".into(), dir.clone()]));
    words.extend(devices(sweep));
    words
}

/// Returns the flags for the devices of a run.
fn devices(sweep: &Sweep) -> [String; 2] {
    let kind = if sweep.slots.starts_with("gpus") { "--gpus" } else { "--cpus" };
    [kind.into(), sweep.workers_per_run.to_string()]
}

impl Running {
    /// Starts or resumes run `index` in `slots`.
    ///
    /// # Errors
    /// A folder cannot be created, or the process cannot be started. The error contains `slots`, so that the caller can free
    /// them.
    pub(super) fn start(
        out: &Path,
        sweep: &mut Sweep,
        index: usize,
        slots: Vec<usize>,
        all: &DeviceSlots,
    ) -> Result<Self, (Vec<usize>, Failure)> {
        let started = || {
            let folder = folder(out, &sweep.runs[index]);
            fs::create_dir_all(&folder)
                .map_err(|error| crate::files::FileError::io(&folder, "create the folder", &error))?;
            let log = folder.join("output.log");
            let mut command = child::command()?;
            match RunFolder::newest(&folder) {
                // `config.toml` in the run folder has all settings. The slots may be of another kind now.
                Ok(run) => command.args(child::TRAIN_ARGS).arg("--resume").arg(run.path()).args(devices(sweep)),
                Err(_) => command.args(arguments(sweep, &sweep.runs[index], &out.join(CONFIG), &folder)),
            };
            let child = all.start(&slots, &mut command, |command| child::start(command, &log))?;
            Ok((child, log))
        };
        match started() {
            Err(failure) => Err((slots, failure)),
            Ok((child, log)) => {
                let run = &mut sweep.runs[index];
                (run.state, run.message, run.exit_code) = (RunState::Running, None, None);
                say(sweep, index, "starts");
                Ok(Self { child, slots, index, log, since: Instant::now() })
            }
        }
    }

    /// Records the result of a run that has ended.
    ///
    /// # Errors
    /// The result of the run cannot be read.
    pub(super) fn finish(self, out: &Path, sweep: &mut Sweep, status: ExitStatus) -> Result<(), Failure> {
        let metric = sweep.metric;
        let run = &mut sweep.runs[self.index];
        run.exit_code = status.code();
        run.state = match status.code() {
            Some(0) => RunState::Done,
            Some(129 | 130 | 131 | 143) => RunState::Interrupted,
            _ => RunState::Failed,
        };
        run.seconds = Some(self.since.elapsed().as_secs_f64());
        if let Ok(found) = RunFolder::newest(&folder(out, run)) {
            run.folder = Some(found.path().strip_prefix(out).unwrap_or(found.path()).to_string_lossy().into_owned());
            // After a failure, `summary.json` is missing or belongs to an earlier session
            if run.state != RunState::Failed {
                read_result(run, metric, &read_or_empty(&found.summary_json())?);
            }
        }
        let said = match (run.state, run.best) {
            (RunState::Failed, _) => {
                let lines = child::last_lines(&self.log, status);
                let first = lines.lines().find(|line| line.starts_with("error")).unwrap_or(&lines).to_owned();
                run.message = Some(lines);
                format!("failed: {first}; all of its output is in {}", self.log.display())
            }
            (state, None) => state.name().to_owned(),
            (state, Some(best)) => {
                let time = duration(run.seconds.unwrap_or_default());
                format!("{}, {} {} in {time}", state.name(), metric.title(), metric.shown(best))
            }
        };
        say(sweep, self.index, &said);
        Ok(())
    }
}

/// Reads the evaluations and the time of a run from its `summary.json`.
fn read_result(run: &mut SweepRun, metric: Metric, bytes: &[u8]) {
    let result: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let value = |evaluation: &str| result[evaluation][metric.key()].as_f64();
    run.best = value("best");
    run.best_epoch = result["best"]["epoch"].as_u64().map(|epoch| epoch as usize);
    run.last = value("last");
    run.test = value("test");
    run.seconds = result["seconds"].as_f64().or(run.seconds);
}

/// Prints the progress of a run on stderr, because stdout contains only the table.
fn say(sweep: &Sweep, index: usize, what: &str) {
    let run = &sweep.runs[index];
    let values: Vec<_> = sweep.keys.iter().zip(&run.values).map(|(key, value)| format!("{key}={value}")).collect();
    console::eprint(format_args!("run {:03} of {}: {}: {what}", run.number, sweep.runs.len(), values.join(" ")));
}
