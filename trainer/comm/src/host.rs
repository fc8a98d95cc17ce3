//! Tells whether two processes are on the same host.

/// Returns the id of this boot of the kernel, which no other machine has. Empty if the kernel hides it.
pub fn boot() -> String {
    super::system::boot_id()
}

/// Identifies this host for shared memory: one boot, and one view of process numbers (a PID namespace).
pub fn of_shared_memory() -> String {
    let pids = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot(), pids.display())
}
