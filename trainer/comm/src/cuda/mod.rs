//! Collectives between the GPUs of one host, with custom kernels.
//!
//! - `protocol.rs`: the steps of a rank and the meaning of its flags. The loom models use it too.
//! - `layout.rs`, `plan.rs`, `sequence.rs`: windows, chunks and launches: all that the host computes.
//! - `kernels/`, `source.rs`: the kernels, in CUDA C++.
//! - `supports.rs`: whether the kernels can run a collective, and if not, why.
//! - `topology.rs`, `route.rs`: where the ranks are, and the route that follows: kernels, NCCL, or kernels inside hosts and
//!   another transport between them.
//! - `driver/`: the binding to libcuda.
//! - With the feature `cuda`: `window.rs` (memory over IPC), `device.rs` (launches through cubecl), `DeviceGroup` (`connect.rs`
//!   finds a route that works, `group.rs` has the collectives), `nccl.rs`, `inter_host.rs`, `stream_event.rs`.
//!
//! # Why CUDA C++ and not `#[cube]`
//!
//! In a `#[cube]` function, every access that matters here would be a `gpu_asm!` string too. What the optimizer around such
//! strings guarantees for plain accesses beside them is not documented. The CUDA C++ text, in contrast, compiles with NVRTC (in
//! CI, which searches the PTX for the instructions), with nvcc, and with a C++ compiler for the CPU, which runs *these very
//! kernels* with threads, also under ThreadSanitizer (`tests/cuda_kernels.rs`). Like all kernels, they are launched through
//! cubecl's client. Their stream comes after the streams that wrote the gradients and before those that read the sums
//! (`StreamEvent`).
//!
//! # Windows
//!
//! Each rank has a window: an allocation of its own (never in cubecl's pool) that the other ranks open over CUDA IPC. It holds
//! flags, then two slots. A collective is cut into chunks that fit a slot. Each chunk is a launch with a number (the *epoch*,
//! from 1, the same on all ranks) and uses slot `epoch % 2`. In a launch, a block
//!
//! 1. *packs* its share of the rank's tensors into the rank's own slot: gathered, scaled, cast;
//! 2. *meets* the same block of all other ranks: it stores `epoch` into its word of each peer's flags `FILLED` (release, system
//!    scope), and waits until all of its own words are at least `epoch` (acquire, system scope);
//! 3. reads the same share of all ranks' slots, sums it in rank order in f32, rounds the sum once to the wire's type, and either
//!    writes it to the output (one-shot), or
//! 4. (two-shot) writes the sum of its part into its own slot, meets again at the flags `REDUCED`, and copies all parts from
//!    their owners' slots to the output.
//!
//! Except for flags, a rank stores to its own memory only, and only reads the peers' memory. A pack of 16 bytes belongs to the
//! same block and thread in all phases and on all ranks (`move_packs`). This is why a block waits for one block per rank and not
//! for a grid. One-shot and two-shot round at the same point, so they give the same bits on all ranks.
//!
//! # Why the order holds
//!
//! Notation: `A.pack(e)` and so on are rank A's accesses in launch `e`; → is "happens before" in the PTX memory model
//! (causality order).
//!
//! - *Data is written before it is read*: `A.pack(e)` by any thread of block b → `bar.sync` of that block → `st.release.sys` of
//!   the flag by one of its threads → (observed) `ld.acquire.sys` by a thread of B's block b → `bar.sync` → `B.read(e)`. Release
//!   and acquire have system scope on both sides, so they are morally strong across GPUs; the barriers make them cumulative over
//!   the block. The same holds for `A.reduce(e)` and `B.gather(e)` with the flags `REDUCED`. Data is read with plain loads: after
//!   the acquire they may not return older values, and the compiler cannot use the non-coherent path, since it must assume that
//!   the stores in the same kernel alias.
//! - *Data is not overwritten while it is read*: `A.pack(e+2)` writes the slot that `B.read(e)` and `B.gather(e)` read. All
//!   blocks of A's launch `e+1` ended before `A.pack(e+2)` (one stream). At least one of them met B's launch `e+1`, whose flag B
//!   set after its launch `e` had ended (one stream). So `B.read(e)` → `B.flag(e+1)` → `A.wait(e+1)` → `A.pack(e+2)`. Other
//!   designs need a barrier at the end of a collective. Here the start of the next one serves as that barrier, at no cost: this
//!   is the purpose of two slots. *Every* kernel therefore meets all ranks at `FILLED`, also the readers of a broadcast.
//! - *In two-shot, A reduces into the slot that others read*: `A.reduce(e)` writes only packs of A's part, which peers read only
//!   in `gather(e)`, behind `REDUCED`. In `reduce(e)` each peer reads its own part of A's slot.
//! - *Flags* are words of 64 bits with one writer each. They only grow and are never reset. A sender can be one launch ahead,
//!   never more, which "at least" allows. `FILLED` and `REDUCED` are separate words.
//! - *Waits end*: block b waits for blocks b only, and blocks start in the order of their numbers. So the lowest unfinished block
//!   of the slowest rank can always proceed, however few blocks fit beside the model's kernels. A wait beyond the limit ends in
//!   a fault that names the peer. An abort (a word on the host that all waits read) ends it too. From then on every later launch
//!   of this rank returns at once, so nothing spins on a GPU forever. The launch that has the fault still meets in all its
//!   blocks, since the same blocks of the peers wait for them.
//!
//! *NCCL's sums* lie between two launches of the stream: `order` signals that the slot is packed, and `order` again waits until it is
//! summed (`nccl.rs`). Their waits end as those above.
//!
//! A flag also holds the call's fingerprint (kernel, type, length, root), so ranks that make different calls name each other.
//!
//! # Ranks that share a GPU
//!
//! Without MPS, a GPU runs kernels of one process at a time: a kernel that waits for another rank's kernel would keep that
//! kernel from running until the time slice ends. Such ranks launch each step separately ([`sequence::host_steps`]), and the
//! hosts meet over their communicator in between. The kernels' text and the bits are the same, for tests. Timings mean nothing.
//!
//! # Known bugs of other implementations, and how this one avoids them
//!
//! - Byte flags in one word were a race (vllm#2760): a flag is a word of 64 bits.
//! - Flags that were zeroed after handles were exchanged hung (apache/tvm#16797): a window is zeroed, and the device
//!   synchronised, before its handle exists.
//! - One set of flags for start and end hung on H100 (vllm#8558): there are two sets.
//! - A missing end barrier gave NaN (ROCm/aiter#3514): there are two slots, see above. The sanitizer's test has a version with
//!   one slot.
//! - Only the first peer's access was checked (vllm#50775), and drivers misreport it: after opening, every rank writes to and
//!   reads from every peer, by kernel, before anything is reduced.
//! - Without NVLink, nothing was launched and nothing reported (flashinfer#4393): [`supports()`] returns the reason, which is an
//!   error for users who asked for the kernels. `auto` reports what it uses instead.

#[cfg(feature = "cuda")]
pub mod bench;
#[cfg(feature = "cuda")]
mod connect;
#[cfg(feature = "cuda")]
mod device;
#[allow(unsafe_code)]
pub mod driver;
#[cfg(feature = "cuda")]
mod fault;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod group;
#[cfg(feature = "cuda")]
mod inter_host;
pub mod layout;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod nccl;
pub mod plan;
pub mod protocol;
mod route;
pub mod sequence;
pub mod source;
#[cfg(feature = "cuda")]
mod stream_event;
mod supports;
mod topology;
#[cfg(feature = "cuda")]
mod window;

#[cfg(feature = "cuda")]
pub use connect::Connected;
#[cfg(feature = "cuda")]
pub use device::is_cuda;
#[cfg(feature = "cuda")]
pub use group::{DeviceGroup, DeviceGroupOptions};
pub use route::{DeviceBackend, NoRoute, Route};
#[cfg(feature = "cuda")]
pub use stream_event::StreamEvent;
pub use supports::{Refusal, supports};
pub use topology::{RankLocation, Topology};
