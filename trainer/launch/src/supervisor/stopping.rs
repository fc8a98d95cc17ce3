//! What signals do to the workers.

use std::os::unix::process::ExitStatusExt;
use std::time::Instant;

use rustix::process::Signal;
use signal_hook::consts::{SIGTSTP, SIGWINCH};

use super::{Phase, Supervisor, SupervisorState};
use crate::launcher::OnSignal;
use crate::process::WorkerProcess;
use crate::signals::{self, STOPPING};
use crate::status_page::Stage;

impl Supervisor<'_> {
    /// Handles a signal to the launcher.
    pub(super) fn handle_signal(&mut self, signal: i32, state: &mut SupervisorState) {
        tracing::info!(signal = signals::name(signal), "received a signal");
        match signal {
            SIGWINCH => self.workers.iter().for_each(|worker| worker.output.resize()),
            SIGTSTP => self.suspend(),
            signal if STOPPING.contains(&signal) => self.stop(signal, state),
            _ => {}
        }
    }

    /// Handles Ctrl-Z (SIGTSTP): stops and continues the workers together with the launcher.
    fn suspend(&self) {
        self.workers.iter().for_each(|worker| worker.signal_group(Signal::STOP));
        // Stops this process, and returns after SIGCONT. If the launcher cannot stop, the workers must not stay stopped either.
        let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
        self.workers.iter().for_each(|worker| worker.signal_group(Signal::CONT));
    }

    fn stop(&mut self, signal: i32, state: &mut SupervisorState) {
        let name = signals::name(signal);
        if state.stopped_by.is_some() && !signals::ends_at_once(signal) {
            return;
        }
        let is_second = state.signalled || matches!(state.phase, Phase::Ending { .. });
        state.signalled = true;
        if state.remote_failure && !is_second {
            return self.screen.say(&format!("{name}: all workers are ending already; once more ends them at once"));
        }
        state.stopped_by = state.stopped_by.or(Some(signal));
        if matches!(state.phase, Phase::Running) {
            state.phase = Phase::Stopping { signal, since: Instant::now() };
        }
        if is_second || self.on_signal == OnSignal::End {
            if !state.killed {
                self.screen.say(&format!("{name}: ending all workers at once"));
                // Publish first: the workers of other nodes notice the end of these.
                if let Phase::Stopping { signal, .. } = state.phase {
                    self.publish_stop(signal);
                }
            }
            state.killed = true;
            self.workers.iter_mut().for_each(|worker| worker.termination_requested = true);
            self.workers.iter().for_each(|worker| worker.signal_group(Signal::KILL));
            return;
        }
        if self.on_signal == OnSignal::Forward {
            return self.forward(signal);
        }
        let can_save = |worker: &WorkerProcess| !worker.is_alive() || worker.page.status().stage == Stage::Training;
        if self.workers.iter().all(can_save) {
            let Some(signal) = Signal::from_named_raw(signal) else { return };
            self.workers.iter().for_each(|worker| worker.signal(signal));
            self.screen.say(&format!("{name}: workers save a checkpoint and stop; once more ends them at once"));
        } else {
            // There is nothing to save. Workers that wait for other ranks would not react to the signal, and the workers of
            // other nodes would notice only that these are gone.
            self.screen.say(&format!("{name}: the job has not begun: ending all workers"));
            self.publish_stop(signal);
            self.abort(&format!("stopped by {name} before training"));
            self.signal_workers(Signal::TERM);
        }
    }

    /// Stops the workers because a signal stops the job on another node.
    pub(super) fn stop_with_node(&mut self, node: usize, signal: i32, state: &mut SupervisorState) {
        match state.phase {
            Phase::Running => {}
            // The workers here have noticed the end of that node's workers before this launcher has read the reason.
            Phase::Ending { reported: false, .. } if state.failures.iter().all(|failure| failure.consequence) => {
                state.failures.clear();
            }
            // If the workers here are already stopping, they may be saving.
            _ => return,
        }
        let signal = *state.stopped_by.get_or_insert(signal);
        state.phase = Phase::Stopping { signal, since: Instant::now() };
        let name = signals::name(signal);
        self.screen.say(&format!("{name} on node {node}: ending all workers"));
        self.abort(&format!("stopped by {name} on node {node}"));
        let forwarded = Signal::from_named_raw(signal).filter(|_| self.on_signal == OnSignal::Forward);
        self.signal_workers(forwarded.unwrap_or(Signal::TERM));
    }

    /// Returns whether `worker` has ended by a signal that stops the job, or because another worker of this node has.
    pub(super) fn ended_by_stop(&self, worker: &WorkerProcess) -> bool {
        let mut found = Some(worker);
        // The limit is for workers that blame each other.
        for _ in 0..self.workers.len() {
            let Some(exit) = found.and_then(|worker| worker.exit.as_ref()) else { return false };
            let (code, signal) = (exit.status.code(), exit.status.signal());
            if STOPPING.into_iter().any(|by| code == Some(128 + by) || signal == Some(by)) {
                return true;
            }
            let culprit = exit.report.as_ref().filter(|report| report.consequence).and_then(|report| report.culprit);
            found = self.workers.iter().find(|worker| Some(worker.rank) == culprit);
        }
        false
    }

    /// Forwards the signal to all workers. They have the grace time to end.
    fn forward(&mut self, signal: i32) {
        let name = signals::name(signal);
        self.screen.say(&format!("{name}: passed on to all workers; once more ends them at once"));
        // Publish first: the workers of other nodes notice the end of these.
        self.publish_stop(signal);
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.signal_workers(signal);
        }
    }

    fn publish_stop(&self, signal: i32) {
        if let Some(rendezvous) = self.rendezvous {
            rendezvous.publish_stop(signal);
        }
    }
}
