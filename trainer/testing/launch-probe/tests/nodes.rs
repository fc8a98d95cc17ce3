//! Jobs of several nodes: over loopback, and between network namespaces with separate addresses.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use support::namespaces::{ADDRESSES, Namespaces, namespaces};
use support::{Ended, LIMIT, PROBE, Run, probe, read};

fn free_port() -> String {
    support::free_port().to_string()
}

/// Node `rank` of two, over loopback.
fn node(rank: &str, port: &str, workers: &str, more: &[&str]) -> Run {
    Run::of(command(rank, port, workers, more))
}

fn command(rank: &str, port: &str, workers: &str, more: &[&str]) -> Command {
    let mut command = probe(&["--nnodes", "2", "--node-rank", rank, "--master-port", port, "--workers", workers]);
    command.args(more);
    command
}

#[test]
fn two_nodes_share_the_ranks_out() {
    let port = free_port();
    // Start node 1 first: it waits for node 0.
    let second = node("1", &port, "1", &[]);
    let first = node("0", &port, "2", &[]);
    let (first, second) = (first.end(), second.end());
    first.said(0, &[]);
    second.said(0, &[]);
    let log = second.log("rank-2/stdout.log");
    for line in ["RANK=2", "LOCAL_RANK=0", "WORLD_SIZE=3", "LOCAL_WORLD_SIZE=1", "GROUP_RANK=1", "step 5"] {
        assert!(log.lines().any(|found| found == line), "{line}: {log}");
    }
    assert!(second.stdout.is_empty(), "rank 0 is on node 0's screen: {}", second.stdout);
    assert!(first.log("rank-1/stdout.log").contains("hello from rank 1 of 3"));
}

#[test]
fn an_error_on_one_node_ends_all() {
    let port = free_port();
    let first = node("0", &port, "1", &["--do", "kill-between@2"]);
    let second = node("1", &port, "2", &["--do", "kill-between@2"]);
    let (first, second) = (first.end(), second.end());
    second.said(3, &["error: node 1: rank 2 was killed by SIGKILL", "it was doing: step 3, forward"]);
    first.said(3, &["node 1: rank 2 was killed by SIGKILL"]);
}

#[test]
fn a_launcher_that_is_killed_ends_the_other_node() {
    for (victim, name) in [(0, "node 0"), (1, "node 1")] {
        let port = free_port();
        let more = ["--steps", "1000000", "--step-ms", "20"];
        let mut nodes = [node("0", &port, "1", &more), node("1", &port, "1", &more)];
        nodes[0].wait_for("stdout", "step 1\n");
        nodes[victim].signal(Signal::KILL);
        let [first, second] = nodes.map(Run::end);
        let survivor = if victim == 0 { second } else { first };
        // The kernel resets the connection if the killed launcher has not read all of it.
        survivor.said(3, &["error: "]);
        let found = |told: &str, text| survivor.stderr.contains(told) && survivor.stderr.contains(text);
        let gone = found(&format!("the launcher of {name}"), "is gone");
        assert!(gone || found(name, "has reset the connection"), "{}", survivor.stderr);
    }
}

#[test]
fn a_signal_to_one_launcher_stops_both_nodes_at_one_step() {
    for told in [0, 1] {
        let port = free_port();
        let mut nodes =
            [node("0", &port, "1", &["--steps", "1000000"]), node("1", &port, "1", &["--steps", "1000000"])];
        nodes[0].wait_for("stdout", "step 1\n");
        if told == 0 {
            nodes[0].signal(Signal::TERM);
        } else {
            // Rank 0's flag decides in the probe: signal both launchers, as batch systems do.
            nodes.iter().for_each(|node| node.signal(Signal::TERM));
        }
        let ended = nodes.map(Run::end);
        for node in &ended {
            node.said(143, &[]);
        }
        assert_eq!(ended[0].log("saved-0"), ended[1].log("saved-1"));
    }
}

#[test]
fn nodes_start_again_together() {
    let port = free_port();
    let more = ["--do", "kill-first-attempt@1", "--max-restarts", "1"];
    let (first, second) = (node("0", &port, "1", &more), node("1", &port, "1", &more));
    for ended in [first, second].map(Run::end) {
        ended.said(0, &["rank 1 was killed by SIGKILL", "starting all workers again: attempt 2 of 2"]);
        assert!(ended.folder.path().join("attempt-0").is_dir());
    }
}

