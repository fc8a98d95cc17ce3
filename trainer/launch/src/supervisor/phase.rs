//! The phases of a supervisor, and their time limits.

use std::time::{Duration, Instant};

/// The phase of a supervisor, as in the diagram of the module.
pub(super) enum Phase {
    Running,
    Stopping { signal: i32, since: Instant },
    Ending { since: Instant, reported: bool, terminated: Option<Instant> },
}

impl Phase {
    /// Does not count `stopped`, during which this launcher and its workers were stopped, in the limits of the phase.
    pub(super) fn postpone(&mut self, stopped: Duration, now: Instant) {
        // A signal may have begun the phase after the stop.
        let later = |at: &mut Instant| *at = (*at + stopped).min(now);
        match self {
            Self::Running => {}
            Self::Stopping { since, .. } => later(since),
            Self::Ending { since, terminated, .. } => {
                later(since);
                terminated.iter_mut().for_each(later);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_do_not_count_the_time_during_which_the_job_was_stopped() {
        let start = Instant::now();
        let (before, pause) = (Duration::from_secs(2), Duration::from_secs(3600));
        let now = start + before + pause;
        let mut ending = Phase::Ending { since: start, reported: true, terminated: Some(start + before) };
        ending.postpone(pause, now);
        let Phase::Ending { since, terminated, .. } = ending else { unreachable!() };
        assert_eq!((now - since, terminated), (before, Some(now)));
        let mut stopping = Phase::Stopping { signal: 15, since: now };
        stopping.postpone(pause, now);
        let Phase::Stopping { since, .. } = stopping else { unreachable!() };
        assert_eq!(since, now, "a phase that began after the stop has its whole limit");
    }
}
