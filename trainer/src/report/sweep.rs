//! `trainer sweep`: the runs with their values and results, as a table, as JSON and as CSV.

use serde::{Deserialize, Serialize};

use crate::config::BestBy;
use crate::text::{self, aligned, duration, percent};

/// The state of one run of a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// Not started.
    Waiting,
    /// The process of the run is alive.
    Running,
    /// Training is complete.
    Done,
    /// Stopped by a signal, after a checkpoint.
    Interrupted,
    /// Ended with an error.
    Failed,
}

impl RunState {
    /// Returns the state's name in JSON and in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Done => "done",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        }
    }
}

/// The measure of evaluations that ranks the runs of a sweep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// The highest top-1 accuracy.
    #[default]
    Top1,
    /// The highest share of images whose classes are all predicted correctly (multi-label).
    ExactMatch,
    /// The highest mean of the classes' recalls.
    BalancedAccuracy,
    /// The highest mean average precision.
    MeanAveragePrecision,
    /// The lowest loss.
    Loss,
}

impl Metric {
    /// Returns the measure of runs whose best evaluation is selected by `best_by`.
    pub fn of(best_by: BestBy, multi_label: bool) -> Self {
        match best_by {
            BestBy::Accuracy if multi_label => Self::ExactMatch,
            BestBy::Accuracy => Self::Top1,
            BestBy::BalancedAccuracy => Self::BalancedAccuracy,
            BestBy::MeanAveragePrecision => Self::MeanAveragePrecision,
            BestBy::Loss => Self::Loss,
        }
    }

    /// Returns the name in `summary.json`, and in the columns of `sweep.csv`.
    pub fn key(self) -> &'static str {
        match self {
            Self::Top1 | Self::ExactMatch => "top1",
            Self::BalancedAccuracy => "balanced_accuracy",
            Self::MeanAveragePrecision => "mean_average_precision",
            Self::Loss => "loss",
        }
    }

    /// Returns the name on the screen.
    pub fn title(self) -> &'static str {
        match self {
            Self::Top1 => "top-1",
            Self::ExactMatch => "exact match",
            Self::BalancedAccuracy => "balanced accuracy",
            Self::MeanAveragePrecision => "mAP",
            Self::Loss => "loss",
        }
    }

    /// Formats a value for the screen.
    pub fn shown(self, value: f64) -> String {
        if self == Self::Loss { text::loss(value) } else { percent(value) }
    }

    /// Returns a number that is higher for a better value.
    fn score(self, value: Option<f64>) -> f64 {
        value.map_or(f64::NEG_INFINITY, |value| if self == Self::Loss { -value } else { value })
    }
}

/// One run of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SweepRun {
    /// Number of the run, from 1: the name of its folder in `runs/`.
    pub number: usize,
    /// The values of the sweep's keys, as TOML.
    pub values: Vec<String>,
    /// The state of the run.
    pub state: RunState,
    /// The run folder; `None` until the run has created it.
    pub folder: Option<String>,
    /// The best evaluation by [`Sweep::metric`]; a loss, or percent.
    #[serde(alias = "best_top1")]
    pub best: Option<f64>,
    /// Epoch of the best evaluation.
    pub best_epoch: Option<usize>,
    /// The last evaluation by the same metric.
    #[serde(alias = "last_top1")]
    pub last: Option<f64>,
    /// The evaluation of the test set by the same metric, for runs with a validation split.
    #[serde(alias = "test_top1")]
    pub test: Option<f64>,
    /// Wall-clock seconds over all sessions of the run. For a failed run, only the seconds of the last session.
    pub seconds: Option<f64>,
    /// Exit code of the run's process; `None` if a signal killed the process or the process has not ended.
    pub exit_code: Option<i32>,
    /// The last lines of a run that has failed.
    pub message: Option<String>,
}

