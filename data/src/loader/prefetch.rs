//! Runs work ahead of the consumer on a thread pool and delivers the results in order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use rayon::ThreadPool;

/// Runs a function over a range of numbers on a pool. At most `ahead` results are computed before the consumer asks for them.
///
/// Each item is a job with its own channel. No thread ever waits for the consumer, so dropping the iterator early cannot
/// deadlock: jobs that have not started do nothing, and running jobs finish on the pool.
pub(super) struct Prefetch<T> {
    pool: Arc<ThreadPool>,
    work: Arc<dyn Fn(usize) -> T + Send + Sync>,
    pending: VecDeque<Receiver<thread::Result<T>>>,
    next: usize,
    end: usize,
    ahead: usize,
    cancelled: Arc<AtomicBool>,
}

impl<T: Send + 'static> Prefetch<T> {
    /// Starts the first `ahead` jobs of `start..end`.
    pub(super) fn new(
        pool: Arc<ThreadPool>,
        start: usize,
        end: usize,
        ahead: usize,
        work: impl Fn(usize) -> T + Send + Sync + 'static,
    ) -> Self {
        let cancelled = Arc::new(AtomicBool::new(false));
        let mut prefetch =
            Self { pool, work: Arc::new(work), pending: VecDeque::new(), next: start, end, ahead, cancelled };
        prefetch.fill(ahead);
        prefetch
    }

    /// Starts jobs until `count` are pending or none is left.
    fn fill(&mut self, count: usize) {
        while self.pending.len() < count && self.next < self.end {
            let (sender, receiver) = sync_channel(1);
            let (index, work, cancelled) = (self.next, Arc::clone(&self.work), Arc::clone(&self.cancelled));
            self.pool.spawn_fifo(move || {
                if !cancelled.load(Ordering::Relaxed) {
                    let result = catch_unwind(AssertUnwindSafe(|| work(index)));
                    // An error means that the consumer has dropped the iterator and needs no result.
                    let _ = sender.send(result);
                }
            });
            self.pending.push_back(receiver);
            self.next += 1;
        }
    }
}

impl<T: Send + 'static> Iterator for Prefetch<T> {
    type Item = T;

    /// # Panics
    /// If the job panicked, with the job's panic.
    fn next(&mut self) -> Option<T> {
        // `ahead` jobs, and the one whose result is taken now.
        self.fill(self.ahead + 1);
        let result = self.pending.pop_front()?.recv().expect("a job sends its result before it ends");
        match result {
            Ok(item) => Some(item),
            Err(panic) => {
                self.cancelled.store(true, Ordering::Relaxed);
                self.pending.clear();
                self.next = self.end;
                resume_unwind(panic)
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.pending.len() + self.end - self.next;
        (left, Some(left))
    }
}

impl<T: Send + 'static> ExactSizeIterator for Prefetch<T> {}

impl<T> Drop for Prefetch<T> {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    fn pool(threads: usize) -> Arc<ThreadPool> {
        Arc::new(rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool"))
    }

    #[test]
    fn results_arrive_in_order_though_jobs_end_out_of_order() {
        for (threads, ahead) in [(1, 0), (1, 3), (4, 1), (4, 8), (4, 100)] {
            let items = Prefetch::new(pool(threads), 5, 45, ahead, |index| index);
            assert_eq!(items.len(), 40);
            assert!(items.eq(5..45), "{threads} threads, {ahead} ahead");
        }
        // Job 0 ends after job 1: it waits for job 1's message.
        let (sender, receiver) = channel();
        let (sender, receiver) = (std::sync::Mutex::new(sender), std::sync::Mutex::new(receiver));
        let items = Prefetch::new(pool(2), 0, 2, 2, move |index| {
            match index {
                0 => receiver.lock().expect("only job 0 receives").recv().expect("job 1 sends"),
                _ => sender.lock().expect("only job 1 sends").send(()).expect("job 0 receives"),
            }
            index
        });
        assert!(items.eq(0..2));
    }

    #[test]
    fn no_more_than_the_prefetch_is_started() {
        let started = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&started);
        let mut items = Prefetch::new(pool(4), 0, 100, 3, move |_| counter.fetch_add(1, Ordering::SeqCst));
        items.next();
        // Three jobs are ahead of the result taken. Wait until they have ended, then check that no fourth has started.
        for pending in &items.pending {
            pending.recv().expect("a result").expect("no panic");
        }
        assert_eq!((items.pending.len(), started.load(Ordering::SeqCst)), (3, 4));
    }

    #[test]
    fn a_panicking_job_panics_in_the_consumer_and_ends_the_iteration() {
        let mut items = Prefetch::new(pool(2), 0, 10, 2, |index| {
            assert!(index != 3, "sample {index} is bad");
            index
        });
        assert_eq!(items.by_ref().take(3).collect::<Vec<_>>(), [0, 1, 2]);
        let panic = catch_unwind(AssertUnwindSafe(|| items.next())).expect_err("the job panicked");
        assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some("sample 3 is bad"));
        assert_eq!(items.next(), None);
    }

    #[test]
    fn dropping_returns_while_a_job_runs_and_starts_no_other() {
        let (release, gate) = channel::<()>();
        let (gate, started) = (std::sync::Mutex::new(gate), Arc::new(AtomicUsize::new(0)));
        let (began, begun): (Sender<()>, _) = channel();
        let (counter, pool) = (Arc::clone(&started), pool(1));
        let items = Prefetch::new(Arc::clone(&pool), 0, 100, 5, move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
            began.send(()).ok();
            gate.lock().expect("one job at a time").recv().ok();
        });
        begun.recv().expect("the first job starts");
        drop(items);
        // Dropping the sender opens the gate, also for jobs that should not have started.
        drop(release);
        // The pool has one thread and runs jobs in order: this job runs after all dropped jobs.
        let (done, finished) = channel();
        pool.spawn_fifo(move || done.send(()).expect("the test waits"));
        finished.recv().expect("the pool lives");
        assert_eq!(started.load(Ordering::SeqCst), 1);
    }
}
