//! `trainer launch`: any program as several processes, with torchrun's variables.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use crate::common::{self, Bench, Ended, entries, python_with, signal, signal_process, wait_until};

const SIGINT: i32 = 2;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// Runs a shell script as `ranks` processes.
fn sh(bench: &Bench, flags: &[&str], script: &str) -> Ended {
    bench.run(&[&["launch"], flags, &["--", "sh", "-c", script]].concat())
}

#[test]
fn processes_have_torchruns_variables_and_logs() {
    let bench = Bench::new("");
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_RANK $ROLE_WORLD_SIZE \
                  $ROLE_NAME $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_RUN_ID \
                  $OMP_NUM_THREADS ${TRAINER_WORKER-none} ${#TRAINER_SECRET}; echo $MASTER_PORT >port-$RANK; echo err >&2; \
                  printf 'no newline'; basename $TORCHELASTIC_ERROR_FILE >&2; cat";
    let ended = sh(&bench, &["--cpus", "3", "--log-dir", "logs", "--rdzv-id", "job"], script).expect(0);
    let mut lines: Vec<&str> = ended.stdout.lines().collect();
    lines.sort_unstable();
    let want = |rank| format!("[{rank}]: {rank} {rank} 3 3 0 1 {rank} 3 default 127.0.0.1 0 0 job 1 none 64");
    let mut all: Vec<String> = (0..3).map(want).chain((0..3).map(|rank| format!("[{rank}]: no newline"))).collect();
    all.sort_unstable();
    assert_eq!(lines, all);
    assert!(
        ended.stderr.contains("note: OMP_NUM_THREADS=1") && ended.stderr.contains("[2]: err\n"),
        "{}",
        ended.stderr
    );
    let log = |rank, name: &str| fs::read_to_string(bench.path(&format!("logs/job/attempt_0/{rank}/{name}"))).unwrap();
    for rank in 0..3 {
        assert_eq!(log(rank, "stdout.log"), format!("{}\nno newline", &want(rank)[5..]));
        assert_eq!(log(rank, "stderr.log"), "err\nerror.json\n");
    }
    let port = |rank| fs::read_to_string(bench.path(&format!("port-{rank}"))).unwrap();
    assert!(port(0).trim().parse::<u16>().unwrap() > 0 && port(0) == port(1), "{}", port(0));
    // A second job of that name has its own logs. One process keeps the threads of the user.
    let again =
        ["--cpus", "1", "--log-dir", "logs", "--rdzv-id", "job", "--master-port", &common::free_port().to_string()];
    let ended = sh(&bench, &again, "echo ${OMP_NUM_THREADS-unset} $MASTER_PORT").expect(0);
    assert_eq!(ended.stdout, format!("[0]: unset {}\n", again[7]));
    assert!(bench.path("logs/job/attempt_1/0/stdout.log").exists());
}

#[test]
fn the_earliest_failure_is_the_root_cause() {
    let bench = Bench::new("");
    let script = "[ $RANK = 1 ] && { echo giving up >&2; exit 7; }; trap 'exit 9' TERM; while :; do sleep 0.1; done";
    let ended = sh(&bench, &["--cpus", "3", "--log-dir", "logs"], script).expect(3);
    let root = "error: rank 1 exited with code 7\n  process ";
    assert!(ended.stderr.contains(root) && ended.stderr.contains("    | giving up\n"), "{}", ended.stderr);
    assert!(ended.stderr.contains("logs/none/attempt_0/1") && ended.stderr.contains("being ended"), "{}", ended.stderr);

    let ended = sh(&bench, &["--cpus", "2"], "[ $RANK = 0 ] && kill -SEGV $$; sleep 1000").expect(3);
    assert!(ended.stderr.contains("error: rank 0 was killed by SIGSEGV (signal 11"), "{}", ended.stderr);
    // What other launchers take for a stop, and for wrong usage, is a failure of any program.
    for code in ["2", "143"] {
        let ended = sh(&bench, &["--cpus", "2", "--max-restarts", "1"], &format!("exit {code}")).expect(3);
        assert!(ended.stderr.contains("starting all workers again: attempt 2 of 2"), "{}", ended.stderr);
    }
}

#[test]
fn all_processes_start_again_after_a_failure() {
    let bench = Bench::new("");
    // Rank 1 ends when rank 0 has spoken.
    let script = "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; \
                  [ $RANK = 0 ] && : >spoken; \
                  while [ ! -e spoken ]; do sleep 0.05; done; \
                  [ $TORCHELASTIC_RESTART_COUNT.$RANK = 0.1 ] && kill -KILL $$; \
                  [ $TORCHELASTIC_RESTART_COUNT = 0 ] && sleep 1000; exit 0";
    let ended = sh(&bench, &["--cpus", "2", "--max-restarts", "2", "--log-dir", "logs"], script).expect(0);
    assert!(ended.stderr.contains("error: rank 1 was killed by SIGKILL"), "{}", ended.stderr);
    assert!(ended.stderr.contains("starting all workers again: attempt 2 of 3"), "{}", ended.stderr);
    for (attempt, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let log = bench.path(&format!("logs/none/attempt_{attempt}/{rank}/stdout.log"));
        assert_eq!(fs::read_to_string(log).unwrap(), format!("attempt {attempt} of 2\n"));
    }
}

#[test]
fn torchruns_spelling_of_the_flags_works() {
    let bench = Bench::new("");
    let torchrun =
        ["launch", "--standalone", "--nnodes=1:1", "--nproc_per_node=2", "--max_restarts=1", "--log_dir", "a_b"];
    let program = ["--", "sh", "-c", "echo $RANK/$WORLD_SIZE of $TORCHELASTIC_MAX_RESTARTS, $1", "sh", "--master_addr"];
    let ended = bench.run(&[&torchrun[..], &program].concat()).expect(0);
    let mut lines: Vec<&str> = ended.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0]: 0/2 of 1, --master_addr", "[1]: 1/2 of 1, --master_addr"]);
    assert!(bench.path("a_b/none/attempt_0/1/stdout.log").exists());
    // Without `--`, as torchrun allows
    let ended = bench.run(&["launch", "--nproc_per_node=2", "train.py", "--lr", "1"]).expect(2);
    assert!(ended.stderr.contains("hint: the program and its arguments come after `--`"), "{}", ended.stderr);
}

