//! The one-way switch that ends all waiting in a process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::error::{CommError, Result};

type Waker = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct State {
    error: Option<CommError>,
    wakers: Vec<Waker>,
}

/// Set once, by whichever comes first: an error of this rank, or the news of another's. Cheap to look at in a spin loop;
/// whoever sleeps somewhere has registered a waker.
#[derive(Default)]
pub(crate) struct Abort {
    raised: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Abort {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Whether anything was raised; one relaxed load.
    #[inline]
    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed)
    }

    /// `Err` with the first error once there is one.
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner).error.clone()
    }

    /// Waits up to `limit` for the error to arrive: shared memory may show the abort before the message is here.
    pub(crate) fn wait(&self, limit: Duration) -> Option<CommError> {
        let guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (guard, _) = self
            .changed
            .wait_timeout_while(guard, limit, |s| s.error.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        guard.error.clone()
    }

    /// Raises `error` unless one was raised before, and wakes everybody. Returns whether this was the first.
    pub(crate) fn raise(&self, error: CommError) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.error.is_some() {
            return false;
        }
        state.error = Some(error);
        self.raised.store(true, Ordering::Release);
        self.changed.notify_all();
        let wakers = state.wakers.clone();
        // Wakers take locks of their own, whose holders may look at this state: never call them with it locked.
        drop(state);
        wakers.iter().for_each(|wake| wake());
        true
    }

    /// Has `wake` called when something is raised; at once if that has happened.
    pub(crate) fn on_raise(&self, wake: impl Fn() + Send + Sync + 'static) {
        let wake: Waker = Arc::new(wake);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.wakers.push(wake.clone());
        let late = state.error.is_some();
        drop(state);
        if late {
            wake();
        }
    }
}
