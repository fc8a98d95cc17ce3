//! Tests of the reporter: files of killed and resumed runs, the screen, files that go away.

use std::{fs, path::Path};

use super::*;
use crate::report::testing::TestOutput;
use crate::snapshot::EvalRecord;

fn options() -> ReporterOptions {
    ReporterOptions {
        epochs: 3,
        steps_per_epoch: 4,
        pixel_shares: Vec::new(),
        every: 2,
        tensorboard: true,
        quiet: true,
        multi_label: false,
        device: "cpu".into(),
    }
}

fn sections() -> Vec<Section> {
    vec![Section::new("model").row("name", "lenet").row("classes", 10)]
}

fn step(step: u64) -> StepRecord {
    let loss = 2.0 / (step + 1) as f64;
    StepRecord { epoch: 1 + step as usize / 4, step, loss, lr: 0.1, step_ms: 10.0, ..StepRecord::default() }
}

fn epoch(epoch: usize) -> EpochRecord {
    let eval = EvalRecord {
        loss: 1.0,
        top1: 10.0 * epoch as f64,
        top5: 60.0,
        correct: epoch as u64,
        total: 10,
        ..EvalRecord::default()
    };
    EpochRecord {
        epoch,
        train_loss: 1.0,
        eval: Some(eval),
        is_best: true,
        images_per_s: 400.0,
        seconds: 1.0,
        ..EpochRecord::default()
    }
}

fn run(reporter: &mut Reporter, steps: std::ops::Range<u64>) {
    for i in steps {
        reporter.step(&step(i)).unwrap();
        if (i + 1).is_multiple_of(4) {
            reporter.epoch(&epoch((i as usize + 1) / 4)).unwrap();
        }
    }
}

fn files(folder: &RunFolder) -> [Vec<u8>; 3] {
    [folder.metrics(), folder.summary_csv(), folder.curves()].map(|path| fs::read(path).unwrap())
}

#[test]
fn a_killed_and_resumed_run_has_the_files_of_an_uninterrupted_run() {
    let root = tempfile::tempdir().unwrap();
    let new = |root: &Path| {
        let folder = RunFolder::create(root, "lenet", "single", 1).unwrap();
        Reporter::new(folder, options(), &sections()).unwrap()
    };
    let mut whole = new(root.path());
    let whole_folder = whole.folder().clone();
    run(&mut whole, 0..12);
    whole.finish(&RunSummary::default()).unwrap();
    let whole_name = whole_folder.name();
    // A checkpoint before step 6. A SIGKILL in the middle of writing step 9.
    let mut killed = new(root.path());
    let folder = killed.folder().clone();
    run(&mut killed, 0..10);
    drop(killed);
    let text = fs::read(folder.metrics()).unwrap();
    fs::write(folder.metrics(), &text[..text.len() - 20]).unwrap();
    let mut resumed = Reporter::resume(folder.clone(), options(), &sections(), 6, 2).unwrap();
    assert_eq!(resumed.epochs().len(), 1);
    run(&mut resumed, 6..12);
    resumed.finish(&RunSummary::default()).unwrap();
    let [metrics, summary, curves] = files(&folder);
    let [expected_metrics, expected_summary, expected_curves] = files(&whole_folder);
    assert_eq!(String::from_utf8(metrics).unwrap(), String::from_utf8(expected_metrics).unwrap());
    assert_eq!(String::from_utf8(summary).unwrap(), String::from_utf8(expected_summary).unwrap());
    let titled = String::from_utf8(curves).unwrap().replace(&folder.name(), &whole_name);
    assert_eq!(titled, String::from_utf8(expected_curves).unwrap());
    let events = fs::read_dir(folder.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("events.out.tfevents."));
    assert_eq!(events.count(), 2);
    assert!(fs::read_to_string(folder.env()).unwrap().contains("\"resumed\""));
}

#[test]
fn the_screen_shows_the_start_table_the_epochs_and_the_summary() {
    let root = tempfile::tempdir().unwrap();
    let folder = RunFolder::create(root.path(), "lenet", "single", 1).unwrap();
    let output = TestOutput::default();
    let screen = Screen { lines: output.writer(), ..Screen::quiet() };
    let mut reporter = Reporter::start(screen, folder.clone(), options(), &sections(), None).unwrap();
    run(&mut reporter, 0..4);
    reporter.say("saved checkpoints/last").unwrap();
    let summary = RunSummary {
        model: "lenet".into(),
        data: "fashion-mini".into(),
        device: "cpu".into(),
        epochs: 1,
        planned_epochs: 3,
        steps: 4,
        interrupted: Some("SIGTERM after step 4".into()),
        ..RunSummary::default()
    };
    reporter.finish(&summary).unwrap();
    let shown = output.text();
    insta::assert_snapshot!(shown.replace(&folder.path().display().to_string(), "RUN"), @r"
        model  name     lenet                                 classes  10

        epoch 1/3  train loss 1.0000  top-1  0.00%  eval loss 1.0000  top-1 10.00%  400 images/s  1.0s  best
        saved checkpoints/last

        interrupted: SIGTERM after step 4

        model     lenet, 0 parameters
        data      fashion-mini
        device    cpu
        epochs    1 of 3, 4 steps
        time      0.0s, 400 images/s in training
        training  top-1   0.00%               loss 1.0000

        run folder: RUN
        ");
}

#[test]
fn a_folder_that_was_deleted_is_an_error_that_names_the_file() {
    let root = tempfile::tempdir().unwrap();
    let folder = RunFolder::create(root.path(), "lenet", "single", 1).unwrap();
    let mut reporter = Reporter::new(folder.clone(), options(), &[]).unwrap();
    run(&mut reporter, 0..3);
    fs::remove_dir_all(folder.path()).unwrap();
    reporter.step(&step(3)).unwrap(); // The open file still exists for this process
    let error = reporter.epoch(&epoch(1)).unwrap_err();
    assert_eq!(error.path, folder.curves());
    assert!(error.cause.starts_with("cannot write: No such file"), "{error}");
    assert!(Reporter::new(folder, options(), &[]).is_err());
}
