//! Collectives between GPUs: custom kernels inside a host, NCCL or TCP between hosts.
//!
//! In this module, "on the host" means on the CPU, and "the host processes synchronize" means that the ranks' processes wait for
//! each other over their communicator.
//!
//! - `protocol.rs`: the steps of a rank and the meaning of its flags. The loom models use it too.
//! - `layout.rs`, `plan.rs`, `sequence.rs`: windows, chunks and launches, which are computed on the CPU without a GPU.
//! - `kernels/`, `source.rs`: the kernels, in CUDA C++.
//! - `supports.rs`: whether the kernels can run a collective, and if not, why.
//! - `topology.rs`, `route.rs`: where the ranks are, and the route that follows: kernels, NCCL, or kernels inside hosts and
//!   another transport between them.
//! - `driver/`: the binding to libcuda.
//! - With the feature `cuda`: `window.rs` (memory over IPC), `device.rs` (launches through cubecl), `side_stream.rs` (their stream),
//!   `DeviceGroup` (`connect.rs` finds a route that works, `group.rs` has the collectives), `nccl.rs`, `inter_host.rs`,
//!   `stream_event.rs`.
//!
//! # Why CUDA C++ and not `#[cube]`
//!
//! In a `#[cube]` function, every access whose memory order matters would be a `gpu_asm!` string. cubecl does not document
//! whether its optimizer may move plain accesses across such strings. The CUDA C++ text, in contrast, compiles with NVRTC (in
//! CI, which searches the PTX for the instructions), with nvcc, and with a C++ compiler for the CPU. The tests run *the same
//! kernels* on CPU threads, also under ThreadSanitizer (`tests/cuda_kernels.rs`). The kernels are launched through cubecl's
//! client, as all others, on a second stream. Events order this stream after the stream that writes the gradients, and before the
//! stream that reads the sums (`side_stream.rs`, or `StreamEvent` where the CPU waits for other ranks or NCCL sums).
//!
//! # Windows
//!
//! Each rank has a window: a separate allocation (never in cubecl's pool) that the other ranks open over CUDA IPC. A window holds
//! flags and two slots. A collective is cut into chunks that fit a slot. Each chunk is a launch with a number (`launch_number`,
//! from 1, the same on all ranks) and uses slot `launch_number % 2`. The rank's window has the number of launches so far: each
//! launch reads the number at its start and increments it at its end. So a launch in a CUDA graph, whose parameters are the same in
//! each run, has its own number too, and runs of the graph and other launches can follow each other in any order. In a launch, a
//! block
//!
//! 1. *packs* its share of the rank's tensors into the rank's own slot: gathered, scaled, cast;
//! 2. *synchronizes* with the same block of all other ranks: it stores `launch_number` into its word of each peer's flags
//!    `FILLED` (release, system scope), and waits until all of its own words are at least `launch_number` (acquire, system
//!    scope);
//! 3. reads the same share of all ranks' slots, sums it in rank order in f32, rounds the sum once to the wire's type, and either
//!    writes it to the output (one-shot), or
//! 4. (two-shot) writes the sum of its part into its own slot, synchronizes again at the flags `REDUCED`, and copies all parts from
//!    their owners' slots to the output.
//!
//! Except for flags, a rank stores only to its own memory, and only loads from the peers' memory. A pack of 16 bytes belongs to
//! the same block and thread in all phases and on all ranks (`move_packs`). Therefore a block waits for one block per rank and
//! not for a whole grid. One-shot and two-shot round at the same point, so both produce the same bits on all ranks.
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
//!   blocks of A's launch `e+1` ended before `A.pack(e+2)` (one stream). At least one of them synchronized with B's launch `e+1`,
//!   whose flag B set after its launch `e` had ended (one stream). So `B.read(e)` → `B.flag(e+1)` → `A.wait(e+1)` →
//!   `A.pack(e+2)`. Other designs need a barrier at the end of a collective. With two slots, the wait at the start of the next
//!   collective is this barrier, at no extra cost. *Every* kernel therefore synchronizes with all ranks at `FILLED`, also the
//!   readers of a broadcast.
//! - *In two-shot, A reduces into the slot that others read*: `A.reduce(e)` writes only packs of A's part, which peers read only
//!   in `gather(e)`, behind `REDUCED`. In `reduce(e)` each peer reads its own part of A's slot.
//! - *Flags* are words of 64 bits with one writer each. Their values only grow and are never reset. A sender can be at most one
//!   launch ahead, so a waiter compares with "at least". `FILLED` and `REDUCED` are separate words.
//! - *Waits end*: block b waits only for the blocks b of the other ranks, and blocks start in the order of their numbers. So the
//!   lowest unfinished block of the slowest rank can always proceed, however few blocks fit beside the model's kernels. A wait
//!   that exceeds the timeout ends in a fault that names the peer. An abort (a word in host memory that all waits read) also ends
//!   a wait. After a fault or an abort every later launch of this rank returns at once, so no kernel spins forever, also not in
//!   graphs that are launched already. In the launch with the fault, all blocks still synchronize, since the same blocks of the
//!   peers wait for them.
//! - *Launches have the same numbers on all ranks*: a rank's launches run one after the other, since they are on one stream or on
//!   one branch of a graph that events order before and after it. The last block of a launch to end increments the number, when
//!   all blocks have read it. The next launch starts after this launch has ended, so the next launch reads the new number.
//!
//! *NCCL's sums* run between two launches of the stream. The first launch of `order` signals that the slot is packed. The second
//! waits until the slot is summed (`nccl.rs`). Timeouts and aborts end this wait too. After an abort, the launches of `order` still
//! signal, so that NCCL's stream waits for none of them.
//!
//! A flag also holds the call's fingerprint (kernel, type, length, root). So ranks that make different calls detect the mismatch,
//! and the error names both ranks.
//!
//! # Ranks that share a GPU
//!
//! Without MPS, a GPU runs kernels of one process at a time. A kernel that waits for another rank's kernel would prevent that
//! kernel from running until the time slice ends. So ranks that share a GPU launch each step separately
//! ([`sequence::host_steps`]), and the host processes synchronize between steps. The kernels' text and the bits are the same.
//! This mode is for tests; its timings mean nothing.
//!
//! # Known bugs of other implementations, and how this one avoids them
//!
//! - Several byte flags in one word caused a race (vllm#2760). Here each flag is a word of 64 bits.
//! - Flags that were zeroed after the exchange of handles caused a hang (apache/tvm#16797). Here a window is zeroed, and the
//!   device synchronized, before the window's handle exists.
//! - One set of flags for start and end caused a hang on H100 (vllm#8558). Here there are two sets.
//! - A missing barrier at the end caused NaN (ROCm/aiter#3514). Here there are two slots, see above. The sanitizer's test also
//!   runs a version with one slot, which races.
//! - Only the first peer's access was checked (vllm#50775), and drivers report access that does not work. Here kernels of every
//!   rank write to and read from every peer before the first reduction.
//! - Without NVLink nothing was launched, and no error was reported (flashinfer#4393). Here [`supports()`] returns the reason.
//!   The reason is an error if the user asked for the kernels; `auto` reports which backend it uses instead.

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
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod side_stream;
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
