//! Small things about TCP sockets that store and mesh share.

use std::net::{IpAddr, TcpStream};
use std::time::Duration;

/// Has the kernel notice within about ten seconds that the other host is gone without a farewell (power, cable): the death
/// of a process alone closes its sockets and needs none of this.
pub(crate) fn keepalive(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    sockopt::set_tcp_user_timeout(stream, 10_000)?;
    Ok(())
}

/// The address under which this host reaches the other end of `stream`.
pub(crate) fn own_address(stream: &TcpStream) -> std::io::Result<IpAddr> {
    Ok(stream.local_addr()?.ip())
}
