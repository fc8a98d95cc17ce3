//! All connections of a rank, and transfers over several of them at once.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::peer::{ConnectionError, NextFrame, Peer};
use super::setup::MeshSetup;
use crate::abort::AbortFlag;
use crate::call::{CallComparison, CollectiveCall};
use crate::deadline::WaitDeadline;
use crate::dtype::{DType, ReduceOp};
use crate::error::{CommError, ErrorKind, Result, ranks};
use crate::kernels;
use crate::net;
use crate::system::Wakeup;

/// Longest wait for the rendezvous to report why a connection was closed, for example that the rank has died.
const REASON_TIMEOUT: Duration = Duration::from_secs(5);
/// The kernel ends a silent connection this much later than a collective ends its wait, since the collective's error says more.
const SILENCE_GRACE_PERIOD: Duration = Duration::from_secs(1);
/// Number of checks of the connections before sleeping, if every rank has a core.
const SPINS: u32 = 40;

/// Bytes to send to one rank: `head`, then `body`.
pub(super) struct SendOp<'a> {
    pub peer: usize,
    pub head: Vec<u8>,
    pub body: &'a [u8],
    /// Bytes written so far, and bytes that must be written before a transfer may end.
    pub done: usize,
    pub needed: usize,
}

impl<'a> SendOp<'a> {
    pub(super) fn new(peer: usize, head: Vec<u8>, body: &'a [u8]) -> Self {
        let needed = head.len() + body.len();
        Self { peer, head, body, done: 0, needed }
    }

    fn is_done(&self) -> bool {
        self.done >= self.needed
    }
}

/// Where arriving data goes.
pub(super) enum Sink<'a> {
    Copy(&'a mut [u8]),
    /// `into = arriving op into`, piece by piece through `scratch`.
    Reduce {
        into: &'a mut [u8],
        scratch: &'a mut [u8],
        dtype: DType,
        op: ReduceOp,
    },
}

/// One frame expected from one rank.
pub(super) enum RecvOp<'a> {
    CallComparison { peer: usize, got: Option<CallComparison> },
    Data { peer: usize, sink: Sink<'a>, filled: usize, done: bool },
}

impl RecvOp<'_> {
    fn peer(&self) -> usize {
        match self {
            RecvOp::CallComparison { peer, .. } | RecvOp::Data { peer, .. } => *peer,
        }
    }
    fn is_done(&self) -> bool {
        match self {
            RecvOp::CallComparison { got, .. } => got.is_some(),
            RecvOp::Data { done, .. } => *done,
        }
    }
}

/// The connections of this rank to the other ranks of a stream's group.
pub(crate) struct Mesh {
    pub(super) rank: usize,
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) abort: Arc<AbortFlag>,
    pub(super) timeout: Duration,
    wakeup: Arc<Wakeup>,
    spins: u32,
}

