//! The end of a job on several nodes. The launchers wait for each other in an exit barrier, as torchrun's agents do.
//!
//! ```text
//! node R  sets  ended/R   its workers have ended
//! node 0  waits for       ended/R of all nodes, or a failure
//! node R  waits for exit  if its workers are done: another node may still fail, and then all nodes start again or fail together
//! node 0  sets  exit      = the failure of another node, if there is one: the other nodes leave
//! node 0  waits for       the end of the other nodes' connections: it hosts both stores
//! ```
//!
//! The waits have no limit (torchrun's is 300 s), because workers that are any program may run longer on another node. A signal
//! ends a wait, and also stops the other nodes. Exception: if workers save a checkpoint on a signal ([`OnSignal::Save`]), a node
//! other than node 0 leaves without stopping the other nodes, whose workers are saving already. After a failure, the other nodes
//! have a limited time to leave.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::announcer::Notices;
use super::launcher::{OnSignal, Timeouts};
use super::node_failure::NodeFailure;
use super::node_rendezvous::{NodeRendezvous, POLL};
use super::screen::Screen;
use super::supervisor::Outcome;
use comm::ErrorKind;

/// How the exit barrier ended.
#[derive(Debug)]
pub(super) enum JobEnd {
    /// No other node has failed.
    AllEnded,
    /// Another node has failed, or its launcher is gone.
    Failed(NodeFailure),
    /// This signal has ended the wait. The other nodes get the signal too.
    Interrupted(i32),
}

/// What a launcher does while it waits for the other nodes.
pub(super) struct ExitWait<'a> {
    screen: &'a Screen,
    notices: Notices,
    /// Longest time in which the other nodes leave after a failure.
    failure_limit: Duration,
    on_signal: OnSignal,
    interrupted: &'a mut dyn FnMut() -> Option<i32>,
}

impl<'a> ExitWait<'a> {
    /// Starts a wait. `interrupted` returns a signal of the user, if one has arrived.
    pub(super) fn new(
        screen: &'a Screen,
        timeouts: &Timeouts,
        on_signal: OnSignal,
        interrupted: &'a mut dyn FnMut() -> Option<i32>,
    ) -> Self {
        let notices = Notices::new(Instant::now(), timeouts.notice);
        // A node notices a failure by missing heartbeats at the latest, and then ends its workers.
        Self { screen, notices, failure_limit: timeouts.stall + timeouts.grace, on_signal, interrupted }
    }

    fn notify_if_due(&mut self, whom: &str) {
        if let Some(passed) = self.notices.due() {
            self.screen.say(&format!("waiting for {whom} to end, for {passed:.0?}"));
        }
    }
}

impl NodeRendezvous {
    /// Reports to the other nodes that this node's workers have ended with `outcome`, and waits for the other nodes. `None`: the
    /// attempt ended with an error before its workers ran.
    ///
    /// A node whose workers failed does not wait, since the other nodes end their workers anyway. Only node 0 waits in every case,
    /// until the other nodes have left.
    pub(super) fn exit_barrier(mut self, outcome: Option<Outcome>, wait: &mut ExitWait<'_>) -> JobEnd {
        let (node_rank, nnodes) = (self.parameters.node_rank, self.parameters.nnodes);
        // If the store is gone, the wait notices that.
        let _ = self.client.set(&format!("ended/{node_rank}"), b"");
        let awaited: Vec<(String, String)> = match (outcome, node_rank) {
            (Some(Outcome::Done | Outcome::Stopped(_)), 0) => {
                (1..nnodes).map(|node| (format!("ended/{node}"), format!("node {node}"))).collect()
            }
            (Some(Outcome::Done), _) => vec![("exit".to_owned(), "the other nodes".to_owned())],
            _ => Vec::new(),
        };
        let mut value = Vec::new();
        let passed = awaited.iter().try_for_each(|(key, whom)| {
            value = self.wait_for_key(key, whom, wait)?;
            Ok(())
        });
        let reported = match node_rank {
            0 => self.client.get("failed").map(Option::unwrap_or_default),
            _ => Ok(value),
        };
        let by_report = || match (&reported, outcome) {
            (Ok(reported), _) => self.end_by(reported),
            // The launcher of a node that was done is gone. The other nodes fail, so node 0 fails with them.
            (Err(error), Some(Outcome::Done)) => JobEnd::Failed(self.broken_by(error)),
            (Err(_), _) => JobEnd::AllEnded,
        };
        let end = match passed.err().unwrap_or_else(by_report) {
            // The other node was stopped by a signal. It has not failed.
            JobEnd::Failed(failure) if failure.stopped_by.is_some() => JobEnd::AllEnded,
            end => end,
        };
        if node_rank > 0 {
            return end;
        }
        // The store may end before the other nodes read another key. After a broken connection it has sent that error to all nodes,
        // and an empty `exit` that follows would be read as a good end.
        if let Ok(reported) = &reported {
            let _ = self.client.set("exit", reported);
        }
        let failed = matches!(end, JobEnd::Failed(_)) || !matches!(outcome, Some(Outcome::Done | Outcome::Stopped(_)));
        let limit = failed.then_some(wait.failure_limit);
        match (self.wait_until_all_have_left(wait, limit), &end) {
            (None, _) => end,
            // All nodes are done, so nothing is left for the signal to stop.
            (Some(_), JobEnd::AllEnded) if outcome == Some(Outcome::Done) => end,
            (Some(signal), _) => JobEnd::Interrupted(signal),
        }
    }

