//! `benches/first_light.sh`: slices, resumption, retries, failures, table and bad input. The programs are
//! `first_light_support/program.sh`; `benches/gpu_check/on_cpu.sh` runs the real ones.

use std::{
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::common::{Ended, children, entries, signal_process, wait_until};
use tempfile::TempDir;

struct Bench {
    folder: TempDir,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/first_light_support/program.sh");
        std::fs::create_dir(folder.path().join("bin")).unwrap();
        for name in ["trainer", "gpu_check", "step", "python", "compute-sanitizer"] {
            symlink(&program, folder.path().join("bin").join(name)).unwrap();
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, variables: &[(&str, &str)]) -> Command {
        let mut command = Command::new("env");
        command.args(["--default-signal=HUP,INT,QUIT,TERM", "bash"]);
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/first_light.sh")).arg("out");
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        let unset =
            ["DATA", "LIMIT", "ONLY", "AGAIN", "WORK", "CACHE", "NETWORKS", "BATCHES", "STEPS", "NETWORK", "COMPARED"];
        let more =
            ["SIZES", "SETTINGS", "TOP1", "EPOCH_CONFIG", "STEP_LIMIT", "PEER_DEVICE", "TRAIN", "CUDA_VISIBLE_DEVICES"];
        // What program.sh reads.
        let programs =
            ["FAIL", "HANG", "HANG_ONCE", "FEATURES", "GPUS", "KILLED_CODE", "RANDOM_LOSS", "TOP1_REACHED", "NO_TORCH"];
        for variable in unset.into_iter().chain(more).chain(programs) {
            command.env_remove(variable);
        }
        for (variable, name) in
            [("TRAINER", "trainer"), ("GPU_CHECK", "gpu_check"), ("STEP", "step"), ("PYTHON", "python")]
        {
            command.env(variable, self.path("bin").join(name));
        }
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.path("bin").display())).env("CALLS", self.path("calls"));
        command.envs(variables.iter().copied());
        command
    }

    fn run(&self, variables: &[(&str, &str)]) -> Ended {
        self.command(variables).output().expect("bash starts").into()
    }

    /// Returns the calls of programs that contain a text.
    fn calls(&self, text: &str) -> usize {
        let calls = std::fs::read_to_string(self.path("calls")).unwrap_or_default();
        calls.lines().filter(|line| line.contains(text)).count()
    }
}

/// Returns the line of a step.
fn line<'a>(table: &'a str, step: &str) -> &'a str {
    let mut lines = table.lines().filter(|line| line.split(' ').next() == Some(step));
    lines.next().unwrap_or_else(|| panic!("no line of {step}:\n{table}"))
}

#[track_caller]
fn has(table: &str, step: &str, words: &[&str]) {
    let line = line(table, step);
    assert!(words.iter().all(|word| line.contains(word)), "{words:?}: {line}");
}

#[test]
fn all_steps_run_once_and_the_table_fits_a_screen() {
    let bench = Bench::new();
    let ended = bench.run(&[]).expect(0);
    let table = &ended.stdout;
    assert!(table.starts_with("first light: NVIDIA H200 (9.0), driver 580.1 for CUDA 13.0, NVRTC 13.0\n"), "{table}");
    assert!(table.lines().count() <= 40 && table.lines().all(|line| line.chars().count() <= 80), "{table}");
    assert!(table.contains("34 passed, 0 failed, 0 skipped, 0 left"), "{table}");
    has(table, "quickstart-3", &["passed", "losses as in quickstart-2"]);
    has(table, "launched", &["passed", "losses as in quickstart-2"]);
    has(table, "densenet121", &["128", "2.00", "3.00", "1.50", "1.0/2.0", "1/9"]);
    let names: Vec<_> = entries(&bench.path("out")).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
    let logs = ["checks.log", "epochs.log", "more.log", "results.jsonl", "table.txt", "times.log", "training.log"];
    assert_eq!(names, logs);
    assert_eq!(std::fs::read_to_string(bench.path("out/table.txt")).unwrap(), *table);

    let calls = bench.calls("");
    let again = bench.run(&[]).expect(0);
    assert_eq!(again.stdout, *table);
    // Only the list of networks and the search for data.
    assert!(bench.calls("") - calls <= 2, "finished steps do not run again");

    // Many lines: steps that passed share lines.
    let many = bench.run(&[("BATCHES", "1 2 3 4 5"), ("STEPS", "2")]).expect(0).stdout;
    assert!(many.lines().count() <= 40 && many.contains("more: 7 passed: networks, matrix"), "{many}");
}

