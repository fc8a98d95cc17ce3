//! Progress of a run: a bar on a terminal, plain lines elsewhere, and one line per epoch in both.
//!
//! The bar goes to stderr and lines go to stdout, so that `trainer … > log` shows the bar and keeps the lines.

use std::{
    io::{ErrorKind, Write},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::console;
use crate::files::FileError;
use crate::report::pace::Pace;
use crate::report::screen::Screen;
use crate::report::{EpochRecord, StepRecord};
use crate::text;

/// Length of a run, and how often to write a line.
#[derive(Debug, Clone, Copy)]
pub struct ProgressOptions {
    /// Epochs of the whole run.
    pub epochs: usize,
    /// Steps of each epoch.
    pub steps_per_epoch: usize,
    /// Steps between two plain lines. 0: only the first step of the session, and the epochs.
    pub every: usize,
    /// The name of the accuracy of training batches: `top-1`, or `exact` for multi-label images, where all classes must be right.
    pub accuracy: &'static str,
}

/// Shows steps and epochs as they happen.
pub struct Progress {
    options: ProgressOptions,
    bar: Option<ProgressBar>,
    lines: Option<Box<dyn Write + Send>>,
    step_lines: bool,
    styles: (ProgressStyle, ProgressStyle),
    pace: Pace,
    /// Epoch that the bar shows.
    epoch: usize,
    /// Mean over the epoch's steps so far in this session.
    loss: Mean,
    top1: Mean,
    spoken: bool,
}

#[derive(Default)]
struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, value: f64) -> f64 {
        self.sum += value;
        self.count += 1.0;
        self.sum / self.count
    }
}

impl Progress {
    /// Creates the progress. Draws nothing before the first step.
    pub fn new(options: ProgressOptions, pace: Pace, screen: Screen) -> Self {
        let style = |before: &str, after: &str| {
            let bar = if screen.colour { "{wide_bar:.cyan/dim}" } else { "{wide_bar}" };
            ProgressStyle::with_template(&format!("epoch {{prefix}} {before}{bar} {{pos}}/{{len}}{after}"))
                .expect("the template is a constant and valid")
                .progress_chars("━╸─")
        };
        let length = Some(options.steps_per_epoch as u64);
        let bar = screen.bar.map(|target| ProgressBar::with_draw_target(length, target));
        bar.iter().for_each(console::set_bar);
        Self {
            options,
            bar,
            lines: screen.lines,
            step_lines: screen.step_lines,
            // Two lines: all of the text fits 80 columns, and most of it fits 60.
            styles: (style("", "{msg}"), style("evaluating ", "")),
            pace,
            epoch: 0,
            loss: Mean::default(),
            top1: Mean::default(),
            spoken: false,
        }
    }

    /// Shows one step. Loss and accuracy are means over the epoch so far.
    ///
    /// # Errors
    /// When stdout cannot be written, for example on a full disk. A reader that has closed the pipe is not an error.
    pub fn step(&mut self, record: &StepRecord) -> Result<(), FileError> {
        let ProgressOptions { epochs, steps_per_epoch, every, accuracy } = self.options;
        if self.epoch != record.epoch {
            self.epoch = record.epoch;
            (self.loss, self.top1) = (Mean::default(), Mean::default());
            self.show_phase(&self.styles.0, steps_per_epoch);
        }
        let before = (record.epoch.saturating_sub(1) * steps_per_epoch) as u64;
        let done = (record.step + 1).saturating_sub(before) as usize;
        self.pace.step(record);
        let loss = text::loss(self.loss.add(record.loss));
        let top1 = percent(self.top1.add(record.top1));
        let speed = text::speed(record.images_per_s);
        let lr = text::rate(record.lr);
        let left = text::duration(self.pace.left_in_epoch(record.epoch, done).unwrap_or(f64::NAN));
        let left_in_run = text::duration(self.pace.left_in_run(record.epoch, done).unwrap_or(f64::NAN));
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
            bar.set_message(format!(
                "  eta {left}, run {left_in_run}
loss {loss}  {accuracy} {top1}  lr {lr}  {speed} images/s"
            ));
        }
        let due = !self.spoken || (every > 0 && done.is_multiple_of(every));
        if self.step_lines && due {
            self.spoken = true;
            let (number, step) = (of(record.epoch, epochs), of(done, steps_per_epoch));
            self.say(&format!(
                "epoch {number}  step {step}  loss {loss}  {accuracy} {top1}  lr {lr}  {speed} images/s  left: epoch {left}, run {left_in_run}"
            ))?;
        }
        Ok(())
    }

    /// Resets the bar for an evaluation of `batches` batches.
    pub fn evaluating(&mut self, batches: usize) {
        self.show_phase(&self.styles.1, batches);
    }

    /// Counts one evaluated batch.
    pub fn evaluated(&mut self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// Writes the epoch's line, which stays above the bar.
    ///
    /// # Errors
    /// When stdout cannot be written.
    pub fn epoch(&mut self, record: &EpochRecord) -> Result<(), FileError> {
        self.pace.epoch(record);
        let number = of(record.epoch, self.options.epochs);
        let loss = text::loss(record.train_loss);
        let accuracy = self.options.accuracy;
        let mut line = format!("epoch {number}  train loss {loss}  {accuracy} {}", percent(record.train_top1));
        if let Some(eval) = record.eval {
            let (name, value) = eval.mean_average_precision.map_or((accuracy, eval.top1), |map| ("mAP", map));
            line += &format!("  eval loss {}  {name} {}", text::loss(eval.loss), percent(value));
        }
        line += &format!("  {} images/s  {}", text::speed(record.images_per_s), text::duration(record.seconds));
        self.say(&format!("{line}{}", if record.is_best { "  best" } else { "" }))
    }

    /// Writes lines (a table, a warning) above the bar.
    ///
    /// # Errors
    /// When stdout cannot be written.
    pub fn say(&mut self, lines: &str) -> Result<(), FileError> {
        let Some(out) = &mut self.lines else { return Ok(()) };
        let mut write = || writeln!(out, "{lines}").and_then(|()| out.flush());
        let written = match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        };
        match written {
            // The reader of the pipe has exited (`| head`), or the terminal has closed. This must not end a run of hours.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.lines = None;
                Ok(())
            }
            Err(error) => Err(console::not_written(error)),
            Ok(()) => Ok(()),
        }
    }

    /// Removes the bar from the screen.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Restarts the bar for `length` steps or batches.
    fn show_phase(&self, style: &ProgressStyle, length: usize) {
        if let Some(bar) = &self.bar {
            bar.reset();
            bar.set_elapsed(Duration::ZERO);
            bar.set_style(style.clone());
            bar.set_length(length as u64);
            bar.set_prefix(format!("{}/{}", self.epoch, self.options.epochs));
            bar.set_message("");
        }
    }
}

