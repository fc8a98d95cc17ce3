//! Starts and ends MPI in this process, and runs each group's calls on a thread.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mpi::Threading;
use mpi::topology::{Communicator as _, SimpleCommunicator};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::abort::AbortFlag;
use crate::aligned::AlignedBytes;
use crate::deadline::WaitDeadline;
use crate::error::{self, CommError};
use crate::message_header::MessageHeader;

/// Messages that arrived before their receive call (MPI: unexpected messages), by sender.
pub(super) type UnexpectedMessages = Vec<VecDeque<(MessageHeader, AlignedBytes)>>;

/// The state of a group's thread.
pub(super) struct GroupState {
    pub comm: SimpleCommunicator,
    pub unexpected: UnexpectedMessages,
    pub abort: Arc<AbortFlag>,
}

type Task = Box<dyn FnOnce(&mut GroupState) + Send>;

/// Why a call did not return.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CallError {
    Timeout,
    Aborted,
    Panicked,
}

/// Wakes the thread that waits for a result.
#[derive(Default)]
struct Notifier {
    turn: Mutex<()>,
    notified: Condvar,
}

impl Notifier {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    fn notify(&self) {
        drop(self.lock());
        self.notified.notify_all();
    }
}

/// A thread that runs tasks in order.
struct TaskThread<T> {
    tasks: Option<Sender<T>>,
    thread: Option<JoinHandle<()>>,
    notifier: Arc<Notifier>,
    abort: Arc<AbortFlag>,
}

impl<T: Send + 'static> TaskThread<T> {
    fn start(
        name: &str,
        abort: Arc<AbortFlag>,
        body: impl FnOnce(Receiver<T>) + Send + 'static,
    ) -> error::Result<Self> {
        let (tasks, queue) = channel();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || body(queue))
            .map_err(|e| CommError::setup(format!("cannot start the MPI thread: {e}")))?;
        let notifier = Arc::new(Notifier::default());
        let waiting = Arc::downgrade(&notifier);
        abort.on_raise(move || {
            if let Some(notifier) = waiting.upgrade() {
                notifier.notify();
            }
        });
        Ok(Self { tasks: Some(tasks), thread: Some(thread), notifier, abort })
    }

    /// Sends a task to the thread, and waits for the task's result. `task` makes the task from the sender of the result.
    fn run_and_wait<R: Send + 'static>(
        &self,
        limit: Duration,
        task: impl FnOnce(ResultSender<R>) -> T,
    ) -> Result<R, CallError> {
        let slot = Arc::new(Mutex::new(ResultSlot::Empty));
        let sent = self.tasks.as_ref().is_some_and(|tasks| {
            tasks.send(task(ResultSender { slot: slot.clone(), notifier: self.notifier.clone() })).is_ok()
        });
        if !sent {
            return Err(CallError::Panicked);
        }
        let mut deadline = WaitDeadline::after(limit);
        let mut turn = self.notifier.lock();
        loop {
            match std::mem::replace(&mut *slot.lock(), ResultSlot::Empty) {
                ResultSlot::Full(value) => return Ok(value),
                ResultSlot::Gone => return Err(CallError::Panicked),
                ResultSlot::Empty if self.abort.is_raised() => return Err(CallError::Aborted),
                ResultSlot::Empty => {}
            }
            let slice = deadline.next_sleep();
            if slice.is_zero() {
                return Err(CallError::Timeout);
            }
            self.notifier.notified.wait_for(&mut turn, slice);
        }
    }

    /// Joins the thread. After an abort or a panic the thread may never end, so it is not joined.
    fn close(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take()
            && !self.abort.is_raised()
            && !std::thread::panicking()
        {
            let _ = thread.join();
        }
    }
}

enum ResultSlot<R> {
    Empty,
    Full(R),
    /// The sender was dropped without a result.
    Gone,
}

/// Sends one result.
struct ResultSender<R> {
    slot: Arc<Mutex<ResultSlot<R>>>,
    notifier: Arc<Notifier>,
}

impl<R> ResultSender<R> {
    fn send(self, value: R) {
        *self.slot.lock() = ResultSlot::Full(value);
    }
}

impl<R> Drop for ResultSender<R> {
    fn drop(&mut self) {
        let mut slot = self.slot.lock();
        if matches!(*slot, ResultSlot::Empty) {
            *slot = ResultSlot::Gone;
        }
        drop(slot);
        self.notifier.notify();
    }
}

/// MPI between `MPI_Init_thread` and `MPI_Finalize`. One thread must call both.
pub(crate) struct Runtime(TaskThread<()>);

