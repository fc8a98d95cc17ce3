//! The functions of this module for systems other than Linux, with POSIX only.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::sockopt;

use super::{KEEPALIVE_IDLE, KEEPALIVE_INTERVAL};

/// Fills `bytes` with random bytes.
///
/// # Errors
/// There is no `/dev/urandom`.
pub(crate) fn random(bytes: &mut [u8]) -> io::Result<()> {
    File::open("/dev/urandom")?.read_exact(bytes)
}

/// A file descriptor that another thread makes readable. Once readable, it stays readable.
pub(crate) struct Wakeup {
    read: PipeReader,
    write: PipeWriter,
}

impl Wakeup {
    /// Name in error messages.
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
        // One byte never fills a pipe, so this write does not wait.
        let _ = (&self.write).write_all(&[0]);
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}

/// Makes the kernel end an idle connection whose other end has answered no probe for `limit`. The limit does not apply to sent
/// data: POSIX has no `TCP_USER_TIMEOUT`, so the kernel retransmits data until its own limit.
///
/// # Errors
/// The kernel refuses an option.
pub(crate) fn set_peer_timeout(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    let (interval, count) = probes(limit);
    sockopt::set_tcp_keepintvl(stream, interval)?;
    Ok(sockopt::set_tcp_keepcnt(stream, count)?)
}

/// Returns the interval and the number of probes for which `limit` is over when all probes stay unanswered.
fn probes(limit: Duration) -> (Duration, u32) {
    /// Largest number of probes, and longest interval in seconds, that Linux accepts. The limits of macOS are not documented.
    const MOST: u64 = 127;
    const LONGEST: u64 = 32767;
    let seconds = limit.saturating_sub(KEEPALIVE_IDLE).as_secs();
    let interval = seconds.div_ceil(MOST).clamp(KEEPALIVE_INTERVAL.as_secs(), LONGEST);
    (Duration::from_secs(interval), seconds.div_ceil(interval).clamp(1, MOST) as u32)
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
    fn limits_are_set_whatever_their_size() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        for (limit, interval, count) in [(0, 1, 1), (3, 1, 1), (10, 1, 8), (600, 5, 120), (u64::MAX, 32767, 127)] {
            set_peer_timeout(&stream, Duration::from_secs(limit)).unwrap();
            assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), Duration::from_secs(interval), "{limit}");
            assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), count, "{limit}");
        }
    }
}
