//! The functions of this module for Linux.

use std::fs;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt;
use rustix::rand::{GetRandomFlags, getrandom};

use super::KEEPALIVE_INTERVAL;

/// Longest interval between retransmissions, in milliseconds. The kernel doubles the interval after each retransmission, up to two
/// minutes by default. Without this limit, a connection could stay silent after an outage for as long as the outage lasted.
const RETRANSMIT_MS: i32 = 1000;

/// Returns the id of this boot of the kernel. Empty if the kernel hides it.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Fills `bytes` with random bytes.
///
/// # Errors
/// The kernel provides no random bytes.
pub(crate) fn random(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A file descriptor that another thread makes readable. Once readable, it stays readable.
pub(crate) struct Wakeup(OwnedFd);

impl Wakeup {
    /// Name in error messages.
    pub(crate) const NAME: &str = "an eventfd";

    /// Opens the descriptor, which is not readable yet.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the descriptor readable.
    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Makes the kernel end a connection whose other end has acknowledged nothing for `limit`: neither data nor the probes of a
/// quiet connection.
///
/// # Errors
/// The kernel refuses an option.
pub(crate) fn set_peer_timeout(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    // With this option the kernel ignores the number of probes. A limit of 0 would mean the kernel's default.
    let limit_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32);
    sockopt::set_tcp_user_timeout(stream, limit_ms)?;
    limit_retransmit_interval(stream);
    Ok(())
}

/// Makes the connection recover within a second after an outage. This needs Linux 6.15 or later. Earlier kernels ignore the
/// option and retransmit 0.2, 0.6, 1.4, 3, 6.2, 12.6, … seconds after the start of the outage.
#[allow(unsafe_code)]
fn limit_retransmit_interval(stream: &TcpStream) {
    /// `TCP_RTO_MAX_MS` of `linux/tcp.h`.
    const TCP_RTO_MAX_MS: libc::c_int = 44;
    let (fd, value) = (stream.as_fd().as_raw_fd(), RETRANSMIT_MS as libc::c_int);
    // SAFETY: the descriptor is open while `stream` is borrowed, and the kernel reads `size_of::<c_int>()` bytes of `value`.
    // An error means that the kernel is older than 6.15, see above.
    let _ = unsafe {
        libc::setsockopt(
            fd,
            libc::IPPROTO_TCP,
            TCP_RTO_MAX_MS,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
}

/// Returns the user id of the process at the other end, at the time when the process connected or began to listen
/// (`SO_PEERCRED`). rustix's function is not used, since it fails for a process of another PID namespace: the kernel reports
/// process id 0 for it.
///
/// # Errors
/// The kernel does not know the peer.
#[allow(unsafe_code)]
pub fn peer_user(stream: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers are to a `ucred` and to its size, which outlive the call.
    let result = unsafe {
        let to = (&raw mut peer).cast();
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len)
    };
    if result == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_of_a_pair_is_this_one() {
        let (one, _other) = UnixStream::pair().expect("a pair of sockets");
        assert_eq!(peer_user(&one).expect("a peer"), rustix::process::getuid().as_raw());
    }
}
