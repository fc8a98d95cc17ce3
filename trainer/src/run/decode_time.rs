//! When the images are decoded: once into memory, or in every epoch. All ranks of a job must do the same.

use comm::Communicator;
use data::augment::Augment;
use data::formats::DecodeTime;

use crate::config::{Decode, OnError, RunPlan};
use crate::failure::Failure;

/// Returns the time that the plan sets. Without `data.decode`, this machine's memory decides.
pub(super) fn of_this_machine(plan: &RunPlan) -> DecodeTime {
    let data = &plan.data;
    let crops = data.augment.iter().any(|step| matches!(step, Augment::RandomResizedCrop { .. }));
    match data.decode {
        Some(Decode::Memory) => DecodeTime::Memory,
        Some(Decode::Epoch) => DecodeTime::Epoch,
        // These settings need the files in every epoch.
        None if crops || data.on_error == Some(OnError::Skip) => DecodeTime::Epoch,
        // The size decides. The processes of a machine share the images, so their number does not matter.
        None => DecodeTime::by_memory(),
    }
}

/// Returns the time for all ranks: the machine with the least memory decides. All ranks call this function.
///
/// # Errors
/// A rank has left the job.
pub(super) fn agreed(plan: &RunPlan, comm: &Communicator) -> Result<DecodeTime, Failure> {
    let own = of_this_machine(plan);
    let mut all = vec![[0; 2]; comm.world_size()];
    comm.all_gather(&encode(own), all.as_flattened_mut())?;
    Ok(agree(own, &all))
}

/// Encodes a time: whether the size of the images decides, and the most bytes that are decoded into memory.
fn encode(time: DecodeTime) -> [i64; 2] {
    match time {
        DecodeTime::Epoch => [0, 0],
        DecodeTime::Memory => [0, i64::MAX],
        DecodeTime::BySize(most) => [1, i64::try_from(most).unwrap_or(i64::MAX)],
    }
}

/// Returns the time of a rank whose own is `own`. Plans that set different times are not reconciled here: the ranks compare their
/// plans later. A plan may have a time that others lack, since a resumed run records its choice; then all ranks use this time.
fn agree(own: DecodeTime, all: &[[i64; 2]]) -> DecodeTime {
    if !matches!(own, DecodeTime::BySize(_)) {
        return own;
    }
    match all.iter().find(|[by_size, _]| *by_size == 0) {
        Some([_, 0]) => DecodeTime::Epoch,
        Some(_) => DecodeTime::Memory,
        None => DecodeTime::BySize(all.iter().map(|[_, most]| most.unsigned_abs()).min().unwrap_or(u64::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_with_the_least_memory_decides() {
        let ranks = |times: &[DecodeTime]| {
            let all: Vec<_> = times.iter().map(|time| encode(*time)).collect();
            times.iter().map(|own| agree(*own, &all)).collect::<Vec<_>>()
        };
        use DecodeTime::{BySize, Epoch, Memory};
        assert_eq!(ranks(&[BySize(9), BySize(4), BySize(7)]), [BySize(4); 3]);
        assert_eq!(ranks(&[BySize(9), Epoch]), [Epoch; 2]);
        assert_eq!(ranks(&[Memory, BySize(4)]), [Memory; 2]);
        assert_eq!(ranks(&[Memory, Epoch]), [Memory, Epoch], "the comparison of the plans reports this");
    }
}
