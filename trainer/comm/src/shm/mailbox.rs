//! Messages between two ranks: a channel of two chunks for each ordered pair of ranks.
//!
//! The sender owns the counter `sent`, the receiver owns the counter `received`. Chunk `i` (counted over all messages) is in slot
//! `i mod 2`. The sender writes chunk `i` once `received` shows that chunk `i-2` was copied out. The receiver reads chunk `i` once
//! `sent` shows that the chunk was written. A message starts with a header in its first chunk. A message that arrives before its
//! receive call is kept (MPI: unexpected message), so tags may be received in any order.
//!
//! Two ranks may send to each other at once. So a sender whose channel is full receives chunks of the other direction meanwhile,
//! without waiting. It must not wait for the end of the other rank's message: the other rank may in turn wait for this sender.

use std::collections::VecDeque;
use std::time::Duration;

use super::group::ShmGroup;
use super::segment::{CHANNEL_CHUNK, CHANNEL_SLOTS};
use super::wait::WaitError;
use super::word::NotReached;
use crate::call::CollectiveCall;
use crate::deadline::WaitDeadline;
use crate::error::{CommError, Result};
use crate::message_header::{MESSAGE_HEADER_BYTES, MessageHeader};
use crate::transport::{MessageBody, MessageOp};

/// How long to wait before checking whether the other rank is in a collective.
const PEER_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// How long a blocked sender sleeps before it checks for messages from the other rank.
const SEND_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Counters of this rank's channels, and the messages that arrived before they were asked for.
pub(super) struct Mailbox {
    sent: Vec<u32>,
    received: Vec<u32>,
    unexpected: Vec<VecDeque<(MessageHeader, Vec<u8>)>>,
    /// Messages of which a blocked sender has received the first chunks.
    partial: Vec<Option<PartialMessage>>,
}

#[derive(Clone)]
struct PartialMessage {
    message: MessageHeader,
    body: Vec<u8>,
    filled: usize,
}

impl Mailbox {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            sent: vec![0; ranks],
            received: vec![0; ranks],
            unexpected: vec![VecDeque::new(); ranks],
            partial: vec![None; ranks],
        }
    }
}

impl ShmGroup {
    pub(super) fn send_message(&mut self, call: &CollectiveCall, tag: u64, data: &[u8]) -> Result<()> {
        self.waiter.abort.check()?;
        let to = call.root_or_peer();
        let message = MessageHeader { tag, dtype: call.dtype, bytes: data.len() as u64 };
        let mut sent = 0;
        while sent < MESSAGE_HEADER_BYTES + data.len() {
            self.wait_for_room(call, to)?;
            sent += self.put_chunk(to, &message, data, sent);
        }
        Ok(())
    }

    /// Writes the next chunk of a message, after the first `sent` bytes of header and data. A slot must be free. Returns the
    /// chunk's length.
    fn put_chunk(&mut self, to: usize, message: &MessageHeader, data: &[u8], sent: usize) -> usize {
        let (me, chunk) = (self.me(), self.mailbox.sent[to]);
        // SAFETY: this rank writes this channel, and the receiver has copied the slot's former content.
        let slot = unsafe { self.segment.write(self.segment.chunk(me, to, chunk)) };
        let at = MESSAGE_HEADER_BYTES.saturating_sub(sent);
        if at > 0 {
            slot[..MESSAGE_HEADER_BYTES].copy_from_slice(&message.encode());
        }
        let rest = &data[sent.saturating_sub(MESSAGE_HEADER_BYTES)..];
        let now = &rest[..rest.len().min(CHANNEL_CHUNK - at)];
        slot[at..at + now.len()].copy_from_slice(now);
        self.mailbox.sent[to] = chunk.wrapping_add(1);
        self.segment.sent(me, to).publish();
        at + now.len()
    }

