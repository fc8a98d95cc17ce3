//! The watch over a node's workers: what may happen, and what is done about it.
//!
//! ```text
//!            a worker fails, is silent,             all have ended
//! Running ──── or another node fails ────▶ Ending ──────────────────▶ Failed: exit code 3, or all again
//!    │  │                                    ▲
//!    │  └── all exit 0 ──▶ Done              │ one fails, or does not stop in time
//!    │                                       │
//!    └── SIGINT, SIGTERM, SIGHUP, SIGQUIT ─▶ Stopping ── all have ended ──▶ Stopped: exit code 128 + n
//!                                               └── a second signal: SIGKILL for all
//! ```
//!
//! `Ending` tells the others through the store at once, so that they leave their collectives with an error of their own;
//! reports after [`SETTLE`], when the first failure's neighbours have had their say; sends SIGTERM after [`POLITE`] and
//! SIGKILL `grace` later.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use signal_hook::consts::{SIGTSTP, SIGWINCH};

use super::node_rendezvous::NodeRendezvous;
use super::output::Screen;
use super::process::Process;
use super::report::{self, Who, WorkerFailure};
use super::signals::{self, STOPPING, Signals};
use super::status_page::Stage;
use comm::{StoreEvent, StoreServer};

/// Between two looks at what cannot be polled.
const TICK: Duration = Duration::from_millis(100);
/// From the first failure to its report.
const SETTLE: Duration = Duration::from_millis(500);
/// The same where all workers of this node blame others, and another node's launcher may know the cause.
const NEWS: Duration = Duration::from_millis(1500);
/// From the first failure to SIGTERM for those that have not left by themselves.
const POLITE: Duration = Duration::from_secs(1);
/// A worker that has been silent this long when others complain about it is to blame.
const SUSPICIOUS: Duration = Duration::from_secs(1);
/// Strangers at the rendezvous that are told of; a port scan must not fill the screen.
const TOLD_STRANGERS: usize = 5;

/// How a job's attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All workers exited with 0.
    Done,
    /// By this signal.
    Stopped(i32),
    /// `again`: it may work the next time.
    Failed { again: bool },
}

/// Limits of timeouts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    /// Silence that counts as a stall.
    pub(super) stall: Duration,
    /// From SIGTERM to SIGKILL.
    pub(super) grace: Duration,
    /// From the signal to the end of the last worker's checkpoint.
    pub(super) stop: Duration,
}

enum Mode {
    Running,
    Stopping { signal: i32, since: Instant },
    Ending { since: Instant, reported: bool, polite: bool },
}

pub(super) struct Supervisor<'a> {
    pub(super) workers: &'a mut [Process],
    /// The workers' store, where this launcher hosts it.
    pub(super) store: Option<&'a StoreServer>,
    pub(super) events: Receiver<StoreEvent>,
    pub(super) link: Option<&'a NodeRendezvous>,
    /// This node's index in a job of several.
    pub(super) node: Option<usize>,
    pub(super) signals: &'a mut Signals,
    pub(super) screen: &'a Arc<Screen>,
    pub(super) timeouts: Timeouts,
}

/// What goes on inside [`Supervisor::run`].
struct Watch {
    mode: Mode,
    failures: Vec<WorkerFailure>,
    /// The signal that the job is stopped by, which outlives `Stopping`.
    stopped_by: Option<i32>,
    /// A second signal has come.
    killed: bool,
    /// Another node's failure has been noted.
    elsewhere: bool,
    again: bool,
    strangers: usize,
    last_tick: Instant,
}

