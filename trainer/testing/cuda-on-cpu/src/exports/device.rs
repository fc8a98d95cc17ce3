//! The driver and its GPUs.

use std::ffi::{CStr, c_char, c_int, c_uint};

use super::{exports, write_out, write_text};
use crate::cu_result::{CuResult, INVALID_DEVICE, INVALID_VALUE, describe};
use crate::kernel::{DEFAULT_SHARED, MAX_BLOCK, MAX_GRID, MAX_THREADS};
use crate::machine::{self, Device, Machine, Peers, machine};

exports! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        machine::init()
    }

    fn cuDriverGetVersion(version: Option<&mut c_int>) {
        let (major, minor) = machine::driver();
        write_out(version, major * 1000 + minor * 10)
    }

    fn cuDeviceGetCount(count: Option<&mut c_int>) {
        write_out(count, machine()?.devices().len() as c_int)
    }

    fn cuDeviceGet(device: Option<&mut c_int>, ordinal: c_int) {
        let index = machine()?.device(ordinal)?.index;
        write_out(device, index as c_int)
    }

    unsafe fn cuDeviceGetName(name: *mut c_char, room: c_int, device: c_int) {
        let text = machine()?.device(device)?.name();
        // SAFETY: the caller has room for `room` bytes.
        unsafe { write_text(name, room, &text) }
    }

    fn cuDeviceTotalMem_v2(bytes: Option<&mut usize>, device: c_int) {
        let machine = machine()?;
        machine.device(device)?;
        write_out(bytes, machine.memory())
    }

    fn cuDeviceGetAttribute(value: Option<&mut c_int>, attribute: c_int, device: c_int) {
        let machine = machine()?;
        let is = self::attribute(machine, machine.device(device)?, attribute);
        write_out(value, is)
    }

    fn cuDeviceGetUuid(uuid: Option<&mut [u8; 16]>, device: c_int) {
        write_out(uuid, machine()?.device(device)?.uuid())
    }

    fn cuDeviceGetUuid_v2(uuid: Option<&mut [u8; 16]>, device: c_int) {
        write_out(uuid, machine()?.device(device)?.uuid())
    }

    unsafe fn cuDeviceGetPCIBusId(text: *mut c_char, room: c_int, device: c_int) {
        let bus = pci_bus(machine()?.device(device)?);
        // SAFETY: the caller has room for `room` bytes.
        unsafe { write_text(text, room, &format!("0000:{bus:02X}:00.0")) }
    }

    fn cuDeviceCanAccessPeer(can: Option<&mut c_int>, device: c_int, peer: c_int) {
        let machine = machine()?;
        let (device, peer) = (machine.device(device)?, machine.device(peer)?);
        write_out(can, c_int::from(device.index != peer.index && machine.peers() != Peers::None))
    }

    fn cuDeviceGetP2PAttribute(value: Option<&mut c_int>, attribute: c_int, from: c_int, to: c_int) {
        const RANK: c_int = 1;
        const LAST: c_int = 5;
        let machine = machine()?;
        if machine.device(from)?.index == machine.device(to)?.index {
            return Err(INVALID_DEVICE);
        }
        match attribute {
            // All pairs are equally fast.
            RANK => write_out(value, 0),
            2..=LAST => write_out(value, c_int::from(machine.peers() != Peers::None)),
            _ => Err(INVALID_VALUE),
        }
    }
}

fn pci_bus(device: &Device) -> usize {
    (device.physical + 1) % 256
}

/// Returns a `CUdevice_attribute`. The values are about those of an A100, but with two multiprocessors.
fn attribute(machine: &Machine, device: &Device, attribute: c_int) -> c_int {
    match attribute {
        1 => MAX_THREADS as c_int,
        2..=4 => MAX_BLOCK[attribute as usize - 2] as c_int,
        5..=7 => MAX_GRID[attribute as usize - 5] as c_int,
        // Shared memory per block.
        8 => DEFAULT_SHARED,
        // Constant memory, registers per block and per multiprocessor.
        9 | 12 | 82 => 64 << 10,
        // Threads per warp.
        10 => 32,
        // Maximum pitch.
        11 => c_int::MAX,
        // Clock rates in kHz.
        13 | 36 => 1_410_000,
        // Texture alignment.
        14 => 512,
        // Copies overlapping kernels, mapped host memory, concurrent kernels, unified addressing, stream priorities, L1 caches,
        // compute preemption, memory pools, memory operations of streams on words of 64 bits.
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 90 | 115 | 122 => 1,
        // Multiprocessors.
        16 => 2,
        // Time limit of kernels.
        17 => c_int::from(machine.has_display()),
        // Compute mode: for one process.
        20 if machine.is_exclusive() => 3,
        33 => pci_bus(device) as c_int,
        // Memory bus width in bits.
        37 => 5120,
        // L2 cache in bytes.
        38 => 40 << 20,
        // Threads per multiprocessor.
        39 => 2048,
        // Copy engines.
        40 => 3,
        // Texture pitch alignment, blocks per multiprocessor.
        51 | 106 => 32,
        75 => machine.capability().0,
        76 => machine.capability().1,
        // Shared memory per multiprocessor, per block with opt-in, reserved by the driver.
        81 => machine.shared_optin() + 1024,
        97 => machine.shared_optin(),
        111 => 1024,
        _ => 0,
    }
}

/// Implements `cuGetErrorName` and `cuGetErrorString`, which are not logged.
fn describe_to(
    text: Option<&mut *const c_char>,
    code: CuResult,
    which: fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> CuResult {
    let Some(text) = text else { return INVALID_VALUE };
    let known = describe(code);
    *text = known.map_or(std::ptr::null(), |known| which(known).as_ptr());
    if known.is_some() { 0 } else { INVALID_VALUE }
}

/// `cuGetErrorName` of `cuda.h`.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: CuResult, text: Option<&mut *const c_char>) -> CuResult {
    describe_to(text, code, |known| known.0)
}

/// `cuGetErrorString` of `cuda.h`.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: CuResult, text: Option<&mut *const c_char>) -> CuResult {
    describe_to(text, code, |known| known.1)
}
