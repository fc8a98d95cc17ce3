//! Copies and fills.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use super::exports;
use crate::capture;
use crate::code::{Answer, INVALID_VALUE};
use crate::context::current;
use crate::machine::machine;
use crate::memory::{self, Place};
use crate::op::{Fill, Op, Rows, Side};
use crate::stream::Target;

/// `CUmemorytype`.
mod memory_type {
    use std::ffi::c_uint;

    pub(super) const HOST: c_uint = 1;
    pub(super) const DEVICE: c_uint = 2;
    pub(super) const UNIFIED: c_uint = 4;
}

/// What one side of a copy has to be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Is {
    /// Reachable by a GPU.
    Device,
    Host,
    Any,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Copy2d {
    /// One side.
    pub from: Copy2dSide<*const c_void>,
    /// The other.
    pub to: Copy2dSide<*mut c_void>,
    /// Bytes of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

/// A side of [`Copy2d`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Copy2dSide<P> {
    /// Bytes before the first column.
    pub x: usize,
    /// Rows before the first one.
    pub y: usize,
    /// `CUmemorytype`: which of the next three it is.
    pub kind: c_uint,
    /// The host's memory.
    pub host: P,
    /// A GPU's.
    pub device: usize,
    /// Arrays are not supported.
    pub array: usize,
    /// Bytes from one row to the next.
    pub pitch: usize,
}

fn side(address: usize, pitch: usize, extent: usize, is: Is) -> Answer<Side> {
    let place = match is {
        Is::Device => memory::reachable(address, extent)?,
        Is::Host | Is::Any => memory::place(address, extent)?,
    };
    if is == Is::Host && place == Place::Device || address == 0 && extent > 0 {
        return Err(INVALID_VALUE);
    }
    Ok(Side { address, pitch, place })
}

fn line(to: (usize, Is), from: (usize, Is), bytes: usize) -> Answer<Rows> {
    let (to, from) = (side(to.0, bytes, bytes, to.1)?, side(from.0, bytes, bytes, from.1)?);
    Ok(Rows { to, from, width: bytes, height: 1 })
}

/// Gives a copy to a stream. What the host may change as soon as the call returns is read before; what it may read then is
/// waited for. A capture does neither: the real one goes to the host's memory whenever the graph is launched.
///
/// # Safety
/// Host memory is there.
unsafe fn submit(target: &Target, rows: Rows) -> Answer {
    if rows.width == 0 || rows.height == 0 {
        return target.device().healthy();
    }
    if target.is_capturing() || matches!(target, Target::Null(_)) {
        return target.submit(Op::Copy(rows));
    }
    if rows.from.place == Place::Pageable {
        let from = rows.from.address as *const u8;
        // SAFETY: the caller's memory.
        let data: Arc<[u8]> = unsafe { std::slice::from_raw_parts(from, rows.extent(&rows.from)) }.into();
        target.submit(Op::Staged(rows, data))?;
    } else {
        target.submit(Op::Copy(rows))?;
    }
    if rows.to.place == Place::Pageable { target.synchronize() } else { Ok(()) }
}

/// On the null stream, and done when it returns.
///
/// # Safety
/// As for [`submit`].
unsafe fn now(rows: Answer<Rows>) -> Answer {
    let device = current()?;
    capture::refuse_unsafe()?;
    // SAFETY: by the caller.
    unsafe { submit(&Target::Null(device), rows?) }
}

/// # Safety
/// As for [`submit`].
unsafe fn later(stream: usize, rows: impl FnOnce() -> Answer<Rows>) -> Answer {
    let target = Target::of(stream)?;
    // SAFETY: by the caller.
    unsafe { submit(&target, rows()?) }
}

fn fill(target: &Target, to: usize, value: c_uint, width: usize, count: usize) -> Answer {
    let bytes = count.checked_mul(width).ok_or(INVALID_VALUE)?;
    if !to.is_multiple_of(width) {
        return Err(INVALID_VALUE);
    }
    memory::reachable(to, bytes)?;
    target.submit(Op::Set(Fill { to, value, width, count }))
}

fn fill_now(to: usize, value: c_uint, width: usize, count: usize) -> Answer {
    let device = current()?;
    capture::refuse_unsafe()?;
    fill(&Target::Null(device), to, value, width, count)
}

/// Both contexts have to be some.
fn contexts(one: usize, other: usize) -> Answer {
    machine()?.of_context(one).and(machine()?.of_context(other)).map(drop)
}

