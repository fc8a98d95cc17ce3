//! Which process gets which GPU.

use super::{Gpus, hidden};
use crate::failure::Failure;

/// A process among those of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seat {
    /// 0 to `local_world` - 1.
    pub local_rank: usize,
    /// Processes on this host.
    pub local_world: usize,
    /// Another launcher's worker: it may have given each process a GPU of its own, the only one that the process sees.
    pub foreign: bool,
    /// `--oversubscribe`: several processes may have one GPU.
    pub oversubscribe: bool,
}

/// There are fewer GPUs than processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooFew {
    processes: usize,
    gpus: usize,
}

impl Seat {
    /// One process alone.
    pub const ALONE: Self = Self { local_rank: 0, local_world: 1, foreign: false, oversubscribe: false };

    /// Whether several processes share a GPU, of `gpus` that this one sees.
    pub fn crowded(&self, gpus: usize) -> bool {
        self.oversubscribe && self.local_world > gpus
    }
}

/// The GPU of a process, among the `gpus` that it sees: the one with its local rank's number. With `--oversubscribe` ranks
/// take turns. A worker of another launcher that sees a single one has been given it (Slurm's `--gpus-per-task`); should
/// several have been given the same, they find out when they meet.
///
/// # Errors
/// There are fewer GPUs than processes.
pub fn place(seat: &Seat, gpus: usize) -> Result<usize, TooFew> {
    let Seat { local_rank, local_world, foreign, oversubscribe } = *seat;
    match gpus {
        0 => Err(TooFew { processes: local_world, gpus }),
        _ if local_world <= gpus => Ok(local_rank),
        _ if oversubscribe => Ok(local_rank % gpus),
        1 if foreign => Ok(0),
        _ => Err(TooFew { processes: local_world, gpus }),
    }
}

impl TooFew {
    /// For the user.
    pub fn failure(self, gpus: &Gpus) -> Failure {
        let Self { processes, gpus: count } = self;
        let few = if count == 1 { "there is 1 GPU".to_owned() } else { format!("there are {count} GPUs") };
        let hidden = hidden(gpus.visible.as_deref()).map(|clause| format!(" ({clause})")).unwrap_or_default();
        Failure::usage(
            format!("{processes} processes want a GPU each: {few}{hidden}"),
            format!(
                "ask for --gpus {count}; --oversubscribe lets processes share GPUs, for tests: slow, and no timing counts"
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(local_rank: usize, local_world: usize) -> Seat {
        Seat { local_rank, local_world, ..Seat::ALONE }
    }

    #[test]
    fn ranks_have_the_gpu_of_their_number() {
        for gpus in [4, 8] {
            let places: Vec<_> = (0..4).map(|rank| place(&seat(rank, 4), gpus)).collect();
            assert_eq!(places, (0..4).map(Ok).collect::<Vec<_>>(), "{gpus} GPUs");
        }
        assert_eq!(place(&Seat::ALONE, 2), Ok(0));
    }

    #[test]
    fn fewer_gpus_than_ranks_are_refused_on_every_rank() {
        for rank in 0..4 {
            assert_eq!(place(&seat(rank, 4), 2), Err(TooFew { processes: 4, gpus: 2 }));
            assert!(place(&seat(rank, 4), 0).is_err() && place(&seat(rank, 4), 1).is_err());
        }
        let gpus = Gpus { visible: Some("0,1".into()), ..Gpus::default() };
        let text = TooFew { processes: 4, gpus: 2 }.failure(&gpus).to_string();
        assert!(text.contains("4 processes") && text.contains("there are 2 GPUs"), "{text}");
        assert!(text.contains("CUDA_VISIBLE_DEVICES is `0,1`") && text.contains("--oversubscribe"), "{text}");
    }

    #[test]
    fn oversubscribed_ranks_take_turns_and_say_so() {
        let seats = (0..5).map(|rank| Seat { oversubscribe: true, ..seat(rank, 5) });
        let places: Vec<_> = seats.clone().map(|seat| place(&seat, 2).unwrap()).collect();
        assert_eq!(places, [0, 1, 0, 1, 0]);
        assert!(seats.clone().all(|seat| seat.crowded(2)) && seats.clone().all(|seat| !seat.crowded(5)));
        assert!(Seat { oversubscribe: true, ..Seat::ALONE }.crowded(0), "no GPU is never enough");
        assert!(place(&Seat { oversubscribe: true, ..seat(1, 2) }, 0).is_err());
    }

    #[test]
    fn a_foreign_worker_takes_the_only_gpu_that_it_sees() {
        let foreign = |rank| Seat { foreign: true, ..seat(rank, 4) };
        assert_eq!(place(&foreign(3), 1), Ok(0));
        assert!(place(&foreign(3), 2).is_err(), "two for four is nobody's binding");
        assert!(!foreign(3).crowded(1));
    }
}
