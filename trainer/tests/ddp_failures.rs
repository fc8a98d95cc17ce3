//! Failures of training with several processes: the error names step and phase, and nothing is left behind.

use std::{
    io::Read,
    path::{Path, PathBuf},
    process::Child,
};

use crate::common::{Bench, CONFIG, Ended, children, entries, losses, signal_process, wait_until};

/// Eight convolutions, so that a process is in forward or backward nearly all the time.
const SLOW: &str = r#"
[model]
name = "vgg11"
[data]
name = "fashion-mini"
image_size = 32
limit_test = 10
[train]
batch_size = 16
[optimizer]
lr = 0.001
"#;

fn start(bench: &Bench, root: &str, extra: &[&str]) -> (Child, Vec<u32>) {
    let arguments = ["--config", "config.toml", "--run-dir", root, "--cpus", "2"];
    let child = bench.spawn(&[&arguments[..], extra].concat());
    wait_until("metrics", || {
        let Some(run) = entries(&bench.path(root)).into_iter().next() else { return false };
        std::fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| text.lines().count() >= 3)
    });
    let workers = children(child.id());
    assert_eq!(workers.len(), 2);
    (child, workers)
}

fn end(child: Child) -> Ended {
    child.wait_with_output().expect("the launcher ends").into()
}

/// Returns the status page of a worker.
fn page(worker: u32) -> PathBuf {
    let is_page = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("trainer-worker"))
    };
    entries(Path::new(&format!("/proc/{worker}/fd"))).into_iter().find(is_page).expect("the worker's status page")
}

fn read(page: &Path) -> String {
    let mut bytes = Vec::new();
    std::fs::File::open(page).and_then(|mut file| file.read_to_end(&mut bytes)).expect("the page can be read");
    String::from_utf8_lossy(&bytes).into_owned()
}

const SIGKILL: i32 = 9;
const SIGCONT: i32 = 18;
const SIGSTOP: i32 = 19;