#[test]
fn temporary_logs_are_kept_after_a_failure_only() {
    let bench = Bench::new("");
    let temporary = bench.path("tmp");
    fs::create_dir(&temporary).unwrap();
    let launch = |script: &str| {
        let mut command = bench.command();
        command.args(["launch", "--cpus", "2", "--", "sh", "-c", script]).env("TMPDIR", &temporary);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
    };
    for signals in [1, 2] {
        let mut child = launch("trap '' TERM; echo started; while :; do sleep 0.1; done");
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut err = BufReader::new(child.stderr.take().expect("a pipe"));
        read_until(&mut out, "started");
        let folders = entries(&temporary);
        assert_eq!(folders.len(), 1, "{folders:?}");
        // SIGINT ends the shells. After SIGTERM they continue, and a second signal ends them.
        signal(&child, if signals == 1 { SIGINT } else { SIGTERM });
        if signals == 2 {
            read_until(&mut err, "once more ends them at once");
            signal(&child, SIGINT);
        }
        assert_eq!(child.wait().unwrap().code(), Some(if signals == 1 { 128 + SIGINT } else { 128 + SIGTERM }));
        assert_eq!(entries(&temporary), Vec::<std::path::PathBuf>::new(), "after {signals} signals");
    }
    Ended::from(launch("exit 0").wait_with_output().unwrap()).expect(0);
    assert_eq!(entries(&temporary).len(), 0);
    let failed = Ended::from(launch("exit 7").wait_with_output().unwrap()).expect(3);
    let folder = entries(&temporary).pop().expect("the report names a log in the folder");
    assert!(failed.stderr.contains(folder.to_str().expect("a path in UTF-8")), "{}", failed.stderr);
}