impl Mesh {
    /// Connects the ranks of `setup`, in a job of `world_size` ranks. Each wait in a collective takes at most `timeout`.
    pub(crate) fn new(setup: &MeshSetup<'_>, world_size: usize, timeout: Duration) -> Result<Self> {
        let rank = setup.group.global_rank();
        let peers = setup.connect(world_size, timeout + SILENCE_GRACE_PERIOD)?;
        let wakeup =
            Wakeup::new().map_err(|e| CommError::setup(format!("rank {rank} cannot make {}: {e}", Wakeup::NAME)))?;
        let wakeup = Arc::new(wakeup);
        let abort = setup.store.abort_flag();
        // The wakeup fd stays readable, so an aborted mesh never sleeps again. The job's abort flag lives longer than this mesh.
        let weak = Arc::downgrade(&wakeup);
        abort.on_raise(move || _ = weak.upgrade().map(|wakeup| wakeup.wake()));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self { rank, peers, abort, timeout, wakeup, spins: if setup.group.len() <= cores { SPINS } else { 0 } })
    }

    pub(super) fn peer(&mut self, rank: usize) -> Result<&mut Peer> {
        let me = self.rank;
        self.peers
            .get_mut(rank)
            .and_then(Option::as_mut)
            .ok_or_else(|| CommError::usage(format!("rank {me} has no connection to rank {rank}")))
    }

    /// Returns whether no connection between this rank and `ranks` leaves the host. All of these ranks return the same.
    pub(super) fn is_on_one_host(&self, ranks: &[usize]) -> bool {
        ranks.iter().filter_map(|rank| self.peers.get(*rank)?.as_ref()).all(Peer::is_on_this_host)
    }

    /// Runs all sends and receives at once, in the order in which connections are ready. Takes at most one send and one receive
    /// per rank.
    pub(super) fn transfer(
        &mut self,
        call: &CollectiveCall,
        group: &str,
        sends: &mut [SendOp<'_>],
        recvs: &mut [RecvOp<'_>],
    ) -> Result<()> {
        let (mut deadline, mut idle) = (WaitDeadline::after(self.timeout), 0);
        loop {
            let mut moved = false;
            for out in sends.iter_mut().filter(|o| !o.is_done()) {
                let peer = self.peer(out.peer)?;
                let written = peer.write(&out.head, out.body, out.done);
                let written = written.map_err(|broken| self.broken(call, group, out.peer, broken))?;
                out.done += written;
                moved |= written > 0;
            }
            for expected in recvs.iter_mut().filter(|i| !i.is_done()) {
                moved |= self.receive(call, group, expected)?;
            }
            let read_from: Vec<usize> = recvs.iter().filter(|i| !i.is_done()).map(RecvOp::peer).collect();
            let write_to: Vec<usize> = sends.iter().filter(|o| !o.is_done()).map(|o| o.peer).collect();
            if read_from.is_empty() && write_to.is_empty() {
                return Ok(());
            }
            if moved {
                idle = 0;
                continue;
            }
            idle += 1;
            if idle <= self.spins && !self.abort.is_raised() {
                std::hint::spin_loop();
                continue;
            }
            if idle == self.spins + 1 {
                deadline = WaitDeadline::after(self.timeout);
            }
            self.sleep(call, group, &read_from, &write_to, &mut deadline)?;
        }
    }

    /// Waits until a rank of `read_from` is readable or a rank of `write_to` is writable, or for a slice of the time until `deadline`.
    pub(super) fn sleep(
        &mut self,
        call: &CollectiveCall,
        group: &str,
        read_from: &[usize],
        write_to: &[usize],
        deadline: &mut WaitDeadline,
    ) -> Result<()> {
        self.abort.check()?;
        let slice = deadline.next_sleep();
        if slice.is_zero() {
            let mut waiting: Vec<usize> = read_from.iter().chain(write_to).copied().collect();
            waiting.sort_unstable();
            waiting.dedup();
            return Err(CommError::new(
                ErrorKind::Timeout,
                format!(
                    "{call}, {}: {} did not answer within {:.1?} (rank {} waits)",
                    call.position(group),
                    ranks(&waiting),
                    self.timeout,
                    self.rank
                ),
            )
            .blame(waiting[0]));
        }
        let mut fds = vec![PollFd::from_borrowed_fd(self.wakeup.as_fd(), PollFlags::IN)];
        for (wanted, flag) in [(read_from, PollFlags::IN), (write_to, PollFlags::OUT)] {
            for rank in wanted {
                if let Some(peer) = self.peers.get(*rank).and_then(Option::as_ref) {
                    fds.push(PollFd::from_borrowed_fd(peer.stream.as_fd(), flag));
                }
            }
        }
        let timeout = Timespec { tv_sec: slice.as_secs() as i64, tv_nsec: slice.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => self.abort.check(),
            Err(e) => Err(CommError::system(format!("rank {} cannot poll its connections: {e}", self.rank))),
        }
    }

    /// Receives the part of `expected` that has arrived, without waiting. Keeps point-to-point messages that arrive first.
    /// Returns whether any byte was received.
    fn receive(&mut self, call: &CollectiveCall, group: &str, expected: &mut RecvOp<'_>) -> Result<bool> {
        let from = expected.peer();
        let mut moved = false;
        loop {
            let next = self.peer(from)?.next().map_err(|broken| self.broken(call, group, from, broken))?;
            match (next, &mut *expected) {
                (NextFrame::Empty, _) => return Ok(moved),
                (NextFrame::Message | NextFrame::MessagePart, _) => moved = true,
                (NextFrame::CallComparison(comparison), RecvOp::CallComparison { got, .. }) => {
                    *got = Some(comparison);
                    return Ok(true);
                }
                (NextFrame::Data(head), RecvOp::Data { sink, filled, done, .. }) => {
                    let len = match sink {
                        Sink::Copy(into) => into.len(),
                        Sink::Reduce { into, .. } => into.len(),
                    };
                    if (head.group, head.sequence, head.len as usize) != (call.group, call.sequence, len) {
                        return Err(self.unexpected_frame(call, group, from));
                    }
                    let peer = self.peer(from)?;
                    let progress =
                        drain(peer, sink, filled).map_err(|broken| self.broken(call, group, from, broken))?;
                    *done = *filled == len;
                    if *done {
                        self.peer(from)?.end_data();
                    }
                    return Ok(moved || progress || *done);
                }
                // The peer makes another call, so its comparison cannot belong to this one.
                (NextFrame::CallComparison(comparison), RecvOp::Data { .. }) => {
                    let mine = CallComparison::of(self.rank, *call);
                    mine.merge(comparison).check(group)?;
                    return Err(self.unexpected_frame(call, group, from));
                }
                (NextFrame::Data(_), RecvOp::CallComparison { .. }) => {
                    return Err(self.unexpected_frame(call, group, from));
                }
            }
        }
    }

    pub(super) fn unexpected_frame(&self, call: &CollectiveCall, group: &str, from: usize) -> CommError {
        CommError::system(format!(
            "{call}, {}: rank {from} sent rank {} a frame that does not belong to it",
            call.position(group),
            self.rank
        ))
    }

    pub(super) fn broken(&self, call: &CollectiveCall, group: &str, peer: usize, broken: ConnectionError) -> CommError {
        let (me, place) = (self.rank, call.position(group));
        if let Some(reason) = self.abort.wait(REASON_TIMEOUT) {
            return reason;
        }
        const OTHER_CALLS: &str = "every rank must call the same collectives; one has ended early";
        const NETWORK: &str = "see the network between the hosts, and the other rank's messages";
        let (kind, cause, hint) = match broken {
            ConnectionError::TimedOut => {
                let limit = net::seconds(self.timeout + SILENCE_GRACE_PERIOD);
                let cause = format!("no answer from rank {peer} for {limit}, rank {me} waits in {call}, {place}");
                return CommError::new(ErrorKind::NoAnswer, cause).hint(net::OUTAGE_HINT).blame(peer);
            }
            ConnectionError::Closed => {
                let cause = format!("rank {peer} left the job while rank {me} waits in {call}, {place}");
                (ErrorKind::PeerLost, cause, OTHER_CALLS)
            }
            ConnectionError::Reset => {
                let cause = format!("rank {peer} reset its connection to rank {me} in {call}, {place}");
                (ErrorKind::Reset, cause, NETWORK)
            }
            ConnectionError::Io(e) => (
                ErrorKind::PeerLost,
                format!("the connection of rank {me} to rank {peer} broke in {call}, {place}: {e}"),
                NETWORK,
            ),
            ConnectionError::Protocol => {
                let cause = format!("rank {peer} sent rank {me} an invalid frame in {call}, {place}");
                (ErrorKind::PeerLost, cause, NETWORK)
            }
        };
        CommError::new(kind, cause).hint(hint).blame(peer)
    }
}

/// Reads the bytes of a data frame that have arrived. Returns whether there were any.
fn drain(peer: &mut Peer, sink: &mut Sink<'_>, filled: &mut usize) -> std::result::Result<bool, ConnectionError> {
    let mut moved = false;
    while peer.data_left() > 0 {
        let got = match sink {
            Sink::Copy(into) => peer.read_data(&mut into[*filled..])?,
            Sink::Reduce { into, scratch, dtype, op } => {
                // Pieces begin at multiples of the scratch buffer, which holds whole elements.
                let (start, held) = (*filled / scratch.len() * scratch.len(), *filled % scratch.len());
                let end = (start + scratch.len()).min(into.len());
                let got = peer.read_data(&mut scratch[held..end - start])?;
                if got.is_some_and(|n| start + held + n == end) {
                    kernels::accumulate(*dtype, *op, &mut into[start..end], &scratch[..end - start], false);
                }
                got
            }
        };
        match got {
            Some(n) => *filled += n,
            None => break,
        }
        moved = true;
    }
    Ok(moved)
}
