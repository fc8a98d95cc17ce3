//! One process with several devices trains as one device does: the same losses, samples, weights and stop.

use std::path::PathBuf;

use crate::common::{
    Bench, CONFIG, Ended, assert_same_curve, checkpoint_file, entries, loss_values, losses, signal, summary, wait_until,
};

/// Trains with `--mode dp` on `devices` devices; 0 is one process on one device.
fn train(bench: &Bench, root: &str, devices: usize, extra: &[&str]) -> PathBuf {
    let count = devices.to_string();
    let mode = ["--mode", "dp", "--cpus", &count];
    let mode = if devices == 0 { &[] } else { &mode[..] };
    bench.run(&[&["--config", "config.toml", "--run-dir", root], mode, extra].concat()).expect(0);
    bench.only_run(root)
}

/// 16 samples over 3 devices are 6, 6, 4; 520 samples are 32 batches and one of 8: 3, 3, 2.
#[test]
fn the_losses_do_not_depend_on_the_number_of_devices() {
    let bench = Bench::new(CONFIG);
    for (what, extra) in [
        ("plain", &[][..]),
        ("mixed", &["--set", "train.mixup=0.2", "--set", "train.grad_clip=0.5", "--set", "train.ema=0.9"]),
        (
            "accumulated",
            &["--set", "train.accumulate=3", "--set", "optimizer.kind=adamw", "--set", "optimizer.lr=0.001"],
        ),
    ] {
        // AdamW has no Nesterov momentum: the file's key is ignored with a note.
        let extra = [&["--set", "train.epochs=1"], extra].concat();
        let one = loss_values(&train(&bench, &format!("{what}-single"), 0, &extra));
        assert!(one.len() >= 11);
        for devices in [1, 2, 3, 4] {
            let run = train(&bench, &format!("{what}-{devices}"), devices, &extra);
            assert!(run.to_string_lossy().ends_with(&format!("-lenet-dpx{devices}")), "{}", run.display());
            assert_same_curve(&format!("{what}, {devices} devices"), &one, &loss_values(&run), 1e-5);
        }
    }
}

/// The images of the last batch have one pixel before the last batch norms, and the last batch is one image. So no other device has
/// values of this batch, and synchronised batch norm has one value per channel too.
#[test]
fn a_step_of_one_image_is_refused_with_synchronised_batch_norm_too() {
    let config = CONFIG
        .replace("\"lenet\"", "\"resnet18_imagenet\"")
        .replace("augment = [\"crop\", \"flip\"]", "image_size = 32");
    let bench = Bench::new(&config.replace("[data]", "[parallel]\nbatch_norm = \"sync\"\n[data]"));
    let one_left = ["--set", "data.limit_train=9", "--set", "train.batch_size=8", "--epochs", "1"];
    for mode in [&[][..], &["--mode", "dp", "--cpus", "2"]] {
        let refused = bench.run(&[&["--config", "config.toml"], &one_left[..], mode].concat()).expect(2).stderr;
        assert!(refused.contains("batch norm needs two values") && refused.contains("hint:"), "{mode:?}: {refused}");
    }
}

/// Synchronised batch norm normalises by the whole batch. With local batch norm, each device would have other statistics.
///
/// The steps are few and small: at its start a ResNet multiplies the rounding of sums by a hundred or more per step, and one
/// device with another number of threads leaves the curve as fast as several devices do.
#[test]
fn synchronised_batch_norm_has_the_losses_of_one_device() {
    let config = CONFIG.replace("\"lenet\"", "\"resnet18\"").replace("one-cycle", "constant");
    let bench = Bench::new(&config.replace("[data]", "[parallel]\nbatch_norm = \"sync\"\n[data]"));
    let settings = ["train.batch_size=8", "train.max_steps=3", "data.limit_test=3", "optimizer.lr=0.0002"];
    let limit: Vec<_> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let one = loss_values(&train(&bench, "single", 0, &limit));
    let local = [&limit[..], &["--set", "parallel.batch_norm=local"]].concat();
    for devices in [2, 3] {
        let synchronised = loss_values(&train(&bench, &format!("sync-{devices}"), devices, &limit));
        assert_same_curve(&format!("{devices} devices"), &one, &synchronised, 1e-4);
        let own = loss_values(&train(&bench, &format!("local-{devices}"), devices, &local));
        assert!((own[0] - one[0]).abs() > 1e-4 * one[0], "a device's own statistics are others");
    }
}