    /// Waits until a node sets `key`, and returns its value.
    fn wait_for_key(&mut self, key: &str, whom: &str, wait: &mut ExitWait<'_>) -> std::result::Result<Vec<u8>, JobEnd> {
        loop {
            if let Some(signal) = (wait.interrupted)() {
                // Workers that save decide together to stop, so some that still run are saving already, and may finish.
                if wait.on_signal == OnSignal::Save && self.parameters.node_rank > 0 {
                    return Err(JobEnd::AllEnded);
                }
                self.publish_stop(signal);
                return Err(JobEnd::Interrupted(signal));
            }
            if let Some(failure) = self.failure() {
                return Err(JobEnd::Failed(failure));
            }
            match self.client.wait(key, POLL) {
                Ok(value) => return Ok(value),
                Err(error) if error.kind == ErrorKind::Timeout => wait.notify_if_due(whom),
                Err(error) => {
                    // A report may have arrived right before the connection broke. The thread that watches has then read it.
                    self.join_watch();
                    return Err(JobEnd::Failed(self.failure().unwrap_or_else(|| self.broken_by(&error))));
                }
            }
        }
    }

    /// Returns the end of a job in which `reported` is the first failure, if it is not empty. A node reports before it sets
    /// `ended/R`, so node 0 then has the report, although the thread that watches may not have read it yet.
    fn end_by(&self, reported: &[u8]) -> JobEnd {
        let failure = serde_json::from_slice::<NodeFailure>(reported).ok();
        match failure.filter(|failure| failure.node != self.parameters.node_rank) {
            Some(failure) => JobEnd::Failed(failure),
            None => JobEnd::AllEnded,
        }
    }

    /// Closes this node's connection, and waits until the other nodes have closed theirs. Otherwise they could not distinguish the
    /// end of the store from the death of this launcher. Returns the signal that ended the wait.
    fn wait_until_all_have_left(mut self, wait: &mut ExitWait<'_>, limit: Option<Duration>) -> Option<i32> {
        let server = self.server.take()?;
        drop(self);
        let until = limit.map(|limit| Instant::now() + limit);
        while !server.wait_until_left(POLL) {
            if until.is_some_and(|until| Instant::now() >= until) {
                wait.screen.say("warning: a node has not ended after the failure; its processes may still run");
                break;
            }
            if let Some(signal) = (wait.interrupted)() {
                return Some(signal);
            }
            wait.notify_if_due("the other nodes");
        }
        None
    }

    /// Ends the thread that watches the other nodes.
    pub(super) fn join_watch(&mut self) {
        self.stop_watch.store(true, Ordering::Relaxed);
        if let Some(watch) = self.watch.take() {
            let _ = watch.join();
        }
    }
}
