//! What `configs/speedrun_cifar10.toml` needs beyond other recipes: weights from the training images, frozen weights, a
//! learning rate for batch norm's biases, test-time augmentation. On a part of fashion-mini.

use std::path::Path;

use crate::common::{
    self, Bench, ENDLESS, assert_equal_runs, assert_same_curve, checkpoint_file, entries, loss_values, losses, signal,
    wait_until,
};

const CONFIG: &str = r#"
[model]
name = "airbench94"
[data]
name = "fashion-mini"
augment = ["reflect-crop:2", "alternating-flip"]
limit_train = 320
limit_test = 100
[train]
epochs = 2
batch_size = 32
drop_last = true
label_smoothing = 0.2
ema = 0.9
tta = "flip"
[optimizer]
lr = 0.1
momentum = 0.85
nesterov = true
norm_bias_lr_factor = 16
[schedule]
kind = "one-cycle"
[log]
every = 1
"#;

/// Returns the bytes of a tensor of a checkpoint's file.
fn tensor(run: &Path, checkpoint: &str, file: &str, name: &str) -> Vec<u8> {
    let bytes = checkpoint_file(run, checkpoint, file);
    let (length, rest) = bytes.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let [start, end] = [0, 1].map(|i| header[name]["data_offsets"][i].as_u64().unwrap() as usize);
    data[start..end].to_vec()
}

#[test]
fn frozen_weights_do_not_move_and_the_others_do() {
    let bench = Bench::new(CONFIG);
    let run = bench.train("one", &[]);
    for file in ["model.safetensors", "ema.safetensors"] {
        let moved = |name: &str| tensor(&run, "epoch-1", file, name) != tensor(&run, "epoch-2", file, name);
        assert!(!moved("whiten.weight") && !moved("layer1.norm1.weight"), "{file}");
        assert!(moved("whiten.bias") && moved("layer1.norm1.bias") && moved("layer1.conv1.weight"), "{file}");
    }
    let of_images =
        |root: &str, extra: &[&str]| tensor(&bench.train(root, extra), "last", "model.safetensors", "whiten.weight");
    let steps = ["--set", "train.max_steps=1"];
    let first = tensor(&run, "last", "model.safetensors", "whiten.weight");
    assert_eq!(of_images("seed", &[&steps[..], &["--seed", "1"]].concat()), first, "the seed does not matter");
    let fewer = ["--set", "data.limit_train=160"];
    assert_ne!(of_images("fewer", &[&steps[..], &fewer].concat()), first, "the images do");
}

#[test]
fn the_accuracy_with_mirror_images_is_reported_separately() {
    let bench = Bench::new(CONFIG);
    let (with, without) = (bench.train("with", &[]), bench.train("without", &["--set", "train.tta=none"]));
    let summary = |run: &Path| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap()
    };
    let (with, without) = (summary(&with), summary(&without));
    assert!((0.0..=100.0).contains(&with["last"]["tta_top1"].as_f64().unwrap()), "{with}");
    assert_eq!(without["last"]["tta_top1"], serde_json::Value::Null);
    for key in ["top1", "top5", "loss", "correct", "total"] {
        assert_eq!(with["last"][key], without["last"][key], "{key} is that of the images as they are");
    }
    let table = bench.run(&["table", "with", "without", "--json"]).expect(0).stdout;
    let rows: serde_json::Value = serde_json::from_str(&table).unwrap();
    let of_runs = rows.as_array().unwrap().iter().filter(|row| row["model"] == "airbench94");
    let found: Vec<_> = of_runs.map(|row| row["tta_top1"].clone()).collect();
    assert!(found.contains(&with["last"]["tta_top1"]) || found.contains(&with["best"]["tta_top1"]), "{table}");
    assert!(found.contains(&serde_json::Value::Null), "{table}");
}

#[test]
fn an_interrupted_run_resumes_to_the_same_end() {
    for precision in ["f32", "bf16"] {
        let bench = Bench::new(CONFIG);
        let precision = format!("train.precision={precision}");
        let common = [&["--config", "config.toml", "--set", &precision][..], &ENDLESS].concat();
        let child = bench.spawn(&[&common[..], &["--run-dir", "stopped"]].concat());
        wait_until("metrics", || {
            let Some(run) = entries(&bench.path("stopped")).into_iter().next() else { return false };
            std::fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| text.lines().count() >= 5)
        });
        signal(&child, 2);
        common::Ended::from(child.wait_with_output().unwrap()).expect(130);
        let run = bench.only_run("stopped");
        let end = format!("train.max_steps={}", losses(&run).len() + 12);
        bench.run(&["--resume", run.to_str().unwrap(), "--set", &end]).expect(0);
        bench.run(&[&common[..], &["--run-dir", "undisturbed", "--set", &end]].concat()).expect(0);
        assert_equal_runs(&bench.only_run("undisturbed"), &run);
    }
}

/// With a small learning rate, as in the test of VGG in `ddp.rs`.
#[test]
fn the_losses_do_not_depend_on_the_number_of_processes() {
    let bench = Bench::new(CONFIG);
    let settings = ["--set", "optimizer.lr=0.00001", "--set", "parallel.batch_norm=sync", "--set", "train.epochs=1"];
    let run = |workers: &str| bench.train(workers, &[&settings[..], &["--cpus", workers]].concat());
    let one = run("1");
    for workers in ["2", "3"] {
        let several = run(workers);
        assert_same_curve(&format!("{workers} processes"), &loss_values(&one), &loss_values(&several), 1e-4);
        let weight = |run: &Path| tensor(run, "last", "model.safetensors", "whiten.weight");
        assert_eq!(weight(&one), weight(&several), "{workers} processes");
    }
}
