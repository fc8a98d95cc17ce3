//! Starts the probe as a user would, and checks what it leaves behind.
#![allow(dead_code, reason = "each test program uses a part")]

#[path = "../../../namespaces.rs"]
pub mod namespaces;
#[path = "../../../shared.rs"]
mod shared;

#[allow(unused_imports, reason = "each test file uses a part")]
pub use shared::{free_port, skip_or_fail};

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Longest wait of a test. Only a hang lasts this long, also on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// A running launcher with its workers.
pub struct Run {
    pub child: Child,
    pub folder: tempfile::TempDir,
    marker: String,
    shared_memory: BTreeSet<String>,
}

/// A launcher that has ended.
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    pub folder: tempfile::TempDir,
}

/// The program that the tests launch.
pub const PROBE: &str = env!("CARGO_BIN_EXE_launch-probe");

/// Returns the start of the probe's command line, with all signals at their default actions. A shell starts background jobs with
/// some signals ignored. The tests may be such a job, children inherit the setting, and the launcher respects it.
pub fn probe(arguments: &[&str]) -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,QUIT,TERM", PROBE]).args(arguments);
    command
}

impl Run {
    pub fn start(arguments: &[&str]) -> Self {
        Self::of(probe(arguments))
    }

    /// Starts `command` with `--logs`, without variables of launchers.
    pub fn of(mut command: Command) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let folder = tempfile::tempdir().unwrap();
        let marker = format!("launch-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAYON_NUM_THREADS"] {
            command.env_remove(name);
        }
        let file = |name: &str| File::create(folder.path().join(name)).unwrap();
        command.arg("--logs").arg(folder.path()).env("LAUNCH_TEST", &marker).stdin(Stdio::null());
        command.stdout(file("stdout")).stderr(file("stderr"));
        let shared_memory = shared_memory();
        Self { child: command.spawn().unwrap(), folder, marker, shared_memory }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits until `file` of the logs (or the launcher's `stdout`, `stderr`) contains `text`; returns the content.
    pub fn wait_for(&mut self, file: &str, text: &str) -> String {
        let until = Instant::now() + LIMIT;
        loop {
            let found = read(&self.folder.path().join(file));
            if found.contains(text) {
                return found;
            }
            let over = self.child.try_wait().unwrap();
            assert!(
                over.is_none() || read(&self.folder.path().join(file)).contains(text),
                "ended ({over:?}) without {text:?} in {file}: {found}\n{}",
                read(&self.folder.path().join("stderr"))
            );
            assert!(
                Instant::now() < until,
                "no {text:?} in {file}: {found}\n{}",
                read(&self.folder.path().join("stderr"))
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the process ids of the launcher's workers.
    pub fn workers(&self) -> Vec<Pid> {
        let own = self.child.id() as i32;
        marked(&self.marker).into_iter().filter(|pid| *pid != own).filter_map(Pid::from_raw).collect()
    }

    /// Waits for the end, and checks that nothing is left: no process, no shared memory, no socket.
    pub fn end(mut self) -> Ended {
        let until = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() >= until {
                let stderr = read(&self.folder.path().join("stderr"));
                let left = self.workers();
                drop(self);
                panic!("the launcher did not end; workers {left:?}; it said: {stderr}");
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        // Processes that the kernel kills with the launcher end a moment later.
        loop {
            let left = marked(&self.marker);
            if left.is_empty() {
                break;
            }
            assert!(Instant::now() < until, "left behind: {left:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let stdout = read(&self.folder.path().join("stdout"));
        let stderr = read(&self.folder.path().join("stderr"));
        for line in stdout.lines().filter_map(|line| line.strip_prefix("joined at ")) {
            for address in std::net::ToSocketAddrs::to_socket_addrs(line).unwrap() {
                // Another test's job may have the port by now, until it ends.
                while std::net::TcpStream::connect_timeout(&address, Duration::from_secs(5)).is_ok() {
                    assert!(Instant::now() < until, "somebody still listens at {address}");
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
        // Shared memory of other programs may come and go meanwhile.
        let names = shared_memory();
        let ours: Vec<_> = names.difference(&self.shared_memory).filter(|name| name.contains("trainer")).collect();
        assert!(ours.is_empty(), "left in /dev/shm: {ours:?}");
        let folder = std::mem::replace(&mut self.folder, tempfile::tempdir().unwrap());
        Ended { status, stdout, stderr, folder }
    }
}

impl Drop for Run {
    /// A failed test leaves no process either.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    pub fn log(&self, file: &str) -> String {
        read(&self.folder.path().join(file))
    }

    /// Asserts the exit code, and that `texts` appear on stderr in this order.
    pub fn said(&self, code: i32, texts: &[&str]) -> &Self {
        assert_eq!(self.status.code(), Some(code), "{:?}\n{}", self.status, self.stderr);
        let mut rest = self.stderr.as_str();
        for text in texts {
            let at = rest.find(text).unwrap_or_else(|| panic!("no {text:?} (in this place) in\n{}", self.stderr));
            rest = &rest[at + text.len()..];
        }
        self
    }
}

pub fn read(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn shared_memory() -> BTreeSet<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Returns the living processes with `marker` in their environment.
fn marked(marker: &str) -> Vec<i32> {
    let wanted = format!("LAUNCH_TEST={marker}");
    let is_marked = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    };
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(is_marked).collect()
}

/// Returns the kernel's letter for the state of a process.
fn state(pid: Pid) -> Option<char> {
    let stat = read(&PathBuf::from(format!("/proc/{}/stat", pid.as_raw_nonzero())));
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
}

/// Waits until each process is in one of the `wanted` states.
pub fn wait_for_states(pids: &[Pid], wanted: &[char]) {
    let until = Instant::now() + LIMIT;
    while !pids.iter().all(|pid| state(*pid).is_some_and(|state| wanted.contains(&state))) {
        assert!(Instant::now() < until, "{:?}", pids.iter().map(|pid| state(*pid)).collect::<Vec<_>>());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns whether a process exists and is not a zombie.
pub fn lives(pid: Pid) -> bool {
    state(pid).is_some_and(|state| state != 'Z')
}
