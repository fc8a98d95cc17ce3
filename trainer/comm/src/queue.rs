//! Asynchronous collectives: a thread that executes them in the order of their submission.
//!
//! A communicator and the groups made of it share one queue (`process.rs` calls it a line), and a synchronous call waits for
//! the queue to be empty before it starts. So a line has one order of collectives, the one its code has; if all ranks run
//! the same code, no two of them can wait for each other in different collectives. A duplicate has a queue of its own.

use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::error::{CommError, Result};

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    /// Submitted and not finished.
    pending: usize,
    closed: bool,
}

#[derive(Default)]
struct QueueState {
    state: Mutex<State>,
    changed: Condvar,
}

impl QueueState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        loop {
            let mut state = self.lock();
            let task = loop {
                match state.tasks.pop_front() {
                    Some(task) => break task,
                    None if state.closed => return,
                    None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(state);
            // A panic must not leave others waiting; the task's handle reports it, since its sender is gone.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(task));
            self.lock().pending -= 1;
            self.changed.notify_all();
        }
    }
}

/// See the module. The thread starts with the first submission.
#[derive(Default)]
pub(crate) struct Queue {
    shared: Arc<QueueState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Queue {
    /// Has `task` executed after all that were submitted before.
    pub(crate) fn submit<R: Send + 'static>(&self, task: impl FnOnce() -> Result<R> + Send + 'static) -> Work<R> {
        let (sender, result) = sync_channel(1);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = self.shared.clone();
            match std::thread::Builder::new().name("comm-async".into()).spawn(move || shared.serve()) {
                Ok(started) => *thread = Some(started),
                Err(e) => {
                    let error = CommError::system(format!("cannot start the communication thread: {e}"));
                    let _ = sender.send(Err(error));
                    return Work { result };
                }
            }
        }
        drop(thread);
        let mut state = self.shared.lock();
        state.pending += 1;
        state.tasks.push_back(Box::new(move || {
            // Nobody waits for a handle that was dropped.
            let _ = sender.send(task());
        }));
        drop(state);
        self.shared.changed.notify_all();
        Work { result }
    }

    /// Waits until all that was submitted is done.
    pub(crate) fn synchronize(&self) {
        let state = self.shared.lock();
        if state.pending > 0 {
            drop(self.shared.changed.wait_while(state, |s| s.pending > 0).unwrap_or_else(PoisonError::into_inner));
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The last task may be what kept the communicator alive: then this is that thread, which ends by itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// A collective that was submitted and may still be under way. Dropping it does not cancel it.
#[must_use = "the result, and any error, is in the handle"]
pub struct Work<R> {
    result: Receiver<Result<R>>,
}

impl<R> Work<R> {
    /// Waits for the end and gives the buffer back.
    ///
    /// # Errors
    /// Whatever the collective reports.
    pub fn wait(self) -> Result<R> {
        self.result.recv().unwrap_or_else(|_| Err(CommError::system("the communication thread panicked")))
    }
}

impl<R> fmt::Debug for Work<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Work")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_run_in_order_and_a_panic_is_an_error() {
        let queue = Queue::default();
        let order = Arc::new(Mutex::new(Vec::new()));
        let handles: Vec<_> = (0..20)
            .map(|i| {
                let order = order.clone();
                queue.submit(move || {
                    assert_ne!(i, 7, "this panic is part of the test");
                    order.lock().unwrap().push(i);
                    Ok(i)
                })
            })
            .collect();
        queue.synchronize();
        assert_eq!(*order.lock().unwrap(), (0..20).filter(|i| *i != 7).collect::<Vec<_>>());
        for (i, handle) in handles.into_iter().enumerate() {
            assert_eq!(handle.wait().ok(), (i != 7).then_some(i));
        }
    }
}
