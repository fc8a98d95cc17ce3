//! What can go wrong, in a form that travels: the error that one rank raises is the error that all ranks report.

use std::fmt;

use super::wire::{Reader, Writer};

/// Class of a [`CommError`], for code that has to tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ErrorKind {
    /// Ranks called different collectives, or the same one with different shapes, types or roots.
    Mismatch = 1,
    /// Somebody did not arrive in time.
    Timeout = 2,
    /// A rank died, or its connection did.
    PeerLost = 3,
    /// Somebody called `abort`.
    Aborted = 4,
    /// A call that cannot work whatever the other ranks do: wrong length, root out of range, mean of integers.
    Usage = 5,
    /// The job could not be put together: rendezvous, secret, shared memory, addresses.
    Setup = 6,
    /// The operating system refused something in the middle of a collective.
    System = 7,
}

/// An error of the collectives. It names ranks and collective, and has a hint where there is something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommError {
    /// Its class.
    pub kind: ErrorKind,
    /// Rank (of the whole job) that is to blame as far as that is known.
    pub culprit: Option<usize>,
    /// What happened, where, on which ranks.
    pub message: String,
    /// What to do about it; may be empty.
    pub hint: String,
}

impl CommError {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, culprit: None, message: message.into(), hint: String::new() }
    }

    /// Returns an error of wrong use.
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
            _ => return None,
        };
        let culprit = from.u64().map(|r| (r != u64::MAX).then_some(r as usize))?;
        Some(Self { kind, culprit, message: from.text()?, hint: from.text()? })
    }
}

impl fmt::Display for CommError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if !self.hint.is_empty() {
            write!(f, "\nhint: {}", self.hint)?;
        }
        Ok(())
    }
}

impl std::error::Error for CommError {}

/// Result of everything in this module.
pub type Result<T> = std::result::Result<T, CommError>;

/// `0, 1 and 5` for messages.
pub(crate) fn list(ranks: &[usize]) -> String {
    match ranks {
        [] => "none".into(),
        [one] => one.to_string(),
        [init @ .., last] => {
            format!("{} and {last}", init.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
        }
    }
}

/// `rank 3` or `ranks 0 and 1`.
pub(crate) fn ranks(of: &[usize]) -> String {
    if of.len() == 1 { format!("rank {}", of[0]) } else { format!("ranks {}", list(of)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn travels_unchanged() {
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
    fn lists_read_well() {
        assert_eq!(ranks(&[2]), "rank 2");
        assert_eq!(ranks(&[0, 1, 5]), "ranks 0, 1 and 5");
    }
}
