//! Messages about a rendezvous that is not complete yet: which peers were refused and why, and which members are missing.

use std::collections::BTreeSet;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::error::Result;
use super::thread::start_thread;
use comm::{MemberKind, StoreEvent};

/// Number of refused connections that are shown. A port scan must not fill the screen.
const SHOWN: usize = 5;
/// Number of missing members that are listed.
const LISTED: usize = 8;

/// The times of the messages about a wait.
pub(super) struct Notices {
    start: Instant,
    interval: Duration,
    count: u32,
}

impl Notices {
    /// Messages at `interval` after `start`, twice the interval, and so on.
    pub(super) fn new(start: Instant, interval: Duration) -> Self {
        Self { start, interval, count: 0 }
    }

    /// Returns the time since the start if a message is due. Counts the message.
    pub(super) fn due(&mut self) -> Option<Duration> {
        let passed = self.start.elapsed();
        (passed >= self.interval.saturating_mul(self.count + 1)).then(|| {
            self.count += 1;
            passed
        })
    }
}

/// Prints the messages about one rendezvous.
pub(super) struct Announcer<S> {
    /// Writes one message to the screen.
    pub(super) say: S,
    pub(super) member: MemberKind,
    pub(super) world_size: usize,
    /// Host and port, for messages.
    pub(super) place: String,
    /// Interval between messages about missing members.
    pub(super) interval: Duration,
    /// Timeout of the rendezvous, for messages.
    pub(super) limit: Duration,
}

impl<S: Fn(&str) + Send + 'static> Announcer<S> {
    /// Starts a thread that prints the messages. The returned function takes the events of the rendezvous. The thread ends when
    /// the function is dropped.
    ///
    /// # Errors
    /// No thread is left.
    pub(super) fn start(self) -> Result<impl FnMut(StoreEvent) + Send + 'static> {
        let (sender, events): (Sender<StoreEvent>, _) = channel();
        let run = move || {
            let start = Instant::now();
            let mut state = Announcements::new(self.world_size);
            loop {
                let next = start + self.interval.saturating_mul(state.notices + 1);
                let text = match events.recv_timeout(next.saturating_duration_since(Instant::now())) {
                    Ok(event) => state.take(event),
                    Err(RecvTimeoutError::Timeout) => {
                        state.waiting(self.member, &self.place, start.elapsed(), self.limit)
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                };
                if let Some(text) = text {
                    (self.say)(&text);
                }
            }
        };
        start_thread("announcer", "the rendezvous", run)?;
        Ok(move |event| {
            // The receiver exists: the thread runs until this function is dropped.
            let _ = sender.send(event);
        })
    }
}

/// The state of the rendezvous, and what has been printed about it.
struct Announcements {
    missing: BTreeSet<usize>,
    refused: usize,
    notices: u32,
    /// Whether a member has left or failed. Then no message about missing members is needed.
    has_ended: bool,
}

impl Announcements {
    fn new(world_size: usize) -> Self {
        Self { missing: (0..world_size).collect(), refused: 0, notices: 0, has_ended: false }
    }

    fn take(&mut self, event: StoreEvent) -> Option<String> {
        match event {
            StoreEvent::Joined(member) => _ = self.missing.remove(&member),
            StoreEvent::Left(_) | StoreEvent::Lost { .. } | StoreEvent::Aborted(_) => self.has_ended = true,
            StoreEvent::Refused { from, cause } => {
                tracing::warn!(%from, cause, "refused a peer at the rendezvous");
                // A node that starts again tries to join until the other nodes have left the attempt that failed.
                if self.has_ended {
                    return None;
                }
                self.refused += 1;
                if self.refused <= SHOWN {
                    let last = if self.refused == SHOWN { " (others will not be shown)" } else { "" };
                    return Some(format!("note: {from} was refused at the rendezvous: {cause}{last}"));
                }
            }
        }
        None
    }

