//! The end of a training run: the statistics of all ranks, the summary and the exit code.

use std::path::Path;

use crate::config::BestBy;
use crate::console;
use crate::device;
use crate::engine::RunOutcome;
use crate::failure::{Failure, exit_code_of_signal};
use crate::report::{AveragePrecision, Confusion, Reporter, RunSummary};
use crate::strategy::{EvalCounts, Strategy};
use crate::text::thousands;
use crate::timeline::Timeline;
use launch::signals;

/// The statistics of all ranks at the end of a run.
pub(super) struct RankStats {
    /// Peak memory of each rank's process in bytes.
    pub peak_bytes: Vec<u64>,
    /// Memory taken by each device in bytes, rank after rank.
    pub device_bytes: Vec<u64>,
    /// Number of replaced damaged images, summed over all ranks.
    pub replaced: u64,
    /// Each rank's part of the timeline; empty if the timeline is off.
    pub timelines: Vec<Vec<u8>>,
}

/// Gathers every rank's statistics on all ranks. `replaced` is the number of replaced damaged images on this rank.
///
/// # Errors
/// A rank has left the job.
pub(super) fn gather_rank_stats(
    strategy: &dyn Strategy,
    timeline: &Timeline,
    replaced: u64,
) -> Result<RankStats, Failure> {
    let peaks = strategy.all_gather(&device::peak_bytes().unwrap_or(0).to_le_bytes())?;
    let number = |bytes: &Vec<u8>| bytes.as_slice().try_into().map_or(0, u64::from_le_bytes);
    let replaced = strategy.all_gather(&replaced.to_le_bytes())?.iter().map(number).sum();
    let held: Vec<u8> = strategy.device_bytes().iter().flat_map(|bytes| bytes.to_le_bytes()).collect();
    let held = strategy.all_gather(&held)?;
    let device_bytes =
        held.iter().flat_map(|bytes| bytes.chunks_exact(8).map(|bytes| number(&bytes.to_vec()))).collect();
    let timelines = if timeline.is_on() { strategy.all_gather(&timeline.part(strategy.rank()))? } else { Vec::new() };
    Ok(RankStats { peak_bytes: peaks.iter().map(number).collect(), device_bytes, replaced, timelines })
}

/// Returns the results by class: the confusion matrix, or each class's average precision for multi-label images.
pub(crate) fn by_class(classes: Vec<String>, counts: EvalCounts) -> (Option<Confusion>, Option<AveragePrecision>) {
    let Some(scores) = counts.scores else { return (Some(Confusion { classes, counts: counts.confusion }), None) };
    let average_precision =
        scores.average_precision().into_iter().map(|one| one.map(|precision| 100.0 * precision)).collect();
    (None, Some(AveragePrecision { classes, images: scores.images_per_class(), average_precision }))
}

/// How the run can be continued.
pub(super) struct Continuation {
    /// The command that continues the run.
    pub command: String,
    /// The `train.max_time_s` with which a run continues whose time is over.
    pub max_time_s: usize,
}

/// Prints and writes the summary, and returns the exit code. `best_by` is the metric that early stopping used.
pub(super) fn finish(
    reporter: &mut Reporter,
    mut summary: RunSummary,
    outcome: RunOutcome,
    classes: Vec<String>,
    best_by: BestBy,
    Continuation { command, max_time_s }: &Continuation,
) -> Result<u8, Failure> {
    match outcome {
        RunOutcome::Finished(counts) => {
            (summary.confusion, summary.average_precision) = by_class(classes, counts);
            reporter.finish(&summary)?;
            Ok(0)
        }
        RunOutcome::StoppedEarly { counts, epoch, best } => {
            (summary.confusion, summary.average_precision) = by_class(classes, counts);
            let what = match best_by {
                BestBy::Accuracy if summary.confusion.is_some() => "top-1",
                BestBy::Accuracy => "exact match",
                BestBy::BalancedAccuracy => "balanced accuracy",
                BestBy::MeanAveragePrecision => "mean average precision",
                BestBy::Loss => "loss",
            };
            summary.note =
                Some(format!("stopped after epoch {epoch}: no better {what} since epoch {best} (train.patience)"));
            reporter.finish(&summary)?;
            Ok(0)
        }
        RunOutcome::OutOfTime { counts, step } => {
            (summary.confusion, summary.average_precision) = by_class(classes, counts);
            summary.note = Some(format!(
                "stopped after step {}: train.max_time_s is over; continue with: {command} --set train.max_time_s={max_time_s}",
                thousands(step)
            ));
            reporter.finish(&summary)?;
            Ok(0)
        }
        RunOutcome::Interrupted { signal, step } => {
            summary.interrupted = Some(format!("{} after step {}", signals::name(signal), thousands(step)));
            if steps_of_result(&reporter.folder().summary_json()) == Some(step) {
                // The weights are those of the earlier result, which may be that of a complete run.
                reporter.finish_without_result(&summary)?;
                console::eprint("note: summary.json keeps the earlier result, which is of the same steps");
            } else {
                reporter.finish(&summary)?;
            }
            console::print(format_args!("checkpoint saved; continue with: {command}"));
            Ok(exit_code_of_signal(signal))
        }
    }
}

/// Returns the number of steps of an earlier session's `summary.json`. Returns `None` if there is none, if it cannot be read, or if
/// that session was interrupted: then this session may have evaluated more.
fn steps_of_result(path: &Path) -> Option<u64> {
    let (file, _) = data::open_regular(path).ok()?;
    let result: serde_json::Value = serde_json::from_reader(std::io::BufReader::new(file)).ok()?;
    result["steps"].as_u64().filter(|_| result["interrupted"].is_null())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::report::{ReporterOptions, RunFolder};

    #[test]
    fn an_interrupted_session_without_a_step_keeps_the_result_of_a_complete_one() {
        let root = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(root.path(), "lenet", "single", 1).unwrap();
        let options = ReporterOptions {
            epochs: 1,
            steps_per_epoch: 9,
            pixel_shares: Vec::new(),
            every: 0,
            tensorboard: false,
            quiet: true,
            multi_label: false,
            device: "cpu".to_owned(),
        };
        let mut reporter = Reporter::new(folder.clone(), options, &[]).unwrap();
        let mut end = |outcome, steps| {
            let continuation = Continuation { command: String::new(), max_time_s: 0 };
            let classes = vec!["cat".to_owned(), "dog".to_owned()];
            let summary = RunSummary { steps, ..RunSummary::default() };
            finish(&mut reporter, summary, outcome, classes, BestBy::Accuracy, &continuation).unwrap();
            fs::read_to_string(folder.summary_json()).unwrap()
        };
        let interrupted = |step| RunOutcome::Interrupted { signal: 2, step };
        let first = end(interrupted(8), 8);
        assert!(first.contains("SIGINT after step 8"), "there is no earlier result: {first}");
        let complete = end(RunOutcome::Finished(EvalCounts::new(2)), 9);
        assert_eq!(end(interrupted(9), 9), complete);
        assert!(end(interrupted(10), 10).contains("SIGINT after step 10"));
    }
}
