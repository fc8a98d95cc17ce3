//! `trainer sweep`: combinations, slots, failures, interruption and continuation, mistakes.

use std::path::Path;

use crate::common::{self, Bench, CONFIG, children, entries, signal, wait_until};
use serde_json::Value;

fn sweep(bench: &Bench, extra: &[&str]) -> common::Ended {
    bench.run(&[&["sweep", "--config", "config.toml", "--out", "out", "--set", "train.epochs=1"], extra].concat())
}

fn state(bench: &Bench) -> Value {
    serde_json::from_slice(&std::fs::read(bench.path("out/sweep.json")).expect("sweep.json")).expect("JSON")
}

fn states(bench: &Bench) -> Vec<String> {
    let state = state(bench);
    let runs = state["runs"].as_array().expect("runs");
    runs.iter().map(|run| run["state"].as_str().expect("a state").to_owned()).collect()
}

/// Returns the run folder of run `number`.
fn run_folder(bench: &Bench, number: usize) -> std::path::PathBuf {
    let folder = bench.path(&format!("out/runs/{number:03}"));
    entries(&folder).into_iter().find(|path| path.is_dir()).expect("a run folder")
}

#[test]
fn each_combination_of_values_is_a_normal_run() {
    let bench = Bench::new(CONFIG);
    let lists = ["--set", "optimizer.lr=0.05,0.01", "--set", "train.seed=0,1", "--set", "data.limit_train=64"];
    let ended = sweep(&bench, &[&["--cpus", "2"], &lists[..]].concat()).expect(0);
    assert_eq!(states(&bench), ["done"; 4]);
    let alone =
        ["--set", "train.epochs=1", "--set", "data.limit_train=64", "--set", "optimizer.lr=0.01", "--seed", "0"];
    // A run of the sweep has one of two slots
    let alone = bench.train("alone", &[&alone[..], &["--cpus", "1"]].concat());
    assert_eq!(common::losses(&run_folder(&bench, 3)).len(), 4);
    common::assert_same_curve(
        "alone",
        &common::loss_values(&alone),
        &common::loss_values(&run_folder(&bench, 3)),
        1e-4,
    );
    // The table is sorted by accuracy, and says what CSV and JSON say
    let csv = std::fs::read_to_string(bench.path("out/sweep.csv")).unwrap();
    assert!(csv.starts_with("run,optimizer.lr,train.seed,state,best_top1,"), "{csv}");
    let best: Vec<f64> = csv.lines().skip(1).map(|line| line.split(',').nth(4).unwrap().parse().unwrap()).collect();
    assert!(best.len() == 4 && best.is_sorted_by(|one, other| one >= other), "{csv}");
    let numbers = |text: &str, separator: char| -> Vec<usize> {
        text.lines().filter_map(|line| line.split(separator).next()?.parse().ok()).collect()
    };
    assert_eq!(numbers(&ended.stdout, ' '), numbers(&csv, ','), "{}", ended.stdout);
    assert!(ended.stderr.contains("run 003 of 4: optimizer.lr=0.01 train.seed=0: done, top-1 "), "{}", ended.stderr);
    let log = std::fs::read_to_string(bench.path("out/runs/003/output.log")).unwrap();
    assert!(log.contains("run folder: out/runs/003/"), "{log}");
}

#[test]
fn a_failed_run_does_not_end_the_others() {
    let bench = Bench::new(CONFIG);
    // The loss is not finite after some steps
    let lists =
        ["--set", "optimizer.lr=1000,0.01", "--set", "schedule.kind=constant", "--set", "optimizer.weight_decay=10"];
    let ended = sweep(&bench, &[&["--cpus", "2", "--json"], &lists[..]].concat()).expect(1);
    let printed: Value = serde_json::from_str(&ended.stdout).expect("JSON on stdout");
    assert_eq!(printed, state(&bench));
    assert_eq!(states(&bench), ["failed", "done"]);
    let failed = &printed["runs"][0];
    assert_eq!(failed["exit_code"], 1);
    assert!(failed["message"].as_str().unwrap().contains("the training loss is"), "{failed}");
    assert!(printed["runs"][1]["best"].as_f64().unwrap() > 0.0);
}

