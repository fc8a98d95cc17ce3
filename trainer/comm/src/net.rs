//! Options of sockets, and what the errors of TCP connections mean.

use std::io::ErrorKind as IoKind;
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A quiet connection is probed after this long, and then once per [`PROBE_INTERVAL`].
const PROBE_AFTER: Duration = Duration::from_secs(2);
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest interval between retransmissions, in milliseconds. The kernel's limit of two minutes would prolong an outage of the
/// network by its own length: intervals double.
const RETRANSMIT_MS: i32 = 1000;

/// Makes the kernel end a connection when the other host has not answered for `limit` (a pulled cable, a host without power),
/// and not earlier: a shorter outage of the network is survived. Sent data has to be acknowledged in this time, and a quiet
/// connection is probed. The death of a process is noticed at once, since it closes the process's sockets. A stopped process
/// still answers probes.
pub(crate) fn limit_silence(stream: &TcpStream, limit: Duration) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_INTERVAL)?;
    // The number of probes does not count beside this limit. 0 would be the kernel's default.
    let limit_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32);
    sockopt::set_tcp_user_timeout(stream, limit_ms)?;
    limit_backoff(stream);
    Ok(())
}

/// Makes the connection recover within a second after an outage. Linux 6.15 and later can do this. Earlier kernels retransmit
/// when the outage has lasted 0.2, 0.6, 1.4, 3, 6.2, 12.6, … seconds.
#[allow(unsafe_code)]
fn limit_backoff(stream: &TcpStream) {
    /// `TCP_RTO_MAX_MS` of `linux/tcp.h`.
    const TCP_RTO_MAX_MS: libc::c_int = 44;
    let (fd, value) = (stream.as_fd().as_raw_fd(), RETRANSMIT_MS as libc::c_int);
    // SAFETY: the descriptor is open while `stream` is borrowed, and the kernel reads `size_of::<c_int>()` bytes of `value`.
    // An error says that the kernel is too old, which is the case described above.
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

/// What to do about a host that has not answered.
pub(crate) const OUTAGE_HINT: &str = "the network between the hosts is down, or that host is; longer outages are survived with \
                                      a larger timeout ([parallel] timeout_s)";

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The other end closed it: its process has ended.
    Closed,
    /// The other host has not answered for as long as [`limit_silence`] allows.
    Silent,
    /// The other end does not know the connection any more: its process has ended, or has given up after an outage.
    Reset,
    /// Another error of the operating system.
    Failed,
}

impl Ending {
    /// Classifies an error of a connection that was established.
    pub(crate) fn of(error: &std::io::Error) -> Self {
        match error.kind() {
            // After an outage the kernel reports the last error on the way, if there was one.
            IoKind::TimedOut | IoKind::HostUnreachable | IoKind::NetworkUnreachable | IoKind::NetworkDown => {
                Self::Silent
            }
            IoKind::ConnectionReset => Self::Reset,
            IoKind::BrokenPipe => Self::Closed,
            _ => Self::Failed,
        }
    }
}

/// Writes a time limit for messages: `10 s`, `0.3 s`.
pub(crate) fn seconds(limit: Duration) -> String {
    let seconds = (limit.as_secs_f64() * 10.0).round() / 10.0;
    format!("{seconds} s")
}

/// Returns the address under which this host reaches the other end of `stream`.
pub(crate) fn own_address(stream: &TcpStream) -> std::io::Result<IpAddr> {
    Ok(stream.local_addr()?.ip())
}

/// Returns the user id of the process at the other end, as it was when that process connected or began to listen
/// (`SO_PEERCRED`). rustix's function fails for a process of another PID namespace, whose process id is 0 here.
///
/// # Errors
/// The kernel does not know the peer.
#[allow(unsafe_code)]
pub fn peer_user(stream: &UnixStream) -> std::io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers are to a `ucred` and to its size, which outlive the call.
    let result = unsafe {
        let to = (&raw mut peer).cast();
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len)
    };
    if result == 0 { Ok(peer.uid) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_set_whatever_their_size() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        for (limit, expected) in
            [(Duration::from_secs(10), 10_000), (Duration::ZERO, 1), (Duration::MAX, i32::MAX as u32)]
        {
            limit_silence(&stream, limit).unwrap();
            assert_eq!(rustix::net::sockopt::tcp_user_timeout(&stream).unwrap(), expected, "{limit:?}");
        }
        assert_eq!(
            (seconds(Duration::from_secs(600)), seconds(Duration::from_millis(300))),
            ("600 s".into(), "0.3 s".into())
        );
    }

    #[test]
    fn the_user_of_a_pair_is_this_one() {
        let (one, _other) = UnixStream::pair().expect("a pair of sockets");
        assert_eq!(peer_user(&one).expect("a peer"), rustix::process::getuid().as_raw());
    }
}