/// All runs of a sweep: the content of `sweep.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// The configuration, as the user named it. The sweep's folder has a copy.
    pub config: String,
    /// Settings that are the same for all runs, in the form of `--set`.
    pub fixed: Vec<String>,
    /// The keys with several values.
    pub keys: Vec<String>,
    /// `cpus:6` or `gpus:4`: kind and number of the slots (one slot is one worker's cores or GPU) that the runs share.
    #[serde(rename = "places")]
    pub slots: String,
    /// What the runs are compared by.
    #[serde(default)]
    pub metric: Metric,
    /// Number of slots that each run needs: one per worker.
    pub workers_per_run: usize,
    /// The folder of the data sets, if `--data-dir` names it.
    pub data_dir: Option<String>,
    /// The runs, by number.
    pub runs: Vec<SweepRun>,
}

impl Sweep {
    /// Returns the runs, the best first. Runs without an evaluation come last, by number.
    pub fn ranked(&self) -> Vec<&SweepRun> {
        let mut runs: Vec<&SweepRun> = self.runs.iter().collect();
        let key = |run: &SweepRun| self.metric.score(run.best);
        runs.sort_by(|one, other| key(other).total_cmp(&key(one)).then(one.number.cmp(&other.number)));
        runs
    }

    /// Formats the table, then the messages of failed runs. The text ends with a newline.
    pub fn render(&self) -> String {
        let has_test = self.runs.iter().any(|run| run.test.is_some());
        let shown = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| self.metric.shown(value));
        let title = self.metric.title();
        let mut head = vec!["run".to_owned()];
        head.extend(self.keys.iter().cloned());
        head.extend([format!("best {title}"), "epoch".to_owned(), format!("last {title}")]);
        head.extend(has_test.then(|| format!("test {title}")));
        head.extend(["time", "state"].map(str::to_owned));
        let mut rows = vec![head];
        for run in self.ranked() {
            let mut row = vec![format!("{:03}", run.number)];
            row.extend(run.values.iter().map(|value| unquoted(value)));
            row.push(shown(run.best));
            row.push(run.best_epoch.map_or_else(|| "–".to_owned(), |epoch| epoch.to_string()));
            row.push(shown(run.last));
            row.extend(has_test.then(|| shown(run.test)));
            row.push(run.seconds.map_or_else(|| "–".to_owned(), duration));
            row.push(run.state.name().to_owned());
            rows.push(row);
        }
        let mut page = aligned(&rows);
        for run in self.runs.iter().filter(|run| run.state == RunState::Failed) {
            let code = run.exit_code.map_or_else(|| "killed".to_owned(), |code| format!("exit code {code}"));
            page += &format!("\nrun {:03} failed ({code}):\n", run.number);
            run.message.iter().flat_map(|text| text.lines()).for_each(|line| page += &format!("  {line}\n"));
        }
        page
    }

    /// Formats the runs as CSV with a header, in the order of the table. Strings are without quotes, other values are as TOML.
    ///
    /// # Errors
    /// A row cannot be encoded. Writes to memory do not fail.
    pub fn csv(&self) -> Result<Vec<u8>, csv::Error> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        let [best, last, test] = ["best", "last", "test"].map(|which| format!("{which}_{}", self.metric.key()));
        let columns = ["state", &best, "best_epoch", &last, &test, "seconds", "exit_code", "folder"];
        writer.write_record(["run"].into_iter().chain(self.keys.iter().map(String::as_str)).chain(columns))?;
        let text = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
        for run in self.ranked() {
            let results = [
                run.state.name().to_owned(),
                text(run.best),
                run.best_epoch.map(|epoch| epoch.to_string()).unwrap_or_default(),
                text(run.last),
                text(run.test),
                text(run.seconds),
                run.exit_code.map(|code| code.to_string()).unwrap_or_default(),
                run.folder.clone().unwrap_or_default(),
            ];
            let number = [run.number.to_string()];
            let values: Vec<String> = run.values.iter().map(|value| unquoted(value)).collect();
            writer.write_record(number.iter().chain(&values).chain(&results))?;
        }
        writer.into_inner().map_err(|error| csv::Error::from(error.into_error()))
    }
}

