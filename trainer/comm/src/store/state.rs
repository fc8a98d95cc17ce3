//! The state of the server, and its answers to requests: a state machine without sockets and without a clock.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::config::{MemberKind, StoreConfig};
use super::message::{ClientMessage, ServerMessage};
use crate::error::{CommError, ErrorKind};
use crate::net::{self, DisconnectKind};

/// Longest wait that a request may ask for.
const MAX_WAIT: Duration = Duration::from_secs(7 * 24 * 3600);

struct PendingGet {
    rank: u32,
    id: u64,
    until: Instant,
}

#[derive(Default)]
struct Barrier {
    arrived: BTreeMap<u32, (u64, Instant)>,
}

/// Messages to send, each with the rank that receives it.
pub(super) type Outgoing = Vec<(u32, ServerMessage)>;

/// The keys, the barriers, the members and the job's first error.
pub(super) struct StoreState {
    world_size: u32,
    member: MemberKind,
    answer_timeout: Duration,
    members: BTreeSet<u32>,
    joined_before: BTreeSet<u32>,
    values: HashMap<String, Vec<u8>>,
    waiting: HashMap<String, Vec<PendingGet>>,
    barriers: HashMap<String, Barrier>,
    error: Option<CommError>,
}

impl StoreState {
    pub(super) fn new(config: &StoreConfig) -> Self {
        Self {
            world_size: config.world_size as u32,
            member: config.member,
            answer_timeout: config.answer_timeout,
            members: BTreeSet::new(),
            joined_before: BTreeSet::new(),
            values: HashMap::new(),
            waiting: HashMap::new(),
            barriers: HashMap::new(),
            error: None,
        }
    }

    pub(super) fn error(&self) -> Option<&CommError> {
        self.error.as_ref()
    }

    /// Checks whether a rank that has authenticated may join. The error is the reason why not.
    pub(super) fn admit(&self, rank: u32, world_size: u32) -> Result<(), String> {
        let member = self.member;
        if world_size != self.world_size {
            return Err(format!("it was started for {world_size} {member}s, this job has {}", self.world_size));
        }
        if rank >= self.world_size {
            return Err(format!("there is no {member} {rank} in a job of {}", self.world_size));
        }
        if self.joined_before.contains(&rank) {
            let setting = member.setting();
            return Err(format!("{member} {rank} has joined already; two processes must not have the same {setting}"));
        }
        Ok(())
    }

    pub(super) fn join(&mut self, rank: u32) -> Outgoing {
        self.members.insert(rank);
        self.joined_before.insert(rank);
        self.error.clone().map(|error| (rank, ServerMessage::Aborted { error })).into_iter().collect()
    }

    /// Ends the job with `error`, unless it has ended before.
    pub(super) fn abort(&mut self, error: CommError) -> Option<Outgoing> {
        if self.error.is_some() {
            return None;
        }
        self.error = Some(error.clone());
        Some(self.members.iter().map(|rank| (*rank, ServerMessage::Aborted { error: error.clone() })).collect())
    }

    /// Ends the job because a member's connection ended without a goodbye. The `ending` decides the kind of the error: only a
    /// closed connection proves that the member's process has ended.
    pub(super) fn lost(&mut self, rank: u32, ending: DisconnectKind, cause: &str) -> Option<Outgoing> {
        self.members.remove(&rank);
        let member = self.member;
        let error = match ending {
            DisconnectKind::TimedOut => {
                let limit = net::seconds(self.answer_timeout);
                CommError::new(ErrorKind::NoAnswer, format!("no answer from {member} {rank} for {limit}"))
                    .hint(net::OUTAGE_HINT)
            }
            DisconnectKind::Reset => CommError::new(ErrorKind::Reset, format!("{member} {rank} is gone: {cause}"))
                .hint(format!("the log of {member} {rank} says more, unless it was killed or the network was down")),
            DisconnectKind::Closed | DisconnectKind::Failed => {
                CommError::new(ErrorKind::PeerLost, format!("{member} {rank} is gone: {cause}"))
                    .hint(format!("the log of {member} {rank} says more, unless it was killed"))
            }
        };
        self.abort(error.blame(rank as usize))
    }

