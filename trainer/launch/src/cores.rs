//! Cores: which there are, in what order, and who gets which.

use std::fs;
use std::num::NonZero;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// What each worker of a node gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// Threads of a worker's pool; the same for all, so that no rank computes differently.
    pub threads: usize,
    /// Cores of each worker, by local rank; none where there are more workers than cores, which then share all of them.
    pub pins: Option<Vec<Vec<usize>>>,
}

/// Splits `cores` over `workers` in runs of neighbours; what does not divide evenly goes to the first ones. `quota` is the
/// number of cores that may be busy at once (a container's limit), which may be less than there are.
pub fn split(cores: &[usize], quota: usize, workers: usize) -> Split {
    let threads = (cores.len().min(quota) / workers.max(1)).max(1);
    let pins = (workers > 0 && workers <= cores.len()).then(|| {
        let (each, more) = (cores.len() / workers, cores.len() % workers);
        let mut rest = cores;
        (0..workers)
            .map(|worker| {
                let (own, others) = rest.split_at(each + usize::from(worker < more));
                rest = others;
                own.to_vec()
            })
            .collect()
    });
    Split { threads, pins }
}

/// The cores that this process may use, neighbours (threads of a core, cores of a socket) next to each other.
pub fn available() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    let mut cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
    cores.sort_by_key(|cpu| (topology(*cpu, "physical_package_id"), topology(*cpu, "core_id"), *cpu));
    cores
}

/// Cores that may be busy at once: what is allowed, or a container's quota if that is less.
pub fn quota() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Unknown: 0, which leaves the kernel's numbering.
fn topology(cpu: usize, name: &str) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/{name}");
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Keeps the calling thread, and the processes that it starts, to `cores` until dropped: a child that inherits its cores
/// has them from its first instruction on.
pub(super) struct Pinned(Option<CpuSet>);

impl Pinned {
    /// `None` pins nothing. A kernel that refuses (a core went offline) leaves all cores: slower, not wrong.
    pub(super) fn to(cores: Option<&Vec<usize>>) -> Self {
        let (Some(cores), Ok(before)) = (cores, sched_getaffinity(None)) else { return Self(None) };
        let mut set = CpuSet::new();
        cores.iter().for_each(|cpu| set.set(*cpu));
        Self(sched_setaffinity(None, &set).is_ok().then_some(before))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // it was this thread's own set a moment ago
            let _ = sched_setaffinity(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_shared_out_once_each() {
        // cores, quota, workers, threads, cores of each worker
        for (cores, quota, workers, threads, sizes) in [
            (8, 8, 4, 2, Some(&[2, 2, 2, 2][..])),
            (8, 8, 3, 2, Some(&[3, 3, 2])),
            (2, 2, 2, 1, Some(&[1, 1])),
            (2, 2, 4, 1, None),
            (64, 4, 2, 2, Some(&[32, 32])),
            (1, 1, 1, 1, Some(&[1])),
            (0, 1, 2, 1, None),
        ] {
            // numbers with holes, as a container's set may have
            let all: Vec<usize> = (0..cores).map(|core| 3 + 2 * core).collect();
            let found = split(&all, quota, workers);
            assert_eq!(found.threads, threads, "{cores} {quota} {workers}");
            let found_sizes = found.pins.as_ref().map(|pins| pins.iter().map(Vec::len).collect::<Vec<_>>());
            assert_eq!(found_sizes.as_deref(), sizes, "{cores} {quota} {workers}");
            if let Some(pins) = found.pins {
                assert_eq!(pins.concat(), all, "each core once, in order");
            }
        }
    }

    #[test]
    fn children_inherit_the_cores_and_the_parent_gets_its_own_back() {
        let all = available();
        let allowed = |text: &str| {
            text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map(|list| list.trim().to_owned())
        };
        let before = allowed(&fs::read_to_string("/proc/thread-self/status").unwrap());
        let last = *all.last().unwrap();
        let child = {
            let _pinned = Pinned::to(Some(&vec![last]));
            std::process::Command::new("cat").arg("/proc/self/status").output().unwrap().stdout
        };
        assert_eq!(allowed(&String::from_utf8(child).unwrap()), Some(last.to_string()));
        assert_eq!(allowed(&fs::read_to_string("/proc/thread-self/status").unwrap()), before);
    }
}
