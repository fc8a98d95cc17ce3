//! The queue of asynchronous collectives. One thread runs them in the order of submission.
//!
//! A communicator and the groups made from it share the queue of their `CommStream` (`process.rs`). A synchronous call waits
//! until the queue is empty before it starts. So the collectives of a stream run in the order of the code. If all ranks run the
//! same code, no two ranks can wait for each other in different collectives. A duplicate has its own queue.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::error::{CommError, Result};

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct QueueState {
    tasks: VecDeque<Task>,
    /// Number of tasks that are submitted and not finished.
    pending: usize,
    /// Number of tasks that were ever submitted.
    submitted: u64,
    closed: bool,
}

#[derive(Default)]
struct TaskQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

impl TaskQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock()
    }

    fn serve(&self) {
        loop {
            let mut state = self.lock();
            let task = loop {
                match state.tasks.pop_front() {
                    Some(task) => break task,
                    None if state.closed => return,
                    None => self.changed.wait(&mut state),
                }
            };
            drop(state);
            task();
            self.lock().pending -= 1;
            self.changed.notify_all();
        }
    }
}

/// The queue of a stream: one thread runs its tasks in order. The first submission starts the thread.
#[derive(Default)]
pub(crate) struct Queue {
    shared: Arc<TaskQueue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Queue {
    /// Submits `task`, which runs after all tasks submitted before. If `task` cannot run or panics, calls `fail` with the error,
    /// which ends the job and returns the job's error.
    pub(crate) fn submit<R: Send + 'static>(
        &self,
        task: impl FnOnce() -> Result<R> + Send + 'static,
        fail: impl FnOnce(CommError) -> CommError + Send + 'static,
    ) -> Work<R> {
        self.submit_numbered(task, fail).1
    }

    /// Submits `task` as [`submit`](Self::submit) does, and returns the number of tasks that were submitted until then, `task`
    /// included.
    pub(crate) fn submit_numbered<R: Send + 'static>(
        &self,
        task: impl FnOnce() -> Result<R> + Send + 'static,
        fail: impl FnOnce(CommError) -> CommError + Send + 'static,
    ) -> (u64, Work<R>) {
        let (sender, work) = Work::pair();
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let shared = self.shared.clone();
            match std::thread::Builder::new().name("comm-async".into()).spawn(move || shared.serve()) {
                Ok(started) => *thread = Some(started),
                Err(e) => {
                    let error = CommError::system(format!("cannot start the communication thread: {e}"));
                    let _ = sender.send(Err(fail(error.hint("see `ulimit -u`"))));
                    return (self.submitted(), work);
                }
            }
        }
        drop(thread);
        let mut state = self.shared.lock();
        state.pending += 1;
        state.submitted += 1;
        let number = state.submitted;
        state.tasks.push_back(Box::new(move || {
            let result = catch_unwind(AssertUnwindSafe(task))
                .unwrap_or_else(|_| Err(fail(CommError::system("the communication thread panicked"))));
            // No thread waits for a `Work` that was dropped.
            let _ = sender.send(result);
        }));
        drop(state);
        self.shared.changed.notify_all();
        (number, work)
    }

    /// Returns the number of tasks that were ever submitted.
    pub(crate) fn submitted(&self) -> u64 {
        self.shared.lock().submitted
    }

    /// Returns whether all submitted tasks are done.
    pub(crate) fn is_idle(&self) -> bool {
        self.shared.lock().pending == 0
    }

    /// Waits until all submitted tasks are done.
    pub(crate) fn synchronize(&self) {
        let mut state = self.shared.lock();
        self.shared.changed.wait_while(&mut state, |state| state.pending > 0);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        let thread = self.thread.get_mut().take();
        if let Some(thread) = thread {
            // The last task may have been the last owner of the communicator. Then this code runs on the queue's own thread,
            // which cannot join itself and ends anyway.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// A collective that was submitted and may still run, like PyTorch's `Work`. Dropping it does not cancel the collective.
#[must_use = "the result, and any error, is in the `Work`"]
pub struct Work<R> {
    result: Receiver<Result<R>>,
}

impl<R> Work<R> {
    /// Returns a `Work` and the sender of its result.
    pub(crate) fn pair() -> (SyncSender<Result<R>>, Self) {
        let (sender, result) = sync_channel(1);
        (sender, Self { result })
    }

    /// Waits until the collective is done, and returns its buffer.
    ///
    /// # Errors
    /// The error of the collective.
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
        let failed = Arc::new(Mutex::new(Vec::new()));
        let handles: Vec<_> = (0..20)
            .map(|i| {
                let order = order.clone();
                let (failed, task) = (failed.clone(), move || {
                    assert_ne!(i, 7, "this panic is part of the test");
                    order.lock().push(i);
                    Ok(i)
                });
                queue.submit(task, move |error| {
                    failed.lock().push((i, error.message.clone()));
                    error
                })
            })
            .collect();
        queue.synchronize();
        assert_eq!(*order.lock(), (0..20).filter(|i| *i != 7).collect::<Vec<_>>());
        assert_eq!(*failed.lock(), [(7, "the communication thread panicked".to_owned())], "a panic ends the job");
        for (i, handle) in handles.into_iter().enumerate() {
            assert_eq!(handle.wait().ok(), (i != 7).then_some(i));
        }
    }
}
