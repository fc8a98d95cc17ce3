//! Memory of this process and of other processes.

use std::ffi::c_uint;

use super::{exports, write_out};
use crate::capture;
use crate::context::current;
use crate::cu_result::{DriverResult, INVALID_VALUE, NOT_SUPPORTED};
use crate::ipc::{self, IpcHandle};
use crate::machine::{Device, machine};
use crate::memory::{self, BlockKind};
use crate::op::Op;
use crate::stream::StreamRef;

/// `CU_MEMHOSTALLOC_PORTABLE`, `_DEVICEMAP` and `_WRITECOMBINED`.
const HOST_FLAGS: c_uint = 7;

fn require_ipc() -> DriverResult {
    if machine()?.ipc() { Ok(()) } else { Err(NOT_SUPPORTED) }
}

/// Returns the current GPU for a call that adds memory to it.
fn allocator() -> DriverResult<&'static Device> {
    let device = current()?;
    capture::refuse_unsafe()?;
    machine()?.wait_if_strict(device);
    Ok(device)
}

exports! {
    fn cuMemAlloc_v2(address: Option<&mut usize>, bytes: usize) {
        let device = allocator()?;
        let address = address.ok_or(INVALID_VALUE)?;
        write_out(Some(address), memory::allocate(device, bytes, false)?)
    }

    /// Waits for all work that this process has submitted to the memory's GPU.
    fn cuMemFree_v2(address: usize) {
        current()?;
        capture::refuse_unsafe()?;
        if address == 0 {
            return Ok(());
        }
        memory::owner(address)?.synchronize(false);
        memory::remove(address, memory::is_own)
    }

    fn cuMemAllocAsync(address: Option<&mut usize>, bytes: usize, stream: usize) {
        let target = StreamRef::of(stream)?;
        let address = address.ok_or(INVALID_VALUE)?;
        // The memory is valid at once, which is earlier than stream order requires.
        let made = memory::allocate(target.device(), bytes, true)?;
        if target.is_capturing() {
            target.submit(Op::Allocated)?;
        }
        write_out(Some(address), made)
    }

    fn cuMemFreeAsync(address: usize, stream: usize) {
        let target = StreamRef::of(stream)?;
        memory::owner(address)?;
        target.submit(if target.is_capturing() { Op::Freed } else { Op::Free(address) })
    }

    /// Counts the allocations of this process only.
    fn cuMemGetInfo_v2(free: Option<&mut usize>, total: Option<&mut usize>) {
        let device = current()?;
        let all = machine()?.memory();
        write_out(free, all.saturating_sub(device.used.load(std::sync::atomic::Ordering::Acquire)))?;
        write_out(total, all)
    }

    fn cuMemGetAddressRange_v2(base: Option<&mut usize>, bytes: Option<&mut usize>, address: usize) {
        current()?;
        let blocks = memory::blocks();
        let block = memory::block_at(&blocks, address).ok_or(crate::cu_result::NOT_FOUND)?;
        if let Some(base) = base {
            *base = block.mapping.base;
        }
        if let Some(bytes) = bytes {
            *bytes = block.bytes;
        }
        Ok(())
    }

    fn cuMemHostAlloc(address: Option<&mut usize>, bytes: usize, flags: c_uint) {
        let device = allocator()?;
        let address = address.filter(|_| flags & !HOST_FLAGS == 0).ok_or(INVALID_VALUE)?;
        write_out(Some(address), memory::allocate_host(device, bytes)?)
    }

    fn cuMemAllocHost_v2(address: Option<&mut usize>, bytes: usize) {
        let device = allocator()?;
        let address = address.ok_or(INVALID_VALUE)?;
        write_out(Some(address), memory::allocate_host(device, bytes)?)
    }

    /// Waits for all work that this process has submitted to any GPU, because each may use the memory.
    fn cuMemFreeHost(address: usize) {
        current()?;
        capture::refuse_unsafe()?;
        let is_host = |kind: &BlockKind| matches!(kind, BlockKind::Host);
        if !memory::blocks().get(&address).is_some_and(|block| is_host(&block.kind)) {
            return Err(INVALID_VALUE);
        }
        machine()?.devices().iter().for_each(|device| device.synchronize(false));
        memory::remove(address, is_host)
    }

    fn cuMemHostGetDevicePointer_v2(address: Option<&mut usize>, host: usize, flags: c_uint) {
        current()?;
        let blocks = memory::blocks();
        let block = memory::block_at(&blocks, host).ok_or(INVALID_VALUE)?;
        match block.kind {
            BlockKind::Host if flags == 0 => write_out(address, host),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuIpcGetMemHandle(handle: Option<&mut IpcHandle>, address: usize) {
        current()?;
        let to = handle.ok_or(INVALID_VALUE)?;
        require_ipc()?;
        *to = ipc::export(address)?;
        Ok(())
    }

    fn cuIpcOpenMemHandle_v2(address: Option<&mut usize>, handle: IpcHandle, flags: c_uint) {
        let device = allocator()?;
        let address = address.ok_or(INVALID_VALUE)?;
        require_ipc()?;
        write_out(Some(address), ipc::open(device, &handle, flags)?)
    }

    /// Waits for all work that this process has submitted to any GPU.
    fn cuIpcCloseMemHandle(address: usize) {
        current()?;
        capture::refuse_unsafe()?;
        machine()?.devices().iter().for_each(|device| device.synchronize(false));
        ipc::close(address)
    }
}
