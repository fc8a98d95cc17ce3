//! Assigns GPUs to processes.

use super::{Gpus, visible_devices_note};
use crate::failure::Failure;

/// The position of a process among the processes of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRank {
    /// 0 to `local_world_size` - 1.
    pub local_rank: usize,
    /// Processes on this host.
    pub local_world_size: usize,
    /// Another launcher started this worker. That launcher may have made only one GPU visible to each process.
    pub other_launcher: bool,
    /// `--oversubscribe`: several processes may share a GPU.
    pub oversubscribe: bool,
}

/// The error that there are fewer GPUs than processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooFewGpus {
    processes: usize,
    gpus: usize,
}

impl LocalRank {
    /// A single process.
    pub const ALONE: Self = Self { local_rank: 0, local_world_size: 1, other_launcher: false, oversubscribe: false };

    /// Returns whether several processes share a GPU. `gpus`: the number of GPUs that this process sees.
    pub fn oversubscribed(&self, gpus: usize) -> bool {
        self.oversubscribe && self.local_world_size > gpus
    }
}

/// Returns the index of a process's GPU among the `gpus` that the process sees: its local rank. With `--oversubscribe`, ranks
/// take the GPUs in turn. A worker of another launcher that sees a single GPU takes that GPU, because the launcher has assigned
/// it (Slurm's `--gpus-per-task`). If a launcher assigned the same GPU to several workers, `ranks::check_gpus_unique` detects that
/// after the ranks have joined.
///
/// # Errors
/// There are fewer GPUs than processes.
pub fn gpu_index(local_rank: &LocalRank, gpus: usize) -> Result<usize, TooFewGpus> {
    let LocalRank { local_rank, local_world_size, other_launcher, oversubscribe } = *local_rank;
    match gpus {
        0 => Err(TooFewGpus { processes: local_world_size, gpus }),
        _ if local_world_size <= gpus => Ok(local_rank),
        _ if oversubscribe => Ok(local_rank % gpus),
        1 if other_launcher => Ok(0),
        _ => Err(TooFewGpus { processes: local_world_size, gpus }),
    }
}

impl TooFewGpus {
    /// Returns the error message for the user.
    pub fn failure(self, gpus: &Gpus) -> Failure {
        let Self { processes, gpus: count } = self;
        let few = if count == 1 { "there is 1 GPU".to_owned() } else { format!("there are {count} GPUs") };
        let hidden =
            visible_devices_note(gpus.visible.as_deref()).map(|clause| format!(" ({clause})")).unwrap_or_default();
        Failure::usage(
            format!("{processes} processes need one GPU each: {few}{hidden}"),
            format!(
                "ask for --gpus {count}; --oversubscribe lets processes share GPUs, for tests: slow, and no timing counts"
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local_rank(local_rank: usize, local_world_size: usize) -> LocalRank {
        LocalRank { local_rank, local_world_size, ..LocalRank::ALONE }
    }

    #[test]
    fn local_rank_r_has_gpu_r() {
        for gpus in [4, 8] {
            let indices: Vec<_> = (0..4).map(|rank| gpu_index(&local_rank(rank, 4), gpus)).collect();
            assert_eq!(indices, (0..4).map(Ok).collect::<Vec<_>>(), "{gpus} GPUs");
        }
        assert_eq!(gpu_index(&LocalRank::ALONE, 2), Ok(0));
    }

    #[test]
    fn fewer_gpus_than_ranks_are_refused_on_every_rank() {
        for rank in 0..4 {
            assert_eq!(gpu_index(&local_rank(rank, 4), 2), Err(TooFewGpus { processes: 4, gpus: 2 }));
            assert!(gpu_index(&local_rank(rank, 4), 0).is_err() && gpu_index(&local_rank(rank, 4), 1).is_err());
        }
        let gpus = Gpus { visible: Some("0,1".into()), ..Gpus::default() };
        let text = TooFewGpus { processes: 4, gpus: 2 }.failure(&gpus).to_string();
        assert!(text.contains("4 processes") && text.contains("there are 2 GPUs"), "{text}");
        assert!(text.contains("CUDA_VISIBLE_DEVICES is `0,1`") && text.contains("--oversubscribe"), "{text}");
    }

    #[test]
    fn with_oversubscribe_ranks_take_the_gpus_in_turn() {
        let ranks = (0..5).map(|rank| LocalRank { oversubscribe: true, ..local_rank(rank, 5) });
        let indices: Vec<_> = ranks.clone().map(|local_rank| gpu_index(&local_rank, 2).unwrap()).collect();
        assert_eq!(indices, [0, 1, 0, 1, 0]);
        assert!(
            ranks.clone().all(|local_rank| local_rank.oversubscribed(2))
                && ranks.clone().all(|local_rank| !local_rank.oversubscribed(5))
        );
        assert!(LocalRank { oversubscribe: true, ..LocalRank::ALONE }.oversubscribed(0), "no GPU is never enough");
        assert!(gpu_index(&LocalRank { oversubscribe: true, ..local_rank(1, 2) }, 0).is_err());
    }

    #[test]
    fn a_worker_of_another_launcher_takes_the_only_gpu_that_it_sees() {
        let other_launcher = |rank| LocalRank { other_launcher: true, ..local_rank(rank, 4) };
        assert_eq!(gpu_index(&other_launcher(3), 1), Ok(0));
        assert!(gpu_index(&other_launcher(3), 2).is_err(), "a launcher that binds GPUs shows one to each process");
        assert!(!other_launcher(3).oversubscribed(1));
    }
}
