//! Watches the workers of a node and decides what to do: the work of torchrun's elastic agent.
//!
//! ```text
//!            a worker fails, is silent,             all have ended
//! Running ──── or another node fails ────▶ Ending ──────────────────▶ Failed: exit code 3, or restart
//!    │  │                                    ▲
//!    │  └── all exit 0 ──▶ Done              │ one fails, or does not stop in time
//!    │                                       │
//!    └── SIGINT, SIGTERM, SIGHUP, SIGQUIT ─▶ Stopping ── all have ended ──▶ Stopped: exit code 128 + n
//!                                               └── a second signal (not SIGHUP): SIGKILL for all
//! ```
//!
//! In `Ending` the supervisor notifies the other ranks through the store at once, so that they leave their collectives with an
//! error. It reports the failure when the workers that have not failed have ended, and so have reported what they noticed, or after
//! [`REPORT_DELAY`]. It sends SIGTERM after the report, and SIGKILL `grace` later.

mod phase;
mod stopping;

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

use super::job_failure::{self, FailureOrigin, WorkerFailure};
use super::launcher::{OnSignal, Timeouts};
use super::node_rendezvous::NodeRendezvous;
use super::process::WorkerProcess;
use super::screen::Screen;
use super::signals::{self, STOPPING, Signals};
use super::status_page::Stage;
use comm::StoreServer;
use phase::Phase;

/// Interval between checks of heartbeats, other nodes and timeouts, which have no file descriptor to poll.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Longest time from the first failure to its report, and to SIGTERM for workers that have not ended. Workers that end by
/// themselves need less, also on a busy machine, and the report follows the last one's end.
const REPORT_DELAY: Duration = Duration::from_secs(5);
/// Longest time from the first failure to its report if all workers of this node blame other ranks: another node's launcher may
/// still report the cause, which ends the wait.
pub(super) const REMOTE_REPORT_DELAY: Duration = Duration::from_secs(10);
/// If all failures blame other ranks, a worker without heartbeats for this long is reported as the cause.
const SUSPICIOUS_SILENCE: Duration = Duration::from_secs(3);

/// How an attempt of the job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All workers exited with 0.
    Done,
    /// Stopped by this signal.
    Stopped(i32),
    /// A worker has reported that its input is wrong, with exit code 2.
    UsageError,
    /// A worker failed.
    Failed {
        /// Whether a restart may succeed.
        restartable: bool,
    },
}

/// Watches the workers of one attempt.
pub(super) struct Supervisor<'a> {
    pub(super) workers: &'a mut [WorkerProcess],
    /// The workers' store, where this launcher hosts it.
    pub(super) store: Option<&'a StoreServer>,
    pub(super) rendezvous: Option<&'a NodeRendezvous>,
    /// Index of this node in a job of several nodes.
    pub(super) node: Option<usize>,
    pub(super) signals: &'a mut Signals,
    pub(super) screen: &'a Arc<Screen>,
    pub(super) timeouts: Timeouts,
    pub(super) on_signal: OnSignal,
}

/// The state of [`Supervisor::run`].
struct SupervisorState {
    phase: Phase,
    failures: Vec<WorkerFailure>,
    /// The signal that stops the job. Still set after the phase `Stopping`.
    stopped_by: Option<i32>,
    /// A signal has arrived here, not on another node.
    signalled: bool,
    /// All workers were sent SIGKILL because of a signal.
    killed: bool,
    /// Another node's failure is in `failures`.
    remote_failure: bool,
    restartable: bool,
    /// A worker has reported that its input is wrong.
    usage_error: bool,
    last_tick: Instant,
}

