//! Signals and closed terminals: the run saves a checkpoint, in all modes, and other commands end.

use std::{
    io::{Read, Write},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use crate::common::{
    Bench, CONFIG, ENDLESS, Ended, MODES, children, entries, signal, signal_process, skip_or_fail, wait_until,
};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};

const HUP: i32 = 1;
const INT: i32 = 2;
const QUIT: i32 = 3;
const SEGV: i32 = 11;
const TERM: i32 = 15;

/// Returns whether the run under `root` has taken some steps.
fn is_training(bench: &Bench, root: &str) -> bool {
    let Some(run) = entries(&bench.path(root)).into_iter().next() else { return false };
    std::fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| text.lines().count() >= 5)
}

/// Starts an endless run and waits until it has taken some steps.
fn start(bench: &Bench, root: &str, mode: &[&str]) -> Child {
    let arguments = ["--config", "config.toml", "--run-dir", root, "--set", "log.every=1"];
    let child = bench.spawn(&[&arguments[..], &ENDLESS, mode].concat());
    wait_until("metrics", || is_training(bench, root));
    child
}

/// Asserts that the run stopped inside an epoch and saved a checkpoint there.
#[track_caller]
fn assert_saved(what: &str, run: &Path) {
    let names: Vec<_> = entries(&run.join("checkpoints"))
        .iter()
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert!(names.iter().any(|name| name.starts_with("step-")), "{what}: {names:?}");
}

/// Returns whether a process catches a signal.
fn catches(process: u32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal - 1) & 1 == 1
}

#[test]
fn hangup_and_quit_save_a_checkpoint_in_every_mode() {
    let bench = Bench::new(CONFIG);
    for (mode, flags) in MODES {
        for (number, name) in [(HUP, "SIGHUP"), (QUIT, "SIGQUIT")] {
            let root = format!("{mode}-{name}");
            let child = start(&bench, &root, flags);
            signal(&child, number);
            let ended: Ended = child.wait_with_output().unwrap().into();
            let ended = ended.expect(128 + number);
            assert!(ended.stdout.contains(&format!("{name} after step")), "{root}: {}", ended.stdout);
            // A step may take minutes, so the answer does not wait for its end.
            let again = if number == HUP { "\n" } else { "; once more ends it at once\n" };
            let answer = format!("{name}: training saves a checkpoint and stops, after the next steps{again}");
            assert_eq!(ended.stderr.contains(&answer), mode != "ddp", "{root}: {}", ended.stderr);
            assert_saved(&root, &bench.only_run(&root));
        }
    }
}

/// An interactive shell whose terminal closes sends SIGHUP, and the kernel sends it again. A session manager sends it together
/// with SIGTERM. The signals arrive while the run stops: it does not end at once.
#[test]
fn a_second_hangup_does_not_end_the_run_before_its_checkpoint() {
    let bench = Bench::new(CONFIG);
    for (mode, flags) in MODES {
        for first in [HUP, INT] {
            let root = format!("{mode}-{first}");
            let child = start(&bench, &root, flags);
            signal(&child, first);
            // An ended process that is not reaped yet accepts signals too.
            (0..20).for_each(|_| signal(&child, HUP));
            let ended: Ended = child.wait_with_output().unwrap().into();
            // A step of microseconds between the two signals may see either of them.
            assert!([Some(129), Some(128 + first)].contains(&ended.code), "{root}: {:?}\n{}", ended.code, ended.stderr);
            assert!(!ended.stderr.contains("ending all workers"), "{root}: {}", ended.stderr);
            assert_saved(&root, &bench.only_run(&root));
        }
    }
}

/// systemd and some batch systems signal the launcher and its workers. The launcher forwards its signal too. A session manager
/// sends SIGHUP right after SIGTERM, so the workers may end with the number of another signal.
#[test]
fn a_signal_to_every_process_of_the_job_saves_a_checkpoint() {
    let bench = Bench::new(CONFIG);
    for (number, of_workers) in [(INT, INT), (TERM, TERM), (TERM, HUP), (HUP, TERM)] {
        let root = format!("ddp-{number}-{of_workers}");
        let child = start(&bench, &root, &["--cpus", "2"]);
        if number != of_workers {
            signal(&child, number);
        }
        // The first worker's signal stops all ranks, so the second one may have ended already.
        for worker in children(child.id()) {
            let worker = rustix::process::Pid::from_raw(worker as i32).unwrap();
            let _ = rustix::process::kill_process(worker, rustix::process::Signal::from_named_raw(of_workers).unwrap());
        }
        if number == of_workers {
            signal(&child, number);
        }
        let ended: Ended = child.wait_with_output().unwrap().into();
        ended.expect(128 + number);
        assert_saved(&root, &bench.only_run(&root));
    }
}

