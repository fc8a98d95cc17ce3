//! Identifies the host of a process, so that ranks can compare their hosts.

/// Returns the kernel's boot id, which differs on every machine and after every boot. Empty if the kernel hides the id.
pub fn boot_id() -> String {
    super::system::boot_id()
}

/// Identifies this host for shared memory: the kernel's boot id and the PID namespace.
pub fn shared_memory_domain() -> String {
    let pids = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot_id(), pids.display())
}
