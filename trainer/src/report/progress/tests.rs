//! Tests of the progress: lines without a terminal, the bar on one, and outputs that fail.

use std::io;

use indicatif::{InMemoryTerm, ProgressDrawTarget};

use super::*;
use crate::report::testing::TestOutput;
use crate::snapshot::EvalRecord;

const OPTIONS: ProgressOptions = ProgressOptions { epochs: 12, steps_per_epoch: 4, every: 2, accuracy: "top-1" };

fn progress_on(screen: Screen) -> Progress {
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
        ..EvalRecord::default()
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
        eval_seconds: 15.0,
    }
}

fn plain() -> (Progress, TestOutput) {
    let output = TestOutput::default();
    (progress_on(Screen { bar: None, lines: output.writer(), step_lines: true, colour: false }), output)
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
fn the_lines_of_a_diverged_and_of_a_resumed_run_are_aligned() {
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
        let mut progress = progress_on(screen);
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
                epoch 2/12 ━━━━━━━━━━━━━━━━━━╸───────────────────────────────────────────────────── 1/4  eta 1m00s, run 17m05s
                loss 1.5000  top-1 40.00%  lr 0.02  3,456 images/s
                "),
            _ => insta::assert_snapshot!(format!("{training}\n{evaluating}\n{next}"), @r"
                epoch 1/12 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸────────── 3/4  eta 20s, run 15m00s
                loss 1.8750  top-1 10.00%  lr 0.0333  3,456 images/s
                epoch 1/12 evaluating ━━━━━━━━━━━━━━━━━━━╸──────────────────────────────── 30/79
                epoch 2/12 ━━━━━━━━━━╸─────────────────────────────── 1/4  eta 1m00s, run 17m05s
                loss 1.5000  top-1 40.00%  lr 0.02  3,456 images/s
                "),
        }
        assert_eq!(
            output.text().lines().count(),
            1,
            "the bar shows steps, and the output has a line per epoch: {}",
            output.text()
        );
        progress.finish();
        assert_eq!(term.contents(), "");
    }
}

#[test]
fn a_closed_pipe_is_ignored_and_a_full_disk_is_an_error() {
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
    progress_on(Screen::quiet()).step(&step(0)).unwrap();
    progress_on(on(ErrorKind::BrokenPipe)).step(&step(0)).unwrap();
    let error = progress_on(on(ErrorKind::StorageFull)).step(&step(0)).unwrap_err();
    assert_eq!(error.to_string(), "standard output: cannot write: no storage space");
}
