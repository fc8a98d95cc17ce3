//! A group of ranks on one host: setting up their segment, and entering a collective.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::mailbox::Mailbox;
use super::mapping::Mapping;
use super::pipeline::StepCounters;
use super::segment::{CounterKind, ENTRY, Region, Segment};
use super::staging::StagingTrials;
use super::wait::{CPU_BYTES, SpinPolicy, WaitError, Waiter, own_cpus};
use super::word::{LEFT, POISON};
use crate::abort::AbortFlag;
use crate::call::{CALL_BYTES, CallComparison, CollectiveCall};
use crate::error::{CommError, ErrorKind, Result, ranks};
use crate::store::StoreClient;
use crate::transport::{ABORT_REASON_TIMEOUT, GroupRanks};

/// The shared-memory transport of one group.
pub(crate) struct ShmGroup {
    pub(super) segment: Arc<Segment>,
    pub(super) group: GroupRanks,
    pub(super) waiter: Waiter,
    /// Collectives entered, set-up included: the value of this rank's `Entered` counter.
    entered: u32,
    /// Values of all ranks' `Filled` and `Reduced` counters between collectives.
    filled: u32,
    reduced: u32,
    pub(super) mailbox: Mailbox,
    pub(super) trials: RefCell<StagingTrials>,
}

impl ShmGroup {
    /// Makes or opens the group's segment. Returns when all ranks of the group have opened it.
    pub(crate) fn new(group: GroupRanks, store: &StoreClient, limit: Duration, timeout: Duration) -> Result<Self> {
        let key = format!("shm/{:x}", group.id);
        let me = group.me;
        let name = group.name();
        let len = Segment::len_for(group.len());
        let (memory, file) = if me == 0 {
            let (memory, file, locator) = create(&group, len)?;
            store.set(&key, locator.as_bytes())?;
            (memory, Some(file))
        } else {
            (open(&group, len, &store.wait(&key, limit)?)?, None)
        };
        let segment = Arc::new(Segment::in_memory(memory, group.len()));
        let abort = store.abort_flag();
        poison_on_abort(&abort, &segment);
        let n = group.len();
        // Whether there are more ranks than cores is not known before the exchange below, so do not spin for long.
        let waiter = Waiter { abort, timeout: limit, spin_policy: SpinPolicy::new(n, 0) };
        let (mailbox, trials) = (Mailbox::new(n), RefCell::default());
        let mut group = Self { segment, group, waiter, entered: 0, filled: 0, reduced: 0, mailbox, trials };
        // Set-up counts as entry number 1. The payload of this entry is each rank's set of CPUs.
        // SAFETY: this rank's own area, which no rank reads before the publication below.
        let area = unsafe { group.segment.write(group.segment.entry(me, 1)) };
        area[..CPU_BYTES].copy_from_slice(&own_cpus());
        group.segment.counter(me, CounterKind::Entered).publish();
        group.entered = 1;
        for rank in 0..n {
            group.waiter.wait(group.segment.counter(rank, CounterKind::Entered), 1).map_err(|error| match error {
                WaitError::Timeout => CommError::new(
                    ErrorKind::Timeout,
                    format!(
                        "{} did not open the shared memory of {name} within {limit:.0?}",
                        ranks(&group.absent_ranks())
                    ),
                ),
                _ => group.abort_error(),
            })?;
        }
        drop::<Option<OwnedFd>>(file);
        let mut cpus = [0u8; CPU_BYTES];
        for rank in 0..n {
            // SAFETY: the owner has published the area, and this rank has waited for the publication above. The owner
            // overwrites the area in its second collective at the earliest (entries alternate between two areas), and cannot
            // enter that collective before this rank has entered the first one.
            let theirs = unsafe { group.segment.read(group.segment.entry(rank, 1)) };
            cpus.iter_mut().zip(theirs).for_each(|(a, b)| *a |= b);
        }
        let cores = cpus.iter().map(|b| b.count_ones() as usize).sum();
        group.waiter.spin_policy = SpinPolicy::new(n, cores);
        group.waiter.timeout = timeout;
        Ok(group)
    }

    pub(super) fn me(&self) -> usize {
        self.group.me
    }

    pub(super) fn len(&self) -> usize {
        self.group.len()
    }

    /// Returns the area of `rank`'s small payload in the current collective.
    pub(super) fn entry(&self, rank: usize) -> Region {
        self.segment.entry(rank, self.entered)
    }