impl Runtime {
    /// Starts MPI, and checks that MPI has the same rank and world size as the job.
    pub(crate) fn start(
        rank: usize,
        world_size: usize,
        abort: &Arc<AbortFlag>,
        limit: Duration,
    ) -> error::Result<Self> {
        let (sender, started) = channel::<ResultSender<Result<(), String>>>();
        let ended = abort.clone();
        let worker = TaskThread::start("comm-mpi", abort.clone(), move |queue: Receiver<()>| {
            let Ok(answer) = started.recv() else { return };
            let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Multiple) else {
                return answer.send(Err("MPI was started before in this process, and starts only once".into()));
            };
            answer.send(check_world(&universe.world(), threading, rank, world_size));
            // The loop ends when the queue is closed.
            while queue.recv().is_ok() {}
            if ended.is_raised() {
                // Dropping `universe` calls `MPI_Finalize`, which waits for all ranks. Other ranks may never call it.
                std::mem::forget(universe);
            }
        })?;
        let started = worker.run_and_wait(limit, |answer| drop(sender.send(answer)));
        let cause = match started {
            Ok(Ok(())) => return Ok(Self(worker)),
            Ok(Err(cause)) => cause,
            Err(CallError::Timeout) => format!("MPI_Init did not return within {limit:.0?}"),
            Err(CallError::Aborted | CallError::Panicked) => "MPI_Init did not return".into(),
        };
        if let Some(error) = abort.error() {
            return Err(error);
        }
        // Keep the queue open: otherwise the thread would call `MPI_Finalize`, which waits for all ranks.
        std::mem::forget(worker);
        Err(CommError::setup(format!("rank {rank} cannot use MPI: {cause}"))
            .hint(format!("start the job with mpirun: mpirun -np {world_size} trainer … --backend mpi"))
            .blame(rank))
    }
}

/// Starts and ends MPI in this process, and returns the highest thread support of the library (`MPI_Init_thread`), for example
/// `MPI_THREAD_MULTIPLE`. Returns `None` if MPI was started before in this process, since MPI starts only once.
pub fn mpi_thread_support() -> Option<&'static str> {
    let (_universe, threading) = mpi::initialize_with_threading(Threading::Multiple)?;
    Some(match threading {
        Threading::Single => "MPI_THREAD_SINGLE",
        Threading::Funneled => "MPI_THREAD_FUNNELED",
        Threading::Serialized => "MPI_THREAD_SERIALIZED",
        Threading::Multiple => "MPI_THREAD_MULTIPLE",
    })
}

fn check_world(comm: &SimpleCommunicator, threading: Threading, rank: usize, world_size: usize) -> Result<(), String> {
    if threading != Threading::Multiple {
        return Err(format!("this MPI library provides {threading:?} threads, and Multiple is needed"));
    }
    let (own, size) = (comm.rank(), comm.size());
    if (own, size) == (rank as i32, world_size as i32) {
        return Ok(());
    }
    Err(format!("MPI counts this process as rank {own} of {size}, the job as rank {rank} of {world_size}"))
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The thread of one group.
pub(super) struct GroupThread(TaskThread<Task>);

impl GroupThread {
    /// Starts the group's thread, which makes and owns the communicator of `ranks`. All of these ranks call this function
    /// together.
    pub(super) fn open(id: u64, ranks: &[usize], abort: &Arc<AbortFlag>, limit: Duration) -> error::Result<Self> {
        let (list, group_abort) = (ranks.iter().map(|rank| *rank as i32).collect::<Vec<_>>(), abort.clone());
        let group_thread = Self(TaskThread::start("comm-mpi-group", abort.clone(), move |queue: Receiver<Task>| {
            let Some(comm) = make(id, &list) else { return };
            let unexpected = list.iter().map(|_| VecDeque::new()).collect();
            let mut state = GroupState { comm, unexpected, abort: group_abort };
            while let Ok(task) = queue.recv() {
                if catch_unwind(AssertUnwindSafe(|| task(&mut state))).is_err() {
                    break;
                }
            }
            if state.abort.is_raised() {
                // Freeing a communicator is a collective call, and other ranks may never make it.
                std::mem::forget(state);
            }
        })?);
        match group_thread.run(limit, |_| ()) {
            Ok(()) => Ok(group_thread),
            Err(CallError::Aborted) => Err(abort.error().unwrap_or_else(|| CommError::setup("the job was aborted"))),
            Err(error) => {
                std::mem::forget(group_thread);
                Err(CommError::setup(format!("MPI cannot make a communicator of ranks {ranks:?}: {error:?}")))
            }
        }
    }

    pub(super) fn run<R: Send + 'static>(
        &self,
        limit: Duration,
        task: impl FnOnce(&mut GroupState) -> R + Send + 'static,
    ) -> Result<R, CallError> {
        self.0.run_and_wait(limit, |answer| Box::new(move |state: &mut GroupState| answer.send(task(state))))
    }
}

impl Drop for GroupThread {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Returns the world's communicator for the whole job, and a new communicator for any other group.
fn make(id: u64, ranks: &[i32]) -> Option<SimpleCommunicator> {
    use mpi::topology::Group as _;
    let world = SimpleCommunicator::world();
    if id == 0 {
        return Some(world);
    }
    // Tags separate calls that run at once. Every library has at least these tags.
    world.split_by_subgroup_with_tag(&world.group().include(ranks), (id % 32_767) as i32)
}
