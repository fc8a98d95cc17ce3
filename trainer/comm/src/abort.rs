//! The abort flag, which ends all waits in a process. Once raised, the flag stays raised.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::error::{CommError, Result};

type Waker = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct AbortState {
    error: Option<CommError>,
    wakers: Vec<Waker>,
}

/// Holds the job's first error: this rank's own error, or an error that another rank reported. A spin loop can check the flag at
/// low cost. Code that sleeps registers a waker.
#[derive(Default)]
pub(crate) struct AbortFlag {
    raised: AtomicBool,
    state: Mutex<AbortState>,
    changed: Condvar,
}

impl AbortFlag {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns whether an error was raised. One relaxed load.
    #[inline]
    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed)
    }

    /// Returns the first error as `Err`, once there is one.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.is_raised() {
            return Ok(());
        }
        match self.error() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    pub(crate) fn error(&self) -> Option<CommError> {
        self.state.lock().error.clone()
    }

    /// Waits up to `limit` for the error, and returns it. A rank may see the abort in shared memory before the message with the
    /// error arrives on the control connection.
    pub(crate) fn wait(&self, limit: Duration) -> Option<CommError> {
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |state| state.error.is_none(), limit);
        state.error.clone()
    }

    /// Raises `error` unless one was raised before, and wakes all waiters. Returns whether this was the first.
    pub(crate) fn raise(&self, error: CommError) -> bool {
        let mut state = self.state.lock();
        if state.error.is_some() {
            return false;
        }
        state.error = Some(error);
        self.raised.store(true, Ordering::Release);
        self.changed.notify_all();
        let wakers = state.wakers.clone();
        // Wakers take their own locks, whose holders may look at this state: never call wakers with the state locked.
        drop(state);
        wakers.iter().for_each(|wake| wake());
        true
    }

    /// Registers `wake`, which is called when an error is raised, or at once if one was raised already.
    pub(crate) fn on_raise(&self, wake: impl Fn() + Send + Sync + 'static) {
        let wake: Waker = Arc::new(wake);
        let mut state = self.state.lock();
        state.wakers.push(wake.clone());
        let late = state.error.is_some();
        drop(state);
        if late {
            wake();
        }
    }
}
