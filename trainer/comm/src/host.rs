//! Whether two processes are on the same host.

/// This boot of this kernel: two machines never have the same. Empty where the kernel hides it.
pub fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// This host as far as memory goes that processes share: one boot, and one view of process numbers.
pub fn of_shared_memory() -> String {
    let pids = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot(), pids.display())
}
