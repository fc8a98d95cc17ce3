//! Collectives between processes of one host, over memory that they share.
//!
//! # Protocol
//!
//! Each rank owns a control block (three counters, two calls and a vote), two entry areas of 64 KB, 4 MB of slots, and a channel to
//! each other rank. Only the owner writes its memory. The exceptions are flags, which an abort sets in the counters of all ranks,
//! and windows (`window.rs`). While other ranks read, the owner writes counters only.
//!
//! 1. **Enter.** A rank writes its call, and a payload of at most 64 KB. It publishes its `entered` counter, waits for all
//!    ranks' counters, and compares all calls. All ranks see the same calls and so report the same mismatch. A small collective
//!    ends here: it reads the payloads, in rank order.
//! 2. **Stream.** Longer arrays go through slots in rounds (`pipeline.rs`): one phase for most collectives; reduce-scatter and
//!    all-gather for an all-reduce over three or more ranks. The slots of a round stay in the caches: main memory is read once
//!    and written once, which limits the speed of long arrays.
//! 3. **In place.** Arrays that the transport has made (`window.rs`) need no slots: each rank reduces its part of all ranks'
//!    arrays, and then every rank waits for all ranks.
//!
//! Only the third kind ends with a barrier. The first two need none: before a rank reuses a slot, it has already waited for steps
//! that come after all reads of the slot. `group.rs` proves this for entries, `pipeline.rs` for slots, `mailbox.rs` for messages.
//!
//! # Memory order
//!
//! Publishing a counter is a release, and seeing the new count is an acquire. So a rank that has waited for a counter sees what
//! its owner wrote before publishing, and the rank's own later writes cannot overtake those reads. Sleeping and waking use the
//! counter's own word, always by read-modify-write, so no fence between two locations is needed (`word.rs`).
//! `trainer/testing/loom` runs counter, entry and schedules through interleavings and all allowed reorderings.
//!
//! # When ranks die
//!
//! Every wait has a timeout. An abort sets a flag in all counters of the segment, which wakes all sleepers in all processes. A
//! rank that ends without an error sets a flag in its own counters. The memory has no name, and the kernel frees it with the
//! last process that maps it (`mapping.rs`).

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

use std::time::Duration;

use crate::error::Result;
use crate::store::StoreClient;
use crate::transport::{GroupRanks, Transport};
use group::ShmGroup;

pub(crate) use mapping::{HEADER, Mapping};
pub(crate) use window::Window;

/// Makes the transport of `group`. Waits at most `limit` until all ranks of the group have opened the memory. `timeout` limits
/// each later wait.
///
/// # Errors
/// The memory cannot be made or opened, or a rank does not open it in time.
pub(crate) fn transport(
    group: GroupRanks,
    store: &StoreClient,
    limit: Duration,
    timeout: Duration,
) -> Result<Box<dyn Transport>> {
    Ok(Box::new(ShmGroup::new(group, store, limit, timeout)?))
}
