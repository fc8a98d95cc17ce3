//! Compiles the kernels ahead of their launches, several at a time.
//!
//! cubecl compiles a kernel when its server's thread executes the first launch, so kernels are compiled one after the other. NVRTC
//! takes up to a second for each of these kernels, and a network has dozens. But launches are queued, and a step's last launch is
//! queued before its first kernel is compiled. So each new kernel is given to threads of this module when its launch is queued.
//! They compile it and put the result into cubecl's in-memory kernel cache. If the server's thread does not find a kernel there, it
//! asks for the source. Then it waits ([`wait`]) until the kernel is compiled, and cubecl finds the result by the source's hash.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{CString, NulError, c_char};
use std::sync::LazyLock;
use std::thread;

use cubecl::cuda::CudaDevice;
use cubecl::hash::{StableHash, StableHasher};
use cubecl::prelude::KernelMetadata;
use cubecl_environment::persistence::{CacheOption, Namespace, Store, StoreKey, StoreOptions, StoreValue};
use cubecl_server::compiler::{KernelCacheKey, build_id_hash};
use cudarc::driver::{DriverError, result::device, sys::CUdevice_attribute};
use cudarc::nvrtc::result::{self as nvrtc, NvrtcError};
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use super::source::ConvKernel;

/// A kernel, and the compute capability that it is compiled for: 90 is 9.0.
type CompileJob = (u32, ConvKernel);

#[derive(Default)]
struct Queue {
    /// Number of threads that may compile; 0 until [`compile_ahead`] is called.
    threads: usize,
    running: usize,
    waiting: VecDeque<CompileJob>,
    /// Jobs that wait or are compiled now.
    pending: Vec<CompileJob>,
    /// Jobs that have been in this queue.
    known: HashSet<CompileJob>,
    /// Compute capability of each GPU that has been used, by index; 0 if it is not known.
    capabilities: HashMap<usize, u32>,
}

static QUEUE: LazyLock<Mutex<Queue>> = LazyLock::new(Mutex::default);
static COMPILED: Condvar = Condvar::new();

/// Lets `threads` threads compile the kernels of convolutions on GPUs before they are launched. Without this call, the kernels are
/// compiled one after the other. cubecl must keep compiled kernels in memory (a cache folder that cannot exist): its database does
/// not allow access by several threads.
pub fn compile_ahead(threads: usize) {
    QUEUE.lock().threads = threads;
}

/// Compiles a kernel whose launch on `gpu` will be queued next, unless it has been compiled before.
pub(super) fn compile(kernel: ConvKernel, gpu: &CudaDevice) {
    let mut queue = QUEUE.lock();
    if queue.threads == 0 {
        return;
    }
    let capability = *queue.capabilities.entry(gpu.index).or_insert_with(|| capability(gpu).unwrap_or(0));
    let job = (capability, kernel);
    if capability == 0 || !queue.known.insert(job) {
        return;
    }
    if queue.running < queue.threads && thread::Builder::new().name("nvrtc".into()).spawn(compile_jobs).is_ok() {
        queue.running += 1;
    }
    // If no thread can be started, cubecl compiles the kernel.
    if queue.running > 0 {
        queue.waiting.push_back(job);
        queue.pending.push(job);
    }
}

fn capability(gpu: &CudaDevice) -> Result<u32, DriverError> {
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let gpu = device::get(gpu.index as i32)?;
    // SAFETY: the driver has returned this device.
    let [major, minor] = unsafe { [device::get_attribute(gpu, MAJOR)?, device::get_attribute(gpu, MINOR)?] };
    Ok((10 * major + minor) as u32)
}

/// Waits until a kernel that has been given to [`compile`] is compiled.
pub(super) fn wait(kernel: &ConvKernel) {
    let mut queue = QUEUE.lock();
    while queue.pending.iter().any(|(_, pending)| pending == kernel) {
        COMPILED.wait(&mut queue);
    }
}

