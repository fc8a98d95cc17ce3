//! Modules and launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::{exports, write_out};
use crate::context::current;
use crate::cu_result::{DriverResult, INVALID_VALUE, NOT_SUPPORTED};
use crate::kernel::{self, KERNELS, MAX_THREADS, Parameters};
use crate::machine::machine;

/// `CUfunction_attribute`.
mod attribute {
    use std::ffi::c_int;

    pub(super) const MAX_THREADS: c_int = 0;
    pub(super) const SHARED: c_int = 1;
    pub(super) const CONST: c_int = 2;
    pub(super) const LOCAL: c_int = 3;
    pub(super) const REGISTERS: c_int = 4;
    pub(super) const PTX: c_int = 5;
    pub(super) const BINARY: c_int = 6;
    pub(super) const CACHE_MODE: c_int = 7;
    pub(super) const MAX_DYNAMIC_SHARED: c_int = 8;
    pub(super) const CARVEOUT: c_int = 9;
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig {
    /// Blocks per dimension.
    pub grid: [c_uint; 3],
    /// Threads per block per dimension.
    pub block: [c_uint; 3],
    /// Bytes of dynamic shared memory.
    pub shared: c_uint,
    /// The stream.
    pub stream: usize,
    /// Attributes, none of which is supported.
    pub attributes: *const c_void,
    /// Number of attributes.
    pub attribute_count: c_uint,
}

/// Reads how the parameters are passed: as pointers, or packed and described by the array `extra`.
///
/// # Safety
/// `extra` is null or an array of name and value pairs that `CU_LAUNCH_PARAM_END` ends.
unsafe fn parameters(each: *const *const u8, extra: *const *const c_void) -> DriverResult<Parameters> {
    const END: usize = 0;
    const POINTER: usize = 1;
    const SIZE: usize = 2;
    if extra.is_null() {
        return Ok(if each.is_null() { Parameters::Absent } else { Parameters::Each(each) });
    }
    if !each.is_null() {
        return Err(INVALID_VALUE);
    }
    let (mut from, mut bytes, mut at) = (None, None, extra);
    loop {
        // SAFETY: pairs of a name and a value, up to the end marker.
        let name = unsafe { at.read() } as usize;
        if name == END {
            break;
        }
        // SAFETY: as above.
        let value = unsafe { at.add(1).read() };
        match name {
            POINTER => from = Some(value.cast::<u8>()),
            // SAFETY: the value is the address of a size.
            SIZE if !value.is_null() => bytes = Some(unsafe { value.cast::<usize>().read() }),
            _ => return Err(INVALID_VALUE),
        }
        // SAFETY: as above.
        at = unsafe { at.add(2) };
    }
    Ok(Parameters::Packed(from.ok_or(INVALID_VALUE)?, bytes.ok_or(INVALID_VALUE)?))
}

exports! {
    unsafe fn cuModuleLoadData(module: Option<&mut usize>, image: *const c_char) {
        let device = current()?;
        let to = module.filter(|_| !image.is_null()).ok_or(INVALID_VALUE)?;
        machine()?.wait_if_strict(device);
        // SAFETY: PTX ends with a zero byte; a binary image contains one too.
        let image = unsafe { CStr::from_ptr(image) };
        write_out(Some(to), kernel::load(device, image.to_bytes())?)
    }

    fn cuModuleUnload(module: usize) {
        machine()?.wait_if_strict(current()?);
        kernel::unload(module)
    }

    unsafe fn cuModuleGetFunction(function: Option<&mut usize>, module: usize, name: *const c_char) {
        current()?;
        let to = function.filter(|_| !name.is_null()).ok_or(INVALID_VALUE)?;
        // SAFETY: a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| INVALID_VALUE)?;
        crate::log::note(|| name.to_owned());
        write_out(Some(to), kernel::function(module, name)?)
    }

    fn cuFuncSetAttribute(function: usize, which: c_int, value: c_int) {
        current()?;
        let kernel = KERNELS.get(function)?;
        match which {
            attribute::MAX_DYNAMIC_SHARED => kernel.set_dynamic(value),
            attribute::CARVEOUT if (-1..=100).contains(&value) => Ok(()),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuFuncGetAttribute(value: Option<&mut c_int>, which: c_int, function: usize) {
        current()?;
        let kernel = KERNELS.get(function)?;
        let (major, minor) = machine()?.capability();
        write_out(value, match which {
            attribute::MAX_THREADS => MAX_THREADS as c_int,
            attribute::SHARED => kernel.function.shared as c_int,
            attribute::REGISTERS => 32,
            attribute::PTX | attribute::BINARY => major * 10 + minor,
            attribute::MAX_DYNAMIC_SHARED => kernel.dynamic(),
            attribute::CARVEOUT => -1,
            attribute::CONST | attribute::LOCAL | attribute::CACHE_MODE => 0,
            _ => return Err(INVALID_VALUE),
        })
    }

    fn cuFuncSetCacheConfig(function: usize, config: c_int) {
        current()?;
        KERNELS.get(function)?;
        if (0..=3).contains(&config) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    unsafe fn cuLaunchKernel(
        function: usize,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: usize,
        each: *const *const u8,
        extra: *const *const c_void,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        // SAFETY: the caller guarantees that the parameters are those of the kernel.
        unsafe { kernel::launch(function, grid, block, shared, stream, parameters(each, extra)?) }
    }

    /// Attributes (clusters, cooperative grids) are not supported.
    unsafe fn cuLaunchKernelEx(
        config: Option<&LaunchConfig>,
        function: usize,
        each: *const *const u8,
        extra: *const *const c_void,
    ) {
        let LaunchConfig { grid, block, shared, stream, attribute_count, .. } = *config.ok_or(INVALID_VALUE)?;
        if attribute_count != 0 {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the caller guarantees that the parameters are those of the kernel.
        unsafe { kernel::launch(function, grid, block, shared, stream, parameters(each, extra)?) }
    }
}
