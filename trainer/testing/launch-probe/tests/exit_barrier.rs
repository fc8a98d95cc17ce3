//! The end of jobs on several nodes, over loopback: all nodes are done, or all fail, or all start again.

mod support;

use rustix::process::{Signal, kill_process};
use support::{Run, free_port, probe, wait_for_states};

/// Starts `N` nodes with a worker each.
fn job<const N: usize>(more: &[&str]) -> [Run; N] {
    let (port, nodes) = (free_port().to_string(), N.to_string());
    std::array::from_fn(|rank| {
        let rank = rank.to_string();
        let mut command = probe(&["--nnodes", &nodes, "--node-rank", &rank, "--master-port", &port, "--workers", "1"]);
        command.args(more);
        Run::of(command)
    })
}

/// Three nodes with a worker each. The worker of node `late` fails when the other nodes are done.
fn late_failure(late: usize, more: &[&str]) -> [Run; 3] {
    let fault = format!("exit-late@{late}");
    let mut nodes = job(&[&["--notice", "0.2", "--do", &fault][..], more].concat());
    for (_, node) in nodes.iter_mut().enumerate().filter(|(rank, _)| *rank != late) {
        node.wait_for("stderr", "to end, for");
    }
    nodes
}

#[test]
fn nodes_that_are_done_start_again_with_one_that_fails() {
    for late in 0..3 {
        let nodes = late_failure(late, &["--max-restarts", "1"]);
        std::fs::write(nodes[late].folder.path().join("go"), "").unwrap();
        for ended in nodes.map(Run::end) {
            let failure = format!("rank {late} exited with code 7");
            ended.said(0, &["error: node ", &failure, "starting all workers again: attempt 2 of 2"]);
        }
    }
}

#[test]
fn nodes_that_are_done_fail_with_a_launcher_that_is_killed() {
    for late in 0..3 {
        let nodes = late_failure(late, &[]);
        nodes[late].signal(Signal::KILL);
        for (rank, ended) in nodes.map(Run::end).into_iter().enumerate().filter(|(rank, _)| *rank != late) {
            ended.said(3, &["error: ", &format!("node {late}")]);
            let gone = ["is gone", "has reset the connection"].iter().any(|text| ended.stderr.contains(text));
            assert!(gone, "node {rank}: {}", ended.stderr);
        }
    }
}

/// A launcher that is stopped reads late, so all messages about the end of the job come at once.
#[test]
fn a_node_that_hears_late_of_a_killed_launcher_fails_too() {
    let [mut first, second, third] = late_failure(1, &[]);
    third.signal(Signal::STOP);
    wait_for_states(&[third.pid()], &['T']);
    second.signal(Signal::KILL);
    first.wait_for("stderr", "waiting for the other nodes to end");
    third.signal(Signal::CONT);
    for ended in [first, third].map(Run::end) {
        ended.said(3, &["error: ", "node 1"]);
    }
}

/// Workers that save decide together, so a node that is done leaves and does not disturb a node that may be saving.
#[test]
fn a_signal_ends_the_wait_of_a_node_that_is_done() {
    let nodes = late_failure(0, &[]);
    nodes[1].signal(Signal::TERM);
    let [first, second, third] = nodes;
    second.end().said(0, &[]);
    std::fs::write(first.folder.path().join("go"), "").unwrap();
    for ended in [first, third].map(Run::end) {
        ended.said(3, &["error: node ", "rank 0 exited with code 7"]);
    }
}

#[test]
fn a_signal_to_node_0_stops_the_nodes_that_are_not_done() {
    let nodes = late_failure(2, &[]);
    nodes[0].signal(Signal::TERM);
    let [first, second, third] = nodes.map(Run::end);
    first.said(143, &["stopped by SIGTERM"]);
    // Its worker was done, and nothing has failed.
    second.said(0, &[]);
    third.said(143, &["SIGTERM on node 0: ending all workers"]);
}

#[test]
fn a_launcher_that_waits_can_be_suspended() {
    let [first, second, third] = late_failure(0, &[]);
    second.signal(Signal::TSTP);
    wait_for_states(&[second.pid()], &['T']);
    second.signal(Signal::CONT);
    std::fs::write(first.folder.path().join("go"), "").unwrap();
    for ended in [first, second, third].map(Run::end) {
        ended.said(3, &["error: node "]);
    }
}

#[test]
fn node_0_does_not_wait_for_ever_for_a_launcher_that_is_stopped() {
    let [first, second, third] = late_failure(1, &["--timeout", "5"]);
    third.signal(Signal::STOP);
    wait_for_states(&[third.pid()], &['T']);
    std::fs::write(second.folder.path().join("go"), "").unwrap();
    second.end().said(3, &["rank 1 exited with code 7"]);
    first.end().said(3, &["warning: a node has not ended after the failure", "error: node 1: "]);
    third.signal(Signal::CONT);
    third.end().said(3, &["error: node "]);
}