    pub(super) fn goodbye(&mut self, rank: u32) {
        self.members.remove(&rank);
    }

    pub(super) fn handle(&mut self, rank: u32, request: ClientMessage, now: Instant) -> Outgoing {
        let until = |ms: u64| now + Duration::from_millis(ms).min(MAX_WAIT);
        match request {
            ClientMessage::Set { key, value } => {
                let out = self
                    .waiting
                    .remove(&key)
                    .into_iter()
                    .flatten()
                    .map(|w| (w.rank, ServerMessage::Value { id: w.id, value: Some(value.clone()) }))
                    .collect();
                self.values.insert(key, value);
                out
            }
            ClientMessage::Get { id, key, limit_ms } => match self.values.get(&key) {
                None if limit_ms > 0 => {
                    self.waiting.entry(key).or_default().push(PendingGet { rank, id, until: until(limit_ms) });
                    Vec::new()
                }
                value => vec![(rank, ServerMessage::Value { id, value: value.cloned() })],
            },
            ClientMessage::Barrier { id, name, limit_ms } => {
                let barrier = self.barriers.entry(name.clone()).or_default();
                barrier.arrived.insert(rank, (id, until(limit_ms)));
                if barrier.arrived.len() < self.world_size as usize {
                    return Vec::new();
                }
                let done = self.barriers.remove(&name).unwrap_or_default();
                done.arrived
                    .into_iter()
                    .map(|(r, (id, _))| (r, ServerMessage::Barrier { id, missing: vec![] }))
                    .collect()
            }
            ClientMessage::Abort { error } => self.abort(error).unwrap_or_default(),
            ClientMessage::Query { id } => self
                .members
                .iter()
                .filter(|r| **r != rank)
                .map(|r| (*r, ServerMessage::Ask { asker: rank, id }))
                .collect(),
            ClientMessage::Activity { asker, id, text } => vec![(asker, ServerMessage::Activity { id, rank, text })],
            ClientMessage::Goodbye => Vec::new(),
        }
    }

    /// Answers the waits whose time is over.
    pub(super) fn tick(&mut self, now: Instant) -> Outgoing {
        let mut out = Vec::new();
        for waiting in self.waiting.values_mut() {
            waiting.retain(|w| {
                let keep = w.until > now;
                if !keep {
                    out.push((w.rank, ServerMessage::Value { id: w.id, value: None }));
                }
                keep
            });
        }
        self.waiting.retain(|_, w| !w.is_empty());
        for barrier in self.barriers.values() {
            let missing: Vec<u32> = (0..self.world_size).filter(|r| !barrier.arrived.contains_key(r)).collect();
            for (rank, (id, until)) in &barrier.arrived {
                if *until <= now {
                    out.push((*rank, ServerMessage::Barrier { id: *id, missing: missing.clone() }));
                }
            }
        }
        for barrier in self.barriers.values_mut() {
            barrier.arrived.retain(|_, (_, until)| *until > now);
        }
        self.barriers.retain(|_, b| !b.arrived.is_empty());
        out
    }

    /// Returns when [`StoreState::tick`] must be called next.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let waits = self.waiting.values().flatten().map(|w| w.until);
        let barriers = self.barriers.values().flat_map(|b| b.arrived.values().map(|(_, until)| *until));
        waits.chain(barriers).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Secret;

    fn state(world_size: usize) -> StoreState {
        let limit = Duration::from_secs(10);
        let config = StoreConfig::new(Secret::random().unwrap(), world_size);
        StoreState::new(&StoreConfig { answer_timeout: limit, ..config })
    }

    fn get(id: u64, limit_ms: u64) -> ClientMessage {
        ClientMessage::Get { id, key: "k".into(), limit_ms }
    }

