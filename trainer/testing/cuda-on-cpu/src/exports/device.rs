//! The driver itself, and its GPUs.

use std::ffi::{CStr, c_char, c_int, c_uint};

use super::{exports, put, put_text};
use crate::code::{Code, INVALID_DEVICE, INVALID_VALUE, describe};
use crate::kernel::{BLOCK, GRID, MOST_THREADS, SHARED};
use crate::machine::{self, Device, Machine, Peers, machine};

/// Of CUDA 13.2.
const VERSION: c_int = 13020;

exports! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        machine::init()
    }

    fn cuDriverGetVersion(version: Option<&mut c_int>) {
        put(version, VERSION)
    }

    fn cuDeviceGetCount(count: Option<&mut c_int>) {
        put(count, machine()?.devices().len() as c_int)
    }

    fn cuDeviceGet(device: Option<&mut c_int>, ordinal: c_int) {
        let index = machine()?.device(ordinal)?.index;
        put(device, index as c_int)
    }

    unsafe fn cuDeviceGetName(name: *mut c_char, room: c_int, device: c_int) {
        let text = machine()?.device(device)?.name();
        // SAFETY: the caller's room.
        unsafe { put_text(name, room, &text) }
    }

    fn cuDeviceTotalMem_v2(bytes: Option<&mut usize>, device: c_int) {
        let machine = machine()?;
        machine.device(device)?;
        put(bytes, machine.memory())
    }

    fn cuDeviceGetAttribute(value: Option<&mut c_int>, attribute: c_int, device: c_int) {
        let machine = machine()?;
        let is = self::attribute(machine, machine.device(device)?, attribute);
        put(value, is)
    }

    fn cuDeviceGetUuid(uuid: Option<&mut [u8; 16]>, device: c_int) {
        put(uuid, machine()?.device(device)?.uuid())
    }

    fn cuDeviceGetUuid_v2(uuid: Option<&mut [u8; 16]>, device: c_int) {
        put(uuid, machine()?.device(device)?.uuid())
    }

    unsafe fn cuDeviceGetPCIBusId(text: *mut c_char, room: c_int, device: c_int) {
        let bus = pci_bus(machine()?.device(device)?);
        // SAFETY: the caller's room.
        unsafe { put_text(text, room, &format!("0000:{bus:02X}:00.0")) }
    }

    fn cuDeviceCanAccessPeer(can: Option<&mut c_int>, device: c_int, peer: c_int) {
        let machine = machine()?;
        let (device, peer) = (machine.device(device)?, machine.device(peer)?);
        put(can, c_int::from(device.index != peer.index && machine.peers() != Peers::None))
    }

    fn cuDeviceGetP2PAttribute(value: Option<&mut c_int>, attribute: c_int, from: c_int, to: c_int) {
        const RANK: c_int = 1;
        const LAST: c_int = 5;
        let machine = machine()?;
        if machine.device(from)?.index == machine.device(to)?.index {
            return Err(INVALID_DEVICE);
        }
        match attribute {
            // all pairs are as fast
            RANK => put(value, 0),
            2..=LAST => put(value, c_int::from(machine.peers() != Peers::None)),
            _ => Err(INVALID_VALUE),
        }
    }
}

fn pci_bus(device: &Device) -> usize {
    (device.physical + 1) % 256
}

/// `CUdevice_attribute`: about those of an A100, but with two multiprocessors.
fn attribute(machine: &Machine, device: &Device, attribute: c_int) -> c_int {
    match attribute {
        1 => MOST_THREADS as c_int,
        2..=4 => BLOCK[attribute as usize - 2] as c_int,
        5..=7 => GRID[attribute as usize - 5] as c_int,
        // shared memory of a block
        8 => SHARED,
        // constant memory, registers of a block and of a multiprocessor
        9 | 12 | 82 => 64 << 10,
        // threads of a warp
        10 => 32,
        // pitch
        11 => c_int::MAX,
        // clocks in kHz
        13 | 36 => 1_410_000,
        // alignment of textures
        14 => 512,
        // copies beside kernels, mapped host memory, concurrent kernels, unified addresses, stream priorities, caches in L1,
        // preemption, memory pools
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 90 | 115 => 1,
        // multiprocessors
        16 => 2,
        33 => pci_bus(device) as c_int,
        // width of the memory bus
        37 => 5120,
        // cache in L2
        38 => 40 << 20,
        // threads of a multiprocessor
        39 => 2048,
        // copy engines
        40 => 3,
        // alignment of a texture's pitch, blocks of a multiprocessor
        51 | 106 => 32,
        75 => machine.capability().0,
        76 => machine.capability().1,
        // shared memory: of a multiprocessor, of a block that asks for it, kept by the driver
        81 => machine.shared_optin() + 1024,
        97 => machine.shared_optin(),
        111 => 1024,
        _ => 0,
    }
}

/// `cuGetErrorName` and `cuGetErrorString`; these are not logged.
fn describe_to(
    text: Option<&mut *const c_char>,
    code: Code,
    which: fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> Code {
    let Some(text) = text else { return INVALID_VALUE };
    let known = describe(code);
    *text = known.map_or(std::ptr::null(), |known| which(known).as_ptr());
    if known.is_some() { 0 } else { INVALID_VALUE }
}

/// `cuGetErrorName` of `cuda.h`.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: Code, text: Option<&mut *const c_char>) -> Code {
    describe_to(text, code, |known| known.0)
}

/// `cuGetErrorString` of `cuda.h`.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: Code, text: Option<&mut *const c_char>) -> Code {
    describe_to(text, code, |known| known.1)
}
