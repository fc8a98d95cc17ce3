//! Complete runs that are resumed: evaluated once more, or trained further.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
};

use serde_json::Value;

use crate::common::{Bench, CONFIG, assert_equal_runs, losses, signal};

fn summary_json(run: &Path) -> Value {
    serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap()
}

#[test]
fn resuming_a_finished_run_reports_its_result_again() {
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &[]);
    let before = losses(&run);
    let ended = bench.run(&["--resume", run.to_str().unwrap()]).expect(0);
    assert_eq!(before, losses(&run));
    assert!(ended.stdout.contains("top-1"), "{}", ended.stdout);
}

/// The last row of a run that ended inside an epoch is replaced by that of the whole epoch.
#[test]
fn a_run_that_max_steps_ended_may_be_resumed_with_more_steps() {
    let bench = Bench::new(CONFIG);
    bench.run(&["--config", "config.toml", "--set", "train.max_steps=40"]).expect(0);
    let run = bench.only_run("runs");
    let resume = ["--resume", run.to_str().unwrap(), "--set"];
    let rows = || fs::read_to_string(run.join("summary.csv")).unwrap();
    let before = rows();
    assert_eq!((losses(&run).len(), before.lines().count()), (40, 3));
    // Without more steps the result is shown again.
    bench.run(&[&resume[..], &["train.max_steps=40"]].concat()).expect(0);
    let evaluated =
        |text: &str| text.lines().map(|line| line.split(',').take(3).collect::<String>()).collect::<Vec<_>>();
    assert_eq!(evaluated(&before), evaluated(&rows()));
    bench.run(&[&resume[..], &["train.max_steps=80"]].concat()).expect(0);
    bench.run(&["--config", "config.toml", "--run-dir", "whole", "--set", "train.max_steps=80"]).expect(0);
    assert_equal_runs(&bench.only_run("whole"), &run);
    bench.run(&[&resume[..], &["train.max_steps=0"]].concat()).expect(0);
    assert_equal_runs(&bench.train("complete", &[]), &run);
}

/// An evaluation of one image may have any accuracy, and says nothing about those of more images.
#[test]
fn a_run_that_evaluates_other_images_chooses_its_best_checkpoint_again() {
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &["--quiet", "--epochs", "1", "--set", "data.limit_test=1"]);
    let summary = || summary_json(&run);
    assert_eq!(summary()["best"]["total"], 1, "{}", summary());
    let resume = |epochs: &str| {
        let flags = ["--resume", run.to_str().unwrap(), "--epochs", epochs, "--set", "data.limit_test=50"];
        bench.run(&flags).expect(0).stderr
    };
    // The run is complete: it is only evaluated again.
    let said = resume("1");
    let expected = "evaluations have 50 images now, and had 1: the next evaluation counts as the best";
    assert!(said.contains(expected), "{said}");
    assert_eq!((&summary()["best"]["total"], &summary()["best"]["epoch"]), (&50.into(), &1.into()), "{}", summary());
    assert_eq!(fs::read_link(run.join("checkpoints/best")).unwrap().to_str(), Some("epoch-1"));
    let said = resume("2");
    assert!(!said.contains("counts as the best"), "{said}");
    assert_eq!(summary()["best"]["total"], 50);
}

/// The learning rate is so small that the accuracy stays the same.
#[test]
fn a_run_that_stopped_early_may_be_resumed_with_more_patience() {
    let bench = Bench::new(CONFIG);
    let constant = ["--set", "optimizer.lr=1e-30", "--set", "train.epochs=9", "--set", "train.patience=2"];
    bench.run(&[&["--config", "config.toml"], &constant[..]].concat()).expect(0);
    let run = bench.only_run("runs");
    for (patience, epochs) in [("2", 3), ("4", 5), ("3", 5), ("0", 9)] {
        let setting = format!("train.patience={patience}");
        let said = bench.run(&["--resume", run.to_str().unwrap(), "--set", &setting]).expect(0).stdout;
        assert_eq!(losses(&run).len(), epochs * 33, "patience {patience}");
        let early = format!("stopped after epoch {epochs}: no better top-1 since epoch 1");
        assert_eq!(said.contains(&early), epochs < 9, "patience {patience}: {said}");
    }
}

