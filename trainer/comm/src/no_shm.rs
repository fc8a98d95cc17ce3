//! Replaces `shm/` on systems other than Linux, which lack what `shm/` needs: memfd, futexes and `/proc`.

use std::convert::Infallible;
use std::time::Duration;

use crate::error::Result;
use crate::rendezvous::TransportKind;
use crate::store::StoreClient;
use crate::transport::{GroupRanks, Transport};

/// A type without values: without shared memory, no transport makes a window.
pub(crate) struct Window(Infallible);

impl Window {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self.0 {}
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self.0 {}
    }
}

/// Returns the error that this system has no shared-memory transport.
///
/// # Errors
/// Always.
pub(crate) fn transport(_: GroupRanks, _: &StoreClient, _: Duration, _: Duration) -> Result<Box<dyn Transport>> {
    Err(TransportKind::needs_linux())
}
