//! Copies and fills.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use super::exports;
use crate::capture;
use crate::context::current;
use crate::cu_result::{DriverResult, INVALID_VALUE};
use crate::machine::machine;
use crate::memory::{self, MemorySpace};
use crate::op::{Fill, Op, Rows, Side};
use crate::stream::StreamRef;

/// `CUmemorytype`.
mod memory_type {
    use std::ffi::c_uint;

    pub(super) const HOST: c_uint = 1;
    pub(super) const DEVICE: c_uint = 2;
    pub(super) const UNIFIED: c_uint = 4;
}

/// Memory that one side of a copy requires.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    /// Memory that a GPU can address.
    Device,
    Host,
    Any,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Copy2d {
    /// Source.
    pub from: Copy2dSide<*const c_void>,
    /// Destination.
    pub to: Copy2dSide<*mut c_void>,
    /// Bytes per row.
    pub width: usize,
    /// Number of rows.
    pub height: usize,
}

/// A side of [`Copy2d`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Copy2dSide<P> {
    /// Offset of the first column in bytes.
    pub x: usize,
    /// Offset of the first row in rows.
    pub y: usize,
    /// `CUmemorytype`: selects one of the next three fields.
    pub kind: c_uint,
    /// Host memory.
    pub host: P,
    /// Memory of a GPU.
    pub device: usize,
    /// Arrays are not supported.
    pub array: usize,
    /// Bytes from one row to the next.
    pub pitch: usize,
}

fn side(address: usize, pitch: usize, extent: usize, expected: Expected) -> DriverResult<Side> {
    let space = match expected {
        Expected::Device => memory::reachable(address, extent)?,
        Expected::Host | Expected::Any => memory::space_of(address, extent)?,
    };
    if expected == Expected::Host && space == MemorySpace::Device || address == 0 && extent > 0 {
        return Err(INVALID_VALUE);
    }
    Ok(Side { address, pitch, space })
}

fn line(to: (usize, Expected), from: (usize, Expected), bytes: usize) -> DriverResult<Rows> {
    let (to, from) = (side(to.0, bytes, bytes, to.1)?, side(from.0, bytes, bytes, from.1)?);
    Ok(Rows { to, from, width: bytes, height: 1 })
}

/// Submits a copy to a stream. A source in pageable memory is read before the call returns, because the caller may change it
/// afterwards. A copy to pageable memory is waited for, because the caller may read it. A capture does neither: as with the
/// real driver, each launch of the graph accesses the host memory.
///
/// # Safety
/// Host memory is valid.
unsafe fn submit(target: &StreamRef, rows: Rows) -> DriverResult {
    if rows.width == 0 || rows.height == 0 {
        return target.device().check_fault();
    }
    if target.is_capturing() || matches!(target, StreamRef::Null(_)) {
        return target.submit(Op::Copy(rows));
    }
    if rows.from.space == MemorySpace::Pageable {
        let from = rows.from.address as *const u8;
        // SAFETY: required of the caller.
        let data: Arc<[u8]> = unsafe { std::slice::from_raw_parts(from, rows.extent(&rows.from)) }.into();
        target.submit(Op::Staged(rows, data))?;
    } else {
        target.submit(Op::Copy(rows))?;
    }
    if rows.to.space == MemorySpace::Pageable { target.synchronize() } else { Ok(()) }
}

/// Copies on the null stream; the copy has finished when the call returns.
///
/// # Safety
/// As for [`submit`].
unsafe fn copy_sync(rows: DriverResult<Rows>) -> DriverResult {
    let device = current()?;
    capture::refuse_unsafe()?;
    // SAFETY: required of the caller.
    unsafe { submit(&StreamRef::Null(device), rows?) }
}

/// Copies on a stream.
///
/// # Safety
/// As for [`submit`].
unsafe fn copy_async(stream: usize, rows: impl FnOnce() -> DriverResult<Rows>) -> DriverResult {
    let target = StreamRef::of(stream)?;
    // SAFETY: required of the caller.
    unsafe { submit(&target, rows()?) }
}

fn fill(target: &StreamRef, to: usize, value: c_uint, width: usize, count: usize) -> DriverResult {
    let bytes = count.checked_mul(width).ok_or(INVALID_VALUE)?;
    if !to.is_multiple_of(width) {
        return Err(INVALID_VALUE);
    }
    memory::reachable(to, bytes)?;
    target.submit(Op::Set(Fill { to, value, width, count }))
}

fn fill_sync(to: usize, value: c_uint, width: usize, count: usize) -> DriverResult {
    let device = current()?;
    capture::refuse_unsafe()?;
    fill(&StreamRef::Null(device), to, value, width, count)
}

/// Checks that both contexts are valid.
fn check_contexts(one: usize, other: usize) -> DriverResult {
    machine()?.of_context(one).and(machine()?.of_context(other)).map(drop)
}

