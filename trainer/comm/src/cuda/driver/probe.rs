//! Tests whether GPUs can access memory. Kernels write a pattern and read it, since the driver's report of access is not
//! reliable.
//!
//! `Pattern::write` sets each element to a function of its index and a seed. `Pattern::wrong` counts the elements with other
//! values. Both kernels are PTX that any driver compiles, so the test needs only the driver.

use std::{ffi::CStr, sync::Arc};

use std::path::Path;

use super::{Address, Compiler, Context, Driver, DriverResult, Module};
use crate::hex;

/// Number of elements: the pattern is larger than a cache line, a page and a block's share.
const COUNT: u32 = 1 << 18;
const BYTES: usize = COUNT as usize * size_of::<u32>();

/// The kernels `write(address, count, seed, _)` and `check(address, count, seed, result)`. Their accesses are volatile, so the
/// cache of the GPU that runs the kernel does not serve them.
const KERNELS: &CStr = c"
.version 6.4
.target sm_50
.address_size 64

.visible .entry write(.param .u64 address, .param .u32 count, .param .u32 seed, .param .u64 result)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [address];
    ld.param.u32 %r1, [count];
    ld.param.u32 %r2, [seed];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r1;
    @%p1 bra DONE;
    mul.lo.u32 %r7, %r6, 2654435761;
    xor.b32 %r7, %r7, %r2;
    mul.wide.u32 %d2, %r6, 4;
    add.u64 %d3, %d1, %d2;
    st.volatile.global.u32 [%d3], %r7;
DONE:
    ret;
}

.visible .entry check(.param .u64 address, .param .u32 count, .param .u32 seed, .param .u64 result)
{
    .reg .pred %p<3>;
    .reg .b32 %r<10>;
    .reg .b64 %d<5>;
    ld.param.u64 %d1, [address];
    ld.param.u32 %r1, [count];
    ld.param.u32 %r2, [seed];
    ld.param.u64 %d4, [result];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r1;
    @%p1 bra DONE;
    mul.lo.u32 %r7, %r6, 2654435761;
    xor.b32 %r7, %r7, %r2;
    mul.wide.u32 %d2, %r6, 4;
    add.u64 %d3, %d1, %d2;
    ld.volatile.global.u32 %r8, [%d3];
    setp.eq.u32 %p2, %r8, %r7;
    @%p2 bra DONE;
    atom.global.add.u32 %r9, [%d4], 1;
DONE:
    ret;
}
";

/// The kernel `write` of [`KERNELS`] as CUDA C++. It includes a header that most of burn's kernels include.
const SOURCE: &CStr = c"
#include <cuda_fp16.h>
extern \"C\" __global__ void write(unsigned *address, unsigned count, unsigned seed, unsigned long long result) {
    unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) address[index] = (index * 2654435761u) ^ seed;
}
";

/// The pattern's kernels on one GPU.
struct Pattern<'a> {
    context: &'a Arc<Context>,
    module: Module,
}

impl<'a> Pattern<'a> {
    fn new(context: &'a Arc<Context>) -> DriverResult<Self> {
        Ok(Self { context, module: context.module(KERNELS)? })
    }

    fn write(&self, address: Address, seed: u32) -> DriverResult {
        self.module.run("write", address, COUNT, seed, 0)
    }

    /// Counts the elements that differ from what [`Pattern::write`] writes.
    fn wrong(&self, address: Address, seed: u32) -> DriverResult<u32> {
        let result = self.context.allocate(size_of::<u32>())?;
        result.write(0, &[0u32])?;
        self.module.run("check", address, COUNT, seed, result.address())?;
        let mut wrong = [0u32];
        result.read(0, &mut wrong)?;
        Ok(wrong[0])
    }
}

/// Result of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeResult {
    /// All elements were read as they were written.
    Works,
    /// Number of elements, of [`ProbeResult::OF`], whose read value differs from the written value.
    Wrong(u32),
}

impl ProbeResult {
    /// Elements of one test.
    pub const OF: u32 = COUNT;

    fn of(wrong: u32) -> Self {
        if wrong == 0 { Self::Works } else { Self::Wrong(wrong) }
    }
}

