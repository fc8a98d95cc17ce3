//! Messages over the connections of a mesh.

use super::mesh::Mesh;
use super::peer::{FrameHeader, FrameKind, NextFrame};
use crate::call::{CallComparison, CollectiveCall};
use crate::deadline::WaitDeadline;
use crate::error::{CommError, Result};
use crate::message_header::MessageHeader;
use crate::transport::{MessageBody, MessageOp};

impl Mesh {
    /// Sends one message. Receives the other direction meanwhile, so two ranks may send to each other at once.
    pub(super) fn send_message(
        &mut self,
        call: &CollectiveCall,
        group: &str,
        to: usize,
        tag: u64,
        data: &[u8],
    ) -> Result<()> {
        self.abort.check()?;
        let head = message_head(call, tag, data);
        let (mut done, total) = (0, head.len() + data.len());
        let mut deadline = WaitDeadline::after(self.timeout);
        loop {
            let written = self.peer(to)?.write(&head, data, done);
            let written = written.map_err(|broken| self.broken(call, group, to, broken))?;
            done += written;
            if done == total {
                return Ok(());
            }
            let mut readable = true;
            let next = self.peer(to)?.next().map_err(|broken| self.broken(call, group, to, broken))?;
            match next {
                NextFrame::Empty | NextFrame::Message | NextFrame::MessagePart => {}
                NextFrame::CallComparison(theirs) => return Err(self.peer_in_collective(call, group, to, theirs)),
                NextFrame::Data(_) => readable = false,
            }
            if written > 0 {
                deadline = WaitDeadline::after(self.timeout);
            }
            let open: &[usize] = if readable { &[to] } else { &[] };
            self.sleep(call, group, open, &[to], &mut deadline)?;
        }
    }

    /// Receives the next message of `from` with this tag.
    pub(super) fn recv_message(
        &mut self,
        call: &CollectiveCall,
        group: &str,
        from: usize,
        tag: u64,
        data: &mut [u8],
    ) -> Result<()> {
        self.abort.check()?;
        let mut deadline = WaitDeadline::after(self.timeout);
        loop {
            if self.take_unexpected(call, group, from, tag, data)? {
                return Ok(());
            }
            match self.peer(from)?.next() {
                Err(broken) => return Err(self.broken(call, group, from, broken)),
                Ok(NextFrame::Message) => {}
                Ok(NextFrame::MessagePart) => deadline = WaitDeadline::after(self.timeout),
                Ok(NextFrame::Empty) => self.sleep(call, group, &[from], &[], &mut deadline)?,
                Ok(NextFrame::CallComparison(theirs)) => return Err(self.peer_in_collective(call, group, from, theirs)),
                Ok(NextFrame::Data(_)) => return Err(self.unexpected_frame(call, group, from)),
            }
        }
    }

    /// Copies a kept message of `from` with this tag to `into`. Returns whether there was such a message.
    fn take_unexpected(
        &mut self,
        call: &CollectiveCall,
        group: &str,
        from: usize,
        tag: u64,
        into: &mut [u8],
    ) -> Result<bool> {
        let me = self.rank;
        let kept = &mut self.peer(from)?.unexpected;
        let wanted = |(id, message, _): &(u64, MessageHeader, Vec<u8>)| *id == call.group && message.tag == tag;
        let Some(place) = kept.iter().position(wanted) else { return Ok(false) };
        let Some((_, message, body)) = kept.remove(place) else { return Ok(false) };
        message.check(call, into.len(), me, from, group)?;
        into.copy_from_slice(&body);
        Ok(true)
    }

    /// See [`Transport::progress`](crate::transport::Transport::progress). `ranks` are the group's.
    pub(super) fn progress(&mut self, group: &str, ranks: &[usize], messages: &mut [MessageOp<'_>]) -> Result<bool> {
        self.abort.check()?;
        let mut moved = false;
        let (mut busy, mut waiting) = (Vec::new(), Vec::new());
        for op in messages.iter_mut().filter(|op| !op.is_done) {
            let (peer, call, tag) = (ranks[op.peer()], op.call, op.tag);
            match &mut op.body {
                MessageBody::Send(_) if busy.contains(&peer) => {}
                MessageBody::Send(data) => {
                    busy.push(peer);
                    let head = message_head(&call, tag, data);
                    let written = self.peer(peer)?.write(&head, data, op.sent);
                    let written = written.map_err(|broken| self.broken(&call, group, peer, broken))?;
                    op.sent += written;
                    op.is_done = op.sent == head.len() + data.len();
                    moved |= written > 0;
                    // The peer may be sending too. It then receives nothing before its own message is sent, so receive here.
                    moved |= !op.is_done && self.read_message(&call, group, peer)?;
                }
                // An earlier receive with the same tag gets the next message, also one that has arrived since it looked.
                MessageBody::Recv(_) if waiting.contains(&(peer, tag)) => {}
                MessageBody::Recv(into) => {
                    loop {
                        op.is_done = self.take_unexpected(&call, group, peer, tag, into)?;
                        moved |= op.is_done;
                        if op.is_done || !self.read_message(&call, group, peer)? {
                            break;
                        }
                        moved = true;
                    }
                    if !op.is_done {
                        waiting.push((peer, tag));
                    }
                }
            }
        }
        Ok(moved)
    }

    /// Receives what has arrived of the next message of `from`; a complete message joins the kept ones. Returns whether any byte
    /// was received.
    fn read_message(&mut self, call: &CollectiveCall, group: &str, from: usize) -> Result<bool> {
        let next = self.peer(from)?.next().map_err(|broken| self.broken(call, group, from, broken))?;
        match next {
            NextFrame::Message | NextFrame::MessagePart => Ok(true),
            NextFrame::Empty => Ok(false),
            NextFrame::CallComparison(theirs) => Err(self.peer_in_collective(call, group, from, theirs)),
            NextFrame::Data(_) => Err(self.unexpected_frame(call, group, from)),
        }
    }

    /// Returns the error for a peer that is in a collective while this rank sends to it or receives from it.
    fn peer_in_collective(&self, call: &CollectiveCall, group: &str, peer: usize, theirs: CallComparison) -> CommError {
        MessageHeader::peer_in_collective(self.rank, call, peer, theirs.first_call(), group)
    }
}

/// Returns the frame header and the message header, which precede the data of a message.
fn message_head(call: &CollectiveCall, tag: u64, data: &[u8]) -> Vec<u8> {
    let message = MessageHeader { tag, dtype: call.dtype, bytes: data.len() as u64 }.encode();
    let len = (message.len() + data.len()) as u64;
    let mut head = FrameHeader { kind: FrameKind::Message, group: call.group, sequence: 0, len }.encode().to_vec();
    head.extend_from_slice(&message);
    head
}