    #[test]
    fn get_waits_for_a_key_until_its_limit() {
        let (mut state, now) = (state(2), Instant::now());
        assert_eq!(state.handle(0, get(1, 0), now), [(0, ServerMessage::Value { id: 1, value: None })]);
        assert_eq!(state.handle(0, get(2, 1000), now), []);
        assert_eq!(state.handle(1, get(3, 5000), now), []);
        assert_eq!(state.next_deadline(), Some(now + Duration::from_secs(1)));
        assert_eq!(state.tick(now + Duration::from_secs(2)), [(0, ServerMessage::Value { id: 2, value: None })]);
        let set = ClientMessage::Set { key: "k".into(), value: vec![7] };
        assert_eq!(state.handle(0, set, now), [(1, ServerMessage::Value { id: 3, value: Some(vec![7]) })]);
        assert_eq!(state.handle(0, get(4, 0), now), [(0, ServerMessage::Value { id: 4, value: Some(vec![7]) })]);
        assert_eq!(state.next_deadline(), None);
    }

    #[test]
    fn a_barrier_opens_for_all_or_names_who_is_missing() {
        let (mut state, now) = (state(3), Instant::now());
        let barrier = |id, limit_ms| ClientMessage::Barrier { id, name: "join".into(), limit_ms };
        assert_eq!(state.handle(1, barrier(5, 1000), now), []);
        let late = now + Duration::from_secs(1);
        assert_eq!(state.tick(late), [(1, ServerMessage::Barrier { id: 5, missing: vec![0, 2] })]);
        for rank in [0, 2] {
            assert_eq!(state.handle(rank, barrier(6, 1000), late), []);
        }
        let open = |rank| (rank, ServerMessage::Barrier { id: 6, missing: vec![] });
        assert_eq!(state.handle(1, barrier(6, 1000), late), [open(0), open(1), open(2)]);
    }

    #[test]
    fn all_members_get_the_first_error() {
        let mut state = state(3);
        for rank in [0, 1] {
            assert_eq!(state.join(rank), []);
        }
        let messages = state.lost(1, DisconnectKind::Closed, "its connection was closed").unwrap();
        let [(0, ServerMessage::Aborted { error })] = messages.as_slice() else { panic!("{messages:?}") };
        assert_eq!((error.kind, error.culprit), (ErrorKind::PeerLost, Some(1)));
        assert!(
            state.lost(0, DisconnectKind::Closed, "its connection was closed").is_none(),
            "consequences are not causes"
        );
        let late = state.join(2);
        assert_eq!(late, [(2, ServerMessage::Aborted { error: error.clone() })]);
    }

    #[test]
    fn an_outage_is_distinguished_from_a_death() {
        for (ending, kind, message) in [
            (DisconnectKind::TimedOut, ErrorKind::NoAnswer, "no answer from rank 1 for 10 s"),
            (DisconnectKind::Reset, ErrorKind::Reset, "rank 1 is gone: why"),
            (DisconnectKind::Closed, ErrorKind::PeerLost, "rank 1 is gone: why"),
        ] {
            let mut state = state(2);
            state.join(1);
            state.lost(1, ending, "why");
            let error = state.error().unwrap();
            assert_eq!((error.kind, error.message.as_str(), error.culprit), (kind, message, Some(1)));
            assert_eq!(error.hint.contains("the network"), ending != DisconnectKind::Closed, "{}", error.hint);
        }
    }

    #[test]
    fn wrong_members_get_the_reason() {
        let mut state = state(2);
        state.join(0);
        assert!(state.admit(0, 2).unwrap_err().contains("joined already"));
        assert!(state.admit(2, 2).unwrap_err().contains("no rank 2"));
        assert!(state.admit(1, 3).unwrap_err().contains("started for 3 ranks, this job has 2"));
        assert!(state.admit(1, 2).is_ok());
    }
}