/// Tests whether a GPU can access its own memory.
///
/// # Errors
/// The driver's error.
pub fn alone(driver: &Driver, gpu: usize) -> DriverResult<ProbeResult> {
    let context = driver.context(gpu)?;
    let (memory, pattern) = (context.allocate(BYTES)?, Pattern::new(&context)?);
    pattern.write(memory.address(), 1)?;
    Ok(ProbeResult::of(pattern.wrong(memory.address(), 1)?))
}

/// Tests whether NVRTC compiles a kernel that the driver loads and the GPU runs. `compute` is the GPU's compute capability, and
/// `include` the folder of CUDA's headers.
///
/// # Errors
/// The compiler's or the driver's error, as text.
pub fn compiled(driver: &Driver, gpu: usize, compute: [u32; 2], include: &Path) -> Result<ProbeResult, String> {
    let ptx = Compiler::load().map_err(|error| error.to_string())?.compile(SOURCE, compute, include)?;
    let run = || {
        let context = driver.context(gpu)?;
        let (memory, pattern) = (context.allocate(BYTES)?, Pattern::new(&context)?);
        context.module(&ptx)?.run("write", memory.address(), COUNT, 3, 0)?;
        Ok(ProbeResult::of(pattern.wrong(memory.address(), 3)?))
    };
    run().map_err(|error: super::DriverError| error.to_string())
}

/// Tests access between two GPUs, in the memory of `other`: `one` reads what `other` has written, and `other` reads what `one`
/// has written.
///
/// # Errors
/// The driver's error.
pub fn across(driver: &Driver, one: usize, other: usize) -> DriverResult<ProbeResult> {
    let (near, far) = (driver.context(one)?, driver.context(other)?);
    let memory = far.allocate(BYTES)?;
    let (here, there) = (Pattern::new(&near)?, Pattern::new(&far)?);
    there.write(memory.address(), 1)?;
    near.enable_peer_access(&far)?;
    let result = there_and_back(&here, &there, memory.address());
    let left = near.disable_peer_access(&far);
    let wrong = result?;
    left.map(|()| ProbeResult::of(wrong))
}

fn there_and_back(here: &Pattern<'_>, there: &Pattern<'_>, address: Address) -> DriverResult<u32> {
    let read = here.wrong(address, 1)?;
    here.write(address, 2)?;
    Ok(read + there.wrong(address, 2)?)
}

/// Runs this process's half of a test between processes. Allocates memory with a pattern and passes the memory's handle, as
/// text, to `peer`. `peer` must start a process that runs [`ipc_peer`] with the handle, and returns that process's number of
/// wrong elements.
///
/// # Errors
/// The driver's error. The inner error is the error of `peer`.
pub fn ipc(
    driver: &Driver,
    gpu: usize,
    peer: impl FnOnce(&str) -> Result<u32, String>,
) -> DriverResult<Result<ProbeResult, String>> {
    let context = driver.context(gpu)?;
    let (memory, pattern) = (context.allocate(BYTES)?, Pattern::new(&context)?);
    pattern.write(memory.address(), 1)?;
    let handle = hex::encode(&memory.handle()?);
    let theirs = match peer(&handle) {
        Ok(wrong) => wrong,
        Err(cause) => return Ok(Err(cause)),
    };
    Ok(Ok(ProbeResult::of(theirs + pattern.wrong(memory.address(), 2)?)))
}

/// Runs the other process's half of the test. Reads the pattern in the memory of `handle` and writes another pattern. Returns the
/// number of wrong elements.
///
/// # Errors
/// The driver's error as text; or `handle` is not 128 hexadecimal digits.
pub fn ipc_peer(driver: &Driver, gpu: usize, handle: &str) -> Result<u32, String> {
    let bytes = hex::decode(handle).ok_or_else(|| format!("`{handle}` is not a handle: 128 hexadecimal digits"))?;
    let probe = || {
        let context = driver.context(gpu)?;
        let (memory, pattern) = (context.open(bytes, BYTES)?, Pattern::new(&context)?);
        let wrong = pattern.wrong(memory.address(), 1)?;
        pattern.write(memory.address(), 2)?;
        Ok(wrong)
    };
    probe().map_err(|error: super::DriverError| error.to_string())
}
