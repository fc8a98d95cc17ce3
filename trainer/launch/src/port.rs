//! Finds the process that listens on a port, as far as this user may see it, and formats addresses.

use std::fs;
use std::net::IpAddr;

use super::error::LaunchError;

/// Returns the process id and the command line (cut off) of the process that listens on `port`. Returns `None` if no process
/// listens, or if the process belongs to another user.
fn listener(port: u16) -> Option<(u32, String)> {
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .flat_map(|table| listening(&table, port))
        .collect();
    let links: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find_map(|pid: u32| {
        let mut files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
        files.find(|file| {
            fs::read_link(file.path()).is_ok_and(|to| links.iter().any(|link| to.as_os_str() == &**link))
        })?;
        Some((pid, command(pid)))
    })
}

/// Returns the inodes of the sockets that listen on `port`, from a table such as `/proc/net/tcp`.
fn listening(table: &str, port: u16) -> Vec<String> {
    let local = format!(":{port:04X}");
    let inode = |line: &str| {
        let mut fields = line.split_whitespace();
        // State 0A is TCP_LISTEN
        let found = fields.nth(1)?.ends_with(&local) && fields.nth(1)? == "0A";
        found.then(|| fields.nth(5).map(str::to_owned)).flatten()
    };
    table.lines().skip(1).filter_map(inode).collect()
}

fn command(pid: u32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = bytes.split(|b| *b == 0).map(String::from_utf8_lossy).filter(|word| !word.is_empty()).collect();
    words.join(" ").chars().take(80).collect()
}

/// Returns the error for an address on which this process cannot listen.
pub(super) fn cannot_listen(host: &str, port: u16, error: &std::io::Error) -> LaunchError {
    use std::io::ErrorKind;
    let (cause, hint) = match error.kind() {
        ErrorKind::AddrInUse => {
            let who = match listener(port) {
                Some((pid, command)) => format!("process {pid} (`{command}`) listens there"),
                None => "another user's process, or one that is not visible from here, listens there".to_owned(),
            };
            (
                format!("port {port} of {host} (MASTER_PORT) is taken: {who}"),
                "end that process or choose another port with --master-port; a job on one machine needs none"
                    .to_owned(),
            )
        }
        ErrorKind::AddrNotAvailable => (
            format!("{host} (MASTER_ADDR) is not an address of this machine, which is to be node 0"),
            "--master-addr is the address of node 0's machine, the same on all nodes; `ip address` lists this one's"
                .to_owned(),
        ),
        ErrorKind::PermissionDenied => (
            format!("port {port} of {host} (MASTER_PORT) is not for this user"),
            "choose a port above 1023 with --master-port".to_owned(),
        ),
        _ => (
            format!("cannot listen on {host}:{port}: {error}"),
            "see whether MASTER_ADDR and MASTER_PORT name this machine and a free port".to_owned(),
        ),
    };
    LaunchError::failed(cause, hint)
}

/// Formats an address as `host:port`. An IPv6 address gets brackets.
pub(super) fn host_port(host: &str, port: u16) -> String {
    match host.parse() {
        Ok(IpAddr::V6(address)) => format!("[{address}]:{port}"),
        _ => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_taken_port_is_reported_with_its_listener() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        assert_eq!(listener(port).map(|(pid, _)| pid), Some(std::process::id()));
        let error = TcpListener::bind(("127.0.0.1", port)).unwrap_err();
        let LaunchError { message: cause, hint, .. } = cannot_listen("127.0.0.1", port, &error);
        assert!(cause.contains(&format!("port {port} of 127.0.0.1 (MASTER_PORT) is taken: process")), "{cause}");
        assert!(cause.contains(&std::process::id().to_string()), "{cause}");
        assert!(hint.contains("--master-port"));
        drop(socket);
        // Another test may be starting a process, which has a copy of the socket until it runs its program.
        let until = Instant::now() + Duration::from_secs(300);
        while listener(port).is_some() {
            assert!(Instant::now() < until, "somebody listens: {:?}", listener(port));
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_kernels_table_is_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:7312 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 x\n\
            1: 0100007F:7312 0100007F:8000 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 x\n";
        assert_eq!(listening(table, 0x7312), ["4711"]);
        assert_eq!(listening(table, 0x7313), [""; 0]);
    }

    #[test]
    fn an_address_of_another_machine_is_reported() {
        // TEST-NET-1: no machine has it
        let error = TcpListener::bind(("192.0.2.1", 0)).unwrap_err();
        assert!(cannot_listen("192.0.2.1", 29500, &error).message.contains("is not an address of this machine"));
        assert_eq!(host_port("::1", 5), "[::1]:5");
    }
}
