//! `--log-level`, `TRAINER_LOG` and `--secret-file` of the real binary.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use crate::common::{self, Bench, CONFIG};

const STEPS: [&str; 6] = ["--config", "config.toml", "--set", "train.max_steps=3", "--run-dir", "runs"];

fn log(run: &Path, name: &str) -> String {
    fs::read_to_string(run.join("logs").join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn assert_contains(text: &str, expected: &[&str]) {
    for words in expected {
        assert!(text.contains(words), "{words:?} is not in\n{text}");
    }
}

#[test]
fn one_process_writes_its_diagnostics_into_the_run_folder() {
    let bench = Bench::new(CONFIG);
    let ended = bench.run(&[&STEPS[..], &["--log-level", "debug"]].concat()).expect(0);
    let text = log(&bench.only_run("runs"), "diagnostics.log");
    assert_contains(&text, &["INFO", "read the data set", "epoch done", "DEBUG", "saved a checkpoint"]);
    assert!(!text.contains("step done"), "trace is not on: {text}");
    assert!(!(ended.stdout + &ended.stderr).contains("read the data set"), "nothing is on the screen");
}

#[test]
fn each_rank_writes_its_diagnostics_beside_its_output() {
    let bench = Bench::new(CONFIG);
    let mut command = bench.command();
    command.args(STEPS).args(["--cpus", "2"]).env("TRAINER_LOG", "warn,launch=debug,trainer=trace");
    common::Ended::from(command.output().expect("the program runs")).expect(0);
    let run = bench.only_run("runs");
    assert_contains(&log(&run, "diagnostics.log"), &["starting 2 workers", "started a worker", "attempt ended"]);
    for rank in 0..2 {
        let text = log(&run, &format!("rank-{rank}/diagnostics.log"));
        assert_contains(&text, &["all ranks have joined", "created the process group", "assigned", "step done"]);
    }
}

#[test]
fn without_a_level_there_are_no_diagnostics() {
    let bench = Bench::new(CONFIG);
    for extra in [&[][..], &["--log-level", "off"]] {
        bench.run(&[&STEPS[..5], &[&format!("runs{}", extra.len())], extra].concat()).expect(0);
        assert!(!bench.only_run(&format!("runs{}", extra.len())).join("logs/diagnostics.log").exists());
    }
}

#[test]
fn an_unknown_level_is_refused_before_anything_starts() {
    let bench = Bench::new(CONFIG);
    let ended = bench.run(&[&STEPS[..], &["--log-level", "loud"]].concat()).expect(2);
    assert_contains(&ended.stderr, &["error: --log-level loud: there is no level `loud`", "hint: off, error, warn"]);
    assert!(!bench.path("runs").exists());
}

#[test]
fn a_bad_secret_file_is_refused_before_anything_starts() {
    let bench = Bench::new(CONFIG);
    let path = bench.path("secret");
    fs::write(&path, "the right words\n").expect("the folder can be written");
    fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).expect("the file is ours");
    let nodes = ["--cpus", "1", "--nnodes", "2", "--master-port", "29599", "--secret-file", "secret"];
    let ended = bench.run(&[&STEPS[..], &nodes].concat()).expect(2);
    assert_contains(&ended.stderr, &["error: secret: other users may read the job's secret", "hint: chmod 600 secret"]);
    assert!(!bench.path("runs").exists());
}
