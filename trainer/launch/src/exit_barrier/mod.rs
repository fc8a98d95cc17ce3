//! The end of a job on several nodes. The launchers wait for each other in an exit barrier, as torchrun's agents do.
//!
//! ```text
//! node R  sets  ended/R   = whether the node waits for exit, or leaves; its workers have ended
//! node 0  waits for       ended/R of all nodes; a failure ends the wait, unless the job may start again
//! node R  waits for exit  if its workers are done, or failed and may start again
//! node 0  sets  exit      = the first failure, and a node that leaves: then no node starts its workers again
//! node 0  waits for       the end of the other nodes' connections: it hosts both stores
//! ```
//!
//! So all nodes start again, or none. A node that started again alone would wait for the others until its timeout.
//!
//! Before a failure the waits have no limit (torchrun's is 300 s), because workers that are any program may run longer on another
//! node. After a failure the other nodes have a limited time to end and to leave.
//!
//! A signal ends a wait. Before a failure it also stops the other nodes. Exception: if workers save a checkpoint on a signal
//! ([`OnSignal::Save`]), a node other than node 0 leaves without stopping the other nodes, whose workers are saving already. After a
//! failure the other nodes end anyway, and do not start again. If node 0 has already decided that all nodes start again, the signal
//! stops them when they have joined again.

mod node_0;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::announcer::Notices;
use super::launcher::{OnSignal, Timeouts};
use super::node_failure::NodeFailure;
use super::node_rendezvous::{NodeRendezvous, POLL_INTERVAL};
use super::screen::Screen;
use super::supervisor::{Outcome, REMOTE_REPORT_DELAY};
use comm::ErrorKind;

/// Longest wait of a node that leaves for a message that node 0 may have sent already.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Values of `ended/R`. A node that leaves does not start its workers again.
const WAITS: &[u8] = b"waits for exit";
const LEAVES: &[u8] = b"leaves";

/// Node 0's message to the other nodes, in `exit`.
#[derive(Debug, Serialize, Deserialize)]
struct ExitMessage {
    /// The failure that a node has reported, if there is one.
    failure: Option<NodeFailure>,
    /// A node that does not start its workers again, because of a signal for example. Then no node does.
    leaving: Option<usize>,
}

/// How the workers of this node have ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeEnd {
    /// `None`: the attempt ended with an error before its workers ran.
    pub(super) outcome: Option<Outcome>,
    /// The job may be started again after a failure.
    pub(super) attempts_left: bool,
}

impl NodeEnd {
    fn is_done(self) -> bool {
        self.outcome == Some(Outcome::Done)
    }

    /// Returns whether the workers of this node ran, and none of them failed.
    fn has_ended_well(self) -> bool {
        matches!(self.outcome, Some(Outcome::Done | Outcome::Stopped(_)))
    }

    /// Returns whether this node starts its workers again if all nodes do.
    pub(super) fn wants_restart(self) -> bool {
        self.attempts_left && self.outcome == Some(Outcome::Failed { restartable: true })
    }

    /// Returns whether this node, whose workers are done, starts them again after `failure` of another node.
    fn may_restart_after(self, failure: &NodeFailure) -> bool {
        self.attempts_left && self.is_done() && failure.restartable && failure.broken.is_none()
    }
}

/// How the exit barrier ended.
#[derive(Debug)]
pub(super) enum JobEnd {
    /// No other node changes the outcome of this node.
    AllEnded,
    /// Another node has failed, or its launcher is gone.
    Failed(NodeFailure),
    /// The workers failed and could start again, but this node does not.
    NoRestart(usize),
    /// This signal has ended the wait.
    Interrupted(i32),
}

/// What a launcher does while it waits for the other nodes.
pub(super) struct ExitWait<'a> {
    screen: &'a Screen,
    notices: Notices,
    /// Longest time in which the other nodes leave after a failure.
    failure_timeout: Duration,
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
        let failure_timeout = timeouts.stall.max(REMOTE_REPORT_DELAY) + timeouts.grace;
        Self { screen, notices, failure_timeout, on_signal, interrupted }
    }

    fn notify_if_due(&mut self, whom: &str) {
        if let Some(passed) = self.notices.due() {
            self.screen.say(&format!("waiting for {whom} to end, for {passed:.0?}"));
        }
    }
}

impl NodeRendezvous {
    /// Reports to the other nodes that this node's workers have ended, and waits for the other nodes.
    ///
    /// A node whose workers failed and may not start again does not wait, since the other nodes end their workers anyway. Only
    /// node 0 waits in every case, until the other nodes have left.
    pub(super) fn exit_barrier(mut self, node: NodeEnd, wait: &mut ExitWait<'_>) -> JobEnd {
        let waits = node.is_done() || node.wants_restart();
        self.set_ended(if waits { WAITS } else { LEAVES });
        if self.parameters.node_rank == 0 {
            return self.end_all(node, wait);
        }
        if !waits {
            return JobEnd::AllEnded;
        }
        let end = match self.wait_for_key("exit", "the other nodes", None, node, wait) {
            Ok(Some(message)) => self.end_by_bytes(&message, node),
            // Node 0 waits for at most `failure_timeout`, so after twice that time it hangs.
            Ok(None) => {
                self.set_ended(LEAVES);
                let message = self.client.wait("exit", EXIT_TIMEOUT);
                message.map_or_else(|_| self.end_without_node_0(node), |message| self.end_by_bytes(&message, node))
            }
            Err(JobEnd::Interrupted(signal)) if self.may_restart(node) => self.interrupt_restart(signal, node),
            Err(end) => end,
        };
        without_stop(end, node)
    }

