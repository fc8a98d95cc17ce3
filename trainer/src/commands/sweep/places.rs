//! The places of a sweep. A place is a share of the cores, and one GPU in a sweep on GPUs, that one worker uses alone.

use std::process::{Child, Command};

use crate::failure::Failure;
use launch::cores::{self, AffinityGuard, CoreAssignment};

/// Environment variable with the GPUs that a process may use, as indices or UUIDs.
pub(super) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
const THREADS: &str = "RAYON_NUM_THREADS";

/// All places of a sweep, and the free ones.
#[derive(Debug)]
pub(super) struct Places {
    /// Free places, in rising order.
    free: Vec<usize>,
    cores: CoreAssignment,
    /// Index or UUID of each place's GPU, for `CUDA_VISIBLE_DEVICES`. Empty if the runs use the CPU.
    gpus: Vec<String>,
}

impl Places {
    /// Divides the cores of this machine into `count` places.
    pub(super) fn cpus(count: usize) -> Self {
        let cores = cores::assign(&cores::available(), cores::quota(), count);
        Self { free: (0..count).collect(), cores, gpus: Vec::new() }
    }

    /// Creates one place for each of `count` GPUs, with a share of the cores. `visible` is `CUDA_VISIBLE_DEVICES` of this
    /// process.
    pub(super) fn gpus(count: usize, visible: Option<&str>) -> Self {
        let named = visible.map(|list| list.split(',').map(|name| name.trim().to_owned()).collect::<Vec<_>>());
        let name =
            |place: usize| named.as_ref().and_then(|names| names.get(place).cloned()).unwrap_or(place.to_string());
        Self { gpus: (0..count).map(name).collect(), ..Self::cpus(count) }
    }

    /// Takes the first `count` free places; `None` if there are fewer.
    pub(super) fn take(&mut self, count: usize) -> Option<Vec<usize>> {
        (self.free.len() >= count).then(|| self.free.drain(..count).collect())
    }

    /// Frees places.
    pub(super) fn put_back(&mut self, places: &[usize]) {
        self.free.extend(places);
        self.free.sort_unstable();
    }

    /// Returns the environment variables of a run in these places. Does not set a variable that the user has set, except
    /// `CUDA_VISIBLE_DEVICES`.
    pub(super) fn variables(&self, places: &[usize], user_has: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if !user_has(THREADS) {
            variables.push((THREADS, self.cores.threads.to_string()));
        }
        if !self.gpus.is_empty() {
            let gpus: Vec<&str> = places.iter().map(|&place| self.gpus[place].as_str()).collect();
            variables.push((VISIBLE, gpus.join(",")));
        }
        variables
    }

    /// Starts a run in these places. The run can use only the cores and GPUs of these places. `spawn` starts the process, which
    /// inherits the core affinity of this thread.
    ///
    /// # Errors
    /// `spawn` fails.
    pub(super) fn start(
        &self,
        places: &[usize],
        command: &mut Command,
        spawn: impl FnOnce(&mut Command) -> Result<Child, Failure>,
    ) -> Result<Child, Failure> {
        command.envs(self.variables(places, |name| std::env::var_os(name).is_some()));
        let cores: Option<Vec<usize>> =
            self.cores.cores.as_ref().map(|all| places.iter().flat_map(|&place| all[place].iter().copied()).collect());
        let _limited = AffinityGuard::new(cores.as_ref());
        spawn(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_gets_free_places_and_gives_them_back() {
        let mut places = Places::cpus(5);
        assert_eq!((places.take(2), places.take(2)), (Some(vec![0, 1]), Some(vec![2, 3])));
        assert_eq!(places.take(2), None, "one is left");
        places.put_back(&[0, 1]);
        assert_eq!(places.take(3), Some(vec![0, 1, 4]));
    }

    #[test]
    fn a_run_sees_the_gpus_of_its_places_only() {
        let visible = |gpus: Option<&str>, own: &[usize]| {
            let variables = Places::gpus(4, gpus).variables(own, |_| true);
            variables.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        assert_eq!(visible(None, &[1]), ["CUDA_VISIBLE_DEVICES=1"]);
        assert_eq!(visible(None, &[2, 3]), ["CUDA_VISIBLE_DEVICES=2,3"]);
        // The GPU indices of CUDA_VISIBLE_DEVICES in this process, not indices from 0
        assert_eq!(visible(Some("4, 5,GPU-a,7"), &[0, 2]), ["CUDA_VISIBLE_DEVICES=4,GPU-a"]);
        let threads = Places::cpus(1).variables(&[0], |_| false);
        assert_eq!(threads[0].0, "RAYON_NUM_THREADS");
        assert!(Places::cpus(1).variables(&[0], |_| true).is_empty(), "the user's number takes precedence");
    }
}