#[test]
fn every_image_is_evaluated_once_and_runs_repeat_bit_for_bit() {
    let bench = Bench::new(CONFIG);
    let (one, two) = (train(&bench, "one", 3, &[]), train(&bench, "two", 3, &[]));
    assert_eq!(losses(&one), losses(&two));
    assert_eq!(summary(&one), summary(&two));
    let result: serde_json::Value = serde_json::from_slice(&std::fs::read(one.join("summary.json")).unwrap()).unwrap();
    assert_eq!(result["last"]["total"], 200);
    assert_eq!(result["device_bytes"].as_array().unwrap().len(), 3);
    for file in ["model.safetensors", "optimizer.safetensors"] {
        assert_eq!(checkpoint_file(&one, "last", file), checkpoint_file(&two, "last", file), "{file}");
    }
}

/// Settings of a run that would last for minutes, with a learning rate that does not depend on its length.
const LONG: [&str; 4] = ["--set", "train.epochs=5000", "--set", "schedule.kind=constant"];

/// Starts or continues a run of [`LONG`], stops it by a signal after ten steps or more; returns the steps taken.
fn stop_after_some_steps(bench: &Bench, arguments: &[&str]) -> u64 {
    let lines = || {
        let run = entries(&bench.path("stopped")).into_iter().next();
        let text = run.and_then(|run| std::fs::read_to_string(run.join("metrics.jsonl")).ok());
        text.map_or(0, |text| text.lines().count())
    };
    let before = lines();
    let child = bench.spawn(arguments);
    wait_until("metrics", || lines() >= before + 10);
    signal(&child, 15);
    let ended: Ended = child.wait_with_output().unwrap().into();
    let said = ended.expect(143);
    assert!(said.stdout.contains(" --resume "), "{}", said.stdout);
    lines() as u64
}

#[test]
fn a_run_may_be_resumed_with_more_and_with_fewer_devices() {
    let bench = Bench::new(CONFIG);
    let first = [&["--config", "config.toml", "--run-dir", "stopped"], &LONG[..]].concat();
    stop_after_some_steps(&bench, &first);
    let run = bench.only_run("stopped");
    let run_name = run.to_str().unwrap();
    let stopped = stop_after_some_steps(&bench, &["--resume", run_name, "--mode", "dp", "--cpus", "3"]);
    let text = std::fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(text.contains("mode = \"dp\""), "{text}");
    let end = format!("train.max_steps={}", stopped + 15);
    bench.run(&["--resume", run_name, "--mode", "single", "--set", &end]).expect(0);
    let whole = train(&bench, "whole", 0, &[&LONG[..], &["--set", &end]].concat());
    let (ours, theirs) = (loss_values(&run), loss_values(&whole));
    assert_eq!(ours.len(), theirs.len());
    // All steps are there. Only those before rounding has grown can be compared closely.
    assert_same_curve("single, dp, single", &theirs[..30], &ours[..30], 1e-4);
}

#[test]
fn a_run_that_a_signal_stopped_resumes_bit_for_bit() {
    let bench = Bench::new(CONFIG);
    let dp = ["--mode", "dp", "--cpus", "2"];
    let first = [&["--config", "config.toml", "--run-dir", "stopped"], &LONG[..], &dp].concat();
    let stopped = stop_after_some_steps(&bench, &first);
    let end = format!("train.max_steps={}", stopped + 15);
    let run = bench.only_run("stopped");
    bench.run(&["--resume", run.to_str().unwrap(), "--cpus", "2", "--set", &end]).expect(0);
    let undisturbed = train(&bench, "undisturbed", 2, &[&LONG[..], &["--set", &end]].concat());
    assert_eq!(losses(&undisturbed), losses(&run));
}

#[test]
fn mistakes_exit_with_code_2() {
    let bench = Bench::new(CONFIG);
    let cases: [(&[&str], &str); 5] = [
        (&["--mode", "dp", "--cpus", "20000"], "from 1 to 1024"),
        (&["--mode", "dp"], "--cpus N"),
        (&["--mode", "dp", "--cpus", "2", "--set", "parallel.batch_norm=reduce"], "batch_norm"),
        (&["--mode", "dp", "--cpus", "2", "--nnodes", "2"], "dp is one process"),
        (&["--mode", "single", "--cpus", "2"], "single is one process"),
    ];
    for (arguments, named) in cases {
        let ended = bench.run(&[&["--config", "config.toml"], arguments].concat()).expect(2);
        assert!(ended.stderr.contains(named) && ended.stderr.contains("hint:"), "{arguments:?}: {}", ended.stderr);
    }
}
