//! One connection to one rank: the format of frames, and the state of the frame that is being read.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::call::{COMPARISON_BYTES, CallComparison};
use crate::message_header::{MESSAGE_HEADER_BYTES, MessageHeader};
use crate::net::{self, DisconnectKind};

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// A [`CallComparison`], at the start of a collective.
    CallComparison = 1,
    /// Data of the collective that the ranks agreed on.
    Data = 2,
    /// A point-to-point message: a [`MessageHeader`] and its data.
    Message = 3,
}

/// The header of every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub kind: FrameKind,
    pub group: u64,
    pub sequence: u64,
    pub len: u64,
}

pub(super) const HEADER_BYTES: usize = 32;

impl FrameHeader {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0] = self.kind as u8;
        out[8..16].copy_from_slice(&self.group.to_le_bytes());
        out[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        out[24..].copy_from_slice(&self.len.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let kind = match bytes[0] {
            1 => FrameKind::CallComparison,
            2 => FrameKind::Data,
            3 => FrameKind::Message,
            _ => return None,
        };
        Some(Self { kind, group: word(8), sequence: word(16), len: word(24) })
    }
}

/// Why a connection cannot be used any more.
#[derive(Debug)]
pub(super) enum ConnectionError {
    /// The other end closed it.
    Closed,
    /// The other host has not answered for too long.
    TimedOut,
    /// The other end reset it: its process has ended, or has given up after an outage.
    Reset,
    Io(std::io::Error),
    /// The other end sent bytes that violate the protocol.
    Protocol,
}

/// The next item in the stream.
pub(super) enum NextFrame {
    /// Nothing has arrived.
    Empty,
    /// A comparison, complete and removed from the stream.
    CallComparison(CallComparison),
    /// A data frame whose `len` bytes are still in the stream. See [`Peer::read_data`].
    Data(FrameHeader),
    /// A message was received and kept.
    Message,
    /// Bytes of a message were received, but not its last ones.
    MessagePart,
}

/// A message of which the first bytes have arrived.
struct PartialMessage {
    group: u64,
    head: MessageHeader,
    body: Vec<u8>,
    filled: usize,
}

/// The connection to one other rank.
pub(super) struct Peer {
    pub(super) stream: TcpStream,
    head: [u8; HEADER_BYTES + COMPARISON_BYTES],
    head_filled: usize,
    /// The header of the data frame that is being read, and the number of its bytes that are still to be read.
    data: Option<(FrameHeader, usize)>,
    message: Option<PartialMessage>,
    /// Messages that arrived before their receive call (MPI: unexpected messages): group, header, data.
    pub(super) unexpected: VecDeque<(u64, MessageHeader, Vec<u8>)>,
}

impl Drop for Peer {
    /// Shuts the stream down before the socket is closed. Closing a socket with unread data resets the connection. The peer
    /// then could not distinguish a rank that ended from a network that failed.
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }
}

/// Converts the result of a read or a write. Returns `None` if the call would block.
fn attempt(result: std::io::Result<usize>) -> Result<Option<usize>, ConnectionError> {
    match result {
        Ok(0) => Err(ConnectionError::Closed),
        Ok(n) => Ok(Some(n)),
        Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::Interrupted) => Ok(None),
        Err(e) => Err(match DisconnectKind::of(&e) {
            DisconnectKind::Closed => ConnectionError::Closed,
            DisconnectKind::TimedOut => ConnectionError::TimedOut,
            DisconnectKind::Reset => ConnectionError::Reset,
            DisconnectKind::Failed => ConnectionError::Io(e),
        }),
    }
}

