//! Communicators.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::collective::Collective;
use super::segment::{Segment, UniqueId};
use super::{INVALID_ARGUMENT, UNHANDLED_CUDA, driver_error, refuse};
use crate::capture;
use crate::cu_result::DriverResult;
use crate::event::{DISABLE_TIMING, Event};
use crate::handles::Table;
use crate::machine::Device;
use crate::op::Op;
use crate::stream::StreamRef;

/// All communicators.
static COMMS: Table<Comm> = Table::new();

/// A communicator: one rank of a group.
#[derive(Debug)]
pub(crate) struct Comm {
    pub(super) device: &'static Device,
    pub(super) segment: Segment,
    /// Set by an abort: collectives that are still queued do nothing.
    pub(super) aborted: AtomicBool,
    /// Number of steps made. Locked while a collective runs.
    pub(super) steps: Mutex<u64>,
    /// Id of the stream of the last collective. Collectives of a communicator run in the order of the calls.
    last_stream: Mutex<Option<usize>>,
    /// Recorded after the last collective.
    done: Arc<Event>,
}

/// The arguments of `ncclCommInitRank`.
pub(super) struct InitRank {
    pub(super) id: UniqueId,
    pub(super) world_size: usize,
    pub(super) rank: usize,
    pub(super) device: &'static Device,
}

impl InitRank {
    /// Checks the arguments that need no other rank.
    pub(super) fn new(id: UniqueId, world_size: i32, rank: i32, device: &'static Device) -> DriverResult<Self> {
        let wrong = || refuse(INVALID_ARGUMENT, &format!("invalid rank requested : {rank}/{world_size}"));
        let number = |number: i32| usize::try_from(number).map_err(|_| wrong());
        let (world_size, rank) = (number(world_size)?, number(rank)?);
        if rank < world_size { Ok(Self { id, world_size, rank, device }) } else { Err(wrong()) }
    }

    /// Waits for all ranks; returns the handle.
    pub(super) fn run(&self) -> DriverResult<usize> {
        Ok(COMMS.add(Arc::new(Comm {
            device: self.device,
            segment: Segment::join(&self.id, self.world_size, self.rank, self.device)?,
            aborted: AtomicBool::new(false),
            steps: Mutex::new(0),
            last_stream: Mutex::new(None),
            done: Arc::new(Event::new(self.device.index, DISABLE_TIMING)),
        })))
    }
}

fn unknown() -> i32 {
    refuse(INVALID_ARGUMENT, "the communicator is invalid or was destroyed")
}

/// Returns the communicator of a handle.
pub(super) fn get(handle: usize) -> DriverResult<Arc<Comm>> {
    COMMS.get(handle).map_err(|_| unknown())
}

/// Removes a handle; returns its communicator.
pub(super) fn remove(handle: usize) -> DriverResult<Arc<Comm>> {
    COMMS.remove(handle).map_err(|_| unknown())
}

impl Comm {
    /// Returns the stream of a handle. The stream must be on the communicator's GPU; the current GPU does not matter.
    pub(super) fn target(&self, stream: usize) -> DriverResult<StreamRef> {
        let target = match stream {
            0..=2 => StreamRef::Null(self.device),
            stream => StreamRef::of(stream).map_err(driver_error)?,
        };
        match target.device().index == self.device.index {
            true => Ok(target),
            false => Err(refuse(UNHANDLED_CUDA, "the stream belongs to another GPU")),
        }
    }

    /// Submits a collective to a stream.
    pub(super) fn submit(target: &StreamRef, call: &Arc<Collective>) -> DriverResult {
        let comm = &call.comm;
        let op = Op::Collective(call.clone());
        if target.is_capturing() {
            return target.submit(op).map_err(driver_error);
        }
        let id = match target {
            StreamRef::Null(_) => 0,
            StreamRef::Stream(stream) => stream.id,
        };
        let mut last = comm.last_stream.lock();
        let waits = last.is_some_and(|last| last != id).then(|| Op::Wait(comm.done.clone(), comm.done.last_ticket()));
        target.submit_all(waits.into_iter().chain([op])).map_err(driver_error)?;
        *last = Some(id);
        capture::record(target, &comm.done).map_err(driver_error)
    }

    /// Waits for all collectives submitted so far.
    pub(super) fn finish(&self) {
        self.done.wait(self.done.last_ticket());
    }

    /// Aborts running and queued collectives. None of them runs any more when this returns.
    pub(super) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        drop(self.steps.lock());
    }
}