#[test]
fn a_node_that_does_not_come_is_named() {
    node("0", &free_port(), "1", &["--join-timeout", "1"]).end().said(3, &["error: node 1 did not join at 127.0.0.1:"]);
    node("1", &free_port(), "1", &["--join-timeout", "1"])
        .end()
        .said(3, &["error: node 1 cannot join node 0", "hint: "]);
}

/// Waits until node 0 listens for other nodes.
fn wait_for_listener(port: &str) {
    let until = Instant::now() + LIMIT;
    while TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
        assert!(Instant::now() < until, "nobody listens on port {port}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn nodes_that_wait_can_be_interrupted() {
    let port = free_port();
    let waiting = node("0", &port, "1", &[]);
    wait_for_listener(&port);
    waiting.signal(Signal::INT);
    waiting.end().said(130, &["stopped by SIGINT"]);
}

#[test]
fn another_secret_keeps_a_node_out() {
    let port = free_port();
    let mut first = command("0", &port, "1", &[]);
    first.env("TRAINER_SECRET", "the right words");
    let mut first = Run::of(first);
    wait_for_listener(&port);
    let mut second = command("1", &port, "1", &[]);
    second.env("TRAINER_SECRET", "some other words");
    Run::of(second)
        .end()
        .said(3, &["error: node 1 cannot join node 0", "secret", "hint: give all nodes the same secret"]);
    // Node 0 says it at once, although its limits are minutes long.
    first.wait_for("stderr", "was refused at the rendezvous: it does not know this run's secret");
    first.signal(Signal::TERM);
    first.end().said(143, &[]);
}

#[test]
fn node_0_says_whom_it_refuses_and_for_whom_it_waits() {
    let port = free_port();
    let mut first = node("0", &port, "1", &["--notice", "0.2", "--nnodes", "3"]);
    wait_for_listener(&port);
    // Another program.
    TcpStream::connect(format!("127.0.0.1:{port}")).unwrap().write_all(&[b'x'; 64]).unwrap();
    first.wait_for("stderr", "was refused at the rendezvous: it does not speak this protocol");
    first.wait_for("stderr", &format!("waiting for nodes 1, 2 at 127.0.0.1:{port} ("));
    // A node with other flags.
    node("1", &port, "1", &[])
        .end()
        .said(3, &["error: node 1 cannot join node 0", "it was started for 2 nodes, this job has 3"]);
    first.wait_for("stderr", "was refused at the rendezvous: it was started for 2 nodes, this job has 3");
    let second = node("1", &port, "1", &["--nnodes", "3"]);
    first.wait_for("stderr", &format!("waiting for node 2 at 127.0.0.1:{port} ("));
    node("1", &port, "1", &["--nnodes", "3"]).end().said(3, &["node 1 has joined already", "hint: start each node"]);
    first.signal(Signal::TERM);
    first.end().said(143, &[]);
    second.end().said(143, &["node 0", "stopped by SIGTERM"]);
}

/// Otherwise the job would begin without the node as soon as the last node has come, and wait for the node's ranks.
#[test]
fn a_node_that_is_interrupted_before_all_have_joined_ends_the_others() {
    let port = free_port();
    let mut first = node("0", &port, "1", &["--notice", "0.2", "--nnodes", "3"]);
    wait_for_listener(&port);
    let second = node("1", &port, "1", &["--nnodes", "3"]);
    first.wait_for("stderr", &format!("waiting for node 2 at 127.0.0.1:{port} ("));
    second.signal(Signal::INT);
    second.end().said(130, &["stopped by SIGINT"]);
    first.end().said(130, &["node 1", "stopped by SIGINT"]);
}

#[test]
fn a_node_says_why_it_does_not_reach_node_0() {
    // Somebody else listens at the address: a program that answers with another protocol, and one that hangs up.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let answer = std::thread::spawn(move || {
        drop(listener.accept().unwrap());
        let (mut peer, _) = listener.accept().unwrap();
        peer.write_all(&[b'x'; 100]).unwrap();
        let _ = peer.read_to_end(&mut Vec::new());
    });
    let with_secret = |rank, port: &str, more: &[&str]| {
        let mut command = command(rank, port, "1", &[&["--notice", "0.2"], more].concat());
        command.env("TRAINER_SECRET", "the right words");
        Run::of(command)
    };
    let ended = with_secret("1", &port, &[]).end();
    ended.said(3, &["error: node 1 cannot join node 0", "it does not speak this protocol", "hint: "]);
    answer.join().unwrap();
    // Nobody listens there.
    let port = free_port();
    let mut second = with_secret("1", &port, &[]);
    second.wait_for("stderr", &format!("waiting for node 0 at 127.0.0.1:{port} ("));
    second.wait_for("stderr", "s of 300 s): Connection refused");
    second.signal(Signal::TERM);
    second.end().said(143, &[]);
}

