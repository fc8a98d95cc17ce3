//! Finds the lines that are missing in the files of a resumed run.
//!
//! The run writes its lines to the disk before it saves the checkpoint of the same steps, so a crash loses no line. A missing
//! line means that another program shortened, replaced or moved the file.

use std::collections::BTreeSet;

use crate::files::FileError;
use crate::report::{RunFolder, StepRecord, summary_csv::SummaryRow};
use crate::text::thousands;

/// Returns an error for each file that lacks lines of earlier steps or epochs. `step` and `epoch` are the next step and the next
/// epoch. The caller shows the errors as warnings, because training does not need the lines.
pub fn missing_lines(
    folder: &RunFolder,
    steps: &[StepRecord],
    rows: &[SummaryRow],
    step: u64,
    epoch: usize,
) -> Vec<FileError> {
    let mut found = Vec::new();
    let found_steps: BTreeSet<u64> = steps.iter().map(|record| record.step).collect();
    if let Some(first) = (0..step).find(|number| !found_steps.contains(number)) {
        let lost = step - found_steps.range(..step).count() as u64;
        found.push(shortened(
            folder.metrics(),
            format!(
                "{} of the {} steps before this checkpoint are missing, from step {first} on",
                thousands(lost),
                thousands(step)
            ),
        ));
    }
    // Derive the number of rows from the steps, not from `epoch`: after early stopping, `epoch` is past the last complete epoch
    let finished = steps.iter().map(|record| record.epoch).filter(|finished| *finished < epoch);
    let last = finished.chain(rows.iter().map(|row| row.epoch)).max().unwrap_or(0);
    let found_epochs: BTreeSet<usize> = rows.iter().map(|row| row.epoch).collect();
    if let Some(first) = (1..=last).find(|number| !found_epochs.contains(number)) {
        let lost = last - found_epochs.len();
        found.push(shortened(
            folder.summary_csv(),
            format!("{lost} of the {last} epochs before this checkpoint are missing, from epoch {first} on"),
        ));
    }
    found
}

fn shortened(path: std::path::PathBuf, cause: String) -> FileError {
    FileError::new(
        path,
        cause,
        "the file was shortened or replaced after the run had written it; training goes on without those lines, curves and \
         averages leave them out",
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::report::EpochRecord;

    fn steps(range: std::ops::Range<u64>) -> Vec<StepRecord> {
        range.map(|step| StepRecord { step, epoch: 1 + step as usize / 4, ..StepRecord::default() }).collect()
    }

    fn rows(epochs: &[usize]) -> Vec<SummaryRow> {
        epochs.iter().map(|&epoch| SummaryRow::from(&EpochRecord { epoch, ..EpochRecord::default() })).collect()
    }

    fn found(steps: &[StepRecord], rows: &[SummaryRow], step: u64, epoch: usize) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(root.path(), "lenet", "single", 1).unwrap();
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        let missing = missing_lines(&folder, steps, rows, step, epoch);
        missing.iter().map(|error| format!("{}: {}", name(&error.path), error.cause)).collect()
    }

    #[test]
    fn complete_files_have_no_missing_lines() {
        assert_eq!(found(&[], &[], 0, 1), [""; 0], "no step yet");
        assert_eq!(found(&steps(0..8), &rows(&[1, 2]), 8, 3), [""; 0], "between epochs");
        assert_eq!(found(&steps(0..10), &rows(&[1, 2]), 10, 3), [""; 0], "inside an epoch");
        assert_eq!(found(&steps(0..10), &rows(&[1, 2, 3]), 10, 21), [""; 0], "ended by train.max_steps");
    }

    #[test]
    fn missing_lines_are_counted() {
        let metrics = "metrics.jsonl: 3 of the 10 steps before this checkpoint are missing, from step 7 on";
        assert_eq!(found(&steps(0..7), &rows(&[1, 2]), 10, 3), [metrics]);
        let middle = [steps(0..2), steps(5..10)].concat();
        assert!(found(&middle, &rows(&[1, 2]), 10, 3)[0].contains("from step 2 on"));
        let summary = "summary.csv: 1 of the 2 epochs before this checkpoint are missing, from epoch 2 on";
        assert_eq!(found(&steps(0..10), &rows(&[1]), 10, 3), [summary]);
        assert_eq!(found(&[], &rows(&[]), 10, 3).len(), 1, "without any line, the number of epochs is not known");
    }
}
