//! When the images are decoded: once into memory, or in every epoch. All ranks of a job must do the same.

use comm::Communicator;
use data::augment::Augment;
use data::formats::DecodePolicy;

use crate::config::{Decode, OnError, RunPlan};
use crate::failure::Failure;

/// Returns the policy that the plan sets. Without `data.decode`, this machine's memory decides.
pub(super) fn of_this_machine(plan: &RunPlan) -> DecodePolicy {
    let data = &plan.data;
    let crops = data.augment.iter().any(|step| matches!(step, Augment::RandomResizedCrop { .. }));
    match data.decode {
        Some(Decode::Memory) => DecodePolicy::Memory,
        Some(Decode::Epoch) => DecodePolicy::Epoch,
        // These settings need the files in every epoch.
        None if crops || data.on_error == Some(OnError::Skip) => DecodePolicy::Epoch,
        // The size decides. The processes of a machine share the images, so their number does not matter.
        None => DecodePolicy::by_memory(),
    }
}

/// Returns the policy for all ranks: the machine with the least memory decides. All ranks call this function.
///
/// # Errors
/// A rank has left the job.
pub(super) fn agreed(plan: &RunPlan, comm: &Communicator) -> Result<DecodePolicy, Failure> {
    let own = of_this_machine(plan);
    let mut all = vec![[0; 2]; comm.world_size()];
    comm.all_gather(&encode(own), all.as_flattened_mut())?;
    Ok(agree(own, &all))
}

/// Encodes a policy as two numbers: whether the size of the images decides, and the most bytes that are decoded into memory.
fn encode(policy: DecodePolicy) -> [i64; 2] {
    match policy {
        DecodePolicy::Epoch => [0, 0],
        DecodePolicy::Memory => [0, i64::MAX],
        DecodePolicy::BySize(most) => [1, i64::try_from(most).unwrap_or(i64::MAX)],
    }
}

/// Returns the policy of a rank whose plan has the policy `own`. Plans that set different policies are not reconciled here: the
/// ranks compare their plans later. A resumed run records its choice, so one plan may set a policy that the other plans leave open.
/// Then all ranks use the policy that is set.
fn agree(own: DecodePolicy, all: &[[i64; 2]]) -> DecodePolicy {
    if !matches!(own, DecodePolicy::BySize(_)) {
        return own;
    }
    match all.iter().find(|[by_size, _]| *by_size == 0) {
        Some([_, 0]) => DecodePolicy::Epoch,
        Some(_) => DecodePolicy::Memory,
        None => DecodePolicy::BySize(all.iter().map(|[_, most]| most.unsigned_abs()).min().unwrap_or(u64::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_with_the_least_memory_decides() {
        let ranks = |policies: &[DecodePolicy]| {
            let all: Vec<_> = policies.iter().map(|policy| encode(*policy)).collect();
            policies.iter().map(|own| agree(*own, &all)).collect::<Vec<_>>()
        };
        use DecodePolicy::{BySize, Epoch, Memory};
        assert_eq!(ranks(&[BySize(9), BySize(4), BySize(7)]), [BySize(4); 3]);
        assert_eq!(ranks(&[BySize(9), Epoch]), [Epoch; 2]);
        assert_eq!(ranks(&[Memory, BySize(4)]), [Memory; 2]);
        assert_eq!(ranks(&[Memory, Epoch]), [Memory, Epoch], "the comparison of the plans reports this");
    }
}
