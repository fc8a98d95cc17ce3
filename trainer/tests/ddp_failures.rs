//! Several processes in training, when things go wrong: the error names what was done when, and nothing is left behind.

mod common;

use std::{
    io::Read,
    path::{Path, PathBuf},
    process::Child,
    time::{Duration, Instant},
};

use common::{Bench, CONFIG, Ended, children, entries, losses, signal_process, wait_until};

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

/// Returns the path of a worker's status page.
fn page(worker: u32) -> PathBuf {
    let is_page = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("trainer-worker"))
    };
    entries(Path::new(&format!("/proc/{worker}/fd"))).into_iter().find(is_page).expect("the worker's page")
}

fn read(page: &Path) -> String {
    let mut bytes = Vec::new();
    std::fs::File::open(page).and_then(|mut file| file.read_to_end(&mut bytes)).expect("the page can be read");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Kills a worker as soon as its status is `phase`, and returns the launcher's message.
fn killed_in(bench: &Bench, phase: &str, root: &str) -> String {
    let (child, workers) = start(bench, root, &[]);
    let page = page(workers[1]);
    wait_until(phase, || read(&page).contains(phase));
    signal_process(workers[1], 9);
    let said = end(child).expect(3).stderr;
    assert!(said.contains("SIGKILL") && said.contains("step "), "{said}");
    said
}

#[test]
fn a_worker_killed_in_forward_or_backward_is_named_with_step_and_phase() {
    let bench = Bench::new(SLOW);
    for phase in ["forward", "backward"] {
        // The worker may go on between the look and the signal.
        let found = (0..8).any(|attempt| killed_in(&bench, phase, &format!("{phase}-{attempt}")).contains(phase));
        assert!(found, "eight workers were killed in {phase}, and no message says so");
    }
}

#[test]
fn a_worker_killed_in_the_reduction_of_a_bucket_is_named_with_the_bucket() {
    let bench = Bench::new(CONFIG);
    let buckets = ["--set", "parallel.first_bucket_mb=0.001", "--set", "parallel.bucket_mb=0.01"];
    let found = (0..20).any(|attempt| {
        let (child, workers) = start(&bench, &format!("{attempt}"), &[&buckets[..], &["--epochs", "1000"]].concat());
        let page = page(workers[1]);
        // The other worker is stopped: this one waits for it, most often in a bucket.
        signal_process(workers[0], 19);
        let still = Instant::now();
        let mut last = (Instant::now(), read(&page));
        while last.0.elapsed() < Duration::from_millis(300) && still.elapsed() < Duration::from_secs(20) {
            let now = read(&page);
            if now != last.1 {
                last = (Instant::now(), now);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        signal_process(workers[1], 9);
        signal_process(workers[0], 18);
        let said = end(child).expect(3).stderr;
        assert!(said.contains("SIGKILL") && said.contains("step "), "{said}");
        said.contains("reducing bucket ") && said.contains(" of ")
    });
    assert!(found, "twenty workers were killed while they waited, and no message names a bucket");
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_no_half() {
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
fn the_timeline_shows_buckets_reduced_under_backward() {
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
        // A busy machine may keep the reducing thread waiting in some steps.
        assert!(all >= 1, "rank {rank}: no bucket was ever reduced under backward");
    }
}
