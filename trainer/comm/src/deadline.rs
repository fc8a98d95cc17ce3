//! The time limit of a wait for other processes.

use std::time::{Duration, Instant};

/// Longest sleep between two looks at the clock.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// If more time than this passes between two looks, this process was stopped, or its machine was.
const SUSPENDED_AFTER: Duration = Duration::from_millis(500);

/// The time limit of a wait for other processes. Time during which this process was stopped (Ctrl-Z, SIGSTOP) does not count: the
/// other processes of the job were probably stopped too, and have not had the time to arrive. A wait therefore sleeps in slices,
/// and looks at the clock after each of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitDeadline {
    until: Instant,
    last_look: Instant,
}

impl WaitDeadline {
    /// Starts a wait of at most `limit`.
    pub(crate) fn after(limit: Duration) -> Self {
        Self::starting_at(Instant::now(), limit)
    }

    fn starting_at(now: Instant, limit: Duration) -> Self {
        Self { until: now + limit, last_look: now }
    }

    /// Returns how long the caller may sleep before it calls this function again; zero if the time is over.
    pub(crate) fn next_sleep(&mut self) -> Duration {
        self.next_sleep_at(Instant::now())
    }

    /// Returns whether the time is over. As [`next_sleep`](Self::next_sleep), this is a look at the clock.
    pub(crate) fn is_over(&mut self) -> bool {
        self.next_sleep().is_zero()
    }

    fn next_sleep_at(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.last_look);
        self.last_look = now;
        if passed > SUSPENDED_AFTER {
            // Exclude the whole slice, so that time is left even if the stop interrupted the last slice.
            self.until += passed;
        }
        self.until.saturating_duration_since(now).min(POLL_INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(1);

    /// Sleeps from `now` on until the time is over. Returns the end.
    fn sleep_to_the_end(deadline: &mut WaitDeadline, mut now: Instant) -> Instant {
        loop {
            match deadline.next_sleep_at(now) {
                Duration::ZERO => return now,
                slice => now += slice,
            }
        }
    }

    #[test]
    fn a_wait_ends_at_its_limit_and_sleeps_in_slices() {
        let start = Instant::now();
        let mut deadline = WaitDeadline::starting_at(start, LIMIT);
        assert_eq!(deadline.next_sleep_at(start), POLL_INTERVAL);
        assert_eq!(sleep_to_the_end(&mut deadline, start), start + LIMIT);
        let short = Duration::from_millis(7);
        assert_eq!(WaitDeadline::starting_at(start, short).next_sleep_at(start), short);
    }

    /// A busy machine delays every sleep. This must not keep a wait from ending.
    #[test]
    fn delayed_sleeps_count() {
        let start = Instant::now();
        let mut deadline = WaitDeadline::starting_at(start, LIMIT);
        let mut now = start;
        while !deadline.next_sleep_at(now).is_zero() {
            now += SUSPENDED_AFTER;
        }
        assert_eq!(now, start + LIMIT);
    }

    #[test]
    fn time_during_which_the_process_was_stopped_does_not_count() {
        let (start, pause) = (Instant::now(), Duration::from_secs(3600));
        for before in [0, 1, 5, 9] {
            let mut deadline = WaitDeadline::starting_at(start, LIMIT);
            let mut now = start;
            for _ in 0..before {
                now += deadline.next_sleep_at(now);
            }
            // Also where this is the last slice, some time is left for the other processes.
            let slice = deadline.next_sleep_at(now);
            let end = sleep_to_the_end(&mut deadline, now + slice + pause);
            assert_eq!(end, start + LIMIT + pause + slice, "{before} slices before the stop");
        }
    }
}