impl Supervisor<'_> {
    /// Watches until all workers have ended.
    ///
    /// # Errors
    /// The kernel refuses to poll or to wait.
    pub(super) fn run(mut self) -> io::Result<Outcome> {
        let mut state = SupervisorState {
            phase: Phase::Running,
            failures: Vec::new(),
            stopped_by: None,
            signalled: false,
            killed: false,
            remote_failure: false,
            restartable: true,
            usage_error: false,
            last_tick: Instant::now(),
        };
        loop {
            self.wait()?;
            for signal in self.signals.take() {
                self.handle_signal(signal, &mut state);
            }
            // Before `reap`: workers here end because a signal has stopped another node.
            self.check_other_nodes(&mut state);
            self.reap(&mut state)?;
            self.check_heartbeats(&mut state);
            self.check_timeouts(&mut state);
            if let Some(outcome) = self.outcome(&state) {
                // The end of a worker may be noticed before its last output is in the logs.
                self.workers.iter().for_each(WorkerProcess::drain);
                return Ok(outcome);
            }
        }
    }

    /// Waits for a signal, the end of a worker, or the next tick.
    fn wait(&self) -> io::Result<()> {
        let mut fds = vec![PollFd::from_borrowed_fd(self.signals.fd(), PollFlags::IN)];
        let alive = self.workers.iter().filter(|worker| worker.is_alive());
        fds.extend(alive.filter_map(|worker| Some(PollFd::from_borrowed_fd(worker.fd()?, PollFlags::IN))));
        let tick = Timespec { tv_sec: 0, tv_nsec: POLL_INTERVAL.as_nanos() as i64 };
        match poll(&mut fds, Some(&tick)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn reap(&mut self, state: &mut SupervisorState) -> io::Result<()> {
        let mut ended = Vec::new();
        for (at, worker) in self.workers.iter_mut().enumerate() {
            if worker.reap()? {
                ended.push(at);
            }
        }
        for at in ended {
            let worker = &self.workers[at];
            let Some(exit) = &worker.exit else { continue };
            let (code, signal) = (exit.status.code(), exit.status.signal());
            let asked = |by: i32| code == Some(128 + by) || signal == Some(by);
            // Not a failure: the worker succeeded, or ended because it was asked to end.
            if code == Some(0) || state.killed || worker.termination_requested {
                continue;
            }
            let may_stop = exit.report.is_none() && !worker.is_any_program();
            let by_itself = STOPPING.into_iter().find(|by| code == Some(128 + by) && may_stop);
            match (&state.phase, by_itself) {
                (Phase::Stopping { signal, .. }, _) if asked(*signal) => continue,
                // A worker may have received another signal than the launcher: a batch system signals all processes, and a
                // session manager sends SIGHUP after SIGTERM. The ranks agree on one signal, and have saved.
                (Phase::Stopping { .. }, Some(_)) => continue,
                // A user has sent the signal to a worker instead of the launcher. The ranks agree on the stop flag, so all
                // ranks stop.
                (Phase::Running, Some(by)) => {
                    state.stopped_by = Some(by);
                    state.phase = Phase::Stopping { signal: by, since: Instant::now() };
                    continue;
                }
                _ => {}
            }
            let failure = WorkerFailure::exited(worker, exit);
            // Not a failure: the signal has ended other workers, here or on another node, and this worker has noticed that.
            let noticed_stop = || failure.consequence && (state.remote_failure || self.ended_by_stop(worker));
            if matches!(state.phase, Phase::Stopping { .. }) && noticed_stop() {
                continue;
            }
            state.usage_error |= failure.usage && !failure.consequence && exit.report.is_some();
            self.fail(failure, state);
        }
        Ok(())
    }

    /// Finds workers without heartbeats. Counts only the time during which the launcher itself ran. Otherwise all workers would
    /// count as stalled after Ctrl-Z, or after the machine has slept.
    fn check_heartbeats(&mut self, state: &mut SupervisorState) {
        let now = Instant::now();
        let elapsed = now.duration_since(state.last_tick);
        let passed = elapsed.min(5 * POLL_INTERVAL);
        state.last_tick = now;
        state.phase.postpone(elapsed - passed, now);
        self.workers.iter_mut().filter(|worker| worker.is_alive()).for_each(|worker| worker.check_heartbeat(passed));
        if matches!(state.phase, Phase::Ending { .. }) {
            return;
        }
        // A worker that has not written a status yet may still be starting.
        let limit = |worker: &WorkerProcess| match worker.page.status().stage {
            Stage::Spawned => self.timeouts.join.max(self.timeouts.stall),
            _ => self.timeouts.stall,
        };
        let silent = self.workers.iter().filter(|worker| worker.is_alive() && worker.silent >= limit(worker));
        let failures: Vec<WorkerFailure> = silent.map(|worker| WorkerFailure::stalled(worker, worker.silent)).collect();
        failures.into_iter().for_each(|failure| self.fail(failure, state));
    }

    fn check_other_nodes(&mut self, state: &mut SupervisorState) {
        // Check also in the phase `Ending`: the cause of this node's failures may be on another node.
        if state.remote_failure || matches!(state.phase, Phase::Ending { reported: true, .. }) {
            return;
        }
        if let Some(failed) = self.rendezvous.and_then(NodeRendezvous::failure) {
            state.remote_failure = true;
            if let Some(signal) = failed.stopped_by {
                return self.stop_with_node(failed.node, signal, state);
            }
            state.restartable &= failed.restartable;
            self.fail(WorkerFailure::on_other_node(&failed), state);
        }
    }

    /// Adds a failure. The first one ends the job.
    fn fail(&mut self, failure: WorkerFailure, state: &mut SupervisorState) {
        if !matches!(state.phase, Phase::Ending { .. }) {
            state.phase = Phase::Ending { since: Instant::now(), reported: false, terminated: None };
            self.abort(&failure.headline());
        }
        tracing::warn!(consequence = failure.consequence, "{}", failure.headline());
        state.restartable &= !failure.permanent;
        // Publish at once, before the workers of other nodes report consequences of this failure.
        if matches!(failure.origin, FailureOrigin::Rank(_)) && !failure.consequence {
            self.publish(&failure, state.restartable);
        }
        state.failures.push(failure);
    }

    fn abort(&self, why: &str) {
        if let Some(store) = self.store {
            store.abort(why);
        }
    }

    /// Reports a failure to the other nodes.
    fn publish(&self, failure: &WorkerFailure, restartable: bool) {
        if let Some(rendezvous) = self.rendezvous {
            rendezvous.publish_failure(failure.headline().lines().next().unwrap_or_default(), restartable);
        }
    }

    /// Sends all workers a signal that ends them.
    fn signal_workers(&mut self, signal: Signal) {
        tracing::debug!(?signal, "ending all workers");
        for worker in self.workers.iter_mut().filter(|worker| worker.is_alive()) {
            worker.termination_requested = true;
            match signal {
                Signal::KILL => worker.signal_group(signal),
                _ => worker.signal(signal),
            }
        }
    }

    /// Reports failures, and sends SIGTERM and SIGKILL, when their time has come.
    fn check_timeouts(&mut self, state: &mut SupervisorState) {
        let alive = self.workers.iter().any(WorkerProcess::is_alive);
        let failed = |rank| state.failures.iter().any(|failure| failure.origin == FailureOrigin::Rank(rank));
        // A worker that is silent has failed, and does not end by itself.
        let all_known = self.workers.iter().all(|worker| !worker.is_alive() || failed(worker.rank));
        // The report has the last lines of the workers that have failed. A process that has left its worker's group may keep the
        // streams open, so the wait for them is limited too.
        let drained = |worker: &WorkerProcess| worker.is_alive() || !failed(worker.rank) || worker.output.is_drained();
        let all_known = all_known && self.workers.iter().all(drained);
        let all_blame_others = self.rendezvous.is_some() && state.failures.iter().all(|failure| failure.consequence);
        match state.phase {
            Phase::Running => {}
            Phase::Stopping { since, .. } => {
                let requested = self.workers.iter().any(|worker| worker.is_alive() && worker.termination_requested);
                if alive && requested && since.elapsed() >= self.timeouts.grace {
                    self.signal_workers(Signal::KILL);
                } else if alive && !requested && since.elapsed() >= self.timeouts.stop {
                    self.report_slow_stop(state);
                }
            }
            Phase::Ending { since, ref mut reported, ref mut terminated } => {
                let passed = since.elapsed();
                let settled =
                    if all_blame_others { passed >= REMOTE_REPORT_DELAY } else { all_known || passed >= REPORT_DELAY };
                if !*reported && settled {
                    *reported = true;
                    self.report(state);
                } else if alive && *reported && terminated.is_none() {
                    *terminated = Some(Instant::now());
                    self.signal_workers(Signal::TERM);
                } else if alive && terminated.is_some_and(|at| at.elapsed() >= self.timeouts.grace) {
                    self.signal_workers(Signal::KILL);
                }
            }
        }
    }

    /// Reports workers that were asked to stop and did not.
    fn report_slow_stop(&mut self, state: &mut SupervisorState) {
        let limit = self.timeouts.stop.as_secs_f64();
        let name = state.stopped_by.map(signals::name).unwrap_or_default();
        let slow: Vec<WorkerFailure> = self
            .workers
            .iter()
            .filter(|worker| worker.is_alive())
            .map(|worker| WorkerFailure {
                what: format!("did not stop within {limit:.0} s after {name}"),
                hint: Some("the launcher asked it to save a checkpoint and exit".to_owned()),
                ..WorkerFailure::stalled(worker, worker.silent)
            })
            .collect();
        slow.into_iter().for_each(|failure| self.fail(failure, state));
    }

    fn report(&mut self, state: &mut SupervisorState) {
        // If all failures blame another rank, the cause is a rank that cannot report: a silent worker (such as one that SIGSTOP
        // has stopped), or else the rank that the others wait for.
        let all_blame_others = state.failures.iter().all(|failure| failure.consequence);
        if all_blame_others {
            let silent = self.workers.iter().filter(|worker| worker.is_alive() && worker.silent >= SUSPICIOUS_SILENCE);
            let silent: Vec<WorkerFailure> =
                silent.map(|worker| WorkerFailure::stalled(worker, worker.silent)).collect();
            let waited_for = state.failures.iter().filter(|_| silent.is_empty()).find_map(|failure| {
                let is_culprit = |worker: &&WorkerProcess| worker.is_alive() && Some(worker.rank) == failure.culprit;
                self.workers.iter().find(is_culprit).map(|worker| WorkerFailure::waited_for(worker, failure))
            });
            state.failures.extend(silent.into_iter().chain(waited_for));
        }
        job_failure::sort(&mut state.failures);
        if let Some(root) = state.failures.first_mut()
            && let Some(details) = &mut root.process
            && let Some(worker) = self.workers.iter().find(|worker| root.origin == FailureOrigin::Rank(worker.rank))
        {
            // When the failure was noticed, the last output may not have arrived yet.
            details.output = worker.output.last_lines();
        }
        let is_found = |rank| state.failures.iter().any(|failure| failure.origin == FailureOrigin::Rank(rank));
        let alive = self.workers.iter().filter(|worker| worker.is_alive()).map(|worker| worker.rank);
        let alive: Vec<usize> = alive.filter(|rank| !is_found(*rank)).collect();
        self.screen.say(&job_failure::render(&state.failures, &alive, self.node));
        // Any other root has been published when it was noticed.
        if let Some(root) = state.failures.first().filter(|_| all_blame_others && !state.remote_failure) {
            self.publish(root, state.restartable);
        }
    }

    fn outcome(&self, state: &SupervisorState) -> Option<Outcome> {
        if self.workers.iter().any(WorkerProcess::is_alive) {
            return None;
        }
        Some(match state.phase {
            Phase::Running => Outcome::Done,
            Phase::Stopping { signal, .. } => {
                let finished = |worker: &WorkerProcess| worker.exit.as_ref().is_some_and(|exit| exit.status.success());
                // If all workers succeeded, the signal arrived when they were already done.
                if self.workers.iter().all(finished) { Outcome::Done } else { Outcome::Stopped(signal) }
            }
            Phase::Ending { reported: false, .. } => return None,
            Phase::Ending { .. } if state.usage_error => Outcome::UsageError,
            Phase::Ending { .. } => match state.stopped_by {
                // After a signal of the user, do not restart.
                Some(_) => Outcome::Failed { restartable: false },
                None => Outcome::Failed { restartable: state.restartable },
            },
        })
    }
}