    /// See [`Transport::progress`](crate::transport::Transport::progress).
    pub(super) fn progress_messages(&mut self, messages: &mut [MessageOp<'_>]) -> Result<bool> {
        self.waiter.abort.check()?;
        let mut moved = false;
        let mut busy = vec![false; self.len()];
        let mut waiting = Vec::new();
        for op in messages.iter_mut().filter(|op| !op.is_done) {
            let (peer, call, tag) = (op.peer(), op.call, op.tag);
            match &mut op.body {
                MessageBody::Send(_) if std::mem::replace(&mut busy[peer], true) => {}
                MessageBody::Send(data) => {
                    let message = MessageHeader { tag, dtype: call.dtype, bytes: data.len() as u64 };
                    while !op.is_done && self.has_room(&call, peer)? {
                        op.sent += self.put_chunk(peer, &message, data, op.sent);
                        op.is_done = op.sent == MESSAGE_HEADER_BYTES + data.len();
                        moved = true;
                    }
                    if !op.is_done {
                        // The peer may be sending too. It then receives nothing before its own message is sent, so receive here.
                        while self.has_arrived(&call, peer)? {
                            self.receive_chunk(&call, peer)?;
                            moved = true;
                        }
                    }
                }
                // An earlier receive with the same tag gets the next message, also one that has arrived since it looked.
                MessageBody::Recv(_) if waiting.contains(&(peer, tag)) => {}
                MessageBody::Recv(into) => {
                    loop {
                        op.is_done = self.take_unexpected(&call, tag, into)?;
                        moved |= op.is_done;
                        if op.is_done || !self.has_arrived(&call, peer)? {
                            break;
                        }
                        self.receive_chunk(&call, peer)?;
                        moved = true;
                    }
                    if !op.is_done {
                        waiting.push((peer, tag));
                    }
                }
            }
        }
        if !moved {
            for op in messages.iter().filter(|op| !op.is_done) {
                self.check_peer_elsewhere(&op.call, op.peer())?;
            }
        }
        Ok(moved)
    }

    fn has_room(&self, call: &CollectiveCall, to: usize) -> Result<bool> {
        let target = self.mailbox.sent[to].wrapping_add(1).wrapping_sub(CHANNEL_SLOTS as u32);
        self.is_reached(call, self.segment.received(self.me(), to).reached(target))
    }

    fn has_arrived(&self, call: &CollectiveCall, from: usize) -> Result<bool> {
        self.is_reached(call, self.arrived(from))
    }

    fn is_reached(&self, call: &CollectiveCall, seen: std::result::Result<(), NotReached>) -> Result<bool> {
        match seen {
            Ok(()) => Ok(true),
            Err(NotReached::NotYet(_)) => Ok(false),
            Err(NotReached::Poisoned) => Err(self.wait_failed(call, WaitError::Aborted)),
            Err(NotReached::Left) => Err(self.wait_failed(call, WaitError::Left)),
        }
    }

    /// Copies a kept message with this tag to `into`. Returns whether there was one.
    fn take_unexpected(&mut self, call: &CollectiveCall, tag: u64, into: &mut [u8]) -> Result<bool> {
        let from = call.root_or_peer();
        let kept = &mut self.mailbox.unexpected[from];
        let Some(place) = kept.iter().position(|(message, _)| message.tag == tag) else { return Ok(false) };
        let Some((message, body)) = kept.remove(place) else { return Ok(false) };
        message.check(call, into.len(), self.group.global_rank(), self.group.ranks[from], &self.group.name())?;
        into.copy_from_slice(&body);
        Ok(true)
    }

    fn wait_for_room(&mut self, call: &CollectiveCall, to: usize) -> Result<()> {
        let target = self.mailbox.sent[to].wrapping_add(1).wrapping_sub(CHANNEL_SLOTS as u32);
        let segment = self.segment.clone();
        let counter = segment.received(self.me(), to);
        let mut deadline = WaitDeadline::after(self.waiter.timeout);
        loop {
            match self.waiter.wait_within(counter, target, SEND_POLL_INTERVAL) {
                Ok(()) => return Ok(()),
                Err(WaitError::Timeout) => {}
                Err(error) => return Err(self.wait_failed(call, error)),
            }
            // While both ranks send, this makes room for the other rank.
            while self.arrived(to).is_ok() {
                self.receive_chunk(call, to)?;
            }
            self.check_peer_elsewhere(call, to)?;
            self.check_in_time(call, to, &mut deadline)?;
        }
    }

    /// Returns an error if `peer` waits in a collective that this rank has not entered, since the peer will not answer before
    /// this rank enters the collective.
    fn check_peer_elsewhere(&self, call: &CollectiveCall, peer: usize) -> Result<()> {
        let me = self.group.global_rank();
        if let Some(theirs) = self.collective_ahead(peer)
            && !self.can_continue(call, peer)
        {
            return Err(MessageHeader::peer_in_collective(
                me,
                call,
                self.group.ranks[peer],
                &theirs,
                &self.group.name(),
            ));
        }
        Ok(())
    }

    /// Returns whether `call` can continue after all: the peer may have sent or received a chunk before it entered the
    /// collective.
    fn can_continue(&self, call: &CollectiveCall, peer: usize) -> bool {
        let me = self.me();
        match call.op {
            crate::call::OpType::Send => {
                let target = self.mailbox.sent[peer].wrapping_add(1).wrapping_sub(CHANNEL_SLOTS as u32);
                self.segment.received(me, peer).reached(target).is_ok()
            }
            _ => self.arrived(peer).is_ok(),
        }
    }

    fn check_in_time(&self, call: &CollectiveCall, peer: usize, deadline: &mut WaitDeadline) -> Result<()> {
        if !deadline.is_over() {
            return Ok(());
        }
        let (me, peer) = (self.group.global_rank(), self.group.ranks[peer]);
        Err(MessageHeader::timed_out(me, call, peer, self.waiter.timeout, &self.group.name()))
    }

    pub(super) fn recv_message(&mut self, call: &CollectiveCall, tag: u64, data: &mut [u8]) -> Result<()> {
        self.waiter.abort.check()?;
        let from = call.root_or_peer();
        let len = data.len();
        let fits = |group: &Self, message: &MessageHeader| {
            message.check(call, len, group.group.global_rank(), group.group.ranks[from], &group.group.name())
        };
        loop {
            if self.take_unexpected(call, tag, data)? {
                return Ok(());
            }
            let slot = self.next_chunk(call, from)?;
            if self.mailbox.partial[from].is_none() {
                let message = Self::header(slot)?;
                if message.tag == tag {
                    fits(self, &message)?;
                    return self.receive_into(call, from, data);
                }
            }
            self.receive_chunk(call, from)?;
        }
    }

    fn header(slot: &[u8]) -> Result<MessageHeader> {
        MessageHeader::decode(&slot[..MESSAGE_HEADER_BYTES])
            .ok_or_else(|| CommError::system("a message in shared memory is damaged"))
    }

    /// Returns whether the next chunk of `from` has arrived.
    fn arrived(&self, from: usize) -> std::result::Result<(), NotReached> {
        self.segment.sent(from, self.me()).reached(self.mailbox.received[from].wrapping_add(1))
    }

    /// Counts the chunk as taken, so `from` may overwrite its slot.
    fn release_chunk(&mut self, from: usize) {
        self.mailbox.received[from] = self.mailbox.received[from].wrapping_add(1);
        self.segment.received(from, self.me()).publish();
    }

    /// Receives the message that begins with the next chunk of `from` directly into `into`, without an intermediate copy.
    fn receive_into(&mut self, call: &CollectiveCall, from: usize, into: &mut [u8]) -> Result<()> {
        let (mut at, mut filled) = (MESSAGE_HEADER_BYTES, 0);
        loop {
            let slot = self.next_chunk(call, from)?;
            let len = (into.len() - filled).min(CHANNEL_CHUNK - at);
            into[filled..filled + len].copy_from_slice(&slot[at..at + len]);
            filled += len;
            at = 0;
            self.release_chunk(from);
            if filled == into.len() {
                return Ok(());
            }
        }
    }

    /// Copies the next chunk of `from`, which must have arrived, to the kept messages.
    fn receive_chunk(&mut self, call: &CollectiveCall, from: usize) -> Result<()> {
        let partial = self.mailbox.partial[from].take();
        let slot = self.next_chunk(call, from)?;
        let (mut partial, at) = match partial {
            Some(partial) => (partial, 0),
            None => {
                let message = Self::header(slot)?;
                (PartialMessage { message, body: vec![0; message.bytes as usize], filled: 0 }, MESSAGE_HEADER_BYTES)
            }
        };
        let len = (partial.body.len() - partial.filled).min(CHANNEL_CHUNK - at);
        partial.body[partial.filled..partial.filled + len].copy_from_slice(&slot[at..at + len]);
        partial.filled += len;
        self.release_chunk(from);
        if partial.filled == partial.body.len() {
            self.mailbox.unexpected[from].push_back((partial.message, partial.body));
        } else {
            self.mailbox.partial[from] = Some(partial);
        }
        Ok(())
    }

    /// Waits for the next chunk of `from` and returns it. The sender does not overwrite the chunk before this rank has counted
    /// it as taken.
    fn next_chunk(&self, call: &CollectiveCall, from: usize) -> Result<&[u8]> {
        let (me, chunk) = (self.me(), self.mailbox.received[from]);
        let mut deadline = WaitDeadline::after(self.waiter.timeout);
        loop {
            match self.waiter.wait_within(self.segment.sent(from, me), chunk.wrapping_add(1), PEER_CHECK_INTERVAL) {
                // SAFETY: the sender has published this chunk, and overwrites it only after `received` has passed it.
                Ok(()) => return Ok(unsafe { self.segment.read(self.segment.chunk(from, me, chunk)) }),
                Err(WaitError::Timeout) => {
                    self.check_peer_elsewhere(call, from)?;
                    self.check_in_time(call, from, &mut deadline)?;
                }
                Err(error) => return Err(self.wait_failed(call, error)),
            }
        }
    }
}
