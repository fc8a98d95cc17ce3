//! Headers of point-to-point messages and errors about messages, for all transports.

use std::time::Duration;

use super::call::CollectiveCall;
use super::dtype::DType;
use super::error::{CommError, ErrorKind, Result};
use super::wire::Reader;

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageHeader {
    pub tag: u64,
    pub dtype: DType,
    pub bytes: u64,
}

/// Bytes of an encoded [`MessageHeader`].
pub(crate) const MESSAGE_HEADER_BYTES: usize = 24;

impl MessageHeader {
    pub(crate) fn encode(&self) -> [u8; MESSAGE_HEADER_BYTES] {
        let mut out = [0; MESSAGE_HEADER_BYTES];
        out[..8].copy_from_slice(&self.tag.to_le_bytes());
        out[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        out[16] = self.dtype as u8;
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader::new(bytes);
        Some(Self { tag: r.u64()?, bytes: r.u64()?, dtype: DType::from_code(r.u8()?)? })
    }

    /// Returns an error for the receiver unless the message has the type and length of `call`. `me` and `peer` are ranks of the
    /// job.
    pub(crate) fn check(&self, call: &CollectiveCall, bytes: usize, me: usize, peer: usize, group: &str) -> Result<()> {
        if self.dtype == call.dtype && self.bytes as usize == bytes {
            return Ok(());
        }
        let count = self.bytes as usize / self.dtype.size();
        Err(CommError::new(
            ErrorKind::Mismatch,
            format!(
                "rank {peer} sends {count} {} (tag {}) where rank {me} calls {call}, {}",
                self.dtype,
                self.tag,
                call.position(group)
            ),
        )
        .hint("both ends of a message must name the same type and length")
        .blame(peer))
    }

    /// Returns the error for a peer that waits in a collective, and therefore will never answer the message.
    pub(crate) fn peer_in_collective(
        me: usize,
        call: &CollectiveCall,
        peer: usize,
        theirs: &CollectiveCall,
        group: &str,
    ) -> CommError {
        let message = format!("rank {peer} calls {theirs} where rank {me} calls {call}, {}", theirs.position(group));
        CommError::new(ErrorKind::Mismatch, message)
            .hint("every rank must call the same collectives in the same order, sends and receives in pairs")
            .blame(peer)
    }

    /// Returns the error for a peer that sent nothing, or received nothing, within the timeout.
    pub(crate) fn timed_out(
        me: usize,
        call: &CollectiveCall,
        peer: usize,
        timeout: Duration,
        group: &str,
    ) -> CommError {
        CommError::new(
            ErrorKind::Timeout,
            format!(
                "{call}, {}: rank {peer} did not answer within {timeout:.1?} (rank {me} waits)",
                call.position(group)
            ),
        )
        .blame(peer)
    }
}
