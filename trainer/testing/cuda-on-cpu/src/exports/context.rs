//! Primary contexts. Other contexts are not supported.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::Ordering;

use super::{exports, write_out};
use crate::capture;
use crate::context::{self, current};
use crate::cu_result::{
    INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED,
    PEER_ACCESS_UNSUPPORTED,
};
use crate::machine::{Peers, machine};

exports! {
    fn cuDevicePrimaryCtxRetain(context: Option<&mut usize>, device: c_int) {
        let device = machine()?.device(device)?;
        write_out(context, device.context())?;
        device.retained.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// The last release keeps memory and streams. Later uses are refused because the context is destroyed.
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let device = machine()?.device(device)?;
        let less = |times: u32| times.checked_sub(1);
        device.retained.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).map_err(|_| INVALID_CONTEXT)?;
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Option<&mut c_uint>, active: Option<&mut c_int>) {
        let device = machine()?.device(device)?;
        write_out(flags, 0)?;
        write_out(active, c_int::from(device.retained.load(Ordering::Acquire) > 0))
    }

    fn cuCtxSetCurrent(context: usize) {
        context::set(context)
    }

    fn cuCtxGetCurrent(context: Option<&mut usize>) {
        write_out(context, context::handle()?)
    }

    fn cuCtxGetDevice(device: Option<&mut c_int>) {
        write_out(device, current()?.index as c_int)
    }

    fn cuCtxPushCurrent_v2(context: usize) {
        context::push(context)
    }

    fn cuCtxPopCurrent_v2(context: Option<&mut usize>) {
        let popped = context::pop()?;
        match context {
            Some(context) => write_out(Some(context), popped),
            None => Ok(()),
        }
    }

    fn cuCtxSynchronize() {
        let device = current()?;
        capture::refuse_unsafe()?;
        capture::refuse_waits(device)?;
        device.synchronize(false);
        device.check_fault()
    }

    fn cuCtxGetStreamPriorityRange(least: Option<&mut c_int>, greatest: Option<&mut c_int>) {
        current()?;
        if let Some(least) = least {
            *least = 0;
        }
        if let Some(greatest) = greatest {
            *greatest = -5;
        }
        Ok(())
    }

    fn cuCtxEnablePeerAccess(peer: usize, flags: c_uint) {
        let (device, machine) = (current()?, machine()?);
        let peer = machine.of_context(peer)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if peer.index == device.index {
            return Err(INVALID_DEVICE);
        }
        if peer.retained.load(Ordering::Acquire) == 0 {
            return Err(INVALID_CONTEXT);
        }
        if machine.peers() == Peers::None {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        if device.peers.lock().insert(peer.physical) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    }

    fn cuCtxDisablePeerAccess(peer: usize) {
        let device = current()?;
        let peer = machine()?.of_context(peer)?;
        if device.peers.lock().remove(&peer.physical) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    }
}