#[test]
fn an_address_that_cannot_be_resolved_is_reported_at_once() {
    let more = ["--master-addr", "no-such-host.invalid", "--notice", "0.2"];
    for rank in ["0", "1"] {
        let mut command = command(rank, &free_port(), "1", &more);
        command.env("TRAINER_SECRET", "the right words");
        let mut run = Run::of(command);
        run.wait_for("stderr", "note: cannot resolve no-such-host.invalid");
        let other = if rank == "0" { "1" } else { "0" };
        run.wait_for("stderr", &format!("waiting for node {other} at no-such-host.invalid:"));
        run.signal(Signal::TERM);
        run.end().said(143, &[]);
    }
}

/// A file for `--secret-file` in `folder`.
fn secret_file(folder: &Path, content: &str, mode: u32) -> PathBuf {
    let path = folder.join("secret");
    std::fs::write(&path, content).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    path
}

#[test]
fn a_secret_file_lets_a_node_join_and_takes_precedence() {
    let port = free_port();
    let folder = tempfile::tempdir().unwrap();
    let path = secret_file(folder.path(), "the right words\n", 0o600);
    let mut first = command("0", &port, "2", &["--secret-file", path.to_str().unwrap()]);
    first.env("TRAINER_SECRET", "some other words");
    let mut second = command("1", &port, "1", &[]);
    second.env("TRAINER_SECRET", "the right words");
    let (first, second) = (Run::of(first), Run::of(second));
    first.end().said(0, &[]);
    second.end().said(0, &[]);
}

#[test]
fn a_secret_file_that_others_may_read_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = secret_file(folder.path(), "the right words\n", 0o644);
    let path = path.to_str().unwrap();
    let ended = node("0", &free_port(), "1", &["--secret-file", path]).end();
    let cause = format!("error: {path}: other users may read the job's secret (mode 644)");
    ended.said(2, &[&cause, &format!("hint: chmod 600 {path}")]);
}

#[test]
fn no_secret_is_needed_on_loopback_only() {
    let ended = node("0", "29500", "1", &["--master-addr", "192.0.2.1"]).end();
    ended.said(
        2,
        &[
            "error: --nnodes 2 over 192.0.2.1 needs a secret",
            "hint: give all nodes the same secret: --secret-file FILE, or TRAINER_SECRET",
        ],
    );
    let mut command = command("0", "29500", "1", &["--master-addr", "192.0.2.1"]);
    command.env("TRAINER_SECRET", "the right words");
    Run::of(command).end().said(3, &["error: 192.0.2.1 (MASTER_ADDR) is not an address of this machine"]);
}

#[test]
fn kubeflows_pods_start_their_share() {
    let port = free_port();
    let pod = |rank: &str| {
        let mut env = Command::new("env");
        env.args(["PET_NNODES=2", "PET_NPROC_PER_NODE=2", "MASTER_ADDR=127.0.0.1"]);
        env.args([format!("PET_NODE_RANK={rank}"), format!("RANK={rank}"), format!("MASTER_PORT={port}")]);
        env.args(["WORLD_SIZE=2", PROBE]);
        Run::of(env)
    };
    let (first, second) = (pod("0"), pod("1"));
    first.end().said(0, &["started by Kubeflow: node 0 of 2, 2 workers on it"]);
    let second = second.end();
    second.said(0, &["started by Kubeflow: node 1 of 2, 2 workers on it"]);
    assert!(second.log("rank-3/stdout.log").contains("hello from rank 3 of 4"));
}

/// Starts nodes of a job in the namespaces.
trait Nodes {
    fn node(&self, rank: usize, secret: &str, more: &[&str]) -> Run;
    fn both(&self, more: &[&str]) -> [Run; 2];
}