/// A launcher of two shells with a child each, and the numbers of all four processes.
fn family(bench: &Bench, trap: &str) -> (Child, BufReader<ChildStdout>, Vec<u32>) {
    let script = format!("{trap} sleep 1000 & echo $$ $!; while :; do wait; done");
    let mut child = bench.spawn(&["launch", "--cpus", "2", "--", "sh", "-c", &script]);
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut processes = Vec::new();
    for _ in 0..2 {
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        processes
            .extend(line.split_once(": ").expect("a rank").1.split_whitespace().map(|n| n.parse::<u32>().unwrap()));
    }
    (child, out, processes)
}

/// Waits until none of the processes lives.
fn ended(processes: &[u32]) {
    wait_until("the end of all processes", || {
        processes.iter().all(|process| {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
        })
    });
}

#[test]
fn no_process_is_left_after_any_end_of_the_launcher() {
    let bench = Bench::new("");
    let (mut child, _out, processes) = family(&bench, "");
    signal(&child, SIGKILL);
    ended(&processes);
    child.wait().unwrap();

    let (child, _out, processes) = family(&bench, "");
    signal(&child, SIGTERM);
    let stopped: Ended = child.wait_with_output().unwrap().into();
    let stopped = stopped.expect(128 + SIGTERM);
    assert!(stopped.stderr.contains("SIGTERM: passed on to all workers"), "{}", stopped.stderr);
    ended(&processes);

    // A rank that fails takes its own children, and the others' ranks, with it.
    let (child, _out, processes) = family(&bench, "");
    signal_process(processes[0], SIGKILL);
    let failed: Ended = child.wait_with_output().unwrap().into();
    failed.expect(3);
    ended(&processes);
}

#[test]
fn processes_may_handle_a_signal_and_end_later() {
    let bench = Bench::new("");
    // A saved checkpoint and exit 0 are not a failure. A second signal does not wait.
    let (child, out, _) = family(&bench, "trap 'echo saved; exit 0' TERM;");
    signal(&child, SIGTERM);
    let stopped: Ended = child.wait_with_output().unwrap().into();
    stopped.expect(0);
    assert_eq!(out.lines().map_while(Result::ok).filter(|line| line.ends_with("saved")).count(), 2);

    let (child, _out, processes) = family(&bench, "trap '' TERM;");
    signal(&child, SIGTERM);
    // The launcher has said so when it has passed the signal on.
    let (child, mut err) = {
        let mut child = child;
        let err = child.stderr.take().expect("a pipe");
        (child, BufReader::new(err))
    };
    let mut line = String::new();
    while !line.contains("passed on") {
        assert!(err.read_line(&mut line).expect("a line") > 0, "{line}");
    }
    let start = Instant::now();
    signal(&child, SIGTERM);
    let stopped: Ended = child.wait_with_output().unwrap().into();
    stopped.expect(128 + SIGTERM);
    assert!(start.elapsed() < Duration::from_secs(25), "the second signal waits for nobody");
    ended(&processes);
}

