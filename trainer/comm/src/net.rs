//! Options of TCP sockets, for the store and the mesh.

use std::net::{IpAddr, TcpStream};
use std::time::Duration;

/// Makes the kernel notice within five seconds that the other host is gone without closing the connection (power, cable):
/// while data is sent, after four seconds without an acknowledgement; otherwise, after two seconds of silence and two probes a
/// second apart. The death of a process needs none of this, since it closes the process's sockets. A stopped process still
/// answers probes.
pub(crate) fn keepalive(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 2)?;
    sockopt::set_tcp_user_timeout(stream, 4000)?;
    Ok(())
}

/// Returns the address under which this host reaches the other end of `stream`.
pub(crate) fn own_address(stream: &TcpStream) -> std::io::Result<IpAddr> {
    Ok(stream.local_addr()?.ip())
}
