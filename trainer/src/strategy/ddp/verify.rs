//! Checks that all ranks agree. Before training: on the job and the model. During training: on the bits of the state, and on the
//! parameters that are used.

use models::{Network, ParameterInfo, StateKind, state};
use sha2::{Digest, Sha256};

use crate::console;
use crate::failure::Failure;
use crate::snapshot::Snapshot;
use crate::state_file::NamedTensor;
use comm::Communicator;

/// Checks that every rank has the same lines, usually `key = value`.
///
/// # Errors
/// Names each rank that differs from rank 0, with the first different line. The error is the same on every rank.
fn check_same_lines(what: &str, lines: &[String], hint: &str, comm: &Communicator) -> Result<(), Failure> {
    let own = lines.join("\n");
    let digest: [u8; 32] = Sha256::digest(own.as_bytes()).into();
    let mut all = vec![0u8; 32 * comm.world_size()];
    comm.all_gather(&digest, &mut all)?;
    let others: Vec<usize> = (1..comm.world_size()).filter(|rank| all[rank * 32..][..32] != all[..32]).collect();
    if others.is_empty() {
        return Ok(());
    }
    // All ranks know now that the texts differ. Exchange the texts to find the differences.
    let gathered = comm.all_gather_v(own.as_bytes())?;
    let texts: Vec<String> = gathered.parts().map(|text| String::from_utf8_lossy(text).into_owned()).collect();
    let differences: Vec<String> = others.iter().map(|&rank| difference(&texts[0], rank, &texts[rank])).collect();
    let list = others.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    Err(Failure::usage(format!("rank {list}: another {what} than rank 0: {}", differences.join("; ")), hint))
}

/// Describes the first line in which `theirs` differs from rank 0's text `first`. If the lines are `key = value`, one of the texts
/// may lack the key.
fn difference(first: &str, rank: usize, theirs: &str) -> String {
    let key = |line: &str| line.split_once(" = ").map(|(key, _)| key.to_owned());
    let lacks = |text: &str, wanted: &str| !text.lines().any(|line| key(line).is_some_and(|key| key == wanted));
    match first.lines().zip(theirs.lines()).find(|(a, b)| a != b) {
        Some((a, _)) if key(a).is_some_and(|key| lacks(theirs, &key)) => {
            format!("rank 0 has {a}, and rank {rank} has no {}", key(a).unwrap_or_default())
        }
        Some((_, b)) if key(b).is_some_and(|key| lacks(first, &key)) => {
            format!("rank {rank} has {b}, and rank 0 has no {}", key(b).unwrap_or_default())
        }
        Some((a, b)) => format!("rank 0 has {a} where rank {rank} has {b}"),
        None => format!("rank 0 has {} of them, rank {rank} has {}", first.lines().count(), theirs.lines().count()),
    }
}

/// Checks that every rank trains with the same settings on the same data. `facts` are lines, `key = value`.
///
/// # Errors
/// Names the ranks that differ and their first different fact.
pub fn check_same_job(facts: &[String], comm: &Communicator) -> Result<(), Failure> {
    check_same_lines("job", facts, "start every rank with the same --config, --set and data set", comm)
}

/// Separates exit code, permanence, cause and hint of a failure in the text that is sent to the other ranks.
const SEPARATOR: char = '\0';

/// Returns `result` if every rank has succeeded. All ranks call this function together, after work that may fail on some of them.
/// So either all ranks continue, or all ranks return the same failure.
///
/// # Errors
/// The failure of the lowest rank that failed, on every rank. Or a rank is gone.
pub fn succeed_together<T>(result: Result<T, Failure>, comm: &Communicator) -> Result<T, Failure> {
    let text = result.as_ref().err().map_or_else(String::new, |Failure { code, message, hint, is_permanent }| {
        let hint = hint.as_deref().unwrap_or_default();
        format!("{code}{SEPARATOR}{is_permanent}{SEPARATOR}{message}{SEPARATOR}{hint}")
    });
    let Some((_, text)) = comm.first_failure(&text)? else { return result };
    let mut parts = text.splitn(4, SEPARATOR);
    let code = parts.next().and_then(|code| code.parse().ok()).unwrap_or(crate::failure::FAILED);
    let is_permanent = parts.next() == Some("true");
    let [message, hint] = [parts.next(), parts.next()].map(|part| part.unwrap_or_default().to_owned());
    Err(Failure { code, message, hint: (!hint.is_empty()).then_some(hint), is_permanent })
}

/// Checks that every rank has the same tensors: number, names, shapes, order, element type
/// (`_verify_param_shape_across_processes` of `DistributedDataParallel`).
///
/// # Errors
/// Names the ranks that differ and their first different tensor.
pub(super) fn check_same_model(network: &Network, comm: &Communicator) -> Result<(), Failure> {
    let lines: Vec<String> =
        state::state_dict(network).iter().map(|tensor| format!("{} {:?} f32", tensor.name, tensor.shape)).collect();
    check_same_lines("model", &lines, "start every rank with the same program, --config and --set", comm)
}