/// Stops a worker and waits until all its threads have stopped: its status page then no longer changes.
fn stop(worker: u32) {
    signal_process(worker, SIGSTOP);
    wait_until("the worker to stop", || {
        entries(Path::new(&format!("/proc/{worker}/task"))).iter().all(|thread| {
            let stat = std::fs::read_to_string(thread.join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        })
    });
}

/// Stops a worker where its status page contains `status`; `retry` is called before each further attempt.
fn stop_in(worker: u32, status: &str, mut retry: impl FnMut()) {
    let page = page(worker);
    wait_until(status, || {
        stop(worker);
        let found = read(&page).contains(status);
        if !found {
            signal_process(worker, SIGCONT);
            retry();
        }
        found
    });
}

#[test]
fn a_worker_killed_in_forward_or_backward_is_named_with_step_and_phase() {
    let bench = Bench::new(SLOW);
    for (phase, checkpoints) in [("forward", "checkpoint.every=0"), ("backward", "checkpoint.every_steps=2")] {
        let (child, workers) = start(&bench, phase, &["--set", "train.epochs=1000", "--set", checkpoints]);
        stop_in(workers[1], phase, || ());
        signal_process(workers[1], SIGKILL);
        let said = end(child).expect(3).stderr;
        assert!(said.contains("SIGKILL") && said.contains("step ") && said.contains(phase), "{said}");
        let resume = format!("--resume {phase}/");
        let offered = said.lines().any(|line| line.contains("the run has a checkpoint") && line.contains(&resume));
        assert_eq!(offered, phase == "backward", "{said}");
    }
}

#[test]
fn a_worker_killed_in_the_reduction_of_a_bucket_is_named_with_the_bucket() {
    let bench = Bench::new(CONFIG);
    let buckets = ["--set", "parallel.first_bucket_mb=0.001", "--set", "parallel.bucket_mb=0.01"];
    let (child, workers) = start(&bench, "runs", &[&buckets[..], &["--epochs", "100000"]].concat());
    // While the other rank stands still this one waits for it, most of the time in the reduction of a bucket.
    stop(workers[0]);
    let mut attempts = 0;
    stop_in(workers[1], "reducing bucket ", || {
        attempts += 1;
        if attempts % 10 == 0 {
            // This rank may wait in another call: let the other rank take some steps.
            signal_process(workers[0], SIGCONT);
            stop(workers[0]);
        }
    });
    signal_process(workers[1], SIGKILL);
    signal_process(workers[0], SIGCONT);
    let said = end(child).expect(3).stderr;
    assert!(said.contains("SIGKILL") && said.contains("step "), "{said}");
    assert!(said.contains("reducing bucket ") && said.contains(" of "), "{said}");
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_no_partial_folder() {
    let bench = Bench::new(CONFIG);
    // 100 blocks of 512 bytes per file: too little for the model, enough for the rest.
    let trainer = env!("CARGO_BIN_EXE_trainer");
    let script = "trap '' XFSZ; ulimit -f 100; exec \"$@\"";
    let mut command = std::process::Command::new("sh");
    command.current_dir(bench.folder.path()).env_remove("TRAINER_DATA_DIR").env("NO_COLOR", "1");
    command.args(["-c", script, "sh", trainer, "--config", "config.toml", "--run-dir", "full", "--cpus", "2"]);
    command.args(["--set", "parallel.backend=tcp", "--set", "log.tensorboard=false"]);
    let ended: Ended = command.output().expect("a shell").into();
    assert!(ended.code.is_some_and(|code| code != 0), "{}", ended.stdout);
    let said = ended.stderr;
    assert!(said.contains("checkpoints/") && said.contains("rank 0") && said.contains("hint:"), "{said}");
    let run = bench.only_run("full");
    let visible: Vec<_> = entries(&run.join("checkpoints"))
        .into_iter()
        .filter(|path| !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')))
        .collect();
    assert!(visible.is_empty(), "no checkpoint is complete, none is shown: {visible:?}");

    // With room again, the run goes on: from the beginning, because there is no checkpoint.
    bench.run(&["--resume", run.to_str().unwrap(), "--cpus", "2"]).expect(0);
    assert!(losses(&run).len() > 90);
}

/// Returns the spans of a rank's row, as `(name, start, end)` in microseconds.
fn spans(trace: &serde_json::Value, rank: u64, thread: u64) -> Vec<(String, f64, f64)> {
    let events = trace["traceEvents"].as_array().expect("events").iter();
    let of_row = events.filter(|e| e["ph"] == "X" && e["pid"] == rank && e["tid"] == thread);
    of_row
        .map(|event| {
            let start = event["ts"].as_f64().expect("ts");
            (event["name"].as_str().expect("name").to_owned(), start, start + event["dur"].as_f64().expect("dur"))
        })
        .collect()
}

/// The timeline shows the overlap: buckets that are full before backward ends begin before it ends.
#[test]
fn the_timeline_shows_buckets_that_are_reduced_during_backward() {
    let bench = Bench::new(SLOW);
    let arguments = ["--config", "config.toml", "--run-dir", "runs", "--cpus", "2", "--set", "train.max_steps=6"];
    let extra = ["--set", "log.timeline=true", "--set", "parallel.bucket_mb=4", "--set", "data.limit_train=96"];
    bench.run(&[&arguments[..], &extra].concat()).expect(0);
    let text = std::fs::read(bench.only_run("runs").join("timeline.json")).expect("timeline.json");
    let trace: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    for rank in 0..2 {
        let (steps, buckets) = (spans(&trace, rank, 0), spans(&trace, rank, 1));
        let backward: Vec<_> = steps.iter().filter(|span| span.0 == "backward").collect();
        assert_eq!(backward.len(), 6);
        // 9.2 million parameters: several buckets per step.
        assert!(buckets.len() >= 6 * 4 && buckets.len() % 6 == 0, "{}", buckets.len());
        let (a_step, mut all) = (buckets.len() / 6, 0);
        for (step, (_, start, finish)) in backward.iter().enumerate() {
            let here = &buckets[step * a_step..(step + 1) * a_step];
            assert!(here.windows(2).all(|two| two[0].2 <= two[1].1 + 1.0), "one after the other: {here:?}");
            assert!(here.iter().all(|bucket| bucket.1 >= *start), "no bucket is full before backward begins");
            let hidden = here.iter().filter(|bucket| bucket.1 < *finish).count();
            // The first step finds the order in which gradients become ready.
            assert!(step > 0 || hidden == 0, "rank {rank}: {hidden} under the first backward");
            all += hidden;
        }
        // On a busy machine the reducing thread may wait for a core in some steps.
        assert!(all >= 1, "rank {rank}: no bucket was ever reduced under backward");
    }
}
