//! Signals: the first SIGINT, SIGTERM, SIGHUP or SIGQUIT requests a stop after a checkpoint, a second one ends the process at
//! once (`launch::signals` has the rules). A file-size limit is an error of the write, not a signal that kills.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use launch::signals;
use signal_hook::{consts::SIGXFSZ, flag, low_level::pipe};

use crate::console;
use crate::failure::Failure;

/// The reason why a run ends before its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A signal, by its number.
    Signal(i32),
    /// `train.max_time_s` has passed.
    TimeLimit,
}

impl StopReason {
    /// The number of [`StopReason::TimeLimit`]. No signal has this number.
    const TIME_LIMIT: i32 = 0x100;

    /// Returns the number that ranks exchange. 0 means that the run goes on. Of two reasons, the one with the higher number
    /// takes precedence.
    pub fn encode(reason: Option<Self>) -> i32 {
        match reason {
            None => 0,
            Some(Self::Signal(signal)) => signal,
            Some(Self::TimeLimit) => Self::TIME_LIMIT,
        }
    }

    /// Returns the reason with this number: the inverse of [`encode`](Self::encode).
    pub fn decode(number: i32) -> Option<Self> {
        match number {
            0 => None,
            Self::TIME_LIMIT => Some(Self::TimeLimit),
            signal => Some(Self::Signal(signal)),
        }
    }
}

/// What a signal does before training starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EarlySignal {
    /// Requests a stop, as a later signal does.
    RequestsStop,
    /// Ends the process at once: there is nothing to save before the first step.
    EndsProcess,
}

/// What the second signal does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SecondSignal {
    /// Ends the process at once.
    EndsProcess,
    /// Nothing.
    IsIgnored,
}

/// Whether a signal has requested a stop of the run.
#[derive(Debug, Clone, Default)]
pub struct StopFlag {
    signal: Arc<AtomicUsize>,
    /// Whether a signal ends the process at once, until [`enter_training`](Self::enter_training).
    exits_at_once: Arc<AtomicBool>,
}

impl StopFlag {
    /// Returns a flag that no signal sets, for evaluation and tests.
    pub fn never() -> Self {
        Self::default()
    }

    /// Installs the handlers. Signals that the parent process has set to be ignored stay ignored.
    ///
    /// # Errors
    /// When the kernel refuses a handler.
    pub fn on_signals() -> Result<Self, Failure> {
        Self::install(EarlySignal::RequestsStop, SecondSignal::EndsProcess).map_err(refused)
    }

    /// Installs the handlers of a worker of another launcher, which waits for the other ranks first. Until
    /// [`enter_training`](Self::enter_training), a signal ends the process at once.
    ///
    /// # Errors
    /// When the kernel refuses a handler.
    pub fn of_foreign_worker() -> Result<Self, Failure> {
        Self::install(EarlySignal::EndsProcess, SecondSignal::EndsProcess).map_err(refused)
    }

    /// Installs the handlers of a worker of this program's launcher. A second signal does nothing: a batch system may signal the
    /// worker and the launcher, which forwards its signal. The launcher kills workers that have to end at once. Until
    /// [`enter_training`](Self::enter_training), a signal ends the process at once.
    ///
    /// # Errors
    /// When the kernel refuses a handler.
    pub fn of_builtin_worker() -> Result<Self, Failure> {
        Self::install(EarlySignal::EndsProcess, SecondSignal::IsIgnored).map_err(refused)
    }

    /// From now on a signal requests a stop: training starts.
    pub fn enter_training(&self) {
        self.exits_at_once.store(false, Ordering::Relaxed);
    }

