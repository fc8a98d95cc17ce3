//! Training on two machines whose network fails for a while.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use crate::common::namespaces::{ADDRESSES, Namespaces, namespaces};
use crate::common::{Bench, CONFIG, ENDLESS, first_entry, signal, wait_until};

const SIGTERM: i32 = 15;

/// A node of two, with one worker.
struct Node {
    child: Child,
    stderr: PathBuf,
}

impl Node {
    fn start(bench: &Bench, net: &Namespaces, rank: usize, timeout_s: usize) -> Self {
        let timeout = format!("parallel.timeout_s={timeout_s}");
        Self::start_at(ADDRESSES[0], bench, net, rank, &[&ENDLESS[..], &["--set", &timeout]].concat())
    }

    fn start_at(master: &str, bench: &Bench, net: &Namespaces, rank: usize, flags: &[&str]) -> Self {
        let stderr = bench.path(&format!("stderr-{rank}"));
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &net.names[rank], "env", "--default-signal=INT,QUIT,TERM"]);
        command.args([env!("CARGO_BIN_EXE_trainer"), "--config", "config.toml", "--cpus", "1", "--nnodes", "2"]);
        command.args(["--node-rank", &rank.to_string(), "--master-addr", master, "--master-port", "29500"]);
        command.args(["--max-restarts", "3", "--run-dir", &format!("node-{rank}")]).args(flags);
        command.current_dir(bench.folder.path()).env_remove("TRAINER_DATA_DIR").env("NO_COLOR", "1");
        command
            .env("TRAINER_SECRET", "words of this test")
            .stdout(File::create(bench.path(&format!("stdout-{rank}"))).unwrap());
        command.stderr(File::create(&stderr).unwrap());
        Self { child: command.spawn().expect("ip starts"), stderr }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.stderr).unwrap_or_default()
    }

    fn wait_for(&mut self, text: &str) {
        wait_until(text, || {
            let ended = self.child.try_wait().expect("a child");
            assert!(ended.is_none() || self.said().contains(text), "{ended:?}: {}", self.said());
            self.said().contains(text)
        });
    }
}

impl Drop for Node {
    /// A failed test leaves no process either.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the number of lines in node 0's file of metrics.
fn lines(bench: &Bench) -> usize {
    let metrics = |run: PathBuf| std::fs::read_to_string(run.join("metrics.jsonl")).ok();
    first_entry(&bench.path("node-0")).and_then(metrics).map_or(0, |text| text.lines().count())
}

/// Waits until training has gone on for some steps.
fn wait_for_steps(bench: &Bench) {
    let start = lines(bench);
    wait_until("steps", || lines(bench) >= start + 3);
}

/// Stops both nodes; returns what they said on stderr.
fn stop(nodes: [Node; 2]) -> [String; 2] {
    nodes.iter().for_each(|node| signal(&node.child, SIGTERM));
    nodes.map(|mut node| {
        let status = node.child.wait().expect("a child");
        assert_eq!(status.code(), Some(128 + SIGTERM), "{}", node.said());
        node.said()
    })
}

#[test]
fn training_survives_an_outage_shorter_than_the_timeout() {
    let Some(net) = namespaces("o") else { return };
    let bench = Bench::new(CONFIG);
    let nodes = [0, 1].map(|rank| Node::start(&bench, &net, rank, 300));
    wait_for_steps(&bench);
    net.cable("down");
    // The length of the outage.
    std::thread::sleep(Duration::from_secs(6));
    net.cable("up");
    wait_for_steps(&bench);
    for said in stop(nodes) {
        assert!(!said.contains("error") && !said.contains("starting all workers again"), "{said}");
    }
}

#[test]
fn training_starts_again_on_both_machines_after_a_longer_outage() {
    let Some(net) = namespaces("r") else { return };
    let bench = Bench::new(CONFIG);
    let mut nodes = [0, 1].map(|rank| Node::start(&bench, &net, rank, 10));
    wait_for_steps(&bench);
    net.cable("down");
    for node in &mut nodes {
        node.wait_for("starting all workers again: attempt 2 of 4");
    }
    net.cable("up");
    // The second attempt has its own log.
    let run = first_entry(&bench.path("node-0")).expect("a run folder");
    let log = run.join("logs/rank-0/stdout.log");
    wait_until("an epoch", || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("eval loss")));
    for (said, other) in stop(nodes).into_iter().zip(["node 1", "node 0"]) {
        assert!(said.contains(&format!("no answer from {other} for 10 s")), "{said}");
        assert!(!said.contains("killed"), "{said}");
    }
}

/// In Debian's `/etc/hosts`, a host's own name has the address 127.0.1.1. A name that other hosts use may be unknown on the host.
#[test]
fn node_0_may_resolve_its_own_name_to_a_loopback_address_or_not_at_all() {
    let Some(net) = namespaces("h") else { return };
    for own in ["127.0.1.1 first-host\n", "127.0.0.1 localhost\n"] {
        let bench = Bench::new(CONFIG);
        net.set_hosts(0, own);
        net.set_hosts(1, &format!("{} first-host\n", ADDRESSES[0]));
        let flags = ["--set", "train.epochs=1", "--set", "parallel.timeout_s=30"];
        for mut node in [0, 1].map(|rank| Node::start_at("first-host", &bench, &net, rank, &flags)) {
            let status = node.child.wait().expect("a child");
            assert!(status.success(), "{own}: {}", node.said());
        }
    }
}
