//! The reporter: writes each step and epoch to the files, the curves and the screen.
//!
//! Only rank 0 makes a `Reporter`, so that the shared files of the run folder have one writer.

use crate::console;
use crate::files::{FileError, write_atomic};
use crate::report::curves::Curves;
use crate::report::environment::Environment;
use crate::report::metrics::{MetricsWriter, read_metrics};
use crate::report::missing::missing_lines;
use crate::report::pace::Pace;
use crate::report::progress::{Progress, ProgressOptions};
use crate::report::screen::Screen;
use crate::report::start_table::start_table;
use crate::report::summary::summary_screen;
use crate::report::summary_csv::{CsvColumns, SummaryRow, SummaryWriter, read_summary};
use crate::report::tensorboard::TensorBoardWriter;
use crate::report::{EpochRecord, RunFolder, RunSummary, Section, StepRecord};

/// Settings of a [`Reporter`].
#[derive(Debug, Clone)]
pub struct ReporterOptions {
    /// Epochs of the whole run.
    pub epochs: usize,
    /// Steps of each epoch.
    pub steps_per_epoch: usize,
    /// See [`Pace::new`].
    pub pixel_shares: Vec<f64>,
    /// Steps between two plain lines, and between two points of TensorBoard's training curves. With 0, there is one plain line for
    /// the session's first step, and TensorBoard has the first and the last step of each epoch.
    pub every: usize,
    /// Whether to write TensorBoard event files.
    pub tensorboard: bool,
    /// Whether to show nothing on the screen.
    pub quiet: bool,
    /// Whether images have several classes each.
    pub multi_label: bool,
    /// Device, as readable text, for `env.json`.
    pub device: String,
}

/// Writes a run's files and shows its progress.
pub struct Reporter {
    folder: RunFolder,
    options: ReporterOptions,
    metrics: MetricsWriter,
    summary: SummaryWriter,
    tensorboard: Option<TensorBoardWriter>,
    progress: Progress,
    epochs: Vec<SummaryRow>,
    /// Epoch position and loss of each step, for the curves.
    losses: Vec<(f64, f64)>,
    /// Number of the next step.
    next_step: u64,
    top5: bool,
}

impl Reporter {
    /// Starts the report of a new run: shows the start table, writes `env.json` and creates the other files. The caller
    /// writes `config.toml`.
    ///
    /// # Errors
    /// When a file of the folder cannot be created or written.
    pub fn new(folder: RunFolder, options: ReporterOptions, sections: &[Section]) -> Result<Self, FileError> {
        Self::start(screen(&options), folder, options, sections, None)
    }

    /// Continues the report of a run from a checkpoint. `step` is the next step. `epoch` is the epoch of that step, which
    /// may start at its beginning or in its middle.
    ///
    /// Removes the lines of `step`, of `epoch` and of all later ones from the files, because the run repeats them.
    ///
    /// # Errors
    /// When a file of the folder cannot be read or written, or is damaged.
    pub fn resume(
        folder: RunFolder,
        options: ReporterOptions,
        sections: &[Section],
        step: u64,
        epoch: usize,
    ) -> Result<Self, FileError> {
        Self::start(screen(&options), folder, options, sections, Some((step, epoch)))
    }

    /// Starts the report, of a new run or at `from`: the next step and its epoch.
    fn start(
        screen: Screen,
        folder: RunFolder,
        options: ReporterOptions,
        sections: &[Section],
        from: Option<(u64, usize)>,
    ) -> Result<Self, FileError> {
        let environment = Environment::detect(&options.device);
        let tensorboard = |step| options.tensorboard.then(|| TensorBoardWriter::start(folder.path(), step)).transpose();
        let ReporterOptions { epochs, steps_per_epoch, every, multi_label, .. } = options;
        let accuracy = if multi_label { "exact" } else { "top-1" };
        let columns = CsvColumns::of(multi_label);
        let pace = Pace::new(epochs, steps_per_epoch, options.pixel_shares.clone());
        let mut progress = Progress::new(ProgressOptions { epochs, steps_per_epoch, every, accuracy }, pace, screen);
        let table = start_table(sections);
        if !table.is_empty() {
            progress.say(&table)?;
        }
        let (next_step, epoch) = from.unwrap_or((0, 1));
        let (metrics, summary) = match from {
            None => {
                environment.write(&folder.env())?;
                (MetricsWriter::create(&folder.metrics())?, SummaryWriter::create(&folder.summary_csv(), columns)?)
            }
            Some(_) => {
                environment.append(&folder.env())?;
                let summary = SummaryWriter::resume(&folder.summary_csv(), columns, epoch)?;
                (MetricsWriter::resume(&folder.metrics(), next_step)?, summary)
            }
        };
        let tensorboard = tensorboard(next_step)?;
        let epochs = read_summary(&folder.summary_csv())?;
        let steps = read_metrics(&folder.metrics())?;
        for error in missing_lines(&folder, &steps, &epochs, next_step, epoch) {
            console::eprint(format_args!("warning: {error}\n  hint: {}", error.hint));
        }
        let losses = steps.iter().map(|record| curve_point(&options, record)).collect();
        Ok(Self { folder, options, metrics, summary, tensorboard, progress, epochs, losses, next_step, top5: false })
    }

    /// Returns the run's folder.
    pub fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// Returns the epochs so far, including those before a resume.
    pub fn epochs(&self) -> &[SummaryRow] {
        &self.epochs
    }