    /// Returns whether node 0 may decide that this node starts its workers again.
    fn may_restart(&self, node: NodeEnd) -> bool {
        node.wants_restart() || self.failure().is_some_and(|failure| node.may_restart_after(&failure))
    }

    /// Returns the end of the attempt on a node to which node 0 sends no message after a failure.
    fn end_without_node_0(&self, node: NodeEnd) -> JobEnd {
        match self.failure() {
            Some(failure) if node.is_done() => JobEnd::Failed(NodeFailure { restartable: false, ..failure }),
            _ => JobEnd::NoRestart(0),
        }
    }

    /// Ends the wait of a node that may start its workers again, and that a signal stops. If node 0 has decided that all nodes start
    /// again, the signal stops them when they join again. So this function raises the signal again, and this node starts again too.
    fn interrupt_restart(&self, signal: i32, node: NodeEnd) -> JobEnd {
        // Node 0 has decided already, or finds that this node leaves.
        let message = self.client.wait("exit", EXIT_TIMEOUT).ok();
        match message.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            Some(message @ ExitMessage { leaving: None, .. }) if signal_hook::low_level::raise(signal).is_ok() => {
                self.end_by(message, node)
            }
            _ => JobEnd::Interrupted(signal),
        }
    }

    /// Reports that this node leaves although its workers have not run: node 0 may wait for it already.
    pub(super) fn leave_before_start(&self) {
        self.set_ended(LEAVES);
    }

    fn set_ended(&self, value: &[u8]) {
        // If the store is gone, the next wait notices that.
        let _ = self.client.set(&format!("ended/{}", self.parameters.node_rank), value);
    }

    /// Waits until a node sets `key`, and returns its value, or `None` after the time `until`. Other nodes than node 0 wait for at
    /// most twice [`ExitWait::failure_timeout`] after a failure, also one of their own.
    fn wait_for_key(
        &mut self,
        key: &str,
        whom: &str,
        mut until: Option<Instant>,
        node: NodeEnd,
        wait: &mut ExitWait<'_>,
    ) -> std::result::Result<Option<Vec<u8>>, JobEnd> {
        let is_node_0 = self.parameters.node_rank == 0;
        loop {
            let failure = self.failure();
            if let Some(signal) = (wait.interrupted)() {
                // Node 0 reads the value again before it starts the job again.
                self.set_ended(LEAVES);
                // Workers that save decide together to stop, so some that still run are saving already, and may finish.
                if wait.on_signal == OnSignal::Save && !is_node_0 && node.is_done() && failure.is_none() {
                    return Err(JobEnd::AllEnded);
                }
                // After a failure of this node, the other nodes are ending already.
                if node.has_ended_well() {
                    self.publish_stop(signal);
                }
                return Err(JobEnd::Interrupted(signal));
            }
            if !is_node_0 && (failure.is_some() || node.wants_restart()) {
                until = until.or_else(|| Some(Instant::now() + 2 * wait.failure_timeout));
            }
            // After a failure that breaks no connection, node 0 sets `exit`, and has to know whether all nodes may start again.
            let ends_wait = |failure: &NodeFailure| failure.broken.is_some() || (is_node_0 && until.is_none());
            if let Some(failure) = failure.filter(ends_wait) {
                return Err(JobEnd::Failed(failure));
            }
            match self.client.wait(key, POLL_INTERVAL) {
                Ok(value) => return Ok(Some(value)),
                Err(error) if error.kind == ErrorKind::Timeout => {
                    if until.is_some_and(|until| Instant::now() >= until) {
                        return Ok(None);
                    }
                    wait.notify_if_due(whom);
                }
                Err(error) => {
                    // A report may have arrived right before the connection broke. The thread that watches has then read it.
                    self.join_watch();
                    let broken = self.broken_by(&error);
                    return Err(JobEnd::Failed(match self.failure() {
                        Some(failure) => {
                            NodeFailure { restartable: failure.restartable && broken.restartable, ..failure }
                        }
                        None => broken,
                    }));
                }
            }
        }
    }

    fn end_by_bytes(&self, message: &[u8], node: NodeEnd) -> JobEnd {
        let unreadable = if node.wants_restart() { JobEnd::NoRestart(0) } else { JobEnd::AllEnded };
        serde_json::from_slice(message).map_or(unreadable, |message| self.end_by(message, node))
    }

    /// Returns the end of the attempt on this node after node 0's `message`.
    fn end_by(&self, message: ExitMessage, node: NodeEnd) -> JobEnd {
        if node.wants_restart() {
            return message.leaving.map_or(JobEnd::AllEnded, JobEnd::NoRestart);
        }
        match message.failure.filter(|failure| failure.node != self.parameters.node_rank) {
            Some(failure) => {
                JobEnd::Failed(NodeFailure { restartable: failure.restartable && message.leaving.is_none(), ..failure })
            }
            None => JobEnd::AllEnded,
        }
    }

    /// Ends the thread that watches the other nodes.
    pub(super) fn join_watch(&mut self) {
        self.stop_watch.store(true, Ordering::Relaxed);
        if let Some(watch) = self.watch.take() {
            let _ = watch.join();
        }
    }
}

/// Returns `end` without a failure that is another node's stop by a signal: that node has not failed, and does not start again.
fn without_stop(end: JobEnd, node: NodeEnd) -> JobEnd {
    match end {
        JobEnd::Failed(failure) if failure.stopped_by.is_some() && node.wants_restart() => {
            JobEnd::NoRestart(failure.node)
        }
        JobEnd::Failed(failure) if failure.stopped_by.is_some() => JobEnd::AllEnded,
        end => end,
    }
}
