//! The transport of a group of one rank: every collective is a copy.

use super::call::CollectiveCall;
use super::error::{CommError, Result};
use super::transport::{MessageOp, Transport};

/// The transport of a group of one rank.
pub(crate) struct Solo;

impl Transport for Solo {
    fn all_reduce(&mut self, _: &CollectiveCall, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
    fn broadcast(&mut self, _: &CollectiveCall, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
    fn reduce(&mut self, _: &CollectiveCall, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
    fn all_gather(&mut self, _: &CollectiveCall, send: &[u8], recv: &mut [u8], _: &[usize]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }
    fn gather(&mut self, _: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }
    fn scatter(&mut self, _: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }
    fn reduce_scatter(&mut self, _: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }
    fn all_to_all(&mut self, _: &CollectiveCall, send: &[u8], recv: &mut [u8]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }
    fn barrier(&mut self, _: &CollectiveCall) -> Result<()> {
        Ok(())
    }
    // There is no other rank.
    fn send(&mut self, call: &CollectiveCall, _: u64, _: &[u8]) -> Result<()> {
        Err(CommError::usage(format!("{call}: the group has one rank")))
    }
    fn recv(&mut self, call: &CollectiveCall, _: u64, _: &mut [u8]) -> Result<()> {
        Err(CommError::usage(format!("{call}: the group has one rank")))
    }
    fn progress(&mut self, messages: &mut [MessageOp<'_>]) -> Result<bool> {
        match messages.first() {
            Some(message) => Err(CommError::usage(format!("{}: the group has one rank", message.call))),
            None => Ok(false),
        }
    }
}
