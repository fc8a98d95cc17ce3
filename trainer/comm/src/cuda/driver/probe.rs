//! Does memory hold what was written, by whoever wrote it? Kernels write and read; the driver's own word is not enough.
//!
//! `Pattern::write` makes each element a function of its place and a seed, `Pattern::wrong` counts those that are
//! something else. Both are PTX that any driver compiles, so nothing but the driver is needed.

use std::ffi::CStr;

use super::{Address, Context, Driver, DriverResult, Module};

/// Elements that are written and read: more than a cache line, a page and a block.
const COUNT: u32 = 1 << 18;
const BYTES: usize = COUNT as usize * size_of::<u32>();

/// `write(address, count, seed, _)` and `check(address, count, seed, result)`. Volatile accesses are not served by a cache of
/// the GPU that has the kernel.
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

/// Writes and checks from one GPU.
struct Pattern<'a> {
    context: &'a Context<'a>,
    module: Module<'a>,
}

impl<'a> Pattern<'a> {
    fn new(context: &'a Context<'a>) -> DriverResult<Self> {
        Ok(Self { context, module: context.module(KERNELS)? })
    }

    fn write(&self, address: Address, seed: u32) -> DriverResult {
        self.module.run("write", address, COUNT, seed, 0)
    }

    /// Elements that are not what [`Pattern::write`] makes them.
    fn wrong(&self, address: Address, seed: u32) -> DriverResult<u32> {
        let result = self.context.allocate(size_of::<u32>())?;
        result.write(&[0])?;
        self.module.run("check", address, COUNT, seed, result.address())?;
        let mut wrong = [0];
        result.read(&mut wrong)?;
        Ok(wrong[0])
    }
}

/// What came of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeResult {
    /// Everything written was read.
    Works,
    /// Elements that were read otherwise than written, of [`ProbeResult::OF`].
    Wrong(u32),
}

impl ProbeResult {
    /// Elements of one probe.
    pub const OF: u32 = COUNT;

    fn of(wrong: u32) -> Self {
        if wrong == 0 { Self::Works } else { Self::Wrong(wrong) }
    }
}

/// A GPU writes its own memory and reads it.
///
/// # Errors
/// The driver's.
pub fn alone(driver: &Driver, gpu: usize) -> DriverResult<ProbeResult> {
    let context = driver.context(gpu)?;
    let (memory, pattern) = (context.allocate(BYTES)?, Pattern::new(&context)?);
    pattern.write(memory.address(), 1)?;
    Ok(ProbeResult::of(pattern.wrong(memory.address(), 1)?))
}

/// GPU `one` reads what `other` has written into its own memory, and `other` reads there what `one` has written.
///
/// # Errors
/// The driver's.
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

/// This process's half of a probe across processes: memory with a pattern in it, whose handle goes to `peer` as text. It has
/// to run [`ipc_peer`] with it and come back with the number of elements that were wrong there.
///
/// # Errors
/// The driver's; the inner one is the peer's.
pub fn ipc(
    driver: &Driver,
    gpu: usize,
    peer: impl FnOnce(&str) -> Result<u32, String>,
) -> DriverResult<Result<ProbeResult, String>> {
    let context = driver.context(gpu)?;
    let (memory, pattern) = (context.allocate(BYTES)?, Pattern::new(&context)?);
    pattern.write(memory.address(), 1)?;
    let handle: String = memory.handle()?.iter().map(|byte| format!("{byte:02x}")).collect();
    let theirs = match peer(&handle) {
        Ok(wrong) => wrong,
        Err(cause) => return Ok(Err(cause)),
    };
    Ok(Ok(ProbeResult::of(theirs + pattern.wrong(memory.address(), 2)?)))
}

/// The other process's half: reads the pattern in the memory of `handle`, and writes another one. Gives how many elements
/// were wrong.
///
/// # Errors
/// The driver's, in words; a handle that is no hexadecimal number of 64 bytes.
pub fn ipc_peer(driver: &Driver, gpu: usize, handle: &str) -> Result<u32, String> {
    let mut bytes = [0u8; 64];
    if handle.len() != 128 || !handle.is_ascii() {
        return Err(format!("`{handle}` is no handle"));
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        let digits = &handle[2 * index..2 * index + 2];
        *byte = u8::from_str_radix(digits, 16).map_err(|error| format!("`{handle}` is no handle: {error}"))?;
    }
    let probe = || {
        let context = driver.context(gpu)?;
        let (memory, pattern) = (context.open(bytes, BYTES)?, Pattern::new(&context)?);
        let wrong = pattern.wrong(memory.address(), 1)?;
        pattern.write(memory.address(), 2)?;
        Ok(wrong)
    };
    probe().map_err(|error: super::DriverError| error.to_string())
}