#[test]
fn a_call_ends_with_its_slice_and_the_next_one_continues() {
    let bench = Bench::new();
    // A call has 105 seconds and a step needs 106: each call runs its first step, in the time that it has, and no other.
    let slice = [("LIMIT", "120"), ("STEP_LIMIT", "106"), ("ONLY", "checks training")];
    let mut codes = Vec::new();
    let table = loop {
        let ended = bench.run(&slice);
        codes.push(ended.code);
        match ended.code {
            Some(75) => assert!(ended.stdout.contains("left: call again") && codes.len() < 13, "{}", ended.stdout),
            _ => break ended.expect(0).stdout,
        }
    };
    assert_eq!(codes.len(), 13, "one step per call: {codes:?}");
    assert!(table.contains("13 passed, 0 failed, 0 skipped, 0 left"), "{table}");
    assert_eq!(bench.calls("gpu_check --ops"), 1, "no step is repeated");
}

#[test]
fn a_failed_step_does_not_stop_the_others_and_a_timeout_is_tried_twice() {
    let bench = Bench::new();
    let both = ("ONLY", "checks training");
    let wrong = [("FAIL", "gpu_check --ops"), ("RANDOM_LOSS", "yes"), ("KILLED_CODE", "1"), both];
    let table = bench.run(&wrong).expect(1).stdout;
    has(&table, "ops", &["FAILED", "error: broken on purpose"]);
    has(&table, "quickstart-3", &["FAILED", "the losses are not those of quickstart-2"]);
    has(&table, "sync-bn", &["passed"]);
    has(&table, "killed-rank", &["FAILED", "the job ended with exit code 1"]);
    assert!(table.contains("9 passed, 4 failed"), "{table}");

    // A step that hangs needs all of its time. The second attempt of a step that hangs once has time on a busy machine too.
    let hanging = [("AGAIN", "clip"), ("HANG", "grad_clip"), ("STEP_LIMIT", "1"), both];
    has(&bench.run(&hanging).expect(1).stdout, "clip", &["TIMEOUT", "attempt 2: not done in 2 s"]);
    let once = [("AGAIN", "five-steps"), ("HANG_ONCE", "max_steps=5"), ("STEP_LIMIT", "15"), both];
    let table = bench.run(&once).expect(1).stdout;
    has(&table, "five-steps", &["passed", "attempt 2"]);
    assert!(table.contains("8 passed, 5 failed"), "{table}");
    // The script notes each start. A program that is killed at once may not have noted its call.
    let started = std::fs::read_to_string(bench.path("out/results.jsonl")).unwrap();
    let started = |step: &str| {
        let of_step = started.lines().filter(|line| line.contains(&format!("\"step\": \"{step}\"")));
        of_step.filter(|line| line.contains("\"state\": \"started\"")).count()
    };
    assert_eq!((started("clip"), started("five-steps")), (3, 3));

    let unknown = bench.run(&[("AGAIN", "nothing")]).expect(2);
    assert!(unknown.stderr.contains("AGAIN=nothing") && unknown.stderr.contains("hint:"), "{}", unknown.stderr);
    let table = bench.run(&[("AGAIN", "failed quickstart-2"), both]).expect(0).stdout;
    assert!(table.contains("13 passed, 0 failed"), "{table}");
    assert_eq!((bench.calls("--ops"), bench.calls("max_steps=5")), (2, 3), "only what failed runs again");
}

#[test]
fn an_accuracy_that_is_too_low_fails_and_steps_with_missing_parts_are_skipped() {
    let bench = Bench::new();
    std::fs::remove_file(bench.path("bin/compute-sanitizer")).unwrap();
    let settings =
        [("TOP1_REACHED", "81"), ("NO_TORCH", "yes"), ("FAIL", "trainer data verify cifar10"), ("NETWORKS", "lenet")];
    let table = bench.run(&settings).expect(1).stdout;
    has(&table, "quickstart", &["FAILED", "the last top-1 is below 82 %"]);
    has(&table, "quickstart-3", &["passed", "losses as in quickstart-2"]);
    has(&table, "memcheck", &["skipped", "compute-sanitizer is not installed"]);
    has(&table, "epoch-resnet18", &["skipped", "no cifar10 in DATA"]);
    has(&table, "lenet", &["2.00", "skipped"]);
    assert!(table.contains("PyTorch was skipped: ") && table.contains("no PyTorch: No module named"), "{table}");
    // What is there now is run now.
    let table = bench.run(&[("AGAIN", "failed"), ("NETWORKS", "lenet")]).expect(0).stdout;
    has(&table, "lenet", &["2.00", "3.00", "1.50"]);
    has(&table, "epoch-resnet18", &["passed"]);
}