    /// Sets whether the curves show top-5 accuracy. The default is false: with ten classes or fewer, top-5 has little
    /// meaning.
    pub fn show_top5(&mut self, show: bool) {
        self.top5 = show;
    }

    /// Reports one step.
    ///
    /// # Errors
    /// When a file or stdout cannot be written.
    pub fn step(&mut self, record: &StepRecord) -> Result<(), FileError> {
        self.metrics.write(record)?;
        self.next_step = record.step + 1;
        self.losses.push(curve_point(&self.options, record));
        let every = self.options.every as u64;
        // The first and the last step of an epoch are always written, so that short epochs have a curve too.
        let due = every > 0 && record.step.is_multiple_of(every);
        let in_epoch = record.step % self.options.steps_per_epoch.max(1) as u64;
        let ends = in_epoch == 0 || in_epoch + 1 == self.options.steps_per_epoch as u64;
        if let (true, Some(tensorboard)) = (due || ends, &mut self.tensorboard) {
            tensorboard.step(record)?;
        }
        self.progress.step(record)
    }

    /// Starts the progress of an evaluation of `batches` batches.
    pub fn evaluating(&mut self, batches: usize) {
        self.progress.evaluating(batches);
    }

    /// Counts one evaluated batch.
    pub fn evaluated(&mut self) {
        self.progress.evaluated();
    }

    /// Reports one epoch, redraws the curves and waits until all files are on the disk.
    ///
    /// Save the checkpoint of this epoch after this call. Otherwise a SIGKILL between the two leaves the files without
    /// the epoch.
    ///
    /// # Errors
    /// When a file or stdout cannot be written.
    pub fn epoch(&mut self, record: &EpochRecord) -> Result<(), FileError> {
        self.summary.write(record)?;
        self.epochs.push(SummaryRow::from(record));
        if let Some(tensorboard) = &mut self.tensorboard {
            // The point is at the epoch's last step, so that a resume from the next step keeps it.
            tensorboard.epoch(record, self.next_step.saturating_sub(1))?;
        }
        self.flush()?;
        self.draw()?;
        self.progress.epoch(record)
    }

    /// Shows lines (a warning, the path of a saved file) above the bar.
    ///
    /// # Errors
    /// When stdout cannot be written.
    pub fn say(&mut self, lines: &str) -> Result<(), FileError> {
        self.progress.say(lines)
    }

    /// Waits until all data so far is on the disk (`fdatasync`). Call before saving a checkpoint that depends on this
    /// data.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn flush(&mut self) -> Result<(), FileError> {
        self.metrics.sync()?;
        match &mut self.tensorboard {
            Some(tensorboard) => tensorboard.sync(),
            None => Ok(()),
        }
    }

    /// Ends the report: writes the curves and `summary.json`, waits until all files are on the disk, and shows the
    /// summary on the screen.
    ///
    /// Training figures that `summary` leaves empty (loss, accuracy, images per second) are taken from the reported
    /// epochs.
    ///
    /// # Errors
    /// When a file or stdout cannot be written.
    pub fn finish(&mut self, summary: &RunSummary) -> Result<(), FileError> {
        let summary = self.end(summary)?;
        let result = serde_json::to_vec_pretty(&summary)
            .map_err(|error| FileError::new(self.folder.summary_json(), error.to_string(), "please report this"))?;
        write_atomic(&self.folder.summary_json(), &result)?;
        self.show(&summary)
    }

    /// Ends the report like [`finish`](Self::finish), but keeps the `summary.json` of an earlier session.
    ///
    /// # Errors
    /// When a file or stdout cannot be written.
    pub fn finish_without_result(&mut self, summary: &RunSummary) -> Result<(), FileError> {
        let summary = self.end(summary)?;
        self.show(&summary)
    }

    /// Writes the files of the epochs, and returns the summary with all training figures.
    fn end(&mut self, summary: &RunSummary) -> Result<RunSummary, FileError> {
        self.progress.finish();
        self.flush()?;
        self.draw()?;
        let mut summary = summary.clone();
        if let Some(last) = self.epochs.last() {
            summary.train_loss.get_or_insert(last.train_loss);
            summary.train_top1.get_or_insert(last.train_top1);
        }
        // All images over all seconds, in units of a step's images: the last epoch may have had fewer steps.
        let per_epoch = self.options.steps_per_epoch.max(1) as u64;
        let steps_of =
            |epoch: usize| summary.steps.saturating_sub((epoch as u64 - 1) * per_epoch).min(per_epoch) as f64;
        let steps: f64 = self.epochs.iter().map(|row| steps_of(row.epoch)).sum();
        let seconds: f64 = self.epochs.iter().map(|row| steps_of(row.epoch) / row.images_per_s).sum();
        summary.images_per_s.get_or_insert(steps / seconds);
        Ok(summary)
    }

    fn show(&mut self, summary: &RunSummary) -> Result<(), FileError> {
        self.progress.say(summary_screen(summary, self.folder.path()).trim_end())
    }

    fn draw(&self) -> Result<(), FileError> {
        let title = self.folder.name();
        Curves { title: &title, epochs: &self.epochs, steps: &self.losses, top5: self.top5 }
            .write(&self.folder.curves())
    }
}

fn screen(options: &ReporterOptions) -> Screen {
    if options.quiet { Screen::quiet() } else { Screen::detect() }
}

/// Returns a step's position on the epoch axis, and the step's loss.
fn curve_point(options: &ReporterOptions, record: &StepRecord) -> (f64, f64) {
    ((record.step + 1) as f64 / options.steps_per_epoch.max(1) as f64, record.loss)
}

#[cfg(test)]
mod tests;