fn rows(copy: &Copy2d) -> Answer<Rows> {
    let from = (copy.from.kind, copy.from.host as usize, copy.from.device, copy.from.x, copy.from.y, copy.from.pitch);
    let to = (copy.to.kind, copy.to.host as usize, copy.to.device, copy.to.x, copy.to.y, copy.to.pitch);
    let whole = |(kind, host, device, x, y, pitch): (c_uint, usize, usize, usize, usize, usize)| {
        // 0 is for rows without gaps
        let pitch = if pitch == 0 { copy.width } else { pitch };
        let (start, is) = match kind {
            memory_type::HOST => (host, Is::Host),
            memory_type::DEVICE => (device, Is::Device),
            memory_type::UNIFIED => (device, Is::Any),
            _ => return Err(INVALID_VALUE),
        };
        if pitch < copy.width + x && copy.height > 1 {
            return Err(INVALID_VALUE);
        }
        let extent = copy.height.saturating_sub(1).checked_mul(pitch).and_then(|bytes| bytes.checked_add(copy.width));
        side(start + y * pitch + x, pitch, extent.filter(|_| copy.height > 0).unwrap_or(0), is)
    };
    Ok(Rows { to: whole(to)?, from: whole(from)?, width: copy.width, height: copy.height })
}

exports! {
    unsafe fn cuMemcpyHtoD_v2(to: usize, from: *const c_void, bytes: usize) {
        // SAFETY: the caller's.
        unsafe { now(line((to, Is::Device), (from as usize, Is::Host), bytes)) }
    }

    unsafe fn cuMemcpyDtoH_v2(to: *mut c_void, from: usize, bytes: usize) {
        // SAFETY: the caller's.
        unsafe { now(line((to as usize, Is::Host), (from, Is::Device), bytes)) }
    }

    unsafe fn cuMemcpyDtoD_v2(to: usize, from: usize, bytes: usize) {
        // SAFETY: no memory of the host's own.
        unsafe { now(line((to, Is::Device), (from, Is::Device), bytes)) }
    }

    unsafe fn cuMemcpy(to: usize, from: usize, bytes: usize) {
        // SAFETY: the caller's.
        unsafe { now(line((to, Is::Any), (from, Is::Any), bytes)) }
    }

    unsafe fn cuMemcpyPeer(to: usize, to_context: usize, from: usize, from_context: usize, bytes: usize) {
        contexts(to_context, from_context)?;
        // SAFETY: no memory of the host's own.
        unsafe { now(line((to, Is::Device), (from, Is::Device), bytes)) }
    }

    unsafe fn cuMemcpyHtoDAsync_v2(to: usize, from: *const c_void, bytes: usize, stream: usize) {
        // SAFETY: the caller's.
        unsafe { later(stream, || line((to, Is::Device), (from as usize, Is::Host), bytes)) }
    }

    unsafe fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: usize, bytes: usize, stream: usize) {
        // SAFETY: the caller's.
        unsafe { later(stream, || line((to as usize, Is::Host), (from, Is::Device), bytes)) }
    }

    unsafe fn cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
        // SAFETY: no memory of the host's own.
        unsafe { later(stream, || line((to, Is::Device), (from, Is::Device), bytes)) }
    }

    unsafe fn cuMemcpyAsync(to: usize, from: usize, bytes: usize, stream: usize) {
        // SAFETY: the caller's.
        unsafe { later(stream, || line((to, Is::Any), (from, Is::Any), bytes)) }
    }

    unsafe fn cuMemcpyPeerAsync(
        to: usize, to_context: usize, from: usize, from_context: usize, bytes: usize, stream: usize,
    ) {
        contexts(to_context, from_context)?;
        // SAFETY: no memory of the host's own.
        unsafe { later(stream, || line((to, Is::Device), (from, Is::Device), bytes)) }
    }

    unsafe fn cuMemcpy2D_v2(copy: Option<&Copy2d>) {
        // SAFETY: the caller's.
        unsafe { now(copy.ok_or(INVALID_VALUE).and_then(rows)) }
    }

    unsafe fn cuMemcpy2DAsync_v2(copy: Option<&Copy2d>, stream: usize) {
        // SAFETY: the caller's.
        unsafe { later(stream, || copy.ok_or(INVALID_VALUE).and_then(rows)) }
    }

    fn cuMemsetD8_v2(to: usize, value: u8, count: usize) {
        fill_now(to, value.into(), 1, count)
    }

    fn cuMemsetD16_v2(to: usize, value: u16, count: usize) {
        fill_now(to, value.into(), 2, count)
    }

    fn cuMemsetD32_v2(to: usize, value: c_uint, count: usize) {
        fill_now(to, value, 4, count)
    }

    fn cuMemsetD8Async(to: usize, value: u8, count: usize, stream: usize) {
        fill(&Target::of(stream)?, to, value.into(), 1, count)
    }

    fn cuMemsetD16Async(to: usize, value: u16, count: usize, stream: usize) {
        fill(&Target::of(stream)?, to, value.into(), 2, count)
    }

    fn cuMemsetD32Async(to: usize, value: c_uint, count: usize, stream: usize) {
        fill(&Target::of(stream)?, to, value, 4, count)
    }
}
