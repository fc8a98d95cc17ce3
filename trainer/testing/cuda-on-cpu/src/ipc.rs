//! Memory of other processes: a handle says where in `/proc` its file is found.

use std::ffi::c_uint;
use std::fs::{self, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::code::{Answer, INVALID_CONTEXT, INVALID_VALUE, PEER_ACCESS_UNSUPPORTED};
use crate::log::Argument;
use crate::machine::{Device, Peers, machine};
use crate::memory::{Block, Kind, Mapping, around, blocks, change, file_name};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag that there is, and which has to be given.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

const MAGIC: u64 = u64::from_le_bytes(*b"CUonCPU1");

/// `CUipcMemHandle`: 64 bytes, which C passes by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle {
    /// Nothing to anybody but this driver.
    pub reserved: [u8; 64],
}

impl Argument for IpcHandle {
    fn number(&self) -> u64 {
        self.words().map_or(0, |words| words[5])
    }
}

impl IpcHandle {
    fn of(words: [u64; 6]) -> Self {
        let mut reserved = [0; 64];
        for (to, word) in reserved.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        Self { reserved }
    }

    /// Magic number, process, file, bytes, GPU, serial number.
    fn words(&self) -> Answer<[u64; 6]> {
        let mut words = [0; 6];
        for (word, bytes) in words.iter_mut().zip(self.reserved.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().map_err(|_| INVALID_VALUE)?);
        }
        if words[0] == MAGIC { Ok(words) } else { Err(INVALID_VALUE) }
    }
}

/// `cuIpcGetMemHandle`. An address inside of a block stands for the block.
pub(crate) fn export(address: usize) -> Answer<IpcHandle> {
    let blocks = blocks();
    let block = around(&blocks, address).ok_or(INVALID_VALUE)?;
    let Kind::Own { file, serial } = &block.kind else { return Err(INVALID_VALUE) };
    let (pid, file) = (u64::from(std::process::id()), file.as_raw_fd() as u64);
    Ok(IpcHandle::of([MAGIC, pid, file, block.bytes as u64, block.physical as u64, *serial]))
}

/// `cuIpcOpenMemHandle`. What is open already is the same memory once more.
pub(crate) fn open(device: &Device, handle: &IpcHandle, flags: c_uint) -> Answer<usize> {
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
    let mut blocks = change();
    for (base, block) in blocks.iter_mut() {
        if let Kind::Opened { pid: of, serial: number, opener, times } = &mut block.kind
            && (*of, *number, *opener) == (pid, serial, device.physical)
        {
            *times += 1;
            return Ok(*base);
        }
    }
    let file = file_of(pid, file, serial)?;
    let mapping = Mapping::new(bytes, Some(&file))?;
    let kind = Kind::Opened { pid, serial, opener: device.physical, times: 1 };
    let base = mapping.base;
    blocks.insert(base, Block { mapping, bytes, physical, kind });
    Ok(base)
}

/// The exporter's file, if it still has it. The number alone may be another file's by now.
fn file_of(pid: u32, file: u64, serial: u64) -> Answer<OwnedFd> {
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

/// `cuIpcCloseMemHandle`: the memory is gone when it has been closed as often as it was opened.
pub(crate) fn close(address: usize) -> Answer {
    let mut blocks = change();
    let block = blocks.get_mut(&address).ok_or(INVALID_VALUE)?;
    let Kind::Opened { times, .. } = &mut block.kind else { return Err(INVALID_VALUE) };
    *times -= 1;
    if *times == 0 {
        blocks.remove(&address);
    }
    Ok(())
}