fn rows(copy: &Copy2d) -> DriverResult<Rows> {
    let from = (copy.from.kind, copy.from.host as usize, copy.from.device, copy.from.x, copy.from.y, copy.from.pitch);
    let to = (copy.to.kind, copy.to.host as usize, copy.to.device, copy.to.x, copy.to.y, copy.to.pitch);
    let whole = |(kind, host, device, x, y, pitch): (c_uint, usize, usize, usize, usize, usize)| {
        // 0 means rows without gaps.
        let pitch = if pitch == 0 { copy.width } else { pitch };
        let (start, expected) = match kind {
            memory_type::HOST => (host, Expected::Host),
            memory_type::DEVICE => (device, Expected::Device),
            memory_type::UNIFIED => (device, Expected::Any),
            _ => return Err(INVALID_VALUE),
        };
        if pitch < copy.width + x && copy.height > 1 {
            return Err(INVALID_VALUE);
        }
        let extent = copy.height.saturating_sub(1).checked_mul(pitch).and_then(|bytes| bytes.checked_add(copy.width));
        side(start + y * pitch + x, pitch, extent.filter(|_| copy.height > 0).unwrap_or(0), expected)
    };
    Ok(Rows { to: whole(to)?, from: whole(from)?, width: copy.width, height: copy.height })
}

exports! {
    unsafe fn cuMemcpyHtoD_v2(to: usize, from: *const c_void, bytes: usize) {
        // SAFETY: required of the caller.
        unsafe { copy_sync(line((to, Expected::Device), (from as usize, Expected::Host), bytes)) }
    }

    unsafe fn cuMemcpyDtoH_v2(to: *mut c_void, from: usize, bytes: usize) {
        // SAFETY: required of the caller.
        unsafe { copy_sync(line((to as usize, Expected::Host), (from, Expected::Device), bytes)) }
    }

    unsafe fn cuMemcpyDtoD_v2(to: usize, from: usize, bytes: usize) {
        // SAFETY: both sides are checked to be memory of the driver.
        unsafe { copy_sync(line((to, Expected::Device), (from, Expected::Device), bytes)) }
    }

    unsafe fn cuMemcpy(to: usize, from: usize, bytes: usize) {
        // SAFETY: required of the caller.
        unsafe { copy_sync(line((to, Expected::Any), (from, Expected::Any), bytes)) }
    }

    unsafe fn cuMemcpyPeer(to: usize, to_context: usize, from: usize, from_context: usize, bytes: usize) {
        check_contexts(to_context, from_context)?;
        // SAFETY: both sides are checked to be memory of the driver.
        unsafe { copy_sync(line((to, Expected::Device), (from, Expected::Device), bytes)) }
    }

    unsafe fn cuMemcpyHtoDAsync_v2(to: usize, from: *const c_void, bytes: usize, stream: usize) {
        // SAFETY: required of the caller.
        unsafe { copy_async(stream, || line((to, Expected::Device), (from as usize, Expected::Host), bytes)) }
    }

    unsafe fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: usize, bytes: usize, stream: usize) {
        // SAFETY: required of the caller.
        unsafe { copy_async(stream, || line((to as usize, Expected::Host), (from, Expected::Device), bytes)) }
    }

    unsafe fn cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
        // SAFETY: both sides are checked to be memory of the driver.
        unsafe { copy_async(stream, || line((to, Expected::Device), (from, Expected::Device), bytes)) }
    }

    unsafe fn cuMemcpyAsync(to: usize, from: usize, bytes: usize, stream: usize) {
        // SAFETY: required of the caller.
        unsafe { copy_async(stream, || line((to, Expected::Any), (from, Expected::Any), bytes)) }
    }

    unsafe fn cuMemcpyPeerAsync(
        to: usize, to_context: usize, from: usize, from_context: usize, bytes: usize, stream: usize,
    ) {
        check_contexts(to_context, from_context)?;
        // SAFETY: both sides are checked to be memory of the driver.
        unsafe { copy_async(stream, || line((to, Expected::Device), (from, Expected::Device), bytes)) }
    }

    unsafe fn cuMemcpy2D_v2(copy: Option<&Copy2d>) {
        // SAFETY: required of the caller.
        unsafe { copy_sync(copy.ok_or(INVALID_VALUE).and_then(rows)) }
    }

    unsafe fn cuMemcpy2DAsync_v2(copy: Option<&Copy2d>, stream: usize) {
        // SAFETY: required of the caller.
        unsafe { copy_async(stream, || copy.ok_or(INVALID_VALUE).and_then(rows)) }
    }

    fn cuMemsetD8_v2(to: usize, value: u8, count: usize) {
        fill_sync(to, value.into(), 1, count)
    }

    fn cuMemsetD16_v2(to: usize, value: u16, count: usize) {
        fill_sync(to, value.into(), 2, count)
    }

    fn cuMemsetD32_v2(to: usize, value: c_uint, count: usize) {
        fill_sync(to, value, 4, count)
    }

    fn cuMemsetD8Async(to: usize, value: u8, count: usize, stream: usize) {
        fill(&StreamRef::of(stream)?, to, value.into(), 1, count)
    }

    fn cuMemsetD16Async(to: usize, value: u16, count: usize, stream: usize) {
        fill(&StreamRef::of(stream)?, to, value.into(), 2, count)
    }

    fn cuMemsetD32Async(to: usize, value: c_uint, count: usize, stream: usize) {
        fill(&StreamRef::of(stream)?, to, value, 4, count)
    }
}
