//! Node 0's part of the exit barrier: it waits for the other nodes, decides whether all nodes start again, and leaves last.

use std::time::Instant;

use super::{ExitMessage, ExitWait, JobEnd, NodeEnd, NodeFailure, WAITS, without_stop};
use crate::node_rendezvous::{NodeRendezvous, POLL_INTERVAL};
use crate::signals::DeferredSignal;
use comm::CommError;

/// What node 0 knows when it has waited for the workers of the other nodes.
struct Waited {
    /// `Err`: the wait has ended early.
    passed: std::result::Result<(), JobEnd>,
    /// Node 0 starts its workers again if all nodes do.
    may_restart: bool,
    /// The time until which the other nodes have to leave, if the job has failed.
    failed_by: Instant,
}

impl NodeRendezvous {
    /// Waits for the other nodes on node 0, and ends the job on all nodes.
    pub(super) fn end_all(mut self, node: NodeEnd, wait: &mut ExitWait<'_>) -> JobEnd {
        let waited = self.wait_until_all_have_ended(node, wait);
        let (failed_by, may_restart) =
            (waited.failed_by, node.attempts_left && (node.is_done() || node.wants_restart()));
        let message = self.decide(&waited);
        // After a broken connection the store has sent that error to all nodes, and a message that follows could be read as a good
        // end.
        if let Some(text) = message.as_ref().ok().and_then(|message| serde_json::to_vec(message).ok()) {
            let _ = self.client.set("exit", &text);
        }
        let all_restart = message.as_ref().is_ok_and(|message| message.leaving.is_none());
        let end = self.end_of_node_0(waited.passed, message, node);
        let limit = (matches!(end, JobEnd::Failed(_)) || !node.has_ended_well()).then_some(failed_by);
        // After an outage of the network, each node starts again by its own decision.
        let restarts = all_restart || (may_restart && matches!(&end, JobEnd::Failed(failure) if failure.restartable));
        match (self.wait_until_all_have_left(wait, limit, restarts), &end) {
            (None, _) => end,
            // All nodes are done, so nothing is left for the signal to stop.
            (Some(_), JobEnd::AllEnded) if node.is_done() => end,
            (Some(signal), _) => JobEnd::Interrupted(signal),
        }
    }

    /// Waits until the workers of the other nodes have ended. The wait ends at the first failure, unless the job may start again.
    fn wait_until_all_have_ended(&mut self, node: NodeEnd, wait: &mut ExitWait<'_>) -> Waited {
        let mut passed = if node.has_ended_well() { self.wait_for_all(None, node, wait) } else { Ok(()) };
        let failed_by = Instant::now() + wait.failure_timeout;
        let failure = match &passed {
            Err(JobEnd::Failed(failure)) => Some(failure.clone()),
            _ => self.reported().ok().flatten(),
        };
        let may_restart = node.wants_restart() || failure.is_some_and(|failure| node.may_restart_after(&failure));
        if may_restart && !matches!(passed, Err(JobEnd::Interrupted(_))) {
            passed = self.wait_for_all(Some(failed_by), node, wait);
            // A signal may have arrived together with the last key.
            if passed.is_ok()
                && let Some(signal) = (wait.interrupted)()
            {
                passed = Err(JobEnd::Interrupted(signal));
            }
        }
        Waited { passed, may_restart, failed_by }
    }

    /// Waits on node 0 until the workers of all other nodes have ended, or until the time `until`.
    fn wait_for_all(
        &mut self,
        until: Option<Instant>,
        node: NodeEnd,
        wait: &mut ExitWait<'_>,
    ) -> std::result::Result<(), JobEnd> {
        (1..self.parameters.nnodes).try_for_each(|other| {
            self.wait_for_key(&format!("ended/{other}"), &format!("node {other}"), until, node, wait).map(drop)
        })
    }

    /// Returns the message to the other nodes: the failure, and a node that does not start again, if there is one.
    ///
    /// # Errors
    /// The store is gone.
    fn decide(&self, waited: &Waited) -> std::result::Result<ExitMessage, CommError> {
        let failure = self.reported()?;
        // A stop by a signal, or a failure that would come again, may have replaced the report of an earlier failure.
        let final_failure = failure.as_ref().filter(|failure| failure.stopped_by.is_some() || !failure.restartable);
        let leaving = match final_failure {
            _ if !waited.may_restart || matches!(waited.passed, Err(JobEnd::Interrupted(_))) => Some(0),
            Some(failure) => Some(failure.node),
            None => self.leaving_node(),
        };
        Ok(ExitMessage { failure, leaving })
    }

    /// Returns the failure that a node has reported. A node reports it before it sets `ended/R`, so node 0 then finds it here,
    /// although the thread that watches may not have read it yet.
    fn reported(&self) -> std::result::Result<Option<NodeFailure>, CommError> {
        let reported = self.client.get("failed")?;
        Ok(reported.and_then(|reported| serde_json::from_slice(&reported).ok()))
    }

    /// Returns a node that does not start its workers again: it leaves, or has not ended in time.
    fn leaving_node(&self) -> Option<usize> {
        let waits =
            |node: usize| matches!(self.client.get(&format!("ended/{node}")), Ok(Some(value)) if value == WAITS);
        (1..self.parameters.nnodes).find(|node| !waits(*node))
    }

    /// Returns the end of the attempt on node 0, whose wait ended with `passed`, and whose decision is `message`.
    fn end_of_node_0(
        &self,
        passed: std::result::Result<(), JobEnd>,
        message: std::result::Result<ExitMessage, CommError>,
        node: NodeEnd,
    ) -> JobEnd {
        let end = match (passed, message) {
            (Err(end @ JobEnd::Interrupted(_)), _) => end,
            (Err(JobEnd::Failed(failure)), _) if failure.broken.is_some() => JobEnd::Failed(failure),
            (_, Ok(message)) => self.end_by(message, node),
            // The launcher of another node is gone. The other nodes fail, so node 0 fails with them.
            (Ok(()), Err(error)) if node.is_done() || node.wants_restart() => JobEnd::Failed(self.broken_by(&error)),
            (passed, Err(_)) => passed.err().unwrap_or(JobEnd::AllEnded),
        };
        without_stop(end, node)
    }

    /// Closes this node's connection, and waits until the other nodes have closed theirs. Otherwise they could not distinguish the
    /// end of the store from the death of this launcher. Returns the signal that ended the wait. If the job `restarts`, the first
    /// signal does not end the wait, but is raised again afterwards: it stops all nodes when they join again.
    fn wait_until_all_have_left(
        mut self,
        wait: &mut ExitWait<'_>,
        until: Option<Instant>,
        restarts: bool,
    ) -> Option<i32> {
        let server = self.server.take()?;
        drop(self);
        let mut deferred = DeferredSignal::default();
        while !server.wait_until_left(POLL_INTERVAL) {
            if until.is_some_and(|until| Instant::now() >= until) {
                wait.screen.say("warning: a node has not ended after the failure; its processes may still run");
                break;
            }
            if let Some(signal) = (wait.interrupted)() {
                let effect = "all nodes stop when they have joined again";
                if !restarts || deferred.ends_wait(signal, effect, wait.screen) {
                    return Some(signal);
                }
            }
            wait.notify_if_due("the other nodes");
        }
        deferred.first().filter(|signal| signal_hook::low_level::raise(*signal).is_err())
    }
}