/// Two runs of two workers on four slots: each has its own cores or threads, its own launcher and its own log.
#[test]
fn an_interrupted_sweep_continues() {
    let bench = Bench::new(CONFIG);
    let start = ["sweep", "--config", "config.toml", "--out", "out", "--cpus", "4", "--workers-per-run", "2"];
    let endless = ["--set", "train.seed=0,1,2", "--set", "train.epochs=5000", "--set", "log.every=1"];
    let child = bench.spawn(&[&start[..], &endless].concat());
    let steps = |number: usize| {
        let runs = entries(&bench.path(&format!("out/runs/{number:03}")));
        let metrics = runs.into_iter().find(|path| path.is_dir()).map(|run| run.join("metrics.jsonl"));
        metrics.and_then(|path| std::fs::read_to_string(path).ok()).map_or(0, |text| text.lines().count())
    };
    wait_until("two runs", || steps(1) > 3 && steps(2) > 3);
    let launchers = children(child.id());
    assert_eq!(launchers.len(), 2, "the third run waits for slots");
    let workers: Vec<u32> = launchers.iter().flat_map(|&launcher| children(launcher)).collect();
    assert_eq!(workers.len(), 4);
    signal(&child, 15);
    let ended = common::Ended::from(child.wait_with_output().expect("output")).expect(143);
    assert!(ended.stderr.contains("trainer sweep --resume out"), "{}", ended.stderr);
    for process in launchers.into_iter().chain(workers) {
        assert!(!Path::new(&format!("/proc/{process}")).exists(), "{process} is left");
    }
    assert_eq!(states(&bench), ["interrupted", "interrupted", "waiting"]);

    // From here on the runs are short
    for config in entries(&bench.path("out/runs")).iter().flat_map(|run| entries(run)).chain([bench.path("out")]) {
        let path = config.join("config.toml");
        if let Ok(text) = std::fs::read_to_string(&path) {
            let text = text.replace("max_steps = 0\n", "").replace("[train]\n", "[train]\nmax_steps = 400\n");
            std::fs::write(path, text).unwrap();
        }
    }
    let ended = bench.run(&["sweep", "--resume", "out"]).expect(0);
    assert_eq!(states(&bench), ["done"; 3]);
    assert!(!ended.stderr.contains("run 004"));
    assert!((1..=3).all(|number| steps(number) >= 400));
    // Nothing is left to do
    let ended = bench.run(&["sweep", "--resume", "out", "--cpus", "2"]).expect(0);
    assert!(ended.stderr.is_empty() && ended.stdout.matches(" done").count() == 3, "{}", ended.stdout);
}

#[test]
fn mistakes_exit_with_code_2_before_anything_starts() {
    let bench = Bench::new(CONFIG);
    let cases: [(&[&str], &str); 12] = [
        (&["--cpus", "2"], "nothing to sweep"),
        (&["--cpus", "2", "--set", "optimizer.lr=0.1"], "nothing to sweep"),
        (&["--cpus", "2", "--set", "optimizer.lrr=0.1,0.2"], "unknown key `lrr`"),
        (&["--cpus", "2", "--set", "optimizer.lr=0.1,\"x\""], "--set optimizer.lr=\"x\""),
        (&["--cpus", "2", "--set", "optimizer.kind=sgd,adamw"], "not a list of TOML values"),
        (
            &["--cpus", "2", "--set", "schedule.milestones=0.5,0.7", "--set", "schedule.kind=multi-step"],
            "array of numbers",
        ),
        (&["--cpus", "2", "--set", "train.seed=0,1", "--workers-per-run", "3"], "--workers-per-run 3"),
        (&["--cpus", "0", "--set", "train.seed=0,1"], "--cpus 0"),
        (&["--cpus", "18446744073709551615", "--set", "train.seed=0,1"], "from 1 to 1024"),
        (&["--gpus", "64", "--set", "train.seed=0,1"], "--gpus"),
        (&["--cpus", "2", "--workers-per-run", "2", "--set", "train.batch_size=16,1"], "a batch of 1 cannot be shared"),
        (&["--cpus", "2", "--set", "parallel.mode=\"single\",\"dpp\""], "did you mean `dp`?"),
    ];
    for (arguments, named) in cases {
        let ended = bench.run(&[&["sweep", "--config", "config.toml"], arguments].concat()).expect(2);
        assert!(ended.stderr.contains(named) && ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
    }
    assert!(entries(&bench.path("runs")).is_empty());
    for (arguments, named) in
        [(&["--resume", "."][..], "is not the folder of a sweep"), (&["--resume", "none"], "none: is not the folder")]
    {
        let ended = bench.run(&[&["sweep"], arguments].concat()).expect(2);
        assert!(ended.stderr.contains(named) && ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
    }
}
