//! A launcher's wait for other launchers, with a timeout. Signals interrupt the wait, and it prints a message at intervals.

use std::sync::Arc;
use std::time::Instant;

use super::announcer::{Notices, waiting_for};
use super::launcher::Timeouts;
use super::node_failure::RendezvousError;
use super::screen::Screen;

/// One wait, which starts when the value is made.
pub(super) struct NodeWait<'a> {
    screen: &'a Arc<Screen>,
    /// Host and port of node 0, for messages.
    address: String,
    since: Instant,
    timeouts: Timeouts,
    notices: Notices,
    interrupted: &'a mut dyn FnMut() -> Option<i32>,
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
        Self { screen, address, since, timeouts, notices, interrupted }
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
        if let Some(passed) = self.notices.due() {
            self.screen.say(&waiting_for(whom, &self.address, passed, self.timeouts.join, reason));
        }
        Ok(())
    }

    /// Continues the wait without a message.
    ///
    /// # Errors
    /// A signal has arrived.
    pub(super) fn check_signals(&mut self) -> std::result::Result<(), RendezvousError> {
        (self.interrupted)().map_or(Ok(()), |signal| Err(RendezvousError::Interrupted(signal)))
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