impl Nodes for Namespaces {
    fn node(&self, rank: usize, secret: &str, more: &[&str]) -> Run {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[rank], PROBE, "--nnodes", "2"]);
        command.args(["--node-rank", &rank.to_string(), "--master-addr", ADDRESSES[0], "--master-port", "29500"]);
        command.args(more).env("TRAINER_SECRET", secret);
        Run::of(command)
    }

    fn both(&self, more: &[&str]) -> [Run; 2] {
        [self.node(0, "words of this test", more), self.node(1, "words of this test", more)]
    }
}

#[test]
fn two_machines_train_together() {
    let Some(net) = namespaces("t") else { return };
    let [first, second] = net.both(&["--workers", "2"]).map(Run::end);
    first.said(0, &[]);
    second.said(0, &[]);
    assert!(first.stdout.contains("joined at 10.231.17.1:"), "{}", first.stdout);
    assert!(second.log("rank-3/stdout.log").contains("step 5"));
}

#[test]
fn a_death_on_the_other_machine_is_reported() {
    let Some(net) = namespaces("d") else { return };
    let mut nodes = net.both(&["--workers", "1", "--steps", "1000000"]);
    nodes[0].wait_for("stdout", "step 1\n");
    kill_process(nodes[1].workers()[0], Signal::KILL).unwrap();
    let [first, second]: [Ended; 2] = nodes.map(Run::end);
    second.said(3, &["error: node 1: rank 1 was killed by SIGKILL"]);
    first.said(3, &["node 1: rank 1 was killed by SIGKILL"]);
}

#[test]
fn a_cable_that_is_pulled_ends_both_sides() {
    let Some(net) = namespaces("c") else { return };
    let mut nodes = net.both(&["--workers", "1", "--steps", "1000000", "--timeout", "10"]);
    nodes[0].wait_for("stdout", "step 1\n");
    net.cable("down");
    let [first, second] = nodes.map(Run::end);
    first.said(3, &["error: no answer from node 1 for 10 s", "hint: the network"]);
    second.said(3, &["error: no answer from node 0 for 10 s", "hint: the network"]);
    for ended in [first, second] {
        assert!(!ended.stderr.contains("killed"), "{}", ended.stderr);
    }
}

/// The steps that rank 0 has begun.
fn steps(node: &Run) -> usize {
    read(&node.folder.path().join("stdout")).lines().filter(|line| line.starts_with("step ")).count()
}

#[test]
fn an_outage_shorter_than_the_timeout_is_survived() {
    let Some(net) = namespaces("s") else { return };
    let limits = ["--timeout", "120", "--barrier-timeout", "120", "--max-restarts", "3"];
    let mut nodes = net.both(&[&["--workers", "1", "--steps", "1000000"][..], &limits].concat());
    nodes[0].wait_for("stdout", "step 1\n");
    net.cable("down");
    // The length of the outage: more than TCP's first retransmissions, less than the timeout.
    std::thread::sleep(Duration::from_secs(5));
    net.cable("up");
    let next = format!("step {}\n", steps(&nodes[0]) + 5);
    nodes[0].wait_for("stdout", &next);
    nodes.iter().for_each(|node| node.signal(Signal::TERM));
    for ended in nodes.map(Run::end) {
        ended.said(143, &[]);
        assert!(!ended.stderr.contains("error"), "{}", ended.stderr);
    }
}

#[test]
fn a_longer_outage_starts_both_nodes_again() {
    let Some(net) = namespaces("l") else { return };
    let limits = ["--timeout", "10", "--max-restarts", "3"];
    let mut nodes = net.both(&[&["--workers", "1", "--steps", "100"][..], &limits].concat());
    nodes[0].wait_for("stdout", "step 1\n");
    net.cable("down");
    for node in &mut nodes {
        node.wait_for("stderr", "starting all workers again: attempt 2 of 4");
    }
    net.cable("up");
    let [first, second] = nodes.map(Run::end);
    first.said(0, &["error: no answer from node 1 for 10 s", "starting all workers again: attempt 2 of 4"]);
    second.said(0, &["error: no answer from node 0 for 10 s", "starting all workers again: attempt 2 of 4"]);
    assert!(first.stdout.contains("step 99\n"), "{}", first.stdout);
}
