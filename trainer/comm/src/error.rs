//! Errors that can be sent to other ranks. All ranks report the error that the first rank raised.

use super::wire::{Reader, Writer};

/// Class of a [`CommError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ErrorKind {
    /// Ranks called different collectives, or the same one with different lengths, types, reductions or roots.
    Mismatch = 1,
    /// A rank did not arrive in time.
    Timeout = 2,
    /// A rank died, or its connection broke.
    PeerLost = 3,
    /// A rank or the launcher aborted the job.
    Aborted = 4,
    /// Invalid arguments of a call: wrong length, root out of range, mean of integers.
    Usage = 5,
    /// The job could not be started: rendezvous, secret, shared memory, addresses.
    Setup = 6,
    /// The operating system failed during a collective.
    System = 7,
    /// A rank, or the rendezvous, has not answered for too long: its host or the network is down.
    NoAnswer = 8,
    /// A rank, or the rendezvous, reset the connection: its process has ended, or has given up after an outage.
    Reset = 9,
}

/// An error of a collective. The message names ranks and the collective.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}{}", hint_line(.hint))]
pub struct CommError {
    /// Class of the error.
    pub kind: ErrorKind,
    /// The rank (of the whole job) that caused the error, if it is known.
    pub culprit: Option<usize>,
    /// What happened, where, on which ranks.
    pub message: String,
    /// What the user can do. May be empty.
    pub hint: String,
}

impl CommError {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, culprit: None, message: message.into(), hint: String::new() }
    }

    /// Returns an error about wrong use.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Usage, message)
    }

    pub(crate) fn setup(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Setup, message)
    }

    pub(crate) fn system(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::System, message)
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    pub(crate) fn blame(mut self, rank: usize) -> Self {
        self.culprit = Some(rank);
        self
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        out.u8(self.kind as u8);
        out.u64(self.culprit.map_or(u64::MAX, |r| r as u64));
        out.text(&self.message);
        out.text(&self.hint);
    }

    pub(crate) fn decode(from: &mut Reader<'_>) -> Option<Self> {
        let kind = match from.u8()? {
            1 => ErrorKind::Mismatch,
            2 => ErrorKind::Timeout,
            3 => ErrorKind::PeerLost,
            4 => ErrorKind::Aborted,
            5 => ErrorKind::Usage,
            6 => ErrorKind::Setup,
            7 => ErrorKind::System,
            8 => ErrorKind::NoAnswer,
            9 => ErrorKind::Reset,
            _ => return None,
        };
        let culprit = from.u64().map(|r| (r != u64::MAX).then_some(r as usize))?;
        Some(Self { kind, culprit, message: from.text()?, hint: from.text()? })
    }
}

/// Returns the line of the hint, which follows the message, or an empty text.
fn hint_line(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!("\nhint: {hint}") }
}

/// Result of everything in this crate.
pub type Result<T> = std::result::Result<T, CommError>;

/// Lists ranks for messages: `0, 1 and 5`.
pub(crate) fn list(ranks: &[usize]) -> String {
    match ranks {
        [] => "none".into(),
        [one] => one.to_string(),
        [init @ .., last] => {
            format!("{} and {last}", init.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Names ranks for messages: `rank 3` or `ranks 0 and 1`.
pub(crate) fn ranks(of: &[usize]) -> String {
    if of.len() == 1 { format!("rank {}", of[0]) } else { format!("ranks {}", list(of)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoded_error_decodes_to_the_same_error() {
        let error = CommError::new(ErrorKind::Timeout, "no sign of rank 3").hint("look at its log").blame(3);
        let mut out = Writer::default();
        error.encode(&mut out);
        let bytes = out.into_bytes();
        assert_eq!(CommError::decode(&mut Reader::new(&bytes)), Some(error));
        for cut in 0..bytes.len() {
            assert_eq!(CommError::decode(&mut Reader::new(&bytes[..cut])), None);
        }
    }

    #[test]
    fn rank_lists_are_formatted_for_messages() {
        assert_eq!(ranks(&[2]), "rank 2");
        assert_eq!(ranks(&[0, 1, 5]), "ranks 0, 1 and 5");
    }
}