/// Compiles kernels until none waits.
fn compile_jobs() {
    while let Some(job) = next_job() {
        // Ends the wait for this job, also if the compiler panics.
        let _guard = JobGuard(job);
        // cubecl compiles a kernel again that has an error, and reports the error.
        let _ = store(job);
    }
}

/// Returns the next job, or ends the thread's part in the queue.
fn next_job() -> Option<CompileJob> {
    let mut queue = QUEUE.lock();
    let job = queue.waiting.pop_front();
    if job.is_none() {
        queue.running -= 1;
    }
    job
}

/// Removes a job from the queue when dropped, also after a panic.
struct JobGuard(CompileJob);

impl Drop for JobGuard {
    fn drop(&mut self) {
        let mut queue = QUEUE.lock();
        queue.pending.retain(|job| *job != self.0);
        if thread::panicking() {
            queue.running -= 1;
            // No thread is left for the waiting jobs, and [`wait`] would never return for them. cubecl compiles their kernels
            // instead, and reports an error.
            if queue.running == 0 {
                queue.waiting.clear();
                queue.pending.clear();
            }
        }
        COMPILED.notify_all();
    }
}

/// A compiled kernel as cubecl stores it, with the same names of fields (`PtxCacheEntry` of cubecl-cuda).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Compiled {
    entrypoint_name: String,
    shared_mem_bytes: usize,
    ptx: Vec<c_char>,
}

/// Compiles a kernel and stores it where cubecl looks for it, unless it is there.
fn store((capability, kernel): CompileJob) -> Result<(), CompileError> {
    let source = kernel.source();
    let hash = StableHasher::hash_one(&source);
    let mut by_source: Store<StableHash, KernelCacheKey> = open_cache("cuda-second-line", capability);
    if by_source.get_mut(&hash).is_some() {
        return Ok(());
    }
    let compiled = Compiled {
        entrypoint_name: kernel.entry_point().to_owned(),
        // The source declares its shared memory statically.
        shared_mem_bytes: 0,
        ptx: ptx(source, capability)?,
    };
    let key = KernelCacheKey::new(&kernel.id(), build_id_hash());
    // An entry that is there already was compiled by another GPU's server from the same source.
    let _ = open_cache("cuda", capability).insert(key, compiled);
    let _ = by_source.insert(hash, key);
    Ok(())
}

/// Opens a part of cubecl's in-memory kernel cache (`CudaContext::new` of cubecl-cuda).
fn open_cache<K: StoreKey, V: StoreValue>(part: &str, capability: u32) -> Store<K, V> {
    let namespace = Namespace::scoped(part, format!("ptx_sm{capability}-cpp"));
    Store::new(StoreOptions::new().storage(namespace).cache(CacheOption::Lazy))
}

#[derive(Debug)]
struct CompileError;

impl From<NvrtcError> for CompileError {
    fn from(_: NvrtcError) -> Self {
        Self
    }
}

impl From<NulError> for CompileError {
    fn from(_: NulError) -> Self {
        Self
    }
}

/// Compiles a source to PTX. cubecl names a GPU (`sm_90a`), for which NVRTC also assembles the PTX. For the virtual architecture
/// the PTX is the same, and takes about half of the time.
fn ptx(source: String, capability: u32) -> Result<Vec<c_char>, CompileError> {
    let specific = if capability >= 90 { "a" } else { "" };
    let architecture = format!("--gpu-architecture=compute_{capability}{specific}");
    let source = CString::new(source)?;
    let program = nvrtc::create_program(&source, None)?;
    // SAFETY: `program` is not used after it has been destroyed, and `source` lives longer.
    unsafe {
        let compiled = nvrtc::compile_program(program, &[architecture.as_str(), "-lineinfo"]);
        let ptx = compiled.and_then(|()| nvrtc::get_ptx(program));
        nvrtc::destroy_program(program)?;
        Ok(ptx?)
    }
}
