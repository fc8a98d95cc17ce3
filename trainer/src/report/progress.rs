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
    /// Steps between two plain lines. With 0 there are lines for the first step of the session and for the epochs only.
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
    /// Whether a line for a step was written in this session.
    has_step_line: bool,
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
            has_step_line: false,
        }
    }

    /// Shows one step. Loss and accuracy are means over the epoch so far.
    ///
    /// # Errors
    /// When stdout cannot be written, for example on a full disk. A pipe that its reader has closed is not an error.
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
        let due = !self.has_step_line || (every > 0 && done.is_multiple_of(every));
        if self.step_lines && due {
            self.has_step_line = true;
            let (number, step) = (of(record.epoch, epochs), of(done, steps_per_epoch));
            self.say(&format!(
                "epoch {number}  step {step}  loss {loss}  {accuracy} {top1}  lr {lr}  {speed} images/s  \
                 left: epoch {left}, run {left_in_run}"
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
    text::align_right(&text::percent(value), 6)
}

#[cfg(test)]
mod tests;
