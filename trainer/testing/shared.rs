//! Helpers of the tests of several crates, included with `#[path]`.

use std::fmt::Display;
use std::io::Write;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Reports on stderr that a test is skipped because `tool` is missing. Fails the test in CI (`CI` is set), which provides all
/// tools, unless `TRAINER_TEST_SKIP` lists the tool.
#[track_caller]
pub fn skip_or_fail(tool: &str, cause: impl Display) {
    let skip = std::env::var("TRAINER_TEST_SKIP").unwrap_or_default();
    let may_skip = skip.split(',').any(|listed| listed.trim() == tool);
    let in_ci = std::env::var("CI").is_ok_and(|ci| !["", "0", "false"].contains(&ci.as_str()));
    assert!(!in_ci || may_skip, "{tool} is required in CI: {cause}");
    let test = std::thread::current().name().unwrap_or("test").to_owned();
    // Not `eprintln`, whose output the test harness hides when a test passes.
    let _ = writeln!(std::io::stderr(), "{test}: skipped, {tool} is missing: {cause}");
}

/// Returns a TCP port that no other test uses while this process lives. The port is below the range of ephemeral ports, so the
/// kernel does not assign it either. A port from `bind` to port 0 could be assigned to another process before the tested program
/// binds it.
pub fn free_port() -> u16 {
    for port in 20_000..30_000 {
        let name = SocketAddr::from_abstract_name(format!("trainer-test-port-{port}")).unwrap();
        // The name in the abstract namespace of Unix sockets marks the port as taken.
        let Ok(lock) = UnixDatagram::bind_addr(&name) else { continue };
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            std::mem::forget(lock);
            return port;
        }
    }
    panic!("no free port from 20000 to 29999")
}
