//! Systems other than Linux, with POSIX only.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::sockopt;

/// Fills `bytes` with random bytes.
///
/// # Errors
/// There is no `/dev/urandom`.
pub(crate) fn random(bytes: &mut [u8]) -> io::Result<()> {
    File::open("/dev/urandom")?.read_exact(bytes)
}

/// A file descriptor that another thread makes readable, once and for all.
pub(crate) struct Wakeup {
    read: PipeReader,
    write: PipeWriter,
}

impl Wakeup {
    /// What messages call it.
    pub(crate) const NAME: &str = "a pipe";

    /// Opens the descriptor, which is not readable yet.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub(crate) fn new() -> io::Result<Self> {
        let (read, write) = io::pipe()?;
        Ok(Self { read, write })
    }

    /// Makes the descriptor readable.
    pub(crate) fn wake(&self) {
        // One byte never fills a pipe, so this does not wait
        let _ = (&self.write).write_all(&[0]);
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}

/// Makes the kernel end a quiet connection whose other end has answered none of `probes` probes. Data that nobody acknowledges
/// is retransmitted for as long as the kernel likes, since POSIX has no `TCP_USER_TIMEOUT`.
///
/// # Errors
/// The kernel refuses the option.
pub(crate) fn limit_silence(stream: &TcpStream, _limit: Duration, probes: u32) -> io::Result<()> {
    Ok(sockopt::set_tcp_keepcnt(stream, probes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    #[test]
    fn a_wakeup_stays_readable() {
        let wakeup = Wakeup::new().unwrap();
        let readable = || {
            let mut fds = [PollFd::new(&wakeup, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        };
        assert!(!readable());
        wakeup.wake();
        assert!(readable() && readable());
    }

    #[test]
    fn random_bytes_differ() {
        let (mut one, mut other) = ([0; 32], [0; 32]);
        random(&mut one).unwrap();
        random(&mut other).unwrap();
        assert_ne!(one, other);
    }

    #[test]
    fn the_number_of_probes_is_set() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        limit_silence(&stream, Duration::from_secs(10), 8).unwrap();
        assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), 8);
    }
}
