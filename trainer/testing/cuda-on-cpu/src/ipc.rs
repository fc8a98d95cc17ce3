//! Memory of other processes (CUDA IPC). A handle contains the process and the descriptor of the memory's file, which is
//! opened through `/proc`.

use std::ffi::c_uint;
use std::fs::{self, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::cu_result::{DriverResult, INVALID_CONTEXT, INVALID_VALUE, PEER_ACCESS_UNSUPPORTED};
use crate::log::Argument;
use crate::machine::{Device, Peers, machine};
use crate::memory::{Block, BlockKind, Mapping, block_at, blocks, blocks_mut, file_name};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: the only flag, and it is required.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"CUonCPU1");

/// `CUipcMemHandle`: 64 bytes, passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle {
    /// Only this driver interprets these bytes.
    pub reserved: [u8; 64],
}

impl Argument for IpcHandle {
    fn number(&self) -> u64 {
        self.words().map_or(0, |words| words[5])
    }
}

impl IpcHandle {
    fn from_words(words: [u64; 6]) -> Self {
        let mut reserved = [0; 64];
        for (to, word) in reserved.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        Self { reserved }
    }

    /// Returns magic number, process id, file descriptor, bytes, physical GPU index and serial number.
    fn words(&self) -> DriverResult<[u64; 6]> {
        let mut words = [0; 6];
        for (word, bytes) in words.iter_mut().zip(self.reserved.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().map_err(|_| INVALID_VALUE)?);
        }
        if words[0] == MAGIC { Ok(words) } else { Err(INVALID_VALUE) }
    }
}

/// Implements `cuIpcGetMemHandle`. An address inside a block refers to the whole block.
pub(crate) fn export(address: usize) -> DriverResult<IpcHandle> {
    let blocks = blocks();
    let block = block_at(&blocks, address).ok_or(INVALID_VALUE)?;
    let BlockKind::Own { file, serial } = &block.kind else { return Err(INVALID_VALUE) };
    let (pid, file) = (u64::from(std::process::id()), file.as_raw_fd() as u64);
    Ok(IpcHandle::from_words([MAGIC, pid, file, block.bytes as u64, block.physical as u64, *serial]))
}

/// Implements `cuIpcOpenMemHandle`. Opening a handle again returns the same address and increases its count.
pub(crate) fn open(device: &Device, handle: &IpcHandle, flags: c_uint) -> DriverResult<usize> {
    if flags != LAZY_ENABLE_PEER_ACCESS {
        return Err(INVALID_VALUE);
    }
    let [_, pid, file, bytes, physical, serial] = handle.words()?;
    let pid = u32::try_from(pid).map_err(|_| INVALID_VALUE)?;
    let bytes = usize::try_from(bytes).map_err(|_| INVALID_VALUE)?;
    let physical = usize::try_from(physical).map_err(|_| INVALID_VALUE)?;
    if pid == std::process::id() {
        return Err(INVALID_CONTEXT);
    }
    if physical != device.physical && machine()?.peers() == Peers::None {
        return Err(PEER_ACCESS_UNSUPPORTED);
    }
    let mut blocks = blocks_mut();
    for (base, block) in blocks.iter_mut() {
        if let BlockKind::Opened { pid: of, serial: number, opener, times } = &mut block.kind
            && (*of, *number, *opener) == (pid, serial, device.physical)
        {
            *times += 1;
            return Ok(*base);
        }
    }
    let file = file_of(pid, file, serial)?;
    let mapping = Mapping::new(bytes, Some(&file))?;
    let kind = BlockKind::Opened { pid, serial, opener: device.physical, times: 1 };
    let base = mapping.base;
    blocks.insert(base, Block { mapping, bytes, physical, kind });
    Ok(base)
}

/// Opens the exporter's file, if the exporter still has it. The name is checked because the descriptor may have been reused.
fn file_of(pid: u32, file: u64, serial: u64) -> DriverResult<OwnedFd> {
    let expected = format!("/memfd:{} (deleted)", file_name(pid, serial));
    let is_it = |path: &str| fs::read_link(path).is_ok_and(|target| target.as_os_str() == expected.as_str());
    let path = format!("/proc/{pid}/fd/{file}");
    if !is_it(&path) {
        return Err(INVALID_VALUE);
    }
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path);
    let opened = OwnedFd::from(opened.map_err(|_| INVALID_VALUE)?);
    match is_it(&format!("/proc/self/fd/{}", opened.as_raw_fd())) {
        true => Ok(opened),
        false => Err(INVALID_VALUE),
    }
}

/// Implements `cuIpcCloseMemHandle`. The memory is unmapped when it has been closed as often as it was opened.
pub(crate) fn close(address: usize) -> DriverResult {
    let mut blocks = blocks_mut();
    let block = blocks.get_mut(&address).ok_or(INVALID_VALUE)?;
    let BlockKind::Opened { times, .. } = &mut block.kind else { return Err(INVALID_VALUE) };
    *times -= 1;
    if *times == 0 {
        blocks.remove(&address);
    }
    Ok(())
}
