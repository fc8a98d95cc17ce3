//! The accuracy table: the published accuracy of each model, and the accuracy of the runs.
//!
//! A run counts by its best evaluation on the test set, as the published values do. Runs of one recipe, device and number of
//! epochs share one row with mean and deviation. `read.rs` lists the settings that are not part of a recipe, such as the seed.

mod read;
mod render;
mod save;

pub use read::{FoundRuns, RunRecord, read_runs, weights_name};
pub use render::{markdown, text};
pub use save::save;

use serde::Serialize;

/// The data set of the published accuracies.
const PUBLISHED_DATASET: &str = "cifar10";

/// A row of the table. `--json` prints an array of rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AccuracyRow {
    /// The registry's name of the model.
    pub model: String,
    /// Data set; with `, part` if only some of its images were trained on or tested.
    pub dataset: String,
    /// Published test accuracy in percent.
    pub published_top1: Option<f64>,
    /// Best test accuracy in percent, mean over the runs; `None` without a run.
    pub top1: Option<f64>,
    /// Sample standard deviation of `top1`; `None` with fewer than two runs.
    pub deviation: Option<f64>,
    /// Test accuracy of the last epoch in percent, mean over the runs; `None` for runs with a validation split.
    pub last_top1: Option<f64>,
    /// Test accuracy with test-time augmentation in percent, of the evaluations of `top1`, mean over the runs; `None` if a run has
    /// none.
    pub tta_top1: Option<f64>,
    /// Number of runs.
    pub runs: usize,
    /// Number of complete epochs of the run with the fewest.
    pub epochs: Option<usize>,
    /// Number of planned epochs.
    pub planned_epochs: Option<usize>,
    /// Name of the run or file whose weights the runs started from.
    pub weights: Option<String>,
    /// Device and strategy, as readable text.
    pub device: Option<String>,
    /// Mean wall-clock minutes per run.
    pub minutes: Option<f64>,
    /// Commits that started the runs, each once. Runs outside a checkout have no commit.
    pub commits: Vec<String>,
    /// Names of the run folders.
    pub folders: Vec<String>,
}

/// A model of the table with its published accuracy in percent.
pub type Published<'a> = (&'a str, Option<f64>);

/// Returns the rows of the table. The published models come first, in the given order, with or without runs. Unpublished
/// models and other data sets follow if there are runs of them.
pub fn rows(published: &[Published], runs: &[RunRecord]) -> Vec<AccuracyRow> {
    let mut groups: Vec<Vec<&RunRecord>> = Vec::new();
    for run in runs {
        match groups.iter_mut().find(|group| group[0].repeats(run)) {
            Some(group) => group.push(run),
            None => groups.push(vec![run]),
        }
    }
    let mut rows: Vec<AccuracyRow> = groups.iter().map(|group| row(group, published)).collect();
    for (model, value) in published.iter().filter(|(_, value)| value.is_some()) {
        if !rows.iter().any(|row| row.model == *model && row.dataset == PUBLISHED_DATASET) {
            rows.push(AccuracyRow::without_run(model, *value));
        }
    }
    let place = |row: &AccuracyRow| published.iter().position(|(model, _)| *model == row.model).unwrap_or(usize::MAX);
    rows.sort_by(|a, b| {
        let key =
            |row: &AccuracyRow| (row.dataset != PUBLISHED_DATASET, row.dataset.clone(), place(row), row.model.clone());
        key(a).cmp(&key(b)).then(b.top1.unwrap_or(0.0).total_cmp(&a.top1.unwrap_or(0.0)))
    });
    rows
}

impl AccuracyRow {
    fn without_run(model: &str, published_top1: Option<f64>) -> Self {
        Self {
            model: model.to_owned(),
            dataset: PUBLISHED_DATASET.to_owned(),
            published_top1,
            top1: None,
            deviation: None,
            last_top1: None,
            tta_top1: None,
            runs: 0,
            epochs: None,
            planned_epochs: None,
            weights: None,
            device: None,
            minutes: None,
            commits: Vec::new(),
            folders: Vec::new(),
        }
    }
}

/// Returns the row of a group of runs that differ only by chance. `group` has at least one run.
fn row(group: &[&RunRecord], published: &[Published]) -> AccuracyRow {
    let first = group[0];
    let n = group.len() as f64;
    let mean = |value: fn(&RunRecord) -> f64| group.iter().map(|run| value(run)).sum::<f64>() / n;
    let top1 = mean(|run| run.top1);
    let deviation =
        (group.len() > 1).then(|| (group.iter().map(|run| (run.top1 - top1).powi(2)).sum::<f64>() / (n - 1.0)).sqrt());
    let published_top1 = published
        .iter()
        .find(|(model, _)| *model == first.model && first.dataset == PUBLISHED_DATASET)
        .and_then(|(_, value)| *value);
    let mut commits: Vec<String> = Vec::new();
    for commit in group.iter().filter_map(|run| run.commit.as_ref()) {
        if !commits.contains(commit) {
            commits.push(commit.clone());
        }
    }
    AccuracyRow {
        model: first.model.clone(),
        dataset: first.dataset.clone(),
        published_top1,
        top1: Some(top1),
        deviation,
        last_top1: group.iter().map(|run| run.last_top1).sum::<Option<f64>>().map(|sum| sum / n),
        tta_top1: group.iter().map(|run| run.tta_top1).sum::<Option<f64>>().map(|sum| sum / n),
        runs: group.len(),
        epochs: group.iter().map(|run| run.epochs).min(),
        planned_epochs: Some(first.planned_epochs),
        weights: first.weights.clone(),
        device: Some(first.device.clone()),
        minutes: Some(mean(|run| run.seconds) / 60.0),
        commits,
        folders: group.iter().map(|run| run.name.clone()).collect(),
    }
}

#[cfg(test)]
mod tests;