#[test]
fn pytorch_connects_over_gloo_and_its_errors_are_shown() {
    let Some(python) = python_with(&["torch"]) else { return };
    let bench = Bench::new("");
    let program = "
import sys, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    dist.init_process_group('gloo')
    data = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(data)
    print('sum', data.tolist(), 'threads', torch.get_num_threads(), flush=True)
    if len(sys.argv) > 1 and dist.get_rank() == 1:
        raise ValueError('the loss is nan')
    dist.barrier()
    dist.destroy_process_group()
main()";
    fs::write(bench.path("program.py"), program).unwrap();
    let python = python.to_str().expect("a path in UTF-8");
    let ended = bench.run(&["launch", "-np", "2", "--", python, "program.py"]).expect(0);
    for rank in 0..2 {
        assert!(ended.stdout.contains(&format!("[{rank}]: sum [3.0, 3.0, 3.0] threads 1\n")), "{}", ended.stdout);
    }
    let ended =
        bench.run(&["launch", "--cpus", "2", "--log-dir", "logs", "--", python, "program.py", "fail"]).expect(3);
    assert!(
        ended.stderr.contains("error: rank 1 failed (exit code 1): ValueError: the loss is nan\n"),
        "{}",
        ended.stderr
    );
    assert!(bench.path("logs/none/attempt_0/1/error.json").exists());
}

/// Reads lines until one has this text.
fn read_until(lines: &mut impl BufRead, text: &str) {
    let mut read = String::new();
    while !read.contains(text) {
        assert!(lines.read_line(&mut read).expect("a line") > 0, "no {text:?} in {read}");
    }
}

/// Node 1 fails when the process of node 0 is done.
#[test]
fn a_node_that_is_done_starts_again_with_one_that_fails() {
    let bench = Bench::new("");
    let port = common::free_port().to_string();
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; \
                  [ $GROUP_RANK = 0 ] && { : >done; exit 0; }; \
                  while [ ! -e done ]; do sleep 0.05; done; exit 5";
    let launchers = ["0", "1"].map(|node| {
        let nodes = ["launch", "--cpus", "1", "--nnodes", "2", "--node-rank", node, "--master-port", &port];
        let more = ["--max-restarts", "1", "--master-addr", "127.0.0.1", "--", "sh", "-c", script];
        bench.spawn(&[&nodes[..], &more].concat())
    });
    for launcher in launchers {
        let ended = Ended::from(launcher.wait_with_output().unwrap()).expect(0);
        assert!(ended.stderr.contains("starting all workers again: attempt 2 of 2"), "{}", ended.stderr);
        assert!(ended.stderr.contains("rank 1 exited with code 5"), "{}", ended.stderr);
    }
}

#[test]
fn a_signal_to_one_node_stops_all_and_does_not_count_as_a_second_one() {
    let bench = Bench::new("");
    let port = common::free_port().to_string();
    // A program that saves something after a signal, for as long as the test wants.
    let script = "trap 'while [ ! -e go ]; do sleep 0.05; done; echo saved; exit 1' TERM; echo started; \
                  while :; do sleep 0.05; done";
    let [mut first, mut second] = ["0", "1"].map(|node| {
        let nodes = ["launch", "--cpus", "1", "--nnodes", "2", "--node-rank", node, "--master-port", &port];
        bench.spawn(&[&nodes[..], &["--master-addr", "127.0.0.1", "--", "sh", "-c", script]].concat())
    });
    let mut out = [&mut first, &mut second].map(|child| BufReader::new(child.stdout.take().expect("a pipe")));
    let mut err = [&mut first, &mut second].map(|child| BufReader::new(child.stderr.take().expect("a pipe")));
    out.iter_mut().for_each(|lines| read_until(lines, "started"));
    signal(&first, SIGTERM);
    read_until(&mut err[1], "SIGTERM on node 0: ending all workers");
    // A batch system signals the launchers of all nodes.
    signal(&second, SIGTERM);
    read_until(&mut err[1], "all workers are ending already");
    fs::write(bench.path("go"), "").unwrap();
    out.iter_mut().for_each(|lines| read_until(lines, "saved"));
    for mut child in [first, second] {
        assert_eq!(child.wait().unwrap().code(), Some(128 + SIGTERM));
    }
    for lines in err {
        let rest: Vec<String> = lines.lines().map_while(Result::ok).collect();
        assert!(!rest.iter().any(|line| line.contains("error")), "{rest:?}");
    }
}