#[test]
fn a_node_that_cannot_start_its_workers_ends_the_other() {
    for faulty in 0..2 {
        let nodes: [Run; 2] = job(&["--do", &format!("no-folder@{faulty}")]);
        for (rank, ended) in nodes.map(Run::end).iter().enumerate() {
            let from = if rank == faulty { String::new() } else { format!("node {faulty}: ") };
            ended.said(3, &[&format!("error: {from}cannot make the folder")]);
        }
    }
}

/// The signalled node kills its workers. The other node's workers fail because of this, and the other launcher must know the
/// reason.
#[test]
fn a_second_signal_to_one_node_stops_the_other_at_once() {
    for all_are_stopping in [false, true] {
        let more = ["--steps", "1000000", "--max-restarts", "1", "--do", "never-stop@0", "--do", "never-stop@1"];
        let mut nodes: [Run; 2] = job(&more);
        nodes[0].wait_for("stdout", "step 1\n");
        for node in nodes.iter_mut().skip(usize::from(!all_are_stopping)) {
            node.signal(Signal::INT);
            node.wait_for("stderr", "once more ends them at once");
        }
        nodes[1].signal(Signal::INT);
        let [first, second] = nodes.map(Run::end);
        second.said(130, &["SIGINT: ending all workers at once", "stopped by SIGINT"]);
        first.said(130, &["stopped by SIGINT"]);
        assert!(!first.stderr.contains("error: node"), "{}", first.stderr);
    }
}

/// All failures blame other ranks. The launcher finds the cause: a rank that runs and does not reach the barrier.
#[test]
fn a_node_that_is_done_fails_with_one_on_which_a_worker_hangs() {
    let port = free_port().to_string();
    let node = |rank, workers, more: &[&str]| {
        let mut command = probe(&["--nnodes", "2", "--node-rank", rank, "--master-port", &port, "--workers", workers]);
        command.args(["--max-restarts", "1"]).args(more);
        Run::of(command)
    };
    let first = node("0", "2", &["--do", "hang@1", "--barrier-timeout", "2"]);
    let second = node("1", "1", &["--steps", "3"]);
    for ended in [first, second].map(Run::end) {
        ended.said(3, &["rank 1 kept others waiting", "starting all workers again: attempt 2 of 2"]);
    }
}

/// Otherwise the other nodes would start again and wait for this node until their timeout.
#[test]
fn no_node_starts_again_if_a_signal_has_stopped_one() {
    for told in 0..3 {
        let more = ["--steps", "1000000", "--max-restarts", "1", "--notice", "0.2"];
        let mut nodes: [Run; 3] = job(&more);
        nodes[0].wait_for("stdout", "step 1\n");
        // A launcher that is stopped holds the other nodes at the end of the attempt.
        nodes[2].signal(Signal::STOP);
        wait_for_states(&[nodes[2].pid()], &['T']);
        kill_process(nodes[1].workers()[0], Signal::KILL).unwrap();
        nodes[0].wait_for("stderr", "waiting for node 2 to end, for");
        nodes[1].wait_for("stderr", "waiting for the other nodes to end, for");
        nodes[told].signal(Signal::INT);
        if told == 1 {
            nodes[1].wait_for("stderr", "stopped by SIGINT");
        }
        nodes[2].signal(Signal::CONT);
        for (rank, ended) in nodes.map(Run::end).into_iter().enumerate() {
            let is_stopped = rank == told && told < 2;
            let note = format!("note: node {told} does not start its workers again, so the job ends");
            ended.said(if is_stopped { 130 } else { 3 }, &["rank 1 was killed by SIGKILL"]);
            assert_eq!(ended.stderr.contains(&note), rank != told, "node {rank}: {}", ended.stderr);
            assert!(!ended.stderr.contains("starting all workers again"), "node {rank}: {}", ended.stderr);
        }
    }
}

/// The workers have joined each other, and have nothing to save.
#[test]
fn a_signal_to_one_node_before_training_stops_both() {
    for told in 0..2 {
        let mut nodes: [Run; 2] = job(&["--max-restarts", "1", "--do", "sleep-joined@0", "--do", "sleep-joined@1"]);
        for (rank, node) in nodes.iter_mut().enumerate() {
            node.wait_for(&format!("rank-{rank}/stdout.log"), "asleep");
        }
        nodes[told].signal(Signal::INT);
        for (rank, ended) in nodes.map(Run::end).into_iter().enumerate() {
            let text = if rank == told { "the job has not begun: ending all workers" } else { "ending all workers" };
            ended.said(130, &["SIGINT", text, "stopped by SIGINT"]);
            assert!(!ended.stderr.contains("error"), "node {rank}: {}", ended.stderr);
        }
    }
}
