//! How much memory a process may use.

use std::fs;
use std::path::Path;

/// Returns the bytes of this machine's memory and swap, or the smaller limit of this process's control group; `None` where
/// the kernel does not report it.
pub fn total_memory() -> Option<u64> {
    memory("MemTotal", "SwapTotal")
}

/// Returns the bytes that processes can still allocate: the free memory and swap of this machine, or the limit of the control group
/// if that is smaller. The usage of the control group is not subtracted, because it includes the page cache.
pub(crate) fn available_memory() -> Option<u64> {
    memory("MemAvailable", "SwapFree")
}

fn memory(memory: &str, swap: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let machine = field(&text, memory)? + field(&text, swap).unwrap_or(0);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(group_limit(&groups, Path::new("/sys/fs/cgroup")).map_or(machine, |limit| limit.min(machine)))
}

/// Returns a field of `/proc/meminfo`, which is in KiB, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Returns the smallest memory limit of the control groups in `groups` (`/proc/self/cgroup`) and of those above them.
fn group_limit(groups: &str, root: &Path) -> Option<u64> {
    let limits = groups.lines().filter_map(|line| {
        // "ID:CONTROLLERS:PATH". Version 2 has no controllers in the line.
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            list if list.split(',').any(|one| one == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return None,
        };
        let above = Path::new(group.trim_start_matches('/')).ancestors();
        // `max` means no limit and does not parse as a number.
        above.filter_map(|group| fs::read_to_string(root.join(group).join(file)).ok()?.trim().parse::<u64>().ok()).min()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory() {
        let (available, total) = (available_memory().unwrap(), total_memory().unwrap());
        assert!(0 < available && available <= total && total > 100 << 20, "{available} {total}");
        assert_eq!(field("MemTotal:       24684096 kB\nSwapTotal: 0 kB\n", "MemTotal"), Some(24_684_096 << 10));
        assert_eq!(field("MemTotal: x kB", "MemTotal"), None);
    }

    #[test]
    fn the_smallest_limit_of_all_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("a/memory.max", "4000\n");
        write("a/b/memory.max", "max\n");
        write("memory/c/memory.limit_in_bytes", "3000\n");
        assert_eq!(group_limit("0::/a/b\n", root.path()), Some(4000));
        assert_eq!(group_limit("5:cpu,memory:/c\n4:pids:/a\n0::/a/b\n", root.path()), Some(3000));
        assert_eq!(group_limit("0::/\n4:pids:/a\nnonsense\n", root.path()), None);
    }
}