    fn install(early: EarlySignal, second: SecondSignal) -> io::Result<Self> {
        let exits_at_once = early == EarlySignal::EndsProcess;
        let stop = Self { exits_at_once: Arc::new(AtomicBool::new(exits_at_once)), ..Self::default() };
        let ignored = signals::ignored();
        // The order matters: the first signal arms the conditional exit, so only a second signal ends the process.
        let armed = Arc::new(AtomicBool::new(false));
        for signal in signals::STOPPING.into_iter().filter(|signal| !ignored.contains(signal)) {
            if exits_at_once {
                flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop.exits_at_once))?;
            }
            // A SIGHUP arms nothing. If several signals are pending, the kernel delivers the lowest number first. So a SIGINT that
            // was sent before a SIGHUP may arrive after it.
            if second == SecondSignal::EndsProcess && signals::ends_at_once(signal) {
                flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&armed))?;
                flag::register(signal, Arc::clone(&armed))?;
            }
            flag::register_usize(signal, Arc::clone(&stop.signal), signal as usize)?;
        }
        Ok(stop)
    }

    /// Starts a thread that prints at once that the run will stop, since a step or a batch may take minutes. At the run's end, wait
    /// for the thread with [`Announcement::wait`], so that its text comes before the text of the run's end.
    ///
    /// # Errors
    /// When the kernel refuses a handler or a thread.
    pub fn announce(&self) -> Result<Announcement, Failure> {
        self.start_announcer().map(Announcement).map_err(refused)
    }

    fn start_announcer(&self) -> io::Result<JoinHandle<()>> {
        let (mut read, write) = UnixStream::pair()?;
        let ignored = signals::ignored();
        for signal in signals::STOPPING.into_iter().filter(|signal| !ignored.contains(signal)) {
            // Handlers run in the order of their registration, so the number is set before the thread wakes up.
            pipe::register(signal, write.try_clone()?)?;
        }
        let stop = self.clone();
        if stop.signal().is_some() {
            // The signal came before these handlers. A second byte in the pipe is harmless.
            (&write).write_all(&[0])?;
        }
        thread::Builder::new().name("signals".into()).spawn(move || {
            if let (Ok(()), Some(signal)) = (read.read_exact(&mut [0]), stop.signal()) {
                // After a SIGHUP, the next signal is the first one that counts.
                let again = if signals::ends_at_once(signal) { "; once more ends it at once" } else { "" };
                console::eprint_above_bar(format_args!(
                    "{}: training saves a checkpoint and stops, after the next steps{again}",
                    signals::name(signal)
                ));
            }
        })
    }

    /// Returns the signal that requested a stop, if any.
    pub fn signal(&self) -> Option<i32> {
        match self.signal.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as i32),
        }
    }

    /// Requests a stop, as `signal` does.
    pub fn request(&self, signal: i32) {
        self.signal.store(signal as usize, Ordering::Relaxed);
    }
}

/// The thread of [`StopFlag::announce`].
pub struct Announcement(JoinHandle<()>);

impl Announcement {
    /// Waits until the text is written. Call this only after a signal.
    pub fn wait(self) {
        // A thread that has panicked has printed that.
        let _ = self.0.join();
    }
}

/// Installs the handlers that every command needs. A write beyond the file-size limit (`ulimit -f`) fails with `EFBIG`, as a
/// write to a full disk fails: without a handler, SIGXFSZ ends the process without a message. A SIGSEGV or SIGBUS that another
/// process sends ends this one.
///
/// # Errors
/// When the kernel refuses a handler.
pub fn install_for_every_command() -> Result<(), Failure> {
    // Nothing reads the flag. The handler is only needed because it replaces the default action.
    flag::register(SIGXFSZ, Arc::default()).map_err(refused)?;
    comm::fault_signals::install_handlers().map_err(refused)
}

fn refused(error: io::Error) -> Failure {
    Failure::run(format!("cannot catch signals: {error}"), "see `ulimit -a`")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A signal may come after the handlers of [`StopFlag::on_signals`] and before those of the thread.
    #[test]
    fn a_signal_that_came_before_the_thread_started_is_announced_too() {
        let stop = StopFlag::never();
        stop.request(rustix::process::Signal::TERM.as_raw());
        stop.announce().unwrap().wait();
    }
}
