//! Starts this program as child processes: the training runs of `compare`, `sweep` and `bench scaling`.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, getppid, kill_process};
use serde::Serialize;
use time::{OffsetDateTime, macros::format_description};

use crate::cli::{DATA_DIR, DataDir, NamedBy, ShortRunArgs};
use crate::config::{Overrides, RunPlan};
use crate::failure::Failure;
use crate::files::{self, FileError, write_atomic};
use crate::report::RunFolder;
use crate::report::run_lock::{LockAttempt, RunLock, locked_error};
use crate::run::plan;
use crate::signals::StopFlag;
use launch::{environment::Variables, set_parent_death_signal, signals};

/// Environment variable with the process id of the command that started the run.
const PARENT_VARIABLE: &str = "TRAINER_PARENT";
/// The first arguments of a run. `--launcher local`: a launcher's environment variables (such as Slurm's) describe this program,
/// not the run.
pub(super) const TRAIN_ARGS: [&str; 3] = ["train", "--launcher", "local"];
/// Interval between two checks of the child processes.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of lines to show from the end of a failed run's output.
const MAX_LOG_LINES: usize = 12;

/// Asks the kernel to send SIGTERM to this process when the command that started this process ends. Works on Linux only.
pub(super) fn end_with_parent(variables: &Variables) {
    let parent = variables.get(PARENT_VARIABLE).and_then(|text| text.parse().ok()).and_then(Pid::from_raw);
    if parent.is_some() && parent == getppid() {
        // Ignore an error: without the signal, the run continues to its normal end.
        let _ = set_parent_death_signal(Signal::TERM);
    }
}

/// Starts `command` in its own process group, so that Ctrl-C reaches only the parent, which passes the signal on. Redirects
/// stdout and stderr of the run to the file `log`.
///
/// # Errors
/// The file cannot be created, or the process cannot be started.
pub(super) fn start(command: &mut Command, log: &Path) -> Result<Child, Failure> {
    let file = files::create(log)?;
    let failed = |error| Failure::run(format!("a run cannot be started: {error}"), "see `ulimit -u`");
    command.env(PARENT_VARIABLE, std::process::id().to_string());
    command.stderr(file.try_clone().map_err(failed)?).stdout(file).stdin(Stdio::null());
    command.process_group(0).spawn().map_err(failed)
}

/// Returns the command of this program, without the variable that names the folder of the data sets.
///
/// # Errors
/// The program's own file cannot be found.
pub(super) fn command() -> Result<Command, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::run(format!("cannot find this program's own file: {error}"), "is /proc mounted?"))?;
    let mut command = Command::new(program);
    command.env_remove(DATA_DIR);
    Ok(command)
}

/// Returns the exit status of a run, or `None` if the run has not ended. Does not wait.
///
/// # Errors
/// `waitpid` fails.
pub(super) fn try_wait(child: &mut Child) -> Result<Option<ExitStatus>, Failure> {
    child.try_wait().map_err(|error| Failure::run(format!("waiting for a run: {error}"), "please report this"))
}

/// Sends a signal to a run.
pub(super) fn signal(child: &Child, signal: i32) {
    let pid = Pid::from_raw(child.id() as i32);
    if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(signal)) {
        // Ignore an error: the run may just have ended.
        let _ = kill_process(pid, signal);
    }
}

/// Returns the end of a failed run's output.
pub(super) fn last_lines(log: &Path, status: ExitStatus) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    match lines.len() {
        0 => format!("{status}, without output"),
        count => lines[count.saturating_sub(MAX_LOG_LINES)..].join("\n"),
    }
}

/// Creates the folder for the results of `command`, and locks it: the folder `asked`, or a new folder under `runs/`. `result` is
/// the name of the file with the results.
///
/// # Errors
/// The folder cannot be created, another program writes to it, or it has results already.
pub(super) fn result_folder(
    asked: Option<&Path>,
    command: &str,
    result: &str,
) -> Result<(PathBuf, Option<RunLock>), Failure> {
    let out = create_folder(asked, command)?;
    let lock = lock(&out)?;
    let file = out.join(result);
    if file.exists() {
        let hint = match command {
            "sweep" => format!("continue it with `trainer sweep --resume {}`, or name another folder", out.display()),
            _ => "name another folder with --out, or delete the file".into(),
        };
        return Err(FileError::input(file, "exists already", hint).into());
    }
    Ok((out, lock))
}

/// Writes the results of a command and their chart to its folder.
///
/// # Errors
/// A file cannot be written.
pub(super) fn write_results(out: &Path, file: &str, results: &impl Serialize, chart: &str) -> Result<(), Failure> {
    let mut json = serde_json::to_vec_pretty(results)
        .map_err(|error| Failure::run(format!("{}: {error}", out.display()), "please report this"))?;
    json.push(b'\n');
    let json_path = out.join(file);
    write_atomic(&json_path, &json)?;
    write_atomic(&json_path.with_extension("svg"), chart.as_bytes())?;
    Ok(())
}

fn create_folder(asked: Option<&Path>, command: &str) -> Result<PathBuf, Failure> {
    let create = |path: PathBuf| match fs::create_dir_all(&path) {
        Ok(()) => Ok(path),
        Err(error) => Err(FileError::io(&path, "create the folder", &error).with_folder_flag("--out").into()),
    };
    if let Some(path) = asked {
        return create(path.to_owned());
    }
    let stamp = OffsetDateTime::now_utc()
        .format(format_description!("[year][month][day]-[hour][minute][second]"))
        .map_err(|error| Failure::run(format!("the clock: {error}"), "set the machine's clock"))?;
    create(Path::new("runs").join(format!("{stamp}-{command}-{}", std::process::id())))
}

