//! One program at a time writes a run folder.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Child,
};

use crate::common::{Bench, CONFIG, ENDLESS, Ended, entries, free_port, losses, signal, wait_until};

const SIGINT: i32 = 2;
const SIGKILL: i32 = 9;

/// Starts a run that a test stops, and waits for its first steps.
fn start(bench: &Bench, root: &str, extra: &[&str]) -> (Child, PathBuf) {
    // Nobody reads the output before the end, and a full pipe would stop the run.
    let arguments = ["--config", "config.toml", "--run-dir", root, "--set", "log.every=1", "--quiet"];
    let before = entries(&bench.path(root));
    let child = bench.spawn(&[&arguments[..], &ENDLESS, extra].concat());
    let new = || entries(&bench.path(root)).into_iter().find(|run| !before.contains(run));
    wait_until("the first steps", || new().is_some_and(|run| lines(&run) >= 3));
    (child, new().expect("the run"))
}

fn lines(run: &Path) -> usize {
    fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

fn stop(child: Child) -> Ended {
    signal(&child, SIGINT);
    Ended::from(child.wait_with_output().expect("output")).expect(130)
}

#[track_caller]
fn assert_whole(run: &Path) {
    let steps: Vec<u64> = losses(run).iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, (0..steps.len() as u64).collect::<Vec<_>>());
}

#[test]
fn a_second_program_is_refused_and_names_the_first() {
    let modes: [&[&str]; 3] = [&[], &["--mode", "dp", "--cpus", "2"], &["--cpus", "2"]];
    for mode in modes {
        let bench = Bench::new(CONFIG);
        let (first, run) = start(&bench, "runs", mode);
        let resume = |extra: &[&str]| bench.run(&[&["--resume", run.to_str().unwrap()], mode, extra].concat());
        let refused = resume(&[]).expect(2).stderr;
        let named = format!("process {} on {}", first.id(), rustix::system::uname().nodename().to_string_lossy());
        assert!(refused.contains(&named) && refused.contains("hint:"), "{named}: {refused}");
        let before = lines(&run);
        wait_until("more steps of the first program", || lines(&run) > before);
        stop(first);
        assert_whole(&run);
        let end = format!("train.max_steps={}", lines(&run) + 2);
        resume(&["--set", &end]).expect(0);
        assert_whole(&run);
    }
}

#[test]
fn a_resume_without_a_name_skips_a_run_that_is_being_written() {
    let bench = Bench::new(CONFIG);
    bench.run(&["--config", "config.toml", "--epochs", "1", "--quiet"]).expect(0);
    let finished = bench.only_run("runs");
    let (first, live) = start(&bench, "runs", &[]);
    let ended = bench.run(&["--resume"]).expect(0);
    let name = |run: &Path| run.file_name().unwrap().to_string_lossy().into_owned();
    assert!(ended.stderr.contains(&format!("note: skipped runs/{}", name(&live))), "{}", ended.stderr);
    assert!(ended.stdout.contains(&name(&finished)), "{}", ended.stdout);
    fs::remove_dir_all(finished).unwrap();
    let refused = bench.run(&["--resume"]).expect(2).stderr;
    assert!(refused.contains(&format!("process {}", first.id())), "{refused}");
    stop(first);
    assert_whole(&live);
}

/// The kernel drops the lock, and the workers of a launcher that is killed end with it.
#[test]
fn a_killed_launcher_leaves_no_lock() {
    let bench = Bench::new(CONFIG);
    let (mut first, run) = start(&bench, "runs", &["--cpus", "2"]);
    signal(&first, SIGKILL);
    first.wait().unwrap();
    let free = || {
        let lock = fs::File::open(run.join("run.lock")).unwrap();
        lock.try_lock_shared().is_ok()
    };
    wait_until("the last worker's end", free);
    let end = format!("train.max_steps={}", lines(&run) + 2);
    bench.run(&["--resume", run.to_str().unwrap(), "--cpus", "2", "--set", &end]).expect(0);
    assert_whole(&run);
}

/// Starts both nodes of a job on this machine with one worker on node 1, and waits for them.
fn two_nodes(bench: &Bench, workers: &str, arguments: [&[&str]; 2]) {
    let port = free_port().to_string();
    let node = |rank: &str, workers: &str, arguments: &[&str]| {
        let nodes = ["--nnodes", "2", "--node-rank", rank, "--master-port", &port, "--cpus", workers];
        bench.spawn(&[&nodes[..], arguments].concat())
    };
    let nodes = [node("0", workers, arguments[0]), node("1", "1", arguments[1])];
    for node in nodes {
        Ended::from(node.wait_with_output().expect("output")).expect(0);
    }
}

/// Node 1 counts other workers than node 0, and both may write one folder: on a shared file system they resume the same run.
#[test]
fn nodes_agree_on_the_name_and_share_a_folder() {
    let bench = Bench::new(CONFIG);
    let config = ["--config", "config.toml", "--epochs", "1"];
    let run_dir = |root| [&config[..], &["--run-dir", root]].concat();
    two_nodes(&bench, "2", [&run_dir("zero"), &run_dir("one")]);
    let (run, of_node_1) = (bench.only_run("zero"), bench.only_run("one"));
    for (folder, end) in [(&run, "-ddpx3"), (&of_node_1, "-ddpx3-node1")] {
        assert!(folder.to_string_lossy().ends_with(end), "{}", folder.display());
    }
    let resume = ["--resume", run.to_str().unwrap(), "--epochs", "2"];
    two_nodes(&bench, "2", [&resume, &resume]);
    assert_eq!(losses(&run).len(), 2 * 33);

    // Node 1's folder of logs is newer than the run, or as old, and is not taken for the newest run.
    fs::rename(&of_node_1, run.with_file_name("29990101-000000-lenet-ddpx3-node1")).unwrap();
    let newest = ["--resume", "--run-dir", "zero", "--epochs", "3"];
    two_nodes(&bench, "2", [&newest, &newest]);
    assert_eq!(losses(&run).len(), 3 * 33);
    assert_whole(&run);
}
