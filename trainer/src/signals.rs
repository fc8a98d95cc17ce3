//! SIGINT and SIGTERM: the first signal requests a stop after a checkpoint, the second ends the process at once.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM},
    flag,
};

/// Stop reason when `train.max_time_s` has passed. Ranks exchange it like a signal number. No signal has this number.
pub const TIME_IS_UP: i32 = 0x100;

/// Whether a signal has requested a stop of the run.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicUsize>);

impl Stop {
    /// Returns a flag that no signal sets, for evaluation and tests.
    pub fn never() -> Self {
        Self::default()
    }

    /// Installs the handlers of a process without a launcher: SIGINT and SIGTERM.
    ///
    /// # Errors
    /// When the kernel refuses a handler.
    pub fn on_signals() -> std::io::Result<Self> {
        Self::on(&[SIGINT, SIGTERM])
    }

    /// Installs the handlers of a worker. The launcher forwards the signal that it has received.
    ///
    /// # Errors
    /// When the kernel refuses a handler.
    pub fn of_worker() -> std::io::Result<Self> {
        Self::on(&[SIGINT, SIGTERM, SIGHUP, SIGQUIT])
    }

    fn on(signals: &[i32]) -> std::io::Result<Self> {
        let stop = Self::default();
        // The order matters: the first signal of any kind arms the conditional exit, so that only a second one takes it
        let armed = Arc::new(AtomicBool::new(false));
        for &signal in signals {
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&armed))?;
            flag::register(signal, Arc::clone(&armed))?;
            flag::register_usize(signal, Arc::clone(&stop.0), signal as usize)?;
        }
        Ok(stop)
    }

    /// Returns the signal that requested a stop, if any.
    pub fn signal(&self) -> Option<i32> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as i32),
        }
    }

    /// Requests a stop, as `signal` does.
    pub fn request(&self, signal: i32) {
        self.0.store(signal as usize, Ordering::Relaxed);
    }
}
