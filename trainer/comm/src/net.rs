//! Socket options, and the classification of errors of TCP connections.

use std::io::ErrorKind as IoKind;
use std::net::{IpAddr, TcpStream};
use std::time::Duration;

use super::system;

/// Makes the kernel end a connection when the other host has not answered for `limit` (a pulled cable, a host without power). The
/// connection survives shorter network outages. On Linux the limit applies to sent data (`TCP_USER_TIMEOUT`) and to keepalive
/// probes of an idle connection, on macOS to probes only. A dead process is noticed at once, since the kernel closes the sockets of
/// a dead process. The host of a stopped process still answers.
pub(crate) fn set_peer_timeout(stream: &TcpStream, limit: Duration) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, system::KEEPALIVE_IDLE)?;
    system::set_peer_timeout(stream, limit)
}

/// Hint for the error about a host that has not answered.
pub(crate) const OUTAGE_HINT: &str = "the network between the hosts is down, or that host is; longer outages are survived with \
                                      a larger timeout ([parallel] timeout_s)";

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DisconnectKind {
    /// The other end closed it: its process has ended.
    Closed,
    /// The other host has not answered for as long as [`set_peer_timeout`] allows.
    TimedOut,
    /// The other end reset the connection: its process has ended, or has given up after an outage.
    Reset,
    /// Another error of the operating system.
    Failed,
}

impl DisconnectKind {
    /// Classifies an error of a connection that was established.
    pub(crate) fn of(error: &std::io::Error) -> Self {
        match error.kind() {
            // After an outage the kernel reports the last ICMP error (such as "host unreachable"), if any, instead of a timeout.
            IoKind::TimedOut | IoKind::HostUnreachable | IoKind::NetworkUnreachable | IoKind::NetworkDown => {
                Self::TimedOut
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
            set_peer_timeout(&stream, limit).unwrap();
            assert_eq!(rustix::net::sockopt::tcp_user_timeout(&stream).unwrap(), expected, "{limit:?}");
        }
        assert_eq!(
            (seconds(Duration::from_secs(600)), seconds(Duration::from_millis(300))),
            ("600 s".into(), "0.3 s".into())
        );
    }
}
