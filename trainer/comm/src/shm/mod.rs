//! Collectives between processes of one host, over memory that they share.
//!
//! # Protocol
//!
//! Each rank owns a control block (three counters and two descriptors), two entry areas of 64 KB, 4 MB of slots, and a
//! channel to each other rank. Only the owner writes them, only counters are written while others look.
//!
//! 1. **Enter.** A rank writes the descriptor of its call and, if it is small, its payload; publishes its `entered`
//!    counter; waits for everybody's; compares all descriptors. All ranks see the same descriptors and so report the same
//!    mismatch. A small collective is over here: it reads the payloads, in rank order.
//! 2. **Stream.** Longer arrays go through slots in rounds (`pipeline.rs`): one phase for most, reduce-scatter and
//!    all-gather for all-reduce over three or more ranks. A round's slots stay in the caches: main memory is read once and
//!    written once, which is what limits long arrays.
//!
//! 3. **In place.** Arrays that the transport has made itself (`window.rs`) need no slots: each rank works on its part of all
//!    ranks' arrays, and all wait for all.
//!
//! But for that there are no end barriers: a slot is free again because of what later steps must have waited for. `group.rs` argues it
//! for entries, `pipeline.rs` for slots, `mailbox.rs` for messages.
//!
//! # Memory order
//!
//! A counter's publication is a release, seeing it an acquire, so what a rank wrote before publishing is visible to whoever
//! waited for it, and a later overwrite cannot overtake the reads that it waited for. Sleeping and waking is on the same
//! word as counting, all by read-modify-write, so no fence between two locations is needed (`word.rs`). `trainer/testing/loom` runs
//! counter, entry and the schedules through interleavings and every allowed reordering.
//!
//! # When ranks die
//!
//! Nothing here is ever waited for without a limit, and an abort marks all counters of the segment, which wakes every
//! sleeper in every process. A rank that leaves in good order marks its own. The memory has no name and ends with its
//! last process (`mapping.rs`).

mod collectives;
mod group;
mod mailbox;
mod mapping;
mod pipeline;
mod segment;
mod staging;
mod wait;
mod window;
mod word;

pub(crate) use group::ShmGroup;
pub(crate) use window::Window;
