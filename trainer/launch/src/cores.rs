//! Lists the CPU cores and assigns cores to workers.

use std::fs;
use std::io;
use std::num::NonZero;

use super::system::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The variable that sets the number of threads of rayon's pool in a process.
pub const RAYON_NUM_THREADS: &str = "RAYON_NUM_THREADS";
/// Bytes of an affinity mask: 1024 cores, as many as the kernel's `cpu_set_t` has.
pub const MASK_BYTES: usize = CpuSet::MAX_CPU / 8;

/// Cores and threads of the workers of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreAssignment {
    /// Number of threads in a worker's pool. All workers have the same number, since the number of threads may change the last
    /// bits of results.
    pub threads: usize,
    /// Cores of each worker, by local rank. `None` if there are more workers than cores. Then all workers share all cores.
    pub cores: Option<Vec<Vec<usize>>>,
}

/// Splits `cores` among `workers`. Each worker gets consecutive cores. If the division leaves a remainder, the first workers
/// get one more core. `quota` is the number of cores that may be busy at once (a container's limit), which may be smaller.
pub fn assign(cores: &[usize], quota: usize, workers: usize) -> CoreAssignment {
    let threads = (cores.len().min(quota) / workers.max(1)).max(1);
    let cores = (workers > 0 && workers <= cores.len()).then(|| {
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
    CoreAssignment { threads, cores }
}

/// Returns the cores that this process may use, sorted so that the threads of a core and the cores of a socket are consecutive.
pub fn available() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    let mut cores: Vec<usize> = members(&set).collect();
    cores.sort_by_key(|cpu| (topology(*cpu, "physical_package_id"), topology(*cpu, "core_id"), *cpu));
    cores
}

/// Returns the number of cores that may be busy at once: the allowed cores, or a container's quota if that is smaller.
pub fn quota() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Returns the cores that this process may use as a bit mask, for [`threads_of_rank`].
///
/// # Errors
/// The kernel refuses, as a sandbox may.
pub fn affinity_mask() -> io::Result<[u8; MASK_BYTES]> {
    let mut mask = [0; MASK_BYTES];
    members(&sched_getaffinity(None)?).for_each(|cpu| mask[cpu / 8] |= 1 << (cpu % 8));
    Ok(mask)
}

/// Returns the number of threads for the rank with the mask `own`: the sum of its shares of cores. A core that `n` ranks of the
/// host may use counts as `1/n` for each. `all` has the masks of all ranks of the host, `own` included. At least 1, at most
/// [`quota`].
pub fn threads_of_rank(own: &[u8], all: &[&[u8]]) -> usize {
    let has = |mask: &[u8], core: usize| mask[core / 8] & (1 << (core % 8)) != 0;
    let share = |core: usize| 1.0 / all.iter().filter(|mask| has(mask, core)).count() as f64;
    let cores: f64 = (0..8 * own.len()).filter(|&core| has(own, core)).map(share).sum();
    // Compensates rounding: three thirds of a core add up to a little less than 1.
    ((cores + 1e-6) as usize).clamp(1, quota())
}

fn members(set: &CpuSet) -> impl Iterator<Item = usize> + '_ {
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu))
}

/// Reads a number from the kernel's description of a core. Returns 0 if it is unknown, which keeps the kernel's order of cores.
fn topology(cpu: usize, name: &str) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/{name}");
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Limits the calling thread, and the processes that it starts, to some cores until the guard is dropped. A child process
/// inherits the limit, so it is limited from its first instruction on.
pub struct AffinityGuard(Option<CpuSet>);

impl AffinityGuard {
    /// Limits the thread to `cores`; `None` limits nothing. If the kernel refuses (a core went offline, or the system is
    /// macOS), all cores stay allowed: this is slower, but correct.
    pub fn new(cores: Option<&Vec<usize>>) -> Self {
        let (Some(cores), Ok(before)) = (cores, sched_getaffinity(None)) else { return Self(None) };
        let mut set = CpuSet::new();
        cores.iter().for_each(|cpu| set.set(*cpu));
        Self(sched_setaffinity(None, &set).is_ok().then_some(before))
    }
}

impl Drop for AffinityGuard {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // This cannot fail: the thread had this set before.
            let _ = sched_setaffinity(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_core_is_assigned_once() {
        // Cores, quota, workers, threads, cores of each worker
        for (cores, quota, workers, threads, sizes) in [
            (8, 8, 4, 2, Some(&[2, 2, 2, 2][..])),
            (8, 8, 3, 2, Some(&[3, 3, 2])),
            (2, 2, 2, 1, Some(&[1, 1])),
            (2, 2, 4, 1, None),
            (64, 4, 2, 2, Some(&[32, 32])),
            (1, 1, 1, 1, Some(&[1])),
            (0, 1, 2, 1, None),
        ] {
            // Numbers with holes, as a container's set may have
            let all: Vec<usize> = (0..cores).map(|core| 3 + 2 * core).collect();
            let found = assign(&all, quota, workers);
            assert_eq!(found.threads, threads, "{cores} {quota} {workers}");
            let found_sizes = found.cores.as_ref().map(|cores| cores.iter().map(Vec::len).collect::<Vec<_>>());
            assert_eq!(found_sizes.as_deref(), sizes, "{cores} {quota} {workers}");
            if let Some(cores) = found.cores {
                assert_eq!(cores.concat(), all, "each core once, in order");
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
            let _pinned = AffinityGuard::new(Some(&vec![last]));
            std::process::Command::new("cat").arg("/proc/self/status").output().unwrap().stdout
        };
        assert_eq!(allowed(&String::from_utf8(child).unwrap()), Some(last.to_string()));
        assert_eq!(allowed(&fs::read_to_string("/proc/thread-self/status").unwrap()), before);
    }

    #[test]
    fn cores_are_divided_among_the_ranks_that_may_use_them() {
        let (zero, one, both): (&[u8], &[u8], &[u8]) = (&[0b01], &[0b10], &[0b11]);
        assert_eq!(threads_of_rank(both, &[both]), 2.min(quota()));
        assert_eq!(threads_of_rank(both, &[both, both]), 1);
        assert_eq!(threads_of_rank(both, &[both, both, both]), 1);
        assert_eq!(threads_of_rank(zero, &[zero, one]), 1);
        let six: &[u8] = &[0b11_1111];
        assert_eq!(threads_of_rank(six, &[six, six, six]), 2.min(quota()));
    }

    #[test]
    fn the_mask_has_the_available_cores() {
        let mask = affinity_mask().unwrap();
        let mut all = available();
        all.sort_unstable();
        let found: Vec<usize> = (0..8 * MASK_BYTES).filter(|core| mask[core / 8] & (1 << (core % 8)) != 0).collect();
        assert_eq!(found, all);
    }
}