#[test]
fn a_signal_ends_the_step_and_a_killed_call_counts_as_a_timeout() {
    let bench = Bench::new();
    let hanging = [("HANG", "gpu_check --ops"), ("ONLY", "checks")];
    for (signal, code) in [(15, Some(143)), (9, None)] {
        let calls = bench.calls("--ops");
        let mut script = bench.command(&hanging).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("the step", || {
            assert!(script.try_wait().unwrap().is_none(), "the script has ended");
            bench.calls("--ops") > calls
        });
        // A killed script leaves its child behind.
        let orphans = if signal == 9 { children(script.id()) } else { Vec::new() };
        signal_process(script.id(), signal);
        let ended = Ended::from(script.wait_with_output().unwrap());
        assert_eq!(ended.code, code, "{}", ended.stderr);
        orphans.into_iter().for_each(|orphan| signal_process(orphan, 15));
        if signal == 15 {
            has(&ended.stdout, "ops", &["stopped"]);
        }
    }
    let table = bench.run(&[("ONLY", "checks")]).expect(0).stdout;
    has(&table, "ops", &["passed", "attempt 2"]);
}

#[test]
fn bad_input_is_an_error_with_a_hint() {
    let bench = Bench::new();
    std::fs::write(bench.path("file"), "not a folder").unwrap();
    let file = bench.path("file");
    let cases = [
        ("TRAINER", "nowhere/trainer", "nowhere/trainer is not a program"),
        ("GPU_CHECK", "nowhere/gpu_check", "nowhere/gpu_check is not a program"),
        ("STEP", "file", "file is not a program"),
        ("LIMIT", "ten", "LIMIT=ten is not a whole number"),
        ("LIMIT", "5", "LIMIT=5 is not a whole number of at least 20"),
        ("BATCHES", "128 -1", "BATCHES=-1"),
        ("ONLY", "checks nonsense", "there is no group nonsense"),
        ("NETWORKS", "resnet18 resnot18", "there is no network resnot18"),
        ("EPOCH_CONFIG", "nowhere.toml", "nowhere.toml is not a file"),
        ("WORK", file.to_str().unwrap(), "cannot be written"),
        ("CACHE", file.to_str().unwrap(), "cannot be written"),
        ("FEATURES", "", "was built without GPUs"),
        ("GPUS", "", "this machine has no GPU"),
    ];
    for (variable, value, cause) in cases {
        let ended = bench.run(&[(variable, value)]).expect(2);
        assert!(ended.stderr.contains(cause), "{variable}={value}: {}", ended.stderr);
        assert!(ended.stderr.lines().any(|line| line.starts_with("hint: ")), "{}", ended.stderr);
    }
    std::fs::remove_dir_all(bench.path("out")).unwrap();
    std::fs::write(bench.path("out"), "a file").unwrap();
    let refused = bench.run(&[]).expect(2);
    assert!(refused.stderr.contains("the folder out cannot be written"), "{}", refused.stderr);
    std::fs::remove_file(bench.path("out")).unwrap();
    std::fs::create_dir(bench.path("out")).unwrap();
    std::fs::write(bench.path("out/results.jsonl"), "torn\n{}\n").unwrap();
    let damaged = bench.run(&[]).expect(2);
    assert!(damaged.stderr.contains("results.jsonl:1: this is not a result"), "{}", damaged.stderr);
    // The last line may be torn: the machine may have stopped while it was written.
    std::fs::write(bench.path("out/results.jsonl"), "{\"step\": \"ops\", \"sta").unwrap();
    bench.run(&[("ONLY", "checks")]).expect(0);
    bench.run(&[("ONLY", "checks")]).expect(0);
}
