//! `--autotune`: all ranks choose the same settings at the same step, and a run keeps them whatever happens to it.
//!
//! `TRAINER_AUTOTUNE_TEST` makes times up (`strategy/ddp/autotune.rs`), so nothing here depends on the machine's speed.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;

use crate::common::{
    self, Bench, CONFIG, ENDLESS, Ended, children, first_entry, free_port, losses, signal_process, wait_until,
};
use serde_json::Value;

const PRETEND: &str = "TRAINER_AUTOTUNE_TEST";
/// LeNet has 0.17 MiB of gradients, so this first bucket makes two of one.
const FASTEST: &str = "steps=1 first_bucket_mb=0.125";

fn tuned(bench: &Bench, pretend: &str, arguments: &[&str]) -> Ended {
    bench.command().env(PRETEND, pretend).args(arguments).output().expect("the binary starts").into()
}

fn read(run: &Path, file: &str) -> String {
    std::fs::read_to_string(run.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn lines(run: &Path) -> usize {
    std::fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

fn chosen(run: &Path) -> Value {
    serde_json::from_str::<Value>(&read(run, "autotune.json")).expect("JSON")["chosen"].take()
}

/// Shared memory adds up in the order of ranks whatever the buckets are, so tuning changes no bit.
#[test]
fn a_tuned_run_has_the_losses_of_a_run_without_tuning() {
    let bench = Bench::new(CONFIG);
    let plain = bench.train("plain", &["--cpus", "3"]);
    let start = ["--config", "config.toml", "--run-dir", "tuned", "--cpus", "3", "--autotune", "--log-level", "debug"];
    // Ends in the second of three epochs of 33 steps, after tuning
    let ended = tuned(&bench, FASTEST, &[&start[..], &["--set", "train.max_steps=40"]].concat()).expect(0);
    assert!(ended.stdout.contains("autotune: "), "{}", ended.stdout);
    assert!(ended.stdout.lines().any(|line| line.contains("0.125") && line.ends_with("chosen")), "{}", ended.stdout);
    let run = bench.only_run("tuned");
    assert_eq!(chosen(&run)["first_bucket_mb"], 0.125);
    let config = read(&run, "config.toml");
    assert!(config.contains("first_bucket_mb = 0.125") && !config.contains("autotune"), "{config}");
    // Each rank has switched at the same steps to the same settings
    let switches = |rank: usize| -> Vec<String> {
        let log = read(&run, &format!("logs/rank-{rank}/diagnostics.log"));
        let of_tuning = log.lines().filter_map(|line| line.split_once("autotune").map(|(_, rest)| rest.to_owned()));
        of_tuning.collect()
    };
    let own = switches(0);
    assert!(own.len() > 2 && own.last().is_some_and(|last| last.contains("0.125")), "{own:?}");
    assert_eq!([switches(1), switches(2)], [own.clone(), own]);
    assert_eq!(losses(&run), losses(&plain)[..40], "40 steps");
}

/// A ring adds up in an order that depends on the buckets: with three ranks the tuned run agrees within rounding.
#[test]
fn over_tcp_tuning_changes_rounding_only() {
    let bench = Bench::new(CONFIG);
    let short = ["--cpus", "3", "--backend", "tcp", "--set", "train.max_steps=30", "--set", "optimizer.lr=0.001"];
    let plain = bench.train("plain", &short);
    let start = ["--config", "config.toml", "--run-dir", "tuned", "--autotune"];
    tuned(&bench, FASTEST, &[&start[..], &short].concat()).expect(0);
    let run = bench.only_run("tuned");
    assert_eq!(chosen(&run)["first_bucket_mb"], 0.125);
    common::assert_same_curve("tcp", &common::loss_values(&plain), &common::loss_values(&run), 1e-4);
}

#[test]
fn a_job_that_is_started_again_keeps_its_choice() {
    let bench = Bench::new(CONFIG);
    let steps = |root: &str| first_entry(&bench.path(root)).map_or(0, |run| lines(&run));
    let plain = bench.stopped("plain", &["--cpus", "2"], 60);
    let mut command = bench.command();
    command.env(PRETEND, FASTEST).args(["--config", "config.toml", "--run-dir", "tuned", "--cpus", "2", "--autotune"]);
    command.args(["--set", "log.every=1", "--max-restarts", "1"]).args(ENDLESS);
    command.stdout(Stdio::piped()).stderr(File::create(bench.path("stderr")).expect("a file"));
    let child = command.spawn().expect("the binary starts");
    wait_until("a choice", || first_entry(&bench.path("tuned")).is_some_and(|run| run.join("autotune.json").exists()));
    signal_process(children(child.id())[1], 9);
    let said = || std::fs::read_to_string(bench.path("stderr")).unwrap_or_default();
    wait_until("another attempt", || said().contains("attempt 2 of 2"));
    wait_until("steps", || steps("tuned") > 60);
    // Workers that have not joined yet would end without a checkpoint
    let run = bench.only_run("tuned");
    wait_until("steps of the second attempt", || {
        std::fs::read_to_string(run.join("logs/rank-0/stdout.log")).is_ok_and(|text| text.contains("eval loss"))
    });
    signal_process(child.id(), 15);
    let ended = Ended::from(child.wait_with_output().expect("output"));
    assert_eq!(ended.code, Some(143), "{}", said());
    assert_eq!(ended.stdout.matches("autotune: ").count(), 1, "{}", ended.stdout);
    assert!(!read(&run, "config.toml").contains("autotune"));
    let (one, other) = (losses(&plain), losses(&run));
    let both = one.len().min(other.len());
    assert!(both >= 60);
    assert_eq!(one[..both], other[..both]);
}

#[test]
fn a_resumed_run_is_not_tuned_again() {
    let bench = Bench::new(CONFIG);
    let arguments = ["--run-dir", "runs", "--cpus", "2", "--autotune", "--set", "train.epochs=1"];
    tuned(&bench, FASTEST, &[&["--config", "config.toml"], &arguments[..]].concat()).expect(0);
    let run = bench.only_run("runs");
    let folder = run.to_str().unwrap();
    let ended =
        tuned(&bench, "steps=1 first_bucket_mb=0.5", &["--resume", folder, "--set", "train.epochs=2"]).expect(0);
    assert!(!ended.stdout.contains("autotune: "), "{}", ended.stdout);
    assert!(read(&run, "config.toml").contains("first_bucket_mb = 0.125"));
    // The file that the run was started with is that of the run, although the run's settings were tuned.
    bench.run(&["--resume", folder, "--config", "config.toml", "--set", "train.epochs=2", "--dry-run"]).expect(0);
    // On request it is
    let again = ["--resume", folder, "--autotune", "--set", "train.epochs=3"];
    let ended = tuned(&bench, "steps=1 bucket_mb=0.25 compression=bf16", &again).expect(0);
    assert!(ended.stdout.contains("autotune: "), "{}", ended.stdout);
    assert_eq!(chosen(&run)["compression"], "none", "a lossy format was not allowed");
}

/// Node 0 alone writes the choice. The other node's config.toml still asks for tuning when the run is resumed.
#[test]
fn all_nodes_continue_with_the_choice_of_node_0() {
    let bench = Bench::new(CONFIG);
    let run = |extra: &dyn Fn(usize) -> Vec<String>| -> Vec<Ended> {
        let port = free_port().to_string();
        let start = |node: usize| {
            let mut command = bench.command();
            command.env(PRETEND, FASTEST).args(["--cpus", "1", "--nnodes", "2", "--node-rank", &node.to_string()]);
            command.args(["--master-port", &port]).args(extra(node));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
        };
        let nodes = [0, 1].map(start);
        nodes.map(|node| Ended::from(node.wait_with_output().expect("output")).expect(0)).into()
    };
    let words = |text: String| text.split(' ').map(str::to_owned).collect();
    run(&|node| words(format!("--config config.toml --run-dir node-{node} --autotune --epochs 1")));
    let folders = [0, 1].map(|node| bench.only_run(&format!("node-{node}")));
    assert_eq!(chosen(&folders[0])["first_bucket_mb"], 0.125);
    assert!(read(&folders[1], "config.toml").contains("autotune = "));
    let ended = run(&|node| words(format!("--resume {} --epochs 2", folders[node].display())));
    assert!(ended.iter().all(|node| !node.stdout.contains("autotune: ")), "{}", ended[0].stdout);
    assert_eq!(losses(&folders[0]).len(), 66);
}

#[test]
fn lossy_formats_are_tried_only_if_they_are_allowed() {
    let bench = Bench::new(CONFIG);
    let allow = ["--set", "parallel.autotune=[\"bucket_mb\", \"bf16\"]", "--set", "train.epochs=2"];
    let arguments = ["--config", "config.toml", "--run-dir", "runs", "--cpus", "2", "--autotune"];
    tuned(&bench, "steps=1 compression=bf16", &[&arguments[..], &allow].concat()).expect(0);
    let run = bench.only_run("runs");
    let report: Value = serde_json::from_str(&read(&run, "autotune.json")).unwrap();
    assert_eq!(report["chosen"]["compression"], "bf16");
    let formats: Vec<_> = report["trials"]
        .as_array()
        .unwrap()
        .iter()
        .map(|trial| trial["settings"]["compression"].as_str().unwrap())
        .collect();
    assert!(!formats.contains(&"fp16"), "{formats:?}");
    assert!(read(&run, "config.toml").contains("compression = \"bf16\""));
}

#[test]
fn a_worker_that_dies_while_tuning_ends_the_job() {
    let bench = Bench::new(CONFIG);
    // Samples that never end
    let mut command = bench.command();
    command.env(PRETEND, "steps=100000000").args(["--config", "config.toml", "--run-dir", "runs", "--cpus", "2"]);
    command.args(["--autotune", "--set", "log.every=1"]).args(ENDLESS);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("the binary starts");
    wait_until("steps", || first_entry(&bench.path("runs")).is_some_and(|run| lines(&run) > 12));
    signal_process(children(child.id())[1], 9);
    let ended = Ended::from(child.wait_with_output().expect("output")).expect(3);
    assert!(ended.stderr.contains("rank 1 was killed by SIGKILL"), "{}", ended.stderr);
    assert!(read(&bench.only_run("runs"), "config.toml").contains("autotune = "), "a resumed run tunes");
}

#[test]
fn a_run_with_nothing_to_tune_is_refused() {
    let bench = Bench::new(CONFIG);
    let cases: [(&[&str], &str); 4] = [
        (&["--autotune"], "one worker has no other"),
        (&["--autotune", "--cpus", "1"], "one worker has no other"),
        (&["--autotune", "--cpus", "2", "--mode", "dp"], "has nothing to tune"),
        (&["--cpus", "2", "--set", "parallel.autotune=[\"lr\"]"], "unknown value \"lr\""),
    ];
    for (arguments, named) in cases {
        let ended = bench.run(&[&["--config", "config.toml"], arguments].concat()).expect(2);
        assert!(ended.stderr.contains(named) && ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
    }
    assert!(first_entry(&bench.path("runs")).is_none(), "nothing was started");
    let ended = tuned(&bench, "steps=50", &["--config", "config.toml", "--cpus", "2", "--autotune", "--epochs", "1"]);
    let ended = ended.expect(0);
    assert!(ended.stdout.contains("33 steps are too few for a choice"), "{}", ended.stdout);
}

/// `parallel.threads` without tuning: another number of threads, the same training within rounding.
#[test]
fn threads_of_a_step_can_be_set() {
    let bench = Bench::new(CONFIG);
    let short = ["--cpus", "2", "--set", "train.max_steps=5"];
    let one = bench.train("one", &[&short[..], &["--set", "parallel.threads=1"]].concat());
    let two = bench.train("two", &[&short[..], &["--set", "parallel.threads=2"]].concat());
    assert!(read(&two, "config.toml").contains("threads = 2"));
    common::assert_same_curve("threads", &common::loss_values(&one), &common::loss_values(&two), 1e-4);
}