/// Whether the ranks must have the same running statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunningStatistics {
    /// All ranks compute the same statistics (`parallel.batch_norm = "sync"`).
    EqualOnAllRanks,
    /// Each rank has the statistics of its own samples.
    PerRank,
}

/// Checks that parameters, optimizer state and weight average have the same bits on every rank. Also compares the running
/// statistics if they must be equal.
///
/// # Errors
/// Names the ranks that differ and their first different tensor.
pub(super) fn check_in_sync(
    snapshot: &Snapshot,
    statistics: RunningStatistics,
    comm: &Communicator,
) -> Result<(), Failure> {
    let mut lines = vec![format!("optimizer step {}", snapshot.optimizer_steps)];
    let mut state = |prefix: &str, tensors: &[models::StateTensor]| {
        let is_compared = |tensor: &&models::StateTensor| {
            tensor.kind != StateKind::Buffer || statistics == RunningStatistics::EqualOnAllRanks
        };
        lines.extend(
            tensors
                .iter()
                .filter(is_compared)
                .map(|tensor| format!("{prefix}{} {:08x}", tensor.name, checksum(&tensor.values))),
        );
    };
    state("", &snapshot.model);
    state("average of ", snapshot.ema.as_deref().unwrap_or_default());
    let slot = |tensor: &NamedTensor| format!("optimizer's {} {:08x}", tensor.name, checksum(&tensor.values));
    lines.extend(snapshot.optimizer.iter().map(slot));
    let hint = "ranks must not change weights on their own: look for faulty memory or mixed processor types, and continue \
                from the last checkpoint (--resume)";
    check_same_lines("state", &lines, hint, comm).map_err(|failure| Failure {
        message: format!("the ranks have drifted apart: {}", failure.message),
        code: crate::failure::FAILED,
        ..failure
    })
}

fn checksum(values: &[f32]) -> u32 {
    crc32c::crc32c(bytemuck::cast_slice(values))
}

/// Warns about parameters that a step did not use (`find_unused_parameters=True` of `DistributedDataParallel`). Warns again
/// when the set of these parameters changes.
#[derive(Debug, Default)]
pub(super) struct UnusedParameterWarning {
    last: Option<String>,
}

impl UnusedParameterWarning {
    /// Warns on rank 0's standard error. `rank` is the rank that calls. `used[rank][parameter]` is 0 if the rank's backward pass
    /// did not reach the parameter.
    pub(super) fn warn(&mut self, rank: usize, step: u64, used: &[&[u8]], parameters: &[ParameterInfo]) {
        let text = describe_unused(used, parameters);
        if self.last.as_ref() == Some(&text) {
            return;
        }
        if rank == 0 {
            console::eprint(format_args!("warning: step {step}: {text}"));
        }
        self.last = Some(text);
    }
}

fn describe_unused(used: &[&[u8]], parameters: &[ParameterInfo]) -> String {
    let names = |unused: &dyn Fn(usize) -> bool| -> Vec<&str> {
        (0..parameters.len()).filter(|&i| unused(i)).map(|i| parameters[i].name.as_str()).collect()
    };
    let by_no_rank = |index: usize| used.iter().all(|used| used[index] == 0);
    let mut lines = Vec::new();
    let unused = names(&by_no_rank);
    if !unused.is_empty() {
        lines.push(format!("no rank used {}: the optimizer does not update unused parameters", list(&unused)));
    }
    for (rank, used) in used.iter().enumerate() {
        let here = names(&|index| used[index] == 0 && !by_no_rank(index));
        if !here.is_empty() {
            lines.push(format!(
                "rank {rank} did not use {}: rank {rank} contributes zeros to these gradients",
                list(&here)
            ));
        }
    }
    lines.join("; ")
}

fn list(names: &[&str]) -> String {
    const SHOWN: usize = 8;
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use burn::module::ParamId;

    use super::*;

    #[test]
    fn the_first_different_line_is_described() {
        assert_eq!(difference("a = 1\nb = 2", 3, "a = 1\nb = 4"), "rank 0 has b = 2 where rank 3 has b = 4");
        assert_eq!(difference("a\nb", 1, "a"), "rank 0 has 2 of them, rank 1 has 1");
        assert_eq!(difference("a = 1\nb = 2\nc = 3", 1, "a = 1\nc = 3"), "rank 0 has b = 2, and rank 1 has no b");
        assert_eq!(difference("a = 1\nc = 3", 1, "a = 1\nb = 2\nc = 3"), "rank 1 has b = 2, and rank 0 has no b");
    }

    #[test]
    fn unused_parameters_are_named_by_rank() {
        let parameters: Vec<_> = ["a", "b", "c"]
            .map(|name| ParameterInfo { name: name.into(), shape: vec![1], id: ParamId::new(), of_norm: false })
            .into();
        let text = describe_unused(&[&[1, 0, 0], &[1, 0, 1]], &parameters);
        assert_eq!(
            text,
            "no rank used `b`: the optimizer does not update unused parameters; rank 0 did not use `c`: rank 0 contributes \
             zeros to these gradients"
        );
    }
}