/// Types a command into an interactive shell on a terminal, and closes the terminal once the run trains.
#[test]
fn closing_the_terminal_of_an_interactive_shell_saves_a_checkpoint() {
    for tool in ["bash", "setsid"] {
        if let Err(error) = Command::new(tool).arg("--version").stdout(Stdio::null()).status() {
            return skip_or_fail(tool, error);
        }
    }
    let bench = Bench::new(CONFIG);
    for (mode, flags) in MODES.into_iter().chain([("ddp-again", MODES[2].1)]) {
        let terminal = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(terminal).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let slave = ioctl_tiocgptpeer(&master, terminal).unwrap();
        rustix::io::ioctl_fionbio(&master, true).unwrap();
        let mut master = std::fs::File::from(master);
        let mut shell = Command::new("env");
        shell.args(["--default-signal=HUP,INT,QUIT,TERM", "setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"]);
        shell.current_dir(bench.folder.path()).env_remove("TRAINER_DATA_DIR").env("TERM", "xterm");
        shell.stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap()).stderr(slave);
        let mut child = shell.spawn().unwrap();
        drop(shell);
        let program = env!("CARGO_BIN_EXE_trainer");
        let command =
            ["--config", "config.toml", "--run-dir", mode].into_iter().chain(ENDLESS).chain(flags.iter().copied());
        let command = command.collect::<Vec<_>>().join(" ");
        master.write_all(format!("{program} {command}\n").as_bytes()).unwrap();
        let mut screen = Vec::new();
        wait_until("metrics", || {
            // Reads what there is, so that nobody waits for a full terminal.
            let _ = master.read_to_end(&mut screen);
            is_training(&bench, mode)
        });
        drop(master);
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(HUP), "the shell ended with its terminal: {status}");
        let run = bench.only_run(mode);
        wait_until("the summary", || run.join("summary.json").exists());
        let summary = std::fs::read_to_string(run.join("summary.json")).unwrap();
        assert!(summary.contains("SIGHUP after step"), "{mode}: {summary}");
        assert_saved(mode, &run);
    }
}

#[test]
fn an_evaluation_ends_with_the_signal_that_stopped_it() {
    let bench = Bench::new(&CONFIG.replace("\"lenet\"", "\"resnet18\""));
    let short = ["--set", "train.max_steps=1", "--set", "data.limit_test=1", "--quiet"];
    bench.run(&[&["--config", "config.toml"], &short[..]].concat()).expect(0);
    let weights = bench.only_run("runs").join("checkpoints/last/model.safetensors");
    let arguments = ["eval", "--model", "resnet18", "--data", "fashion-mini", "--batch-size", "1", "--weights"];
    for (number, name) in [(HUP, "SIGHUP"), (INT, "SIGINT")] {
        let mut child = bench.spawn(&[&arguments[..], &[weights.to_str().unwrap()]].concat());
        wait_until("the evaluation", || catches(child.id(), number) || child.try_wait().unwrap().is_some());
        signal(&child, number);
        let ended: Ended = child.wait_with_output().unwrap().into();
        let said = ended.expect(128 + number).stderr;
        assert!(said.contains(&format!("stopped by {name} after ")) && said.contains("of 1,000 images"), "{said}");
    }
}

#[test]
fn the_first_signal_ends_a_benchmark_of_the_collectives() {
    let bench = Bench::new(CONFIG);
    for (number, name) in [(HUP, "SIGHUP"), (INT, "SIGINT")] {
        let mut child = bench.spawn(&["bench", "allreduce", "--sizes", "4", "--ms", "3600000"]);
        let mut head = [0; 8];
        child.stdout.as_mut().unwrap().read_exact(&mut head).expect("the header");
        signal(&child, number);
        let ended: Ended = child.wait_with_output().unwrap().into();
        let said = ended.expect(128 + number).stderr;
        assert!(said.contains(&format!("{name}: ending all workers at once")), "{said}");
        assert!(!said.contains("checkpoint"), "{said}");
    }
}

#[test]
fn a_fault_signal_from_another_process_ends_the_run() {
    let bench = Bench::new(CONFIG);
    let child = start(&bench, "single", &[]);
    signal(&child, SEGV);
    assert_eq!(child.wait_with_output().unwrap().status.signal(), Some(SEGV));

    let child = start(&bench, "ddp", &["--cpus", "2"]);
    signal_process(children(child.id())[1], SEGV);
    let ended: Ended = child.wait_with_output().unwrap().into();
    let said = ended.expect(3).stderr;
    assert!(said.contains("was killed by SIGSEGV"), "{said}");
}