    fn waiting(&mut self, member: MemberKind, place: &str, passed: Duration, limit: Duration) -> Option<String> {
        self.notices += 1;
        if self.has_ended || self.missing.is_empty() {
            return None;
        }
        let missing: Vec<usize> = self.missing.iter().copied().collect();
        Some(waiting_for(&list(member, &missing), place, passed, limit, None))
    }
}

/// Returns the message about a wait for `whom`, with the reason if it is known.
pub(super) fn waiting_for(whom: &str, place: &str, passed: Duration, limit: Duration, reason: Option<&str>) -> String {
    let (passed, limit) = (passed.as_secs_f64(), limit.as_secs_f64());
    let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
    format!("waiting for {whom} at {place} ({passed:.0} s of {limit:.0} s){reason}")
}

/// Lists members: `nodes 1, 2`.
fn list(member: MemberKind, missing: &[usize]) -> String {
    let listed: Vec<String> = missing.iter().take(LISTED).map(usize::to_string).collect();
    let plural = if missing.len() == 1 { "" } else { "s" };
    let others = match missing.len().saturating_sub(LISTED) {
        0 => String::new(),
        others => format!(" and {others} others"),
    };
    format!("{member}{plural} {}{others}", listed.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused() -> StoreEvent {
        StoreEvent::Refused { from: "10.0.0.2:4711".parse().unwrap(), cause: "it is nobody".into() }
    }

    #[test]
    fn the_missing_are_named_until_all_are_there() {
        let limit = Duration::from_secs(300);
        let mut state = Announcements::new(3);
        let say = |state: &mut Announcements, s| state.waiting(MemberKind::Node, "h:1", Duration::from_secs(s), limit);
        assert_eq!(state.take(StoreEvent::Joined(0)), None);
        assert_eq!(say(&mut state, 10).unwrap(), "waiting for nodes 1, 2 at h:1 (10 s of 300 s)");
        state.take(StoreEvent::Joined(2));
        assert_eq!(say(&mut state, 20).unwrap(), "waiting for node 1 at h:1 (20 s of 300 s)");
        state.take(StoreEvent::Joined(1));
        assert_eq!(say(&mut state, 30), None);
        let all: Vec<usize> = (0..1000).collect();
        assert_eq!(list(MemberKind::Rank, &all), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 others");
    }

    #[test]
    fn a_port_scan_does_not_fill_the_screen() {
        let mut state = Announcements::new(2);
        let said: Vec<String> = (0..50).filter_map(|_| state.take(refused())).collect();
        assert_eq!(said.len(), SHOWN);
        assert_eq!(said[0], "note: 10.0.0.2:4711 was refused at the rendezvous: it is nobody");
        assert!(said[4].ends_with("(others will not be shown)"));
    }

    #[test]
    fn a_node_that_joins_the_next_attempt_too_early_is_not_reported() {
        let mut state = Announcements::new(2);
        for member in 0..2 {
            state.take(StoreEvent::Joined(member));
        }
        assert!(state.take(refused()).is_some(), "the job runs");
        state.take(StoreEvent::Left(1));
        assert_eq!(state.take(refused()), None);
    }

    #[test]
    fn the_thread_says_it_at_once_and_in_intervals() {
        let (sender, said) = channel();
        let say = move |text: &str| _ = sender.send(text.to_owned());
        let interval = Duration::from_millis(5);
        let limit = Duration::from_secs(300);
        let announcer =
            Announcer { say, member: MemberKind::Node, world_size: 2, place: "h:1".into(), interval, limit };
        let mut take = announcer.start().unwrap();
        take(StoreEvent::Joined(0));
        let next = |part: &str| {
            let mut texts = std::iter::repeat_with(|| said.recv_timeout(limit)).map_while(|text| text.ok());
            texts.any(|text| text.contains(part))
        };
        assert!(next("waiting for node 1 at h:1"));
        take(refused());
        assert!(next("was refused"));
        assert!(next("waiting for node 1 at h:1"));
        drop(take);
        // The thread ends and drops its sender
        while said.recv_timeout(limit).is_ok() {}
        assert_eq!(said.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected));
    }
}