    /// Enters collective `call`: publishes the call and the payload that `fill` writes to the entry area, waits for all ranks,
    /// and compares their calls.
    ///
    /// Call and payload alternate between two areas. While a rank enters collective `s`, it overwrites the call and the payload
    /// of collective `s-2`. At that time the rank has seen all ranks enter `s-1`, and no rank enters `s-1` before it has
    /// finished `s-2`. For the same reason all slots for long arrays are free once all ranks have entered.
    pub(super) fn enter(&mut self, call: &CollectiveCall, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        self.waiter.abort.check()?;
        let (me, segment) = (self.me(), self.segment.clone());
        self.entered = self.entered.wrapping_add(1);
        // SAFETY: this rank's own areas, which no rank reads, as explained above.
        unsafe {
            segment.write(segment.call_region(me, self.entered))[..CALL_BYTES].copy_from_slice(&call.encode());
            fill(segment.write(segment.entry(me, self.entered)));
        }
        segment.counter(me, CounterKind::Entered).publish();
        let mut agreed = true;
        for step in 1..self.len() {
            let rank = (me + step) % self.len();
            self.waiter
                .wait(segment.counter(rank, CounterKind::Entered), self.entered)
                .map_err(|error| self.wait_failed(call, error))?;
            agreed &= self.entered_call(rank, self.entered)? == *call;
        }
        if agreed { Ok(()) } else { self.check_all_calls(call) }
    }

    /// Returns the error for ranks that make different calls. All ranks have entered.
    #[cold]
    fn check_all_calls(&self, call: &CollectiveCall) -> Result<()> {
        let mut comparison = CallComparison::of(self.group.global_rank(), *call);
        for rank in (0..self.len()).filter(|rank| *rank != self.me()) {
            let theirs = self.entered_call(rank, self.entered)?;
            comparison = comparison.merge(CallComparison::of(self.group.ranks[rank], theirs));
        }
        comparison.check(&self.group.name())
    }

    /// Returns `rank`'s call of its entry number `entered`, which its counter has reached.
    fn entered_call(&self, rank: usize, entered: u32) -> Result<CollectiveCall> {
        // SAFETY: published, and the caller has waited for it. `enter` explains why it is not overwritten.
        let bytes = unsafe { self.segment.read(self.segment.call_region(rank, entered)) };
        CollectiveCall::decode(&bytes[..CALL_BYTES])
            .ok_or_else(|| CommError::system(format!("the shared memory of {} is damaged", self.group.name())))
    }

    /// Returns `rank`'s call if it has entered a collective that this rank has not entered.
    pub(super) fn collective_ahead(&self, rank: usize) -> Option<CollectiveCall> {
        let next = self.entered.wrapping_add(1);
        self.segment.counter(rank, CounterKind::Entered).reached(next).ok()?;
        self.entered_call(rank, next).ok()
    }

    /// Returns the counters for a schedule, relative to the start of this collective.
    pub(super) fn steps(&self) -> Steps<'_> {
        Steps { group: self, filled: self.filled, reduced: self.reduced }
    }

    /// Returns the number of slots that each rank had filled before this collective.
    pub(super) fn filled(&self) -> u32 {
        self.filled
    }

    /// Adds the steps that all ranks have completed in this collective.
    pub(super) fn advance(&mut self, filled: usize, reduced: usize) {
        self.trials.get_mut().interrupt();
        self.filled = self.filled.wrapping_add(filled as u32);
        self.reduced = self.reduced.wrapping_add(reduced as u32);
    }

    /// Returns the ranks (of the job) that have not entered the collective that this rank has entered.
    fn absent_ranks(&self) -> Vec<usize> {
        self.peers_where(|rank| self.segment.counter(rank, CounterKind::Entered).reached(self.entered).is_err())
    }

    fn peers_where(&self, what: impl Fn(usize) -> bool) -> Vec<usize> {
        (0..self.len()).filter(|rank| *rank != self.me() && what(*rank)).map(|rank| self.group.ranks[rank]).collect()
    }

    pub(super) fn abort_error(&self) -> CommError {
        self.waiter
            .abort
            .wait(ABORT_REASON_TIMEOUT)
            .unwrap_or_else(|| CommError::new(ErrorKind::Aborted, "the job was aborted, and the reason did not arrive"))
    }

    /// Returns the error for a wait in `call` that failed.
    pub(super) fn wait_failed(&self, call: &CollectiveCall, error: WaitError) -> CommError {
        let (me, name) = (self.group.global_rank(), self.group.name());
        let place = call.position(&name);
        if error == WaitError::Aborted {
            return self.abort_error();
        }
        let absent = self.absent_ranks();
        if error == WaitError::Left {
            let gone = self.peers_where(|rank| self.segment.counter(rank, CounterKind::Entered).has_left());
            return CommError::new(
                ErrorKind::PeerLost,
                format!("{} left the job while rank {me} waits in {call}, {place}", ranks(&gone)),
            )
            .hint("every rank must call the same collectives; one has ended early")
            .blame(gone.first().copied().unwrap_or(me));
        }
        let timeout = self.waiter.timeout;
        if absent.is_empty() {
            let slow =
                |which, rank| self.segment.counter(rank, which).is_behind(self.segment.counter(self.me(), which));
            let stuck = self.peers_where(|rank| slow(CounterKind::Filled, rank) || slow(CounterKind::Reduced, rank));
            if stuck.is_empty() {
                // The missing rank arrived after the timeout.
                let message = format!(
                    "{call}, {place}: a rank arrived too late, after more than {timeout:.1?} (rank {me} waited)"
                );
                return CommError::new(ErrorKind::Timeout, message).blame(me);
            }
            return CommError::new(
                ErrorKind::Timeout,
                format!("{call}, {place}: {} stopped inside it for {timeout:.1?} (rank {me} waits)", ranks(&stuck)),
            )
            .blame(stuck[0]);
        }
        CommError::new(
            ErrorKind::Timeout,
            format!("{call}, {place}: {} did not arrive within {timeout:.1?} (rank {me} waits)", ranks(&absent)),
        )
        .blame(absent[0])
    }
}