impl Peer {
    /// Prepares a connected stream. The kernel ends the connection when the other host has not answered for `limit`.
    pub(super) fn new(stream: TcpStream, limit: Duration) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        net::set_peer_timeout(&stream, limit)?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            head: [0; HEADER_BYTES + COMPARISON_BYTES],
            head_filled: 0,
            data: None,
            message: None,
            unexpected: VecDeque::new(),
        })
    }

    /// Returns whether both ends have the same address.
    pub(super) fn is_on_this_host(&self) -> bool {
        matches!((self.stream.local_addr(), self.stream.peer_addr()), (Ok(a), Ok(b)) if a.ip() == b.ip())
    }

    /// Writes as much of `head` and then `body`, from byte `done` on, as is possible without waiting. Returns the bytes written.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8], done: usize) -> Result<usize, ConnectionError> {
        let mut total = done;
        while total < head.len() + body.len() {
            let result = if total < head.len() {
                self.stream.write_vectored(&[IoSlice::new(&head[total..]), IoSlice::new(body)])
            } else {
                self.stream.write(&body[total - head.len()..])
            };
            match attempt(result)? {
                Some(n) => total += n,
                None => break,
            }
        }
        Ok(total - done)
    }

    fn fill_head(&mut self, until: usize) -> Result<bool, ConnectionError> {
        while self.head_filled < until {
            match attempt((&self.stream).read(&mut self.head[self.head_filled..until]))? {
                Some(n) => self.head_filled += n,
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Returns the next item without waiting. A data frame stays the next item until it was read to its end.
    pub(super) fn next(&mut self) -> Result<NextFrame, ConnectionError> {
        if let Some((head, _)) = self.data {
            return Ok(NextFrame::Data(head));
        }
        if self.message.is_some() {
            return self.read_message();
        }
        if !self.fill_head(HEADER_BYTES)? {
            return Ok(NextFrame::Empty);
        }
        let head = self.head.first_chunk().and_then(FrameHeader::decode).ok_or(ConnectionError::Protocol)?;
        match head.kind {
            FrameKind::Data => {
                self.head_filled = 0;
                self.data = Some((head, head.len as usize));
                Ok(NextFrame::Data(head))
            }
            FrameKind::CallComparison => {
                if head.len as usize != COMPARISON_BYTES {
                    return Err(ConnectionError::Protocol);
                }
                if !self.fill_head(HEADER_BYTES + COMPARISON_BYTES)? {
                    return Ok(NextFrame::Empty);
                }
                self.head_filled = 0;
                CallComparison::decode(&self.head[HEADER_BYTES..])
                    .map(NextFrame::CallComparison)
                    .ok_or(ConnectionError::Protocol)
            }
            FrameKind::Message => {
                if !self.fill_head(HEADER_BYTES + MESSAGE_HEADER_BYTES)? {
                    return Ok(NextFrame::Empty);
                }
                self.head_filled = 0;
                let message = MessageHeader::decode(&self.head[HEADER_BYTES..]).ok_or(ConnectionError::Protocol)?;
                if head.len != message.bytes + MESSAGE_HEADER_BYTES as u64 {
                    return Err(ConnectionError::Protocol);
                }
                // Only ranks of the job get this far, so the length is one that a call of this crate sends.
                let body = vec![0; message.bytes as usize];
                self.message = Some(PartialMessage { group: head.group, head: message, body, filled: 0 });
                self.read_message()
            }
        }
    }

    fn read_message(&mut self) -> Result<NextFrame, ConnectionError> {
        let Some(message) = &mut self.message else { return Ok(NextFrame::Empty) };
        let before = message.filled;
        while message.filled < message.body.len() {
            match attempt((&self.stream).read(&mut message.body[message.filled..]))? {
                Some(n) => message.filled += n,
                None if message.filled > before => return Ok(NextFrame::MessagePart),
                None => return Ok(NextFrame::Empty),
            }
        }
        if let Some(PartialMessage { group, head, body, .. }) = self.message.take() {
            self.unexpected.push_back((group, head, body));
        }
        Ok(NextFrame::Message)
    }

    /// Returns the number of bytes of the current data frame that are still to be read.
    pub(super) fn data_left(&self) -> usize {
        self.data.map_or(0, |(_, left)| left)
    }

    /// Reads bytes of the current data frame into the front of `into`. Returns their number; `None` if none have arrived.
    pub(super) fn read_data(&mut self, into: &mut [u8]) -> Result<Option<usize>, ConnectionError> {
        let Some((_, left)) = &mut self.data else { return Ok(None) };
        let len = into.len().min(*left);
        let got = attempt((&self.stream).read(&mut into[..len]))?;
        if let Some(n) = got {
            *left -= n;
        }
        self.end_data();
        Ok(got)
    }

    /// Ends the current data frame if all its bytes have been read. An empty frame ends at once.
    pub(super) fn end_data(&mut self) {
        if self.data.is_some_and(|(_, left)| left == 0) {
            self.data = None;
        }
    }
}

const _: () = assert!(MESSAGE_HEADER_BYTES <= COMPARISON_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_headers_read_back_and_unknown_kinds_are_refused() {
        let head = FrameHeader { kind: FrameKind::Message, group: 5, sequence: 6, len: 7 };
        let mut bytes = head.encode();
        assert_eq!(FrameHeader::decode(&bytes), Some(head));
        bytes[0] = 9;
        assert_eq!(FrameHeader::decode(&bytes), None);
    }

    #[test]
    fn parts_of_a_message_count_as_progress() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut peer = Peer::new(listener.accept().unwrap().0, Duration::from_secs(60)).unwrap();
        let message = MessageHeader { tag: 3, dtype: crate::dtype::DType::U8, bytes: 4 };
        let len = MESSAGE_HEADER_BYTES as u64 + message.bytes;
        let header = FrameHeader { kind: FrameKind::Message, group: 0, sequence: 0, len };
        // Waits until bytes have arrived.
        let mut next = || {
            loop {
                match peer.next().unwrap() {
                    NextFrame::Empty => std::thread::yield_now(),
                    next => return next,
                }
            }
        };
        sender.write_all(&[&header.encode()[..], &message.encode(), b"ab"].concat()).unwrap();
        let first = next();
        assert!(matches!(first, NextFrame::MessagePart));
        sender.write_all(b"cd").unwrap();
        while matches!(next(), NextFrame::MessagePart) {}
        assert_eq!(peer.unexpected.pop_front().unwrap().2, b"abcd");
    }
}
