//! Memory that exists once per host and that all ranks of the host map. It works with every transport.

use std::fmt;
use std::ops::Range;

use super::communicator::Communicator;
use super::error::{CommError, Result};
use super::host;
use super::shm::{HEADER, Mapping};

/// Bytes, zero at first, that the ranks of this host fill together. Made by [`Communicator::node_memory`].
pub struct NodeMemory {
    comm: Communicator,
    memory: Mapping,
    len: usize,
    part: Range<usize>,
}

/// Read-only bytes that all ranks of this host share, made by [`NodeMemory::freeze`]. The kernel frees them when the last rank
/// has dropped its value.
pub struct NodeBytes {
    memory: Mapping,
    len: usize,
}

impl NodeMemory {
    /// Returns the range of this rank's part. The parts of a host's ranks follow each other, and their lengths are about equal.
    pub fn part(&self) -> Range<usize> {
        self.part.clone()
    }

    /// Returns this rank's part.
    pub fn part_mut(&mut self) -> &mut [u8] {
        // SAFETY: in bounds. No other rank has this part, and `self` is borrowed exclusively.
        unsafe { self.memory.slice_mut(HEADER + self.part.start, self.part.len()) }
    }

    /// Makes the bytes read-only, and the parts of all ranks of this host readable for each of them. All ranks of the
    /// communicator call this function.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn freeze(self) -> Result<NodeBytes> {
        // The barrier publishes the bytes that this rank wrote. After the barrier no rank can write: `freeze` takes `self` by
        // value.
        self.comm.barrier()?;
        Ok(NodeBytes { memory: self.memory, len: self.len })
    }
}

impl AsRef<[u8]> for NodeBytes {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: in bounds. Only `NodeMemory` writes, and each rank has consumed its `NodeMemory` (`freeze`).
        unsafe { self.memory.slice(HEADER, self.len) }
    }
}

impl fmt::Debug for NodeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeMemory({} bytes, {:?} of this rank)", self.len, self.part)
    }
}

impl fmt::Debug for NodeBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeBytes({})", self.len)
    }
}

impl Communicator {
    /// Makes memory of `len` bytes on each host. The ranks of a host map the same memory, as with MPI's `MPI_Win_allocate_shared`;
    /// ranks that cannot see each other's processes (in two containers) count as two hosts. All ranks call this with the same
    /// length.
    ///
    /// # Errors
    /// See [`Communicator`]. [`super::ErrorKind::Setup`], on every rank, if the system refuses memory of this length (`ulimit -v`,
    /// `ulimit -f`), or if a rank may not open the memory of another rank (which runs as another user).
    ///
    /// The kernel allocates a page when a rank first writes it. So this function succeeds on a host with too little memory for all
    /// pages, and the kernel kills processes later. Check the host's memory first.
    pub fn node_memory(&self, len: usize) -> Result<NodeMemory> {
        let hosts = self.texts(&host::shared_memory_domain())?;
        let own = &hosts[self.rank()];
        let ranks: Vec<usize> = (0..self.world_size()).filter(|&rank| hosts[rank] == *own).collect();
        let (me, leader) = (ranks.iter().position(|&rank| rank == self.rank()).unwrap_or(0), ranks[0]);

        // A length that no mapping can have is refused by the system too.
        let bytes = HEADER.saturating_add(len);
        // Each host's first rank makes the memory, and keeps the file open until the others have opened it.
        let made = (me == 0).then(|| Mapping::announce(bytes));
        let refused = made.as_ref().and_then(|made| made.as_ref().err());
        self.fail_together(refused.map(|error| format!("cannot make {len} bytes of shared memory: {error}")))?;
        let made = made.and_then(std::result::Result::ok);
        let announced = self.texts(made.as_ref().map_or("", |(_, _, text)| text))?;
        let (memory, file) = match made {
            Some((memory, file, _)) => (Ok(memory), Some(file)),
            None => (Mapping::find(announced[leader].as_bytes(), bytes), None),
        };
        let refused = memory.as_ref().err();
        self.fail_together(
            refused.map(|cause| format!("cannot open the shared memory of rank {}: {cause}", ranks[leader])),
        )?;
        drop(file);
        let memory = memory.map_err(|cause| self.inner.process.fail(CommError::setup(cause)))?;
        let each = len.div_ceil(ranks.len());
        let part = (me * each).min(len)..((me + 1) * each).min(len);
        Ok(NodeMemory { comm: self.clone(), memory, len, part })
    }

    /// Returns the texts of all ranks.
    fn texts(&self, own: &str) -> Result<Vec<String>> {
        let gathered = self.all_gather_v(own.as_bytes())?;
        Ok(gathered.parts().map(|text| String::from_utf8_lossy(text).into_owned()).collect())
    }

    /// Returns an error on every rank if any rank passes the reason of a failure.
    fn fail_together(&self, refused: Option<String>) -> Result<()> {
        let Some((rank, cause)) = self.first_failure(refused.as_deref().unwrap_or_default())? else { return Ok(()) };
        let hint = "the ranks of a host share this memory: they need one user, and limits (`ulimit -v -f`) that allow all of it";
        Err(self.inner.process.fail(CommError::setup(format!("rank {rank} {cause}")).hint(hint).blame(rank)))
    }
}
