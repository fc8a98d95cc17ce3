//! Runs the real binary on the data set that it contains.

#![allow(dead_code, reason = "each executable uses a part")]

#[path = "../../testing/namespaces.rs"]
pub mod namespaces;
#[path = "../../../data/testing/pictures.rs"]
pub mod pictures;
#[path = "../../testing/shared.rs"]
mod shared;
#[path = "../../testing/sshd.rs"]
pub mod sshd;

#[allow(unused_imports, reason = "each executable uses a part")]
pub use shared::{free_port, skip_or_fail};

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// The working folder of one test, with its `config.toml` and its runs. Starts the program in this folder.
pub struct Bench {
    pub folder: TempDir,
}

/// The output and exit code of the binary.
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ended {
    /// Asserts the exit code. A failed assertion shows the whole output.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }
}

/// LeNet on a part of fashion-mini. A step takes a few milliseconds.
pub const CONFIG: &str = r#"
[model]
name = "lenet"
[data]
name = "fashion-mini"
augment = ["crop", "flip"]
limit_train = 520
limit_test = 200
[train]
epochs = 3
batch_size = 16
label_smoothing = 0.1
[optimizer]
lr = 0.05
nesterov = true
[schedule]
kind = "one-cycle"
[log]
every = 5
"#;

impl Bench {
    /// Makes a folder with `config` as `config.toml`.
    pub fn new(config: &str) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        std::fs::write(folder.path().join("config.toml"), config).expect("config written");
        Self { folder }
    }

    /// Returns the path of `name` in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Sets a separate session folder for mpirun. Two mpiruns that start at the same time remove each other's sessions from a
    /// common folder (open-mpi/ompi#8510).
    pub fn own_mpi_session(&self, command: &mut Command) {
        command.env("OMPI_MCA_orte_tmpdir_base", self.folder.path());
    }

    /// Returns the binary's command, without the user's settings in its environment and with default signal actions. Shells
    /// start background jobs, and so these tests, with some signals ignored, and children inherit ignored signals.
    pub fn command(&self) -> Command {
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP,INT,QUIT,TERM").arg(env!("CARGO_BIN_EXE_trainer"));
        command.current_dir(self.folder.path()).env_remove("TRAINER_DATA_DIR").env_remove("TRAINER_LOG");
        command.env("NO_COLOR", "1");
        command
    }

    /// Runs the program to its end.
    pub fn run(&self, arguments: &[&str]) -> Ended {
        self.command().args(arguments).output().expect("the binary starts").into()
    }

    /// Starts a run in the background.
    pub fn spawn(&self, arguments: &[&str]) -> Child {
        self.command().args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
    }

    /// Trains `config.toml` with more arguments, and returns the run's folder in `root`.
    pub fn train(&self, root: &str, extra: &[&str]) -> PathBuf {
        self.run(&[&["--config", "config.toml", "--run-dir", root], extra].concat()).expect(0);
        self.only_run(root)
    }

    /// Starts an endless run that writes metrics at each step, and sends it the signal when `lines` lines are written.
    pub fn signalled(&self, root: &str, extra: &[&str], lines: usize, number: i32) -> Ended {
        let start = ["--config", "config.toml", "--run-dir", root, "--set", "log.every=1"];
        let child = self.spawn(&[&start[..], extra, &ENDLESS].concat());
        wait_until("metrics", || {
            let Some(run) = entries(&self.path(root)).into_iter().next() else { return false };
            std::fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| text.lines().count() >= lines)
        });
        signal(&child, number);
        child.wait_with_output().expect("output").into()
    }

    /// Starts an endless run, stops it with SIGTERM once `lines` steps are logged, and returns its folder.
    pub fn stopped(&self, root: &str, extra: &[&str], lines: usize) -> PathBuf {
        self.signalled(root, extra, lines, 15).expect(143);
        self.only_run(root)
    }

    /// Returns the only run folder under `root`.
    #[track_caller]
    pub fn only_run(&self, root: &str) -> PathBuf {
        let runs = entries(&self.path(root));
        assert_eq!(runs.len(), 1, "one run under {root}: {runs:?}");
        runs[0].clone()
    }
}

/// A name and the flags of each mode.
pub const MODES: [(&str, &[&str]); 3] =
    [("single", &[]), ("dp", &["--mode", "dp", "--cpus", "2"]), ("ddp", &["--cpus", "2"])];

/// Settings for a run that continues until a test stops it.
pub const ENDLESS: [&str; 2] = ["--set", "train.epochs=5000"];

