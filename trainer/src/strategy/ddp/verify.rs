//! Do all ranks do the same? Before training: the same job and the same model; while training: the same bits.

use models::{Network, StateKind, state};
use sha2::{Digest, Sha256};

use crate::failure::Failure;
use crate::snapshot::Snapshot;
use crate::state_file::NamedTensor;
use comm::{Communicator, Gathered};

/// Makes sure that every rank has the same lines, `key = value` by habit.
///
/// # Errors
/// Each rank that differs from rank 0, with the first line that does; the same on every rank.
fn same_lines(what: &str, lines: &[String], hint: &str, comm: &Communicator) -> Result<(), Failure> {
    let own = lines.join("\n");
    let digest: [u8; 32] = Sha256::digest(own.as_bytes()).into();
    let mut all = vec![0u8; 32 * comm.world()];
    comm.all_gather(&digest, &mut all)?;
    let others: Vec<usize> = (1..comm.world()).filter(|rank| all[rank * 32..][..32] != all[..32]).collect();
    if others.is_empty() {
        return Ok(());
    }
    // all ranks know that they differ, and now see where
    let Gathered { data, counts } = comm.all_gather_v(own.as_bytes())?;
    let mut rest = data.as_slice();
    let texts: Vec<String> = counts
        .iter()
        .map(|&count| {
            let (text, later) = rest.split_at(count);
            rest = later;
            String::from_utf8_lossy(text).into_owned()
        })
        .collect();
    let differences: Vec<String> = others.iter().map(|&rank| difference(&texts[0], rank, &texts[rank])).collect();
    let list = others.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    Err(Failure::usage(format!("rank {list}: another {what} than rank 0: {}", differences.join("; ")), hint))
}

/// The first line in which `theirs` differs from rank 0's.
fn difference(first: &str, rank: usize, theirs: &str) -> String {
    match first.lines().zip(theirs.lines()).find(|(a, b)| a != b) {
        Some((a, b)) => format!("rank 0 has {a} where rank {rank} has {b}"),
        None => format!("rank 0 has {} of them, rank {rank} has {}", first.lines().count(), theirs.lines().count()),
    }
}

/// Makes sure that every rank trains the same way on the same data. `facts` are lines, `key = value`.
///
/// # Errors
/// Names the ranks that differ, and the first fact that does.
pub fn same_job(facts: &[String], comm: &Communicator) -> Result<(), Failure> {
    same_lines("job", facts, "start every rank with the same --config, --set and data set", comm)
}

/// Makes sure that every rank has the same tensors: count, names, shapes, order, element type.
///
/// # Errors
/// Names the ranks that differ, and on those the first tensor that does.
pub(super) fn same_model(network: &Network, comm: &Communicator) -> Result<(), Failure> {
    let lines: Vec<String> =
        state::state_dict(network).iter().map(|tensor| format!("{} {:?} f32", tensor.name, tensor.shape)).collect();
    same_lines("model", &lines, "start every rank with the same program, --config and --set", comm)
}

/// Makes sure that parameters, optimizer state and weight average are the same bits on every rank; running statistics only
/// where `statistics` says that they have to be.
///
/// # Errors
/// Names the ranks that differ, and the first tensor that does.
pub(super) fn in_sync(snapshot: &Snapshot, statistics: bool, comm: &Communicator) -> Result<(), Failure> {
    let mut lines = vec![format!("optimizer step {}", snapshot.optimizer_steps)];
    let mut state = |prefix: &str, tensors: &[models::StateTensor]| {
        let kept = tensors.iter().filter(|tensor| statistics || tensor.kind == StateKind::Parameter);
        lines.extend(kept.map(|tensor| format!("{prefix}{} {:08x}", tensor.name, checksum(&tensor.values))));
    };
    state("", &snapshot.model);
    state("average of ", snapshot.ema.as_deref().unwrap_or_default());
    let slot = |tensor: &NamedTensor| format!("optimizer's {} {:08x}", tensor.name, checksum(&tensor.values));
    lines.extend(snapshot.optimizer.iter().map(slot));
    let hint = "ranks must not change weights on their own: look for faulty memory or mixed processor types, and continue \
                from the last checkpoint (--resume)";
    same_lines("state", &lines, hint, comm).map_err(|failure| Failure {
        message: format!("the ranks have drifted apart: {}", failure.message),
        code: crate::failure::FAILED,
        ..failure
    })
}

fn checksum(values: &[f32]) -> u32 {
    crc32c::crc32c(bytemuck::cast_slice(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_shown() {
        assert_eq!(difference("a = 1\nb = 2", 3, "a = 1\nb = 4"), "rank 0 has b = 2 where rank 3 has b = 4");
        assert_eq!(difference("a\nb", 1, "a"), "rank 0 has 2 of them, rank 1 has 1");
    }
}
