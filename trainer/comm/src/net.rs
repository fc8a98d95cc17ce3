//! Small things about TCP sockets that store and mesh share.

use std::net::{IpAddr, TcpStream};
use std::time::Duration;

/// Has the kernel notice within five seconds that the other host is gone without a farewell (power, cable), whether anything
/// is being sent (no acknowledgement for four seconds) or not (two probes, a second apart, after two seconds of silence). The
/// death of a process alone closes its sockets and needs none of this; a stopped process still answers probes.
pub(crate) fn keepalive(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 2)?;
    sockopt::set_tcp_user_timeout(stream, 4000)?;
    Ok(())
}

/// The address under which this host reaches the other end of `stream`.
pub(crate) fn own_address(stream: &TcpStream) -> std::io::Result<IpAddr> {
    Ok(stream.local_addr()?.ip())
}