/// Returns the Python of `TRAINER_TEST_PYTHON` if it has all `packages`; otherwise skips the test.
pub fn python_with(packages: &[&str]) -> Option<OsString> {
    let tool = format!("Python with {}", packages.join(", "));
    let Some(python) = std::env::var_os("TRAINER_TEST_PYTHON") else {
        skip_or_fail(&tool, "TRAINER_TEST_PYTHON is not set");
        return None;
    };
    let import = format!("import {}", packages.join(", "));
    let output = Command::new(&python).args(["-c", &import]).output().expect("python starts");
    if !output.status.success() {
        skip_or_fail(&tool, String::from_utf8_lossy(&output.stderr).trim());
        return None;
    }
    Some(python)
}

/// Returns the sorted paths of all entries of a folder.
pub fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = match std::fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| entry.expect("entry").path()).collect(),
        Err(_) => Vec::new(),
    };
    all.sort();
    all
}

/// Returns the path of the first entry of a folder, if there is one.
pub fn first_entry(folder: &Path) -> Option<PathBuf> {
    entries(folder).into_iter().next()
}

/// Waits until `ready` is true. Only a hang reaches the time limit, even on a busy machine.
#[track_caller]
pub fn wait_until(what: &str, mut ready: impl FnMut() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < Duration::from_secs(300), "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal by its number.
pub fn signal(child: &Child, signal: i32) {
    signal_process(child.id(), signal);
}

/// Sends a signal to any process by its id.
pub fn signal_process(process: u32, signal: i32) {
    let pid = rustix::process::Pid::from_raw(process as i32).expect("a process id");
    let signal = rustix::process::Signal::from_named_raw(signal).expect("a signal");
    rustix::process::kill_process(pid, signal).expect("the process is there");
}

/// Returns the ids of a process's children, in the order in which they were started.
pub fn children(parent: u32) -> Vec<u32> {
    let started = |process: u32| -> Option<(u64, u32)> {
        // The format is "pid (name) state ppid …". The name may hold parentheses, so search for the last one.
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
        let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
        // Ids begin again at 2 after the highest one. The time is in hundredths of a second.
        (number(1)? == u64::from(parent)).then_some((number(19)?, process))
    };
    let ids =
        std::fs::read_dir("/proc").expect("/proc").filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut all: Vec<(u64, u32)> = ids.filter_map(started).collect();
    all.sort_unstable();
    all.into_iter().map(|(_, process)| process).collect()
}

/// Returns `(step, loss)` of every line of `metrics.jsonl`. The loss is its bit pattern, so that comparisons are exact.
pub fn losses(run: &Path) -> Vec<(u64, u64)> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics.jsonl");
    text.lines()
        .map(|line| {
            let value: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
            (value["step"].as_u64().expect("step"), value["loss"].as_f64().expect("loss").to_bits())
        })
        .collect()
}

/// Returns the columns of `summary.csv` that must not depend on time: all but images/s and seconds.
pub fn summary(run: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(run.join("summary.csv")).expect("summary.csv");
    text.lines().map(|line| line.split(',').take(7).collect::<Vec<_>>().join(",")).collect()
}

/// Reads a file of a checkpoint.
pub fn checkpoint_file(run: &Path, checkpoint: &str, file: &str) -> Vec<u8> {
    std::fs::read(run.join("checkpoints").join(checkpoint).join(file)).expect("checkpoint file")
}

/// Returns the loss of every step.
pub fn loss_values(run: &Path) -> Vec<f64> {
    losses(run).into_iter().map(|(_, bits)| f64::from_bits(bits)).collect()
}

/// Checks that two runs have the same loss in every step, within a relative `tolerance`.
#[track_caller]
pub fn assert_same_curve(what: &str, one: &[f64], other: &[f64], tolerance: f64) {
    assert_eq!(one.len(), other.len(), "{what}");
    for (step, (a, b)) in one.iter().zip(other).enumerate() {
        assert!((a - b).abs() <= tolerance * a.abs(), "{what}, step {step}: {a} against {b}");
    }
}

/// Checks that two runs have the same losses, summary and last checkpoint, to the bit.
#[track_caller]
pub fn assert_equal_runs(one: &Path, other: &Path) {
    assert_eq!(losses(one), losses(other), "losses of every step");
    assert_eq!(summary(one), summary(other), "summary.csv");
    for file in ["model.safetensors", "optimizer.safetensors"] {
        assert_eq!(checkpoint_file(one, "last", file), checkpoint_file(other, "last", file), "{file}");
    }
}
