//! Communicators.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::collective::Call;
use super::meeting::{Meeting, UniqueId};
use super::{INVALID_ARGUMENT, UNHANDLED_CUDA, of_driver, refuse};
use crate::capture;
use crate::code::Answer;
use crate::event::{DISABLE_TIMING, Event};
use crate::handles::Table;
use crate::log::lock;
use crate::machine::Device;
use crate::op::Op;
use crate::stream::Target;

/// All communicators.
static COMMS: Table<Comm> = Table::new();

/// A rank of a group of ranks.
#[derive(Debug)]
pub(crate) struct Comm {
    pub(super) device: &'static Device,
    pub(super) meeting: Meeting,
    /// What is still queued does nothing.
    pub(super) ended: AtomicBool,
    /// Steps that have been made; held while a collective runs.
    pub(super) steps: Mutex<u64>,
    /// The id of the stream that got the last collective: those of a communicator run in the order of the calls.
    last: Mutex<Option<usize>>,
    /// Recorded behind the last collective.
    done: Arc<Event>,
}

/// What `ncclCommInitRank` asks for.
pub(super) struct Join {
    pub(super) id: UniqueId,
    pub(super) world: usize,
    pub(super) rank: usize,
    pub(super) device: &'static Device,
}

impl Join {
    /// Checks what can be told without the others.
    pub(super) fn new(id: UniqueId, world: i32, rank: i32, device: &'static Device) -> Answer<Self> {
        let wrong = || refuse(INVALID_ARGUMENT, &format!("invalid rank requested : {rank}/{world}"));
        let number = |number: i32| usize::try_from(number).map_err(|_| wrong());
        let (world, rank) = (number(world)?, number(rank)?);
        if rank < world { Ok(Self { id, world, rank, device }) } else { Err(wrong()) }
    }

    /// Waits for all ranks; gives the handle.
    pub(super) fn run(&self) -> Answer<usize> {
        Ok(COMMS.add(Arc::new(Comm {
            device: self.device,
            meeting: Meeting::join(&self.id, self.world, self.rank, self.device)?,
            ended: AtomicBool::new(false),
            steps: Mutex::new(0),
            last: Mutex::new(None),
            done: Arc::new(Event::new(self.device.index, DISABLE_TIMING)),
        })))
    }
}

fn unknown() -> i32 {
    refuse(INVALID_ARGUMENT, "the communicator is none, or has ended")
}

/// The communicator of a handle.
pub(super) fn get(handle: usize) -> Answer<Arc<Comm>> {
    COMMS.get(handle).map_err(|_| unknown())
}

/// Ends a handle.
pub(super) fn remove(handle: usize) -> Answer<Arc<Comm>> {
    COMMS.remove(handle).map_err(|_| unknown())
}

impl Comm {
    /// The stream of a handle, on the communicator's GPU whichever is current.
    pub(super) fn target(&self, stream: usize) -> Answer<Target> {
        let target = match stream {
            0..=2 => Target::Null(self.device),
            stream => Target::of(stream).map_err(of_driver)?,
        };
        match target.device().index == self.device.index {
            true => Ok(target),
            false => Err(refuse(UNHANDLED_CUDA, "the stream is one of another GPU")),
        }
    }

    /// Gives it to a stream.
    pub(super) fn submit(target: &Target, call: &Arc<Call>) -> Answer {
        let comm = &call.comm;
        let op = Op::Collective(call.clone());
        if target.is_capturing() {
            return target.submit(op).map_err(of_driver);
        }
        let id = match target {
            Target::Null(_) => 0,
            Target::Stream(stream) => stream.id,
        };
        let mut last = lock(&comm.last);
        let waits = last.is_some_and(|last| last != id).then(|| Op::Wait(comm.done.clone(), comm.done.last()));
        target.submit_all(waits.into_iter().chain([op])).map_err(of_driver)?;
        *last = Some(id);
        capture::record(target, &comm.done).map_err(of_driver)
    }

    /// Waits for what it has been given.
    pub(super) fn finish(&self) {
        self.done.wait(self.done.last());
    }

    /// Gives up what runs and what is queued; nothing of it runs on when this returns.
    pub(super) fn abort(&self) {
        self.ended.store(true, Ordering::Release);
        drop(lock(&self.steps));
    }
}
