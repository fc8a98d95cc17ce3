//! Two hosts on one machine: network namespaces, joined by a virtual cable that tests can unplug. Included with `#[path]` by the
//! tests of several crates, after `shared.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::shared::skip_or_fail;

/// Two network namespaces joined by a cable.
pub struct Namespaces {
    pub names: [String; 2],
    cable: String,
}

/// The nodes' addresses.
pub const ADDRESSES: [&str; 2] = ["10.231.17.1", "10.231.17.2"];

impl Namespaces {
    /// Creates the namespaces; `Err` has the reason why this is not possible.
    fn new(tag: &str) -> Result<Self, String> {
        // Two tests of one process may use the same tag.
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let tag = format!("{tag}{}{number}", std::process::id() % 100_000);
        let made = Self { names: [format!("ln{tag}a"), format!("ln{tag}b")], cable: format!("lv{tag}") };
        let [a, b] = &made.names;
        let cable = &made.cable;
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&["-n", a, "link", "add", cable, "type", "veth", "peer", "name", "peer0", "netns", b])?;
        for (name, device, address) in [(a, cable.as_str(), ADDRESSES[0]), (b, "peer0", ADDRESSES[1])] {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", device])?;
            ip(&["-n", name, "link", "set", device, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(made)
    }

    /// Sets the `/etc/hosts` of programs that `ip netns exec` starts in a node's namespace.
    pub fn set_hosts(&self, node: usize, text: &str) {
        let folder = self.own_etc(node);
        fs::create_dir_all(&folder).and_then(|()| fs::write(folder.join("hosts"), text)).unwrap();
    }

    fn own_etc(&self, node: usize) -> PathBuf {
        Path::new("/etc/netns").join(&self.names[node])
    }

    /// Sets node 0's end of the cable `up` or `down`.
    pub fn cable(&self, state: &str) {
        ip(&["-n", &self.names[0], "link", "set", &self.cable, state]).unwrap();
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for (node, name) in self.names.iter().enumerate() {
            let _ = ip(&["netns", "del", name]);
            let _ = fs::remove_dir_all(self.own_etc(node));
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip (iproute2): {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", arguments.join(" "), said.trim())) }
}

/// Makes namespaces, or skips the test.
#[track_caller]
pub fn namespaces(tag: &str) -> Option<Namespaces> {
    match Namespaces::new(tag) {
        Ok(made) => Some(made),
        Err(cause) => {
            // They need root and iproute2.
            skip_or_fail("network namespaces", cause);
            None
        }
    }
}
