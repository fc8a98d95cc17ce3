//! Writes the result of autotuning to the run's `config.toml`, to `autotune.json` and to the screen.

use super::Engine;
use crate::config::Keyword;
use crate::failure::Failure;
use crate::files::write_atomic;
use crate::strategy::{StepSettings, TuningReport};
use crate::text::{aligned, thousands};

impl Engine<'_> {
    /// If the last step has ended autotuning, writes and shows the result. A resumed run reads the choice from its `config.toml`.
    pub(super) fn report_tuning(&mut self) -> Result<(), Failure> {
        let Some(report) = self.strategy.take_tuning_report() else { return Ok(()) };
        self.tunes = false;
        let Some(output) = &mut self.output else { return Ok(()) };
        let mut plan = self.plan.clone();
        report.chosen.write_to(&mut plan);
        let folder = output.reporter.folder().clone();
        let json = serde_json::to_vec_pretty(&report).map_err(|error| Failure::run(error, "please report this"))?;
        // A restart reads the first file, a resumed run the second. If the run is killed between the two writes, a resumed run
        // tunes again.
        write_atomic(&folder.autotune(), &json)?;
        write_atomic(&folder.config(), plan.to_toml().as_bytes())?;
        Ok(output.reporter.say(&table(&report))?)
    }

    /// Prints a note if the run has ended before autotuning has chosen settings.
    pub(super) fn note_unfinished_tuning(&mut self) -> Result<(), Failure> {
        match (&mut self.output, self.tunes) {
            (Some(output), true) => {
                let steps = thousands(self.progress.step);
                let note = format!("note: autotune: {steps} steps are too few for a choice, so nothing was changed");
                Ok(output.reporter.say(&note)?)
            }
            _ => Ok(()),
        }
    }
}

/// Shows every candidate with its time.
fn table(report: &TuningReport) -> String {
    let head = ["bucket_mb", "first_bucket_mb", "compression", "threads", "buckets", "ms per step", ""];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut trials: Vec<_> = report.trials.iter().enumerate().collect();
    trials.sort_by(|(_, one), (_, other)| one.seconds.total_cmp(&other.seconds));
    for (index, trial) in trials {
        let StepSettings { bucket_mb, first_bucket_mb, compression, threads } = trial.settings;
        let mark = match (index, trial.settings == report.chosen) {
            (0, true) => "configured, kept",
            (0, false) => "configured",
            (_, true) => "chosen",
            (_, false) => "",
        };
        rows.push(vec![
            bucket_mb.to_string(),
            first_bucket_mb.to_string(),
            compression.name().to_owned(),
            threads.map_or_else(|| "share".to_owned(), |threads| threads.to_string()),
            trial.buckets.to_string(),
            format!("{:.2}", trial.seconds * 1e3),
            mark.to_owned(),
        ]);
    }
    let (count, steps) = (report.trials.len(), thousands(report.steps));
    format!("autotune: {count} settings in {steps} steps\n{}", aligned(&rows).trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Compression;
    use crate::strategy::Trial;

    #[test]
    fn the_table_marks_the_plans_settings_and_the_choice() {
        let plan =
            StepSettings { bucket_mb: 25.0, first_bucket_mb: 1.0, compression: Compression::None, threads: None };
        let chosen = StepSettings { bucket_mb: 4.0, threads: Some(3), ..plan };
        let trial = |settings, buckets, seconds| Trial { settings, buckets, seconds };
        let trials = vec![trial(plan, 2, 0.0123), trial(chosen, 5, 0.011)];
        let report = TuningReport { chosen, steps: 1058, trials };
        insta::assert_snapshot!(table(&report), @r"
        autotune: 2 settings in 1,058 steps
        bucket_mb  first_bucket_mb  compression  threads  buckets  ms per step
        4                        1         none        3        5        11.00      chosen
        25                       1         none    share        2        12.30  configured
        ");
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<TuningReport>(&json).unwrap(), report);
    }
}
