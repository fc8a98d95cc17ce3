//! Collectives between GPUs of one host, by kernels of our own.
//!
//! - `protocol.rs`: what ranks do in turn and what their flags say; shared with the loom models.
//! - `layout.rs`, `plan.rs`, `sequence.rs`: windows, pieces, launches: everything that is computed on the host.
//! - `kernels/`, `source.rs`: the kernels, CUDA C++.
//! - `supports.rs`: whether they can do a job, and why not.
//! - `route.rs`: kernels, NCCL, or kernels inside hosts and something else between them.
//! - With the feature `cuda`: `gpu.rs` (the driver's calls), `window.rs` (memory over IPC), `topology.rs` (what ranks tell each
//!   other first), `device.rs` (launches through cubecl), `DeviceGroup` (`group.rs`, the collectives), `nccl.rs`, `inter_host.rs`.
//!
//! # Why CUDA C++ and not `#[cube]`
//!
//! Every access that matters here would be a `gpu_asm!` string in a `#[cube]` function as well, with an optimizer around it
//! whose promises about plain accesses beside such strings are not written down. The text, in contrast, is compiled by
//! anybody's compiler: NVRTC in CI (and the PTX is searched for the instructions), nvcc, and a C++ compiler for the CPU, which
//! runs *these very kernels* with threads, under ThreadSanitizer too (`tests/cuda_kernels.rs`). They are launched through
//! cubecl's client like any other kernel, on a stream of its own, which comes after those that wrote the gradients, and before
//! those that read the sums (`StreamEvent`).
//!
//! # Windows
//!
//! Each rank has a window, an allocation of its own (never cubecl's pool) that the others open over CUDA IPC: flags, then two
//! slots. A collective is cut into pieces that fit a slot; each piece is a launch with a number (the *epoch*, from 1, the same
//! on all ranks), which takes slot `epoch % 2`. In it a block
//!
//! 1. *packs* its share of the rank's tensors into the rank's own slot: gathered, scaled, cast;
//! 2. *meets* the same block of all other ranks: stores `epoch` into its word of each peer's flags `FILLED` (release, system
//!    scope), and waits until all words of its own are at least `epoch` (acquire, system scope);
//! 3. reads the same share of everybody's slots, adds up in the order of ranks, in f32, rounds once to the type that travels,
//!    and either writes the sum to the output (one shot), or
//! 4. (two shots) writes its part's sum into its own slot, meets again at the flags `REDUCED`, and copies all parts from
//!    their owners' slots to the output.
//!
//! All stores but those of flags are to the rank's own memory; peers' memory is only read. A pack of 16 bytes belongs to the
//! same block and thread in all phases and on all ranks (`move_packs`), which is why a block waits for one block a rank and not
//! for a grid. One shot and two shots round at the same place: they give the same bits, on all ranks.
//!
//! # Why the order holds
//!
//! Notation: `A.pack(e)` and so on for rank A's accesses in launch `e`; → is "happens before" in the PTX memory model
//! (causality order).
//!
//! - *What is read was written*: `A.pack(e)` by any thread of block b → `bar.sync` of that block → `st.release.sys` of the
//!   flag by one of its threads → (observed) `ld.acquire.sys` by a thread of B's block b → `bar.sync` → `B.read(e)`. Release
//!   and acquire are at system scope on both sides, hence morally strong across GPUs; the barriers make them cumulative over
//!   the block. The same holds for `A.reduce(e)` and `B.gather(e)` with the flags `REDUCED`. Data is read with plain loads:
//!   after the acquire they may not return older values, and the compiler cannot use the non-coherent path, since it must
//!   assume that the stores in the same kernel alias.
//! - *What is being read is not overwritten*: `A.pack(e+2)` writes the slot that `B.read(e)`/`B.gather(e)` reads. All blocks of
//!   A's launch `e+1` ended before `A.pack(e+2)` (one stream). At least one of them met B's launch `e+1`, whose flag B set
//!   after its launch `e` had ended (one stream). So `B.read(e)` → `B.flag(e+1)` → `A.wait(e+1)` → `A.pack(e+2)`. This is the
//!   barrier at the end of a collective that others need, taken from the beginning of the next one, at no cost: it is what two
//!   slots are for. *Every* kernel therefore meets at `FILLED` with all ranks, a broadcast's readers too.
//! - *In two shots A reduces into the slot that others read*: `A.reduce(e)` writes only packs of A's part, which peers read in
//!   `gather(e)` alone, behind `REDUCED`; in `reduce(e)` each reads its own part of A's slot.
//! - *Flags*: a word each, 64 bits, with one writer; they only grow; no word is reset. A sender can be one launch ahead, never
//!   more, and "at least" lets it be. `FILLED` and `REDUCED` are words apart.
//! - *Waits end*: block b waits for blocks b alone, and blocks start in the order of their numbers, so the lowest unfinished
//!   block of the slowest rank can always proceed, however few fit beside the model's kernels. A wait that takes longer than
//!   the limit ends in a fault that names the peer, as does an abort (a word on the host that all waits look at), and from
//!   then on every later launch of this rank returns at once: nothing is left spinning on a GPU. The launch that has the fault
//!   still meets in all its blocks, for the same blocks of the peers wait for them.
//!
//! A flag holds the call's fingerprint as well (kernel, type, length, root): ranks that call different things name each other.
//!
//! # Ranks that share a GPU
//!
//! Without MPS only one process's kernels run on a GPU at a time: a kernel that waits for another rank's would keep it from
//! running until the time slice ends. There each step is a launch of its own ([`sequence::host_steps`]) and the hosts meet over
//! their communicator in between. The same text, the same bits, for tests; timings mean nothing.
//!
//! # Bugs of others, and why they are not here
//!
//! - Byte flags in one word were a race (vllm#2760): a flag is a word of 64 bits.
//! - Flags zeroed after handles were exchanged hung (apache/tvm#16797): a window is zeroed, and the device waited for, before
//!   its handle exists.
//! - One set of flags for start and end hung on H100 (vllm#8558): two sets.
//! - A missing end barrier gave NaN (ROCm/aiter#3514): two slots, see above; the sanitizer's test has a version with one.
//! - Only the first peer's access was checked (vllm#50775), and drivers misreport it: after opening, every rank writes to and
//!   reads from every peer, by kernel, before anything is reduced.
//! - Nothing was launched, silently, without NVLink (flashinfer#4393): [`supports()`] says why not, and whoever asked for the
//!   kernels gets that as an error; `auto` names what it uses instead.

#[cfg(feature = "cuda")]
pub mod bench;
#[cfg(feature = "cuda")]
mod device;
#[allow(unsafe_code)]
pub mod driver;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
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
#[cfg(feature = "cuda")]
mod topology;
#[cfg(feature = "cuda")]
mod window;

#[cfg(feature = "cuda")]
pub use device::is_cuda;
#[cfg(feature = "cuda")]
pub use group::{DeviceGroup, DeviceGroupOptions};
pub use route::{DeviceBackend, NoRoute, Route};
#[cfg(feature = "cuda")]
pub use stream_event::StreamEvent;
pub use supports::{RankLocation, Refusal, Topology, supports};