/// The launcher of a node whose process is done waits for the other nodes. A signal to it stops their processes.
#[test]
fn a_signal_to_a_node_that_is_done_stops_the_others() {
    let bench = Bench::new("");
    let port = common::free_port().to_string();
    let script = "[ $GROUP_RANK = 1 ] && exit 0; while :; do sleep 0.05; done";
    let [first, mut second] = ["0", "1"].map(|node| {
        let nodes = ["launch", "--cpus", "1", "--nnodes", "2", "--node-rank", node, "--master-port", &port];
        bench.spawn(&[&nodes[..], &["--master-addr", "127.0.0.1", "--", "sh", "-c", script]].concat())
    });
    read_until(&mut BufReader::new(second.stderr.take().expect("a pipe")), "waiting for the other nodes to end");
    signal(&second, SIGTERM);
    assert_eq!(second.wait().unwrap().code(), Some(128 + SIGTERM));
    let first = Ended::from(first.wait_with_output().unwrap()).expect(128 + SIGTERM);
    assert!(first.stderr.contains("SIGTERM on node 1: ending all workers"), "{}", first.stderr);
}

#[test]
fn mistakes_have_a_hint() {
    let bench = Bench::new("");
    for (arguments, cause, hint) in [
        (&["launch", "--", "true"][..], "nothing says how many processes to start", "--cpus 4"),
        (&["-np", "2", "--config", "config.toml"], "-np: unknown flag", "--gpus N"),
        (&["launch", "--cpus", "0", "--", "true"], "a job of 0 workers", "--cpus 1"),
        (&["launch", "--cpus", "70000", "--", "true"], "70000 workers are more than a job may have", "this machine"),
        (&["launch", "--cpus", "2", "--", "no-such-program"], "no-such-program: no such program in PATH", "installed"),
        (&["launch", "--cpus", "2", "--", "config.toml"], "config.toml: no such program in PATH", "./config.toml"),
        (&["launch", "--cpus", "2", "--", "./config.toml"], "./config.toml: not executable", "chmod +x"),
        (&["launch", "--cpus", "2", "--rdzv-id", "../x", "--", "true"], "--rdzv-id \"../x\" cannot name", "a word"),
        (&["launch", "--cpus", "2", "--log-dir", "config.toml/x", "--", "true"], "cannot make the folder", "--log-dir"),
        (&["launch", "--cpus", "2", "--node-rank", "1", "--", "true"], "--nnodes 1 --node-rank 1", "--node-rank 0"),
        (&["launch", "--cpus", "2", "-H", "a:1,a:1", "--", "true"], "-H: a is named twice", "a:2"),
        (&["launch", "-H", "a:0", "--", "true"], "-H: a has 0 slots", "host1:4"),
        (&["launch", "--hostfile", "none", "--", "true"], "none: cannot read the hosts", "slots=4"),
        (
            &["launch", "--cpus", "5", "-H", "a:2,b:2", "--", "true"],
            "--cpus 5 are more ranks than the hosts' 4 slots",
            "--cpus 4",
        ),
        (&["--config", "config.toml", "-H", "a:2,,b"], "-H: `` has no host name", "host1:4"),
    ] {
        let ended = bench.run(arguments).expect(2);
        let said = ended.stderr.as_str();
        assert!(said.contains(cause) && said.contains("hint: ") && said.contains(hint), "{arguments:?}: {said}");
    }
    bench.run(&["launch", "--cpus", "2"]).expect(2);
    let ended = bench
        .command()
        .args(["launch", "-H", "a:2", "--", "true"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")])
        .output()
        .expect("the binary starts");
    let ended = Ended::from(ended).expect(2);
    assert!(
        ended.stderr.contains("-H starts the job on its hosts itself, but this process was started by"),
        "{}",
        ended.stderr
    );
    assert!(entries(bench.folder.path()).iter().all(|path| path.ends_with("config.toml")), "no folder of logs is left");
}
