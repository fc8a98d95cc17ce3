//! Replaces `host_memory.rs` on systems other than Linux. Each rank has private memory, as if it were alone on its host.

use std::fmt;
use std::ops::Range;

use super::communicator::Communicator;
use super::error::{CommError, Result};

/// Bytes, zero at first, that this rank fills. Made by [`Communicator::host_memory`].
pub struct HostMemory {
    comm: Communicator,
    bytes: Vec<u8>,
}

/// Bytes that this rank reads, made by [`HostMemory::freeze`].
pub struct HostBytes(Vec<u8>);

impl HostMemory {
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
    pub fn freeze(self) -> Result<HostBytes> {
        // Waits as on Linux does, so that a wrong order of calls fails on every system.
        self.comm.barrier()?;
        Ok(HostBytes(self.bytes))
    }
}

impl AsRef<[u8]> for HostBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({} bytes)", self.bytes.len())
    }
}

impl fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBytes({})", self.0.len())
    }
}

impl Communicator {
    /// Makes memory of `len` bytes on each rank.
    ///
    /// # Errors
    /// [`super::ErrorKind::Setup`] if the system refuses memory of this length.
    pub fn host_memory(&self, len: usize) -> Result<HostMemory> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| {
            CommError::setup(format!("rank {} cannot make {len} bytes of memory", self.inner.group.job_rank()))
        })?;
        bytes.resize(len, 0);
        Ok(HostMemory { comm: self.clone(), bytes })
    }
}