impl Supervisor<'_> {
    /// Watches until all workers have ended.
    pub(super) fn run(mut self) -> io::Result<Outcome> {
        let mut watch = Watch {
            mode: Mode::Running,
            failures: Vec::new(),
            stopped_by: None,
            killed: false,
            elsewhere: false,
            again: true,
            strangers: 0,
            last_tick: Instant::now(),
        };
        loop {
            self.sleep()?;
            for signal in self.signals.take() {
                self.hear(signal, &mut watch);
            }
            self.reap(&mut watch)?;
            self.look_for_silence(&mut watch);
            self.look_elsewhere(&mut watch);
            self.act(&mut watch);
            if let Some(outcome) = self.outcome(&watch) {
                return Ok(outcome);
            }
        }
    }

    fn sleep(&self) -> io::Result<()> {
        let mut fds = vec![PollFd::from_borrowed_fd(self.signals.fd(), PollFlags::IN)];
        let alive = self.workers.iter().filter(|worker| worker.is_alive());
        fds.extend(alive.map(|worker| PollFd::from_borrowed_fd(worker.fd(), PollFlags::IN)));
        let tick = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        match poll(&mut fds, Some(&tick)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn hear(&mut self, signal: i32, watch: &mut Watch) {
        match signal {
            SIGWINCH => self.workers.iter().for_each(|worker| worker.output.resize()),
            SIGTSTP => self.suspend(),
            signal if STOPPING.contains(&signal) => self.stop(signal, watch),
            _ => {}
        }
    }

    /// Ctrl-Z: the workers stop with the launcher, and go on with it.
    fn suspend(&self) {
        self.workers.iter().for_each(|worker| worker.signal_group(Signal::STOP));
        // returns when the launcher is continued; where it cannot stop, the workers must not stay stopped either
        let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
        self.workers.iter().for_each(|worker| worker.signal_group(Signal::CONT));
    }

    fn stop(&mut self, signal: i32, watch: &mut Watch) {
        let name = signals::name(signal);
        if watch.stopped_by.is_some() || matches!(watch.mode, Mode::Ending { .. }) {
            if !watch.killed {
                self.screen.say(&format!("{name}: ending all workers at once"));
            }
            watch.stopped_by = watch.stopped_by.or(Some(signal));
            watch.killed = true;
            self.workers.iter_mut().for_each(|worker| worker.told = true);
            self.workers.iter().for_each(|worker| worker.signal_group(Signal::KILL));
            return;
        }
        watch.stopped_by = Some(signal);
        watch.mode = Mode::Stopping { signal, since: Instant::now() };
        let joined = |worker: &Process| !worker.is_alive() || worker.page.status().stage == Stage::Joined;
        if self.workers.iter().all(joined) {
            self.screen.say(&format!("{name}: workers save a checkpoint and stop; once more ends them at once"));
            let Some(signal) = Signal::from_named_raw(signal) else { return };
            self.workers.iter().for_each(|worker| worker.signal(signal));
        } else {
            // there is nothing to save, and who waits for the others would wait on
            self.screen.say(&format!("{name}: the job has not begun: ending all workers"));
            self.abort(&format!("stopped by {name} before all ranks had joined"));
            self.end_workers(Signal::TERM);
            if let Some(link) = self.link {
                link.tell(&format!("stopped by {name}"), false);
            }
        }
    }

    fn reap(&mut self, watch: &mut Watch) -> io::Result<()> {
        for at in 0..self.workers.len() {
            if !self.workers[at].reap()? {
                continue;
            }
            let worker = &self.workers[at];
            let Some(end) = &worker.end else { continue };
            let (code, signal) = (end.status.code(), end.status.signal());
            let asked = |by: i32| code == Some(128 + by) || signal == Some(by);
            let stopping = match watch.mode {
                Mode::Stopping { signal, .. } => Some(signal),
                _ => None,
            };
            // ended well, or because it was told to
            if code == Some(0) || watch.killed || worker.told || stopping.is_some_and(asked) {
                continue;
            }
            // somebody has stopped a worker rather than the launcher: ranks agree on it, so all of them stop
            let by_itself = STOPPING.into_iter().find(|by| code == Some(128 + by) && end.account.is_none());
            if let (Mode::Running, Some(by)) = (&watch.mode, by_itself) {
                watch.stopped_by = Some(by);
                watch.mode = Mode::Stopping { signal: by, since: Instant::now() };
                continue;
            }
            let failure = WorkerFailure::ended(worker, end);
            self.fail(failure, watch);
        }
        Ok(())
    }

    /// Counts silence in time that this launcher was awake for: after Ctrl-Z, or with a lid closed, nobody is to blame.
    fn look_for_silence(&mut self, watch: &mut Watch) {
        let now = Instant::now();
        let passed = now.duration_since(watch.last_tick).min(5 * TICK);
        watch.last_tick = now;
        self.workers.iter_mut().filter(|worker| worker.is_alive()).for_each(|worker| worker.listen(passed));
        if matches!(watch.mode, Mode::Ending { .. }) {
            return;
        }
        let limit = self.timeouts.stall;
        let silent = self.workers.iter().filter(|worker| worker.is_alive() && worker.silent >= limit);
        let failures: Vec<WorkerFailure> = silent.map(|worker| WorkerFailure::silent(worker, worker.silent)).collect();
        failures.into_iter().for_each(|failure| self.fail(failure, watch));
    }

    fn look_elsewhere(&mut self, watch: &mut Watch) {
        while let Ok(event) = self.events.try_recv() {
            if let StoreEvent::Refused { from, cause } = event {
                watch.strangers += 1;
                if watch.strangers <= TOLD_STRANGERS {
                    let last = if watch.strangers == TOLD_STRANGERS { " (others will not be told of)" } else { "" };
                    self.screen.say(&format!("note: {from} was refused at the rendezvous: {cause}{last}"));
                }
            }
        }
        // also while ending: what ended the workers here may have happened there
        if watch.elsewhere || matches!(watch.mode, Mode::Ending { reported: true, .. }) {
            return;
        }
        if let Some(failed) = self.link.and_then(NodeRendezvous::failure) {
            watch.elsewhere = true;
            watch.again &= failed.again;
            self.fail(WorkerFailure::elsewhere(failed.node, failed.what), watch);
        }
    }

    /// Notes a failure; the first one ends the job.
    fn fail(&mut self, failure: WorkerFailure, watch: &mut Watch) {
        if !matches!(watch.mode, Mode::Ending { .. }) {
            watch.mode = Mode::Ending { since: Instant::now(), reported: false, polite: false };
            self.abort(&failure.headline());
        }
        watch.again &= !failure.usage;
        // at once, before the other nodes' workers complain of what came of it
        if matches!(failure.who, Who::Rank(_)) && !failure.consequence {
            self.tell(&failure, watch.again);
        }
        watch.failures.push(failure);
    }

    fn abort(&self, why: &str) {
        if let Some(store) = self.store {
            store.abort(why);
        }
    }

    fn tell(&self, failure: &WorkerFailure, again: bool) {
        if let Some(link) = self.link {
            link.tell(failure.headline().lines().next().unwrap_or_default(), again);
        }
    }

    fn end_workers(&mut self, signal: Signal) {
        for worker in self.workers.iter_mut().filter(|worker| worker.is_alive()) {
            worker.told = true;
            match signal {
                Signal::KILL => worker.signal_group(signal),
                _ => worker.signal(signal),
            }
        }
    }

    /// What time brings.
    fn act(&mut self, watch: &mut Watch) {
        let alive = self.workers.iter().any(Process::is_alive);
        let patient = self.link.is_some() && watch.failures.iter().all(|failure| failure.consequence);
        match watch.mode {
            Mode::Running => {}
            Mode::Stopping { since, .. } => {
                let told = self.workers.iter().any(|worker| worker.is_alive() && worker.told);
                if alive && told && since.elapsed() >= self.timeouts.grace {
                    self.end_workers(Signal::KILL);
                } else if alive && !told && since.elapsed() >= self.timeouts.stop {
                    self.too_slow(watch);
                }
            }
            Mode::Ending { since, ref mut reported, ref mut polite } => {
                let passed = since.elapsed();
                let settled = if patient { passed >= NEWS } else { !alive || passed >= SETTLE };
                if !*reported && settled {
                    *reported = true;
                    self.report(watch);
                } else if alive && !*polite && passed >= POLITE {
                    *polite = true;
                    self.end_workers(Signal::TERM);
                } else if alive && passed >= POLITE + self.timeouts.grace {
                    self.end_workers(Signal::KILL);
                }
            }
        }
    }

    /// Workers were asked to stop and go on.
    fn too_slow(&mut self, watch: &mut Watch) {
        let limit = self.timeouts.stop.as_secs_f64();
        let name = watch.stopped_by.map(signals::name).unwrap_or_default();
        let slow: Vec<WorkerFailure> = self
            .workers
            .iter()
            .filter(|worker| worker.is_alive())
            .map(|worker| WorkerFailure {
                what: format!("did not stop within {limit:.0} s after {name}"),
                hint: Some("it was told to save a checkpoint and exit".to_owned()),
                ..WorkerFailure::silent(worker, worker.silent)
            })
            .collect();
        slow.into_iter().for_each(|failure| self.fail(failure, watch));
    }

    fn report(&mut self, watch: &mut Watch) {
        // those that complain have waited for somebody: a worker that is stopped cannot speak for itself
        if watch.failures.iter().all(|failure| failure.consequence) {
            let silent = self.workers.iter().filter(|worker| worker.is_alive() && worker.silent >= SUSPICIOUS);
            let silent: Vec<WorkerFailure> =
                silent.map(|worker| WorkerFailure::silent(worker, worker.silent)).collect();
            let awaited = watch.failures.iter().filter(|_| silent.is_empty()).find_map(|complaint| {
                let is_meant = |worker: &&Process| worker.is_alive() && Some(worker.rank) == complaint.culprit;
                self.workers.iter().find(is_meant).map(|worker| WorkerFailure::awaited(worker, complaint))
            });
            watch.failures.extend(silent.into_iter().chain(awaited));
        }
        report::sort(&mut watch.failures);
        let is_found = |rank| watch.failures.iter().any(|failure| failure.who == Who::Rank(rank));
        let alive = self.workers.iter().filter(|worker| worker.is_alive()).map(|worker| worker.rank);
        let alive: Vec<usize> = alive.filter(|rank| !is_found(*rank)).collect();
        self.screen.say(&report::render(&watch.failures, &alive, self.node));
        if let Some(root) = watch.failures.first().filter(|root| root.consequence && !watch.elsewhere) {
            self.tell(root, watch.again);
        }
    }

    fn outcome(&self, watch: &Watch) -> Option<Outcome> {
        if self.workers.iter().any(Process::is_alive) {
            return None;
        }
        Some(match watch.mode {
            Mode::Running => Outcome::Done,
            Mode::Stopping { signal, .. } => {
                let finished = |worker: &Process| worker.end.as_ref().is_some_and(|end| end.status.success());
                // the signal came when they were done
                if self.workers.iter().all(finished) { Outcome::Done } else { Outcome::Stopped(signal) }
            }
            Mode::Ending { reported: false, .. } => return None,
            Mode::Ending { .. } => match watch.stopped_by {
                // asked to stop, or not to wait: starting again is the last thing that is wanted
                Some(_) => Outcome::Failed { again: false },
                None => Outcome::Failed { again: watch.again },
            },
        })
    }
}