impl Drop for Progress {
    /// Removes the bar, so that an error message does not share a line with the bar.
    fn drop(&mut self) {
        self.finish();
    }
}

/// Formats `part/whole` with padding (` 3/30`), so that lines align.
fn of(part: usize, whole: usize) -> String {
    format!("{part:>width$}/{whole}", width = whole.to_string().len())
}

/// Formats a percentage in a column of fixed width: ` 9.80%`.
fn percent(value: f64) -> String {
    text::right(&text::percent(value), 6)
}

#[cfg(test)]
mod tests {
    use std::io;

    use indicatif::{InMemoryTerm, ProgressDrawTarget};

    use super::*;
    use crate::report::testing::TestOutput;
    use crate::snapshot::EvalRecord;

    const OPTIONS: ProgressOptions = ProgressOptions { epochs: 12, steps_per_epoch: 4, every: 2, accuracy: "top-1" };

    fn shown_on(screen: Screen) -> Progress {
        Progress::new(OPTIONS, Pace::new(OPTIONS.epochs, OPTIONS.steps_per_epoch, Vec::new()), screen)
    }

    fn step(step: u64) -> StepRecord {
        StepRecord {
            epoch: 1 + step as usize / 4,
            step,
            loss: 2.0 - 0.125 * step as f64,
            lr: 0.1 / (step + 1) as f64,
            images_per_s: 3456.4,
            top1: 10.0 * step as f64,
            grad_norm: None,
            data_ms: 1.0,
            step_ms: 20_000.0,
            ..StepRecord::default()
        }
    }

    fn epoch(epoch: usize, eval_top1: Option<f64>) -> EpochRecord {
        let eval = eval_top1.map(|top1| EvalRecord {
            loss: 1.5,
            top1,
            top5: 95.0,
            correct: 9,
            total: 10,
            balanced_accuracy: None,
            tta_top1: None,
            mean_average_precision: None,
        });
        EpochRecord {
            epoch,
            train_loss: 1.8125,
            train_top1: 15.0,
            eval,
            is_best: eval.is_some() && !epoch.is_multiple_of(2),
            lr: 0.025,
            images_per_s: 3456.4,
            seconds: 95.0,
        }
    }

    fn plain() -> (Progress, TestOutput) {
        let output = TestOutput::default();
        (shown_on(Screen { bar: None, lines: output.writer(), step_lines: true, colour: false }), output)
    }