/// Takes the lock of the folder for a command's results.
///
/// # Errors
/// Another program writes to the folder, or the folder cannot be written.
pub(super) fn lock(out: &Path) -> Result<Option<RunLock>, Failure> {
    match RunLock::take(out, None)? {
        LockAttempt::Acquired(lock) => Ok(lock),
        LockAttempt::HeldBy(holder) => Err(locked_error(out, holder.as_ref()).into()),
    }
}

/// Reads the plan that all short runs of a command share.
///
/// # Errors
/// A mistake in the file or in the flags.
pub(super) fn plan(arguments: &ShortRunArgs) -> Result<RunPlan, Failure> {
    let (set, data_dir) = (arguments.set.clone(), arguments.data_dir.clone());
    plan::load(&arguments.config, &Overrides { set, data_dir, ..Overrides::default() })
}

/// Maximum number of test images of a short run. The evaluation at the end of the run is not measured, so it should be short.
const TEST_IMAGES: usize = 256;

/// A training run of a few steps, to measure their times.
pub(super) struct ShortRun<'a> {
    pub(super) arguments: &'a ShortRunArgs,
    /// `--set` values of the measurement. They come after the values of the user.
    pub(super) set: Vec<String>,
    /// Further flags.
    pub(super) flags: Vec<String>,
    /// The plan that the configuration file describes.
    pub(super) plan: &'a RunPlan,
}

impl ShortRun<'_> {
    /// Trains in `folder`, with `variables` in the environment. The inner error is the last output of a run that failed.
    ///
    /// # Errors
    /// The run cannot be started, or this process received a signal.
    pub(super) fn run(
        &self,
        folder: &Path,
        variables: &[(&str, String)],
        stop: &StopFlag,
    ) -> Result<Result<RunFolder, String>, Failure> {
        fs::create_dir_all(folder).map_err(|error| FileError::io(folder, "create the folder", &error))?;
        let log = folder.join("messages.log");
        let mut command = self.command(folder)?;
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let status = wait(start(&mut command, &log)?, stop)?;
        if !status.success() {
            return Ok(Err(last_lines(&log, status)));
        }
        let run = RunFolder::newest(folder)?;
        // Delete the weights: nothing reads them again, and they would fill the disk.
        let _ = fs::remove_dir_all(run.checkpoints());
        Ok(Ok(run))
    }

    /// Builds the command: the user's settings, followed by the settings of the measurement.
    fn command(&self, folder: &Path) -> Result<Command, Failure> {
        let mut command = command()?;
        command
            .args(TRAIN_ARGS)
            .arg("--config")
            .arg(&self.arguments.config)
            .arg("--run-dir")
            .arg(folder)
            .arg("--quiet");
        let test = match self.plan.data.limit_test {
            0 => TEST_IMAGES,
            limit => limit.min(TEST_IMAGES),
        };
        let own = [
            format!("train.max_steps={}", self.arguments.steps),
            format!("data.limit_test={test}"),
            "train.eval_every=1000000".to_owned(),
            "checkpoint.every=0".to_owned(),
            "checkpoint.every_steps=0".to_owned(),
            "checkpoint.keep_best=false".to_owned(),
            "log.tensorboard=false".to_owned(),
            // No autotuning: all measured steps must use the settings of the plan
            "parallel.autotune=[]".to_owned(),
        ];
        for setting in self.arguments.set.iter().chain(&self.set).chain(&own) {
            command.arg("--set").arg(setting);
        }
        match &self.arguments.data_dir {
            Some(DataDir { path, by: NamedBy::Flag }) => command.arg("--data-dir").arg(path),
            Some(DataDir { path, by: NamedBy::Variable }) => command.env(DATA_DIR, path),
            None => &mut command,
        };
        command.args(&self.flags);
        Ok(command)
    }
}

/// Returns the setting of a `ddp` run whose workers have `threads` threads each. Returns `None` if the plan leaves
/// `parallel.threads` to the run. The `config.toml` of a tuned run has this key, and a run of one process ignores it.
pub(super) fn set_threads(plan: &RunPlan, threads: usize) -> Option<String> {
    plan.parallel.threads.map(|_| format!("parallel.threads={threads}"))
}

/// Returns the number of a short run's steps to skip: the first steps allocate memory and fill the loader's queue.
pub(super) fn warmup(steps: usize) -> usize {
    (steps / 3).min(5)
}

/// Waits until a run has ended. If this process receives a signal, sends the same signal to the run, waits until the run has
/// ended, and returns an error.
fn wait(mut child: Child, stop: &StopFlag) -> Result<ExitStatus, Failure> {
    let mut passed_on = false;
    loop {
        match try_wait(&mut child)? {
            Some(status) => match stop.signal() {
                None => return Ok(status),
                Some(signal) => {
                    let message = format!("stopped by {}, with the run in progress", signals::name(signal));
                    return Err(Failure::stopped(signal, message));
                }
            },
            None => thread::sleep(POLL_INTERVAL),
        }
        if let (Some(number), false) = (stop.signal(), passed_on) {
            signal(&child, number);
            passed_on = true;
        }
    }
}
