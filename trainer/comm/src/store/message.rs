//! The messages of the control connections.

use crate::error::CommError;
use crate::wire::{Reader, Writer};

/// A message from a rank to the server. The reply has the `id` of the request.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ClientMessage {
    Set {
        key: String,
        value: Vec<u8>,
    },
    /// Waits for the key up to `limit_ms`; 0 does not wait.
    Get {
        id: u64,
        key: String,
        limit_ms: u64,
    },
    Barrier {
        id: u64,
        name: String,
        limit_ms: u64,
    },
    Abort {
        error: CommError,
    },
    /// Asks all other ranks for their activity.
    Query {
        id: u64,
    },
    /// The reply to [`ServerMessage::Ask`].
    Activity {
        asker: u32,
        id: u64,
        text: String,
    },
    /// The rank is done. After this message, the end of the rank's connection is not a failure.
    Goodbye,
}

/// A message from the server to a rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ServerMessage {
    Value {
        id: u64,
        value: Option<Vec<u8>>,
    },
    /// The reply to [`ClientMessage::Barrier`]: all ranks have entered, or the time is over and these ranks are missing.
    Barrier {
        id: u64,
        missing: Vec<u32>,
    },
    Aborted {
        error: CommError,
    },
    Ask {
        asker: u32,
        id: u64,
    },
    Activity {
        id: u64,
        rank: u32,
        text: String,
    },
}

impl ClientMessage {
    pub(super) fn frame(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            ClientMessage::Set { key, value } => {
                w.u8(1);
                w.text(key);
                w.bytes(value);
            }
            ClientMessage::Get { id, key, limit_ms } => {
                w.u8(2);
                w.u64(*id);
                w.text(key);
                w.u64(*limit_ms);
            }
            ClientMessage::Barrier { id, name, limit_ms } => {
                w.u8(3);
                w.u64(*id);
                w.text(name);
                w.u64(*limit_ms);
            }
            ClientMessage::Abort { error } => {
                w.u8(4);
                error.encode(&mut w);
            }
            ClientMessage::Query { id } => {
                w.u8(5);
                w.u64(*id);
            }
            ClientMessage::Activity { asker, id, text } => {
                w.u8(6);
                w.u32(*asker);
                w.u64(*id);
                w.text(text);
            }
            ClientMessage::Goodbye => w.u8(7),
        }
        w.into_frame()
    }

    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let mut r = Reader::new(body);
        Some(match r.u8()? {
            1 => ClientMessage::Set { key: r.text()?, value: r.bytes()? },
            2 => ClientMessage::Get { id: r.u64()?, key: r.text()?, limit_ms: r.u64()? },
            3 => ClientMessage::Barrier { id: r.u64()?, name: r.text()?, limit_ms: r.u64()? },
            4 => ClientMessage::Abort { error: CommError::decode(&mut r)? },
            5 => ClientMessage::Query { id: r.u64()? },
            6 => ClientMessage::Activity { asker: r.u32()?, id: r.u64()?, text: r.text()? },
            7 => ClientMessage::Goodbye,
            _ => return None,
        })
    }
}

impl ServerMessage {
    pub(super) fn frame(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            ServerMessage::Value { id, value } => {
                w.u8(1);
                w.u64(*id);
                w.u8(u8::from(value.is_some()));
                w.bytes(value.as_deref().unwrap_or_default());
            }
            ServerMessage::Barrier { id, missing } => {
                w.u8(2);
                w.u64(*id);
                w.u32(missing.len() as u32);
                missing.iter().for_each(|rank| w.u32(*rank));
            }
            ServerMessage::Aborted { error } => {
                w.u8(3);
                error.encode(&mut w);
            }
            ServerMessage::Ask { asker, id } => {
                w.u8(4);
                w.u32(*asker);
                w.u64(*id);
            }
            ServerMessage::Activity { id, rank, text } => {
                w.u8(5);
                w.u64(*id);
                w.u32(*rank);
                w.text(text);
            }
        }
        w.into_frame()
    }

    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let mut r = Reader::new(body);
        Some(match r.u8()? {
            1 => {
                let (id, some, value) = (r.u64()?, r.u8()?, r.bytes()?);
                ServerMessage::Value { id, value: (some == 1).then_some(value) }
            }
            2 => {
                let (id, count) = (r.u64()?, r.u32()?);
                // Collecting stops at the first missing field, so a damaged count cannot reserve memory.
                let missing = (0..count).map(|_| r.u32()).collect::<Option<Vec<u32>>>()?;
                ServerMessage::Barrier { id, missing }
            }
            3 => ServerMessage::Aborted { error: CommError::decode(&mut r)? },
            4 => ServerMessage::Ask { asker: r.u32()?, id: r.u64()? },
            5 => ServerMessage::Activity { id: r.u64()?, rank: r.u32()?, text: r.text()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn messages_survive_the_wire_and_every_cut_is_refused() {
        let error = CommError::new(ErrorKind::Aborted, "enough");
        let requests = [
            ClientMessage::Set { key: "k".into(), value: vec![1, 2] },
            ClientMessage::Get { id: 1, key: "k".into(), limit_ms: 5 },
            ClientMessage::Barrier { id: 2, name: "join".into(), limit_ms: 9 },
            ClientMessage::Abort { error: error.clone() },
            ClientMessage::Query { id: 3 },
            ClientMessage::Activity { asker: 1, id: 3, text: "t".into() },
            ClientMessage::Goodbye,
        ];
        for request in requests {
            let body = &request.frame()[4..];
            assert_eq!(ClientMessage::decode(body), Some(request));
            (0..body.len()).for_each(|cut| assert_eq!(ClientMessage::decode(&body[..cut]), None));
        }
        let messages = [
            ServerMessage::Value { id: 1, value: None },
            ServerMessage::Value { id: 1, value: Some(vec![]) },
            ServerMessage::Barrier { id: 1, missing: vec![2, 3] },
            ServerMessage::Aborted { error },
            ServerMessage::Ask { asker: 2, id: 1 },
            ServerMessage::Activity { id: 1, rank: 0, text: "t".into() },
        ];
        for message in messages {
            let body = &message.frame()[4..];
            assert_eq!(ServerMessage::decode(body), Some(message));
            (0..body.len()).for_each(|cut| assert_eq!(ServerMessage::decode(&body[..cut]), None));
        }
    }
}