impl Drop for ShmGroup {
    fn drop(&mut self) {
        // A rank that panics has failed, so it must not mark itself as left. The rendezvous reports the failure to the other
        // ranks.
        if !std::thread::panicking() {
            self.segment.owned_by(self.me()).for_each(|counter| counter.mark(LEFT));
        }
    }
}

/// Steps of a collective, counted from the start of the collective.
pub(super) struct Steps<'a> {
    group: &'a ShmGroup,
    filled: u32,
    reduced: u32,
}

impl Steps<'_> {
    fn wait(&self, which: CounterKind, target: u32) -> std::result::Result<(), WaitError> {
        let group = self.group;
        for step in 1..group.len() {
            let rank = (group.me() + step) % group.len();
            group.waiter.wait(group.segment.counter(rank, which), target)?;
        }
        Ok(())
    }
}

impl StepCounters for Steps<'_> {
    type Error = WaitError;
    fn publish_filled(&self) {
        self.group.segment.counter(self.group.me(), CounterKind::Filled).publish();
    }
    fn wait_filled(&self, count: usize) -> std::result::Result<(), WaitError> {
        self.wait(CounterKind::Filled, self.filled.wrapping_add(count as u32))
    }
    fn publish_reduced(&self) {
        self.group.segment.counter(self.group.me(), CounterKind::Reduced).publish();
    }
    fn wait_reduced(&self, count: usize) -> std::result::Result<(), WaitError> {
        self.wait(CounterKind::Reduced, self.reduced.wrapping_add(count as u32))
    }
}

/// Registers a waker: when this process learns of an abort, it wakes the sleepers of all processes.
fn poison_on_abort(abort: &AbortFlag, segment: &Arc<Segment>) {
    let weak = Arc::downgrade(segment);
    abort.on_raise(move || {
        if let Some(segment) = weak.upgrade() {
            (0..segment.ranks()).flat_map(|rank| segment.owned_by(rank)).for_each(|counter| counter.mark(POISON));
        }
    });
}

/// Makes memory of `len` bytes for all ranks of the group. Returns the mapping, the file descriptor, and the text by which the
/// other ranks find the memory. The file must stay open until they have opened it.
pub(super) fn create(group: &GroupRanks, len: usize) -> Result<(Mapping, OwnedFd, String)> {
    let cannot = |e: rustix::io::Errno| {
        let hint = match e {
            // The kernel applies the limit of file sizes to memfds too.
            rustix::io::Errno::FBIG => "raise the limit for the size of a file (`ulimit -f`), or use --backend tcp",
            _ => "use --backend tcp, which needs no shared memory",
        };
        CommError::setup(format!("rank {} cannot make shared memory for {}: {e}", group.global_rank(), group.name()))
            .hint(hint)
    };
    Mapping::announce(len).map_err(cannot)
}

/// Opens the memory of `len` bytes that the group's first rank has made.
pub(super) fn open(group: &GroupRanks, len: usize, locator: &[u8]) -> Result<Mapping> {
    let cannot = |cause: String| {
        CommError::setup(format!(
            "rank {} cannot open the shared memory of rank {}: {cause}",
            group.global_rank(),
            group.ranks[0]
        ))
        .hint("shared memory needs all ranks on one host, in one container, under one user; the tcp backend does not")
    };
    // If the text was sent in an entry area, more bytes follow it. `find` ignores them.
    Mapping::find(locator, len).map_err(cannot)
}

const _: () = assert!(CPU_BYTES <= ENTRY);
