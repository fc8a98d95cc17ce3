//! Replaces `node_memory.rs` on systems other than Linux. Each rank has private memory, as if it were alone on its host.

use std::fmt;
use std::ops::Range;

use super::communicator::Communicator;
use super::error::{CommError, Result};

/// Bytes, zero at first, that this rank fills. Made by [`Communicator::node_memory`].
pub struct NodeMemory {
    comm: Communicator,
    bytes: Vec<u8>,
}

/// Bytes that this rank reads, made by [`NodeMemory::freeze`].
pub struct NodeBytes(Vec<u8>);

impl NodeMemory {
    /// Returns the range of this rank's part: all bytes.
    pub fn part(&self) -> Range<usize> {
        0..self.bytes.len()
    }

    /// Returns this rank's part.
    pub fn part_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Makes the bytes read-only. All ranks of the communicator call this.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn freeze(self) -> Result<NodeBytes> {
        // Enters the same barrier as on Linux, so that a wrong order of calls fails on every system.
        self.comm.barrier()?;
        Ok(NodeBytes(self.bytes))
    }
}

impl AsRef<[u8]> for NodeBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for NodeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeMemory({} bytes)", self.bytes.len())
    }
}

impl fmt::Debug for NodeBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeBytes({})", self.0.len())
    }
}

impl Communicator {
    /// Makes memory of `len` bytes on each rank.
    ///
    /// # Errors
    /// [`super::ErrorKind::Setup`] if the system refuses memory of this length.
    pub fn node_memory(&self, len: usize) -> Result<NodeMemory> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| {
            let cause = format!("rank {} cannot make {len} bytes of memory", self.inner.group.global_rank());
            self.inner.process.fail(CommError::setup(cause))
        })?;
        bytes.resize(len, 0);
        Ok(NodeMemory { comm: self.clone(), bytes })
    }
}