/// Returns a string's text without TOML's quotes, and any other value as it is.
fn unquoted(value: &str) -> String {
    match toml::de::DeValue::parse(value).map(toml::Spanned::into_inner) {
        Ok(toml::de::DeValue::String(text)) => text.into_owned(),
        _ => value.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(number: usize, lr: &str, state: RunState, best: Option<f64>) -> SweepRun {
        SweepRun {
            number,
            values: vec![lr.to_owned(), "[\"crop\", \"flip\"]".to_owned()],
            state,
            folder: best.map(|_| format!("runs/{number:03}/x")),
            best,
            best_epoch: best.map(|_| 2),
            last: best.map(|best| best - 0.5),
            test: None,
            seconds: best.map(|_| 61.0),
            exit_code: Some(i32::from(state == RunState::Failed)),
            message: (state == RunState::Failed).then(|| "error: diverged\n  hint: lower it".to_owned()),
        }
    }

    fn sweep() -> Sweep {
        Sweep {
            config: "c.toml".into(),
            fixed: Vec::new(),
            keys: vec!["optimizer.lr".into(), "data.augment".into()],
            slots: "cpus:2".into(),
            metric: Metric::Top1,
            workers_per_run: 1,
            data_dir: None,
            runs: vec![
                run(1, "0.05", RunState::Done, Some(80.25)),
                run(2, "1000", RunState::Failed, None),
                run(3, "0.1", RunState::Done, Some(81.5)),
                run(4, "0.2", RunState::Waiting, None),
            ],
        }
    }

    #[test]
    fn the_best_run_is_first_and_failures_are_explained() {
        insta::assert_snapshot!(sweep().render(), @r#"
        run  optimizer.lr      data.augment  best top-1  epoch  last top-1   time    state
        003           0.1  ["crop", "flip"]      81.50%      2      81.00%  1m01s     done
        001          0.05  ["crop", "flip"]      80.25%      2      79.75%  1m01s     done
        002          1000  ["crop", "flip"]           –      –           –      –   failed
        004           0.2  ["crop", "flip"]           –      –           –      –  waiting

        run 002 failed (exit code 1):
          error: diverged
            hint: lower it
        "#);
        let mut with_test = sweep();
        with_test.runs[0].test = Some(79.0);
        assert!(with_test.render().lines().next().unwrap().contains("test top-1"));
        let by_loss = Sweep { metric: Metric::Loss, ..sweep() };
        let numbers: Vec<_> = by_loss.ranked().iter().map(|run| run.number).collect();
        assert_eq!(numbers, [1, 3, 2, 4], "the lowest loss is first, and runs without one are last");
        assert!(by_loss.render().starts_with("run  optimizer.lr      data.augment  best loss  epoch  last loss"));
    }

    #[test]
    fn csv_and_json_have_all_runs() {
        let csv = String::from_utf8(sweep().csv().unwrap()).unwrap();
        let lines: Vec<_> = csv.lines().collect();
        assert_eq!(lines.len(), 5);
        assert_eq!(lines[1], r#"3,0.1,"[""crop"", ""flip""]",done,81.5,2,81,,61,0,runs/003/x"#);
        let mut words = sweep();
        words.runs[0].values[0] = "\"sgd\"".to_owned();
        assert!(String::from_utf8(words.csv().unwrap()).unwrap().contains("\n1,sgd,\"[\"\"crop"));
        assert!(words.render().contains("001           sgd  [\"crop\", \"flip\"]"), "{}", words.render());
        let json = serde_json::to_string(&sweep()).unwrap();
        assert!(json.contains(r#""state":"done""#), "{json}");
        assert_eq!(serde_json::from_str::<Sweep>(&json).unwrap(), sweep());
    }
}