/// The numbers of the result are those of one evaluation: with the settings of the last session.
#[test]
fn a_repeated_evaluation_with_other_settings_is_the_last_one() {
    let bench = Bench::new(&CONFIG.replace("[train]", "[train]\nema = 0.9"));
    let run = bench.train("runs", &[]);
    let before = summary_json(&run);
    let resume = |setting: &str| {
        bench.run(&["--resume", run.to_str().unwrap(), "--set", setting]).expect(0);
        summary_json(&run)
    };
    let mirrored = resume("train.tta=flip");
    assert!(before["last"]["tta_top1"].is_null() && mirrored["last"]["tta_top1"].is_f64(), "{before} {mirrored}");
    for key in ["epoch", "correct"] {
        assert_eq!(mirrored["last"][key], before["last"][key], "{key}");
    }

    let without_average = resume("train.ema=0");
    assert_ne!(without_average["last"]["loss"], before["last"]["loss"], "other weights");
    assert_eq!(without_average["last"]["epoch"], before["last"]["epoch"]);
    assert_eq!(without_average["best"]["loss"], before["best"]["loss"], "the best checkpoint is the same");
    let counts = without_average["confusion"]["counts"].as_array().unwrap();
    let diagonal: u64 = counts.iter().step_by(10 + 1).map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(without_average["last"]["correct"], diagonal);
    assert!(run.join("checkpoints/last/ema.safetensors").is_file(), "the checkpoint is not written again");
}

/// The weights of a run that ends after an epoch without evaluation were not evaluated before.
#[test]
fn the_first_evaluation_of_the_final_weights_may_be_the_best() {
    let bench = Bench::new(&CONFIG.replace("[train]", "[train]\neval_every = 2").replace("epochs = 3", "epochs = 4"));
    let run = bench.train("runs", &["--set", "checkpoint.keep_last=9"]);
    // As if the run had been killed after epoch 3.
    fs::remove_dir_all(run.join("checkpoints/epoch-4")).unwrap();
    bench.run(&["--resume", run.to_str().unwrap(), "--epochs", "3"]).expect(0);
    let summary = summary_json(&run);
    assert_eq!((&summary["last"]["epoch"], &summary["steps"]), (&3.into(), &99.into()), "{summary}");
}

/// The weights are those of the middle of epoch 2.
#[test]
fn a_run_inside_an_epoch_is_not_complete_with_the_epochs_before() {
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &["--set", "train.max_steps=40"]);
    let resume = ["--resume", run.to_str().unwrap(), "--set", "train.max_steps=0", "--epochs"];
    let before = fs::read(run.join("summary.json")).unwrap();
    let refused = bench.run(&[&resume[..], &["1"]].concat()).expect(2).stderr;
    assert!(refused.contains("the run has trained 1 epoch and a part of the next one, more than 1"), "{refused}");
    assert!(refused.contains("hint: continue it with 2 epochs or more, or leave --epochs out"), "{refused}");
    assert_eq!(fs::read(run.join("summary.json")).unwrap(), before);
    bench.run(&[&resume[..], &["2"]].concat()).expect(0);
    assert_eq!(losses(&run).len(), 66);
}

/// The evaluation of 1,000 images with a ResNet takes seconds. The run is in it when it prints its note.
#[test]
fn a_signal_in_a_repeated_evaluation_keeps_the_result() {
    let bench = Bench::new(&CONFIG.replace("\"lenet\"", "\"resnet18\"").replace("one-cycle", "constant"));
    let run = bench.train("runs", &["--epochs", "1", "--set", "data.limit_train=16", "--set", "data.limit_test=1"]);
    let before = fs::read(run.join("summary.json")).unwrap();
    let mut child = bench.spawn(&["--resume", run.to_str().unwrap(), "--set", "data.limit_test=1000"]);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut said: Vec<String> = Vec::new();
    while !said.iter().any(|line| line.contains("it is only evaluated again")) {
        said.push(lines.next().unwrap_or_else(|| panic!("{said:#?}")));
    }
    signal(&child, 15);
    said.extend(lines);
    assert_eq!(child.wait().unwrap().code(), Some(143), "{said:#?}");
    assert!(said.iter().any(|line| line.contains("summary.json keeps the earlier result")), "{said:#?}");
    assert_eq!(fs::read(run.join("summary.json")).unwrap(), before);
}
