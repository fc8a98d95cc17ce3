//! A launcher's wait for other launchers, with a timeout. Signals interrupt the wait, and it prints a message at intervals.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::announcer::{Notices, waiting_for};
use super::launcher::Timeouts;
use super::node_failure::RendezvousError;
use super::screen::Screen;
use super::signals::DeferredSignal;

/// Longest time in which a node that a signal stops tries to join the other nodes, to stop them too.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// One wait, which starts when the value is made.
pub(super) struct NodeWait<'a> {
    screen: &'a Arc<Screen>,
    /// Host and port of node 0, for messages.
    address: String,
    since: Instant,
    timeouts: Timeouts,
    notices: Notices,
    interrupted: &'a mut dyn FnMut() -> Option<i32>,
    deferred: DeferredSignal,
}

impl<'a> NodeWait<'a> {
    /// Starts a wait. `interrupted` returns a signal of the user, if one has arrived.
    pub(super) fn new(
        screen: &'a Arc<Screen>,
        address: String,
        timeouts: Timeouts,
        interrupted: &'a mut dyn FnMut() -> Option<i32>,
    ) -> Self {
        let since = Instant::now();
        let notices = Notices::new(since, timeouts.notice);
        Self { screen, address, since, timeouts, notices, interrupted, deferred: DeferredSignal::default() }
    }

    /// Continues the wait for `whom`, and prints a message if the interval is over. `reason` is the reason for the wait, if
    /// known.
    ///
    /// # Errors
    /// A signal has arrived.
    pub(super) fn check_signals_and_notify(
        &mut self,
        whom: &str,
        reason: Option<&str>,
    ) -> std::result::Result<(), RendezvousError> {
        self.check_signals()?;
        self.notify_if_due(whom, reason);
        Ok(())
    }

    fn notify_if_due(&mut self, whom: &str, reason: Option<&str>) {
        if let Some(passed) = self.notices.due() {
            self.screen.say(&waiting_for(whom, &self.address, passed, self.timeouts.join, reason));
        }
    }

    /// Does what [`check_signals_and_notify`](Self::check_signals_and_notify) does, when all nodes start again. The first signal
    /// does not end the wait at once: this node can stop the other nodes only when it has joined them.
    ///
    /// # Errors
    /// A signal has arrived [`STOP_TIMEOUT`] ago, or a second signal has arrived.
    pub(super) fn defer_signal_and_notify(
        &mut self,
        whom: &str,
        reason: Option<&str>,
    ) -> std::result::Result<(), RendezvousError> {
        let effect = format!("joining {whom} to stop all nodes");
        let is_second =
            (self.interrupted)().is_some_and(|signal| self.deferred.ends_wait(signal, &effect, self.screen));
        if is_second || self.deferred.elapsed().is_some_and(|elapsed| elapsed >= STOP_TIMEOUT) {
            return self.check_signals();
        }
        self.notify_if_due(whom, reason);
        Ok(())
    }

    /// Continues the wait without a message.
    ///
    /// # Errors
    /// A signal has arrived.
    pub(super) fn check_signals(&mut self) -> std::result::Result<(), RendezvousError> {
        let signal = std::mem::take(&mut self.deferred).first().or_else(|| (self.interrupted)());
        signal.map_or(Ok(()), |signal| Err(RendezvousError::Interrupted(signal)))
    }

    /// Shows a message now.
    pub(super) fn say(&self, text: &str) {
        self.screen.say(text);
    }

    /// Returns whether the time is over.
    pub(super) fn is_over(&self) -> bool {
        self.since.elapsed() >= self.timeouts.join
    }

    /// Returns host and port of node 0.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Returns the launcher's timeouts. That of the whole wait is `join`.
    pub(super) fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    /// Returns the launcher's screen.
    pub(super) fn screen(&self) -> &Arc<Screen> {
        self.screen
    }
}
