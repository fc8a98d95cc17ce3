//! The error for faults that kernels have reported.

use std::time::Duration;

use super::layout::{Fault, fault};
use crate::error::{CommError, ErrorKind, ranks};

/// Returns the error for a rank's `faults`. Returns `None` if an abort of the job caused the faults. `names` has the job's rank
/// of each peer, `me` is this process's rank in the job, and `limit` is the longest wait.
pub(super) fn fault_error(faults: &[Fault], names: &[usize], me: usize, limit: Duration) -> Option<CommError> {
    let of = |kind: u64| -> Vec<usize> {
        let name = |fault: &Fault| names.get(fault.peer).copied().unwrap_or(fault.peer);
        faults.iter().filter(|fault| fault.kind == kind).map(name).collect()
    };
    let (missing, differing) = (of(fault::TIMEOUT), of(fault::MISMATCH));
    let launch_of = |kind: u64| faults.iter().find(|fault| fault.kind == kind).map_or(0, |fault| fault.launch_number);
    if let Some(first) = differing.first() {
        let launch = launch_of(fault::MISMATCH);
        let text =
            format!("{} and rank {me} make different calls as launch #{launch} on their GPUs", ranks(&differing));
        let error = CommError::new(ErrorKind::Mismatch, text)
            .hint("every rank must call the same collectives in the same order, with the same lengths and types");
        return Some(error.blame(*first));
    }
    if let Some(fault) = faults.iter().find(|fault| fault.kind == fault::STALLED) {
        let text = format!(
            "launch #{}: NCCL did not finish a sum within {limit:.1?} (rank {me}'s GPU waits)",
            fault.launch_number
        );
        let error = CommError::new(ErrorKind::Timeout, text);
        return Some(error.hint("another rank is late or gone; NCCL_DEBUG=INFO makes NCCL report more"));
    }
    let (first, launch) = (missing.first()?, launch_of(fault::TIMEOUT));
    let text = format!(
        "launch #{launch} on the GPUs: {} did not arrive within {limit:.1?} (rank {me}'s GPU waits)",
        ranks(&missing)
    );
    Some(CommError::new(ErrorKind::Timeout, text).blame(*first))
}
