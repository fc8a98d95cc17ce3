//! The slots of a sweep. One worker uses a slot alone. A slot is a share of the cores; in a sweep on GPUs, it also has one GPU.

use std::process::{Child, Command};

use crate::failure::Failure;
use launch::cores::{self, AffinityGuard, CoreAssignment, RAYON_NUM_THREADS};

/// Environment variable with the GPUs that a process may use, as indices or UUIDs.
pub(super) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// All slots of a sweep, and the free ones.
#[derive(Debug)]
pub(super) struct DeviceSlots {
    /// Free slots, in rising order.
    free: Vec<usize>,
    cores: CoreAssignment,
    /// Index or UUID of each slot's GPU, for `CUDA_VISIBLE_DEVICES`. Empty if the runs use the CPU.
    gpus: Vec<String>,
}

impl DeviceSlots {
    /// Divides the cores of this machine into `count` slots.
    pub(super) fn cpus(count: usize) -> Self {
        let cores = cores::assign(&cores::available(), cores::quota(), count);
        Self { free: (0..count).collect(), cores, gpus: Vec::new() }
    }

    /// Creates one slot for each of `count` GPUs, with a share of the cores. `visible` is `CUDA_VISIBLE_DEVICES` of this
    /// process.
    pub(super) fn gpus(count: usize, visible: Option<&str>) -> Self {
        let named = visible.map(|list| list.split(',').map(|name| name.trim().to_owned()).collect::<Vec<_>>());
        let name = |slot: usize| named.as_ref().and_then(|names| names.get(slot).cloned()).unwrap_or(slot.to_string());
        Self { gpus: (0..count).map(name).collect(), ..Self::cpus(count) }
    }

    /// Takes the first `count` free slots; `None` if there are fewer.
    pub(super) fn take(&mut self, count: usize) -> Option<Vec<usize>> {
        (self.free.len() >= count).then(|| self.free.drain(..count).collect())
    }

    /// Frees slots.
    pub(super) fn put_back(&mut self, slots: &[usize]) {
        self.free.extend(slots);
        self.free.sort_unstable();
    }

    /// Returns the environment variables of a run in these slots. Does not set a variable that the user has set, except
    /// `CUDA_VISIBLE_DEVICES`.
    pub(super) fn variables(&self, slots: &[usize], user_has: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if !user_has(RAYON_NUM_THREADS) {
            variables.push((RAYON_NUM_THREADS, self.cores.threads.to_string()));
        }
        if !self.gpus.is_empty() {
            let gpus: Vec<&str> = slots.iter().map(|&slot| self.gpus[slot].as_str()).collect();
            variables.push((VISIBLE, gpus.join(",")));
        }
        variables
    }

    /// Starts a run in these slots. The run can use only the cores and GPUs of these slots. `spawn` starts the process, which
    /// inherits the core affinity of this thread.
    ///
    /// # Errors
    /// `spawn` fails.
    pub(super) fn start(
        &self,
        slots: &[usize],
        command: &mut Command,
        spawn: impl FnOnce(&mut Command) -> Result<Child, Failure>,
    ) -> Result<Child, Failure> {
        command.envs(self.variables(slots, |name| std::env::var_os(name).is_some()));
        let cores: Option<Vec<usize>> =
            self.cores.cores.as_ref().map(|all| slots.iter().flat_map(|&slot| all[slot].iter().copied()).collect());
        let _limited = AffinityGuard::new(cores.as_ref());
        spawn(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_gets_free_slots_and_gives_them_back() {
        let mut slots = DeviceSlots::cpus(5);
        assert_eq!((slots.take(2), slots.take(2)), (Some(vec![0, 1]), Some(vec![2, 3])));
        assert_eq!(slots.take(2), None, "one is left");
        slots.put_back(&[0, 1]);
        assert_eq!(slots.take(3), Some(vec![0, 1, 4]));
    }

    #[test]
    fn a_run_sees_the_gpus_of_its_slots_only() {
        let visible = |gpus: Option<&str>, own: &[usize]| {
            let variables = DeviceSlots::gpus(4, gpus).variables(own, |_| true);
            variables.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        assert_eq!(visible(None, &[1]), ["CUDA_VISIBLE_DEVICES=1"]);
        assert_eq!(visible(None, &[2, 3]), ["CUDA_VISIBLE_DEVICES=2,3"]);
        // The GPU indices of CUDA_VISIBLE_DEVICES in this process, not indices from 0
        assert_eq!(visible(Some("4, 5,GPU-a,7"), &[0, 2]), ["CUDA_VISIBLE_DEVICES=4,GPU-a"]);
        let threads = DeviceSlots::cpus(1).variables(&[0], |_| false);
        assert_eq!(threads[0].0, "RAYON_NUM_THREADS");
        assert!(DeviceSlots::cpus(1).variables(&[0], |_| true).is_empty(), "the user's number takes precedence");
    }
}