    #[test]
    fn without_a_terminal_there_are_lines() {
        let (mut progress, output) = plain();
        (0..4).for_each(|i| progress.step(&step(i)).unwrap());
        progress.evaluating(3);
        progress.evaluated();
        progress.epoch(&epoch(1, Some(9.8))).unwrap();
        (4..8).for_each(|i| progress.step(&step(i)).unwrap());
        progress.epoch(&epoch(2, None)).unwrap();
        progress.epoch(&epoch(3, Some(43.21))).unwrap();
        progress.epoch(&epoch(4, Some(43.21))).unwrap();
        insta::assert_snapshot!(output.text(), @r"
            epoch  1/12  step 1/4  loss 2.0000  top-1  0.00%  lr 0.1  3,456 images/s  left: epoch 1m00s, run 15m40s
            epoch  1/12  step 2/4  loss 1.9375  top-1  5.00%  lr 0.05  3,456 images/s  left: epoch 40s, run 15m20s
            epoch  1/12  step 4/4  loss 1.8125  top-1 15.00%  lr 0.025  3,456 images/s  left: epoch 0.0s, run 14m40s
            epoch  1/12  train loss 1.8125  top-1 15.00%  eval loss 1.5000  top-1  9.80%  3,456 images/s  1m35s  best
            epoch  2/12  step 2/4  loss 1.4375  top-1 45.00%  lr 0.0167  3,456 images/s  left: epoch 40s, run 16m45s
            epoch  2/12  step 4/4  loss 1.3125  top-1 55.00%  lr 0.0125  3,456 images/s  left: epoch 0.0s, run 16m05s
            epoch  2/12  train loss 1.8125  top-1 15.00%  3,456 images/s  1m35s
            epoch  3/12  train loss 1.8125  top-1 15.00%  eval loss 1.5000  top-1 43.21%  3,456 images/s  1m35s  best
            epoch  4/12  train loss 1.8125  top-1 15.00%  eval loss 1.5000  top-1 43.21%  3,456 images/s  1m35s
            ");
    }

    #[test]
    fn a_diverged_run_and_a_resumed_one_read_well() {
        let (mut progress, output) = plain();
        progress.step(&StepRecord { loss: f64::NAN, images_per_s: f64::INFINITY, ..step(6) }).unwrap();
        progress.epoch(&EpochRecord { train_loss: f64::NAN, ..epoch(2, Some(49.0)) }).unwrap();
        progress.epoch(&epoch(3, Some(51.0))).unwrap();
        insta::assert_snapshot!(output.text(), @r"
            epoch  2/12  step 3/4  loss NaN  top-1 60.00%  lr 0.0143  – images/s  left: epoch 20s, run 13m40s
            epoch  2/12  train loss NaN  top-1 15.00%  eval loss 1.5000  top-1 49.00%  3,456 images/s  1m35s
            epoch  3/12  train loss 1.8125  top-1 15.00%  eval loss 1.5000  top-1 51.00%  3,456 images/s  1m35s  best
            ");
    }

    #[test]
    fn on_a_terminal_there_is_a_bar_below_the_epochs() {
        for (columns, name) in [(110, "wide"), (80, "narrow")] {
            let term = InMemoryTerm::new(10, columns);
            let output = TestOutput::default();
            let target = ProgressDrawTarget::term_like(Box::new(term.clone()));
            let screen = Screen { bar: Some(target), lines: output.writer(), step_lines: false, colour: false };
            let mut progress = shown_on(screen);
            let shown = |progress: &Progress| {
                progress.bar.as_ref().unwrap().force_draw();
                term.contents()
            };
            (0..3).for_each(|i| progress.step(&step(i)).unwrap());
            let training = shown(&progress);
            progress.evaluating(79);
            (0..30).for_each(|_| progress.evaluated());
            let evaluating = shown(&progress);
            progress.epoch(&epoch(1, Some(9.8))).unwrap();
            progress.step(&step(4)).unwrap();
            let next = shown(&progress);
            match name {
                "wide" => insta::assert_snapshot!(format!("{training}\n{evaluating}\n{next}"), @r"
                    epoch 1/12 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸────────────────── 3/4  eta 20s, run 15m00s
                    loss 1.8750  top-1 10.00%  lr 0.0333  3,456 images/s
                    epoch 1/12 evaluating ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸────────────────────────────────────────────────── 30/79
                    epoch 2/12 ━━━━━━━━━━━━━━━━━━╸───────────────────────────────────────────────────── 1/4  eta 1m00s, run 20m45s
                    loss 1.5000  top-1 40.00%  lr 0.02  3,456 images/s
                    "),
                _ => insta::assert_snapshot!(format!("{training}\n{evaluating}\n{next}"), @r"
                    epoch 1/12 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸────────── 3/4  eta 20s, run 15m00s
                    loss 1.8750  top-1 10.00%  lr 0.0333  3,456 images/s
                    epoch 1/12 evaluating ━━━━━━━━━━━━━━━━━━━╸──────────────────────────────── 30/79
                    epoch 2/12 ━━━━━━━━━━╸─────────────────────────────── 1/4  eta 1m00s, run 20m45s
                    loss 1.5000  top-1 40.00%  lr 0.02  3,456 images/s
                    "),
            }
            assert_eq!(output.text().lines().count(), 1, "steps are on the bar, epochs on output: {}", output.text());
            progress.finish();
            assert_eq!(term.contents(), "");
        }
    }

    #[test]
    fn quiet_is_quiet_and_a_reader_that_left_is_no_error() {
        struct Gone(ErrorKind);
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let on = |kind| Screen { lines: Some(Box::new(Gone(kind))), step_lines: true, ..Screen::quiet() };
        shown_on(Screen::quiet()).step(&step(0)).unwrap();
        shown_on(on(ErrorKind::BrokenPipe)).step(&step(0)).unwrap();
        let error = shown_on(on(ErrorKind::StorageFull)).step(&step(0)).unwrap_err();
        assert_eq!(error.to_string(), "standard output: cannot write: no storage space");
    }
}
