//! The user at the other end of a Unix socket.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Returns the user id of the process at the other end, as it was when that process connected or began to listen
/// (`SO_PEERCRED`). rustix's function fails for a process of another PID namespace, whose process id is 0 here.
///
/// # Errors
/// The kernel does not know the peer.
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
