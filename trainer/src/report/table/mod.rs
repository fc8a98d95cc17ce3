//! The accuracy table: what each model is published with, and what the runs at hand reached.
//!
//! A run counts by its best evaluation on the test set, as the published values do. Runs that differ in their seed alone
//! are one row with mean and deviation; any other difference, also the device's, makes rows of their own.

mod read;
mod render;
mod save;

pub use read::{Found, RunRecord, read_runs};
pub use render::{markdown, text};
pub use save::save;

use serde::Serialize;

/// The data set that the published accuracies are for.
const PUBLISHED_FOR: &str = "cifar10";

/// A line of the table; `--json` prints an array of them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The registry's name of the model.
    pub model: String,
    /// Data set; `, part` where only some of its images were used.
    pub dataset: String,
    /// Published test accuracy in percent.
    pub published_top1: Option<f64>,
    /// Mean over the runs of the best test accuracy in percent; none without a run.
    pub top1: Option<f64>,
    /// Sample standard deviation of it; none below two runs.
    pub deviation: Option<f64>,
    /// Mean over the runs of the last epoch's test accuracy in percent.
    pub last_top1: Option<f64>,
    /// Number of runs.
    pub runs: usize,
    /// Epochs that are complete, of the run with the fewest.
    pub epochs: Option<usize>,
    /// Epochs that were asked for.
    pub planned_epochs: Option<usize>,
    /// Device and strategy in words.
    pub device: Option<String>,
    /// Mean wall-clock minutes of a run.
    pub minutes: Option<f64>,
    /// Commits that the runs were started from, each once; runs outside a checkout have none.
    pub commits: Vec<String>,
    /// Names of the run folders.
    pub folders: Vec<String>,
}

/// A model of the table with its published accuracy in percent.
pub type Published<'a> = (&'a str, Option<f64>);

/// Puts the table together: the published models in the order given, each with its runs or without; then unpublished
/// models and other data sets, where there are runs of them.
pub fn rows(published: &[Published], runs: &[RunRecord]) -> Vec<Row> {
    let mut groups: Vec<Vec<&RunRecord>> = Vec::new();
    for run in runs {
        match groups.iter_mut().find(|group| group[0].repeats(run)) {
            Some(group) => group.push(run),
            None => groups.push(vec![run]),
        }
    }
    let mut rows: Vec<Row> = groups.iter().map(|group| row(group, published)).collect();
    for (model, value) in published.iter().filter(|(_, value)| value.is_some()) {
        if !rows.iter().any(|row| row.model == *model && row.dataset == PUBLISHED_FOR) {
            rows.push(Row::without_run(model, *value));
        }
    }
    let place = |row: &Row| published.iter().position(|(model, _)| *model == row.model).unwrap_or(usize::MAX);
    rows.sort_by(|a, b| {
        let key = |row: &Row| (row.dataset != PUBLISHED_FOR, row.dataset.clone(), place(row), row.model.clone());
        key(a).cmp(&key(b)).then(b.top1.unwrap_or(0.0).total_cmp(&a.top1.unwrap_or(0.0)))
    });
    rows
}

impl Row {
    fn without_run(model: &str, published_top1: Option<f64>) -> Self {
        Self {
            model: model.to_owned(),
            dataset: PUBLISHED_FOR.to_owned(),
            published_top1,
            top1: None,
            deviation: None,
            last_top1: None,
            runs: 0,
            epochs: None,
            planned_epochs: None,
            device: None,
            minutes: None,
            commits: Vec::new(),
            folders: Vec::new(),
        }
    }
}

/// The row of runs that repeat each other; there is at least one.
fn row(group: &[&RunRecord], published: &[Published]) -> Row {
    let first = group[0];
    let n = group.len() as f64;
    let mean = |value: fn(&RunRecord) -> f64| group.iter().map(|run| value(run)).sum::<f64>() / n;
    let top1 = mean(|run| run.top1);
    let deviation =
        (group.len() > 1).then(|| (group.iter().map(|run| (run.top1 - top1).powi(2)).sum::<f64>() / (n - 1.0)).sqrt());
    let published_top1 = published
        .iter()
        .find(|(model, _)| *model == first.model && first.dataset == PUBLISHED_FOR)
        .and_then(|(_, value)| *value);
    let mut commits: Vec<String> = Vec::new();
    for commit in group.iter().filter_map(|run| run.commit.as_ref()) {
        if !commits.contains(commit) {
            commits.push(commit.clone());
        }
    }
    Row {
        model: first.model.clone(),
        dataset: first.dataset.clone(),
        published_top1,
        top1: Some(top1),
        deviation,
        last_top1: Some(mean(|run| run.last_top1)),
        runs: group.len(),
        epochs: group.iter().map(|run| run.epochs).min(),
        planned_epochs: Some(first.planned_epochs),
        device: Some(first.device.clone()),
        minutes: Some(mean(|run| run.seconds) / 60.0),
        commits,
        folders: group.iter().map(|run| run.name.clone()).collect(),
    }
}

#[cfg(test)]
mod tests;
