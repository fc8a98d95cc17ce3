//! Tests the exchange of weights: `eval` reads PyTorch's files, and PyTorch reads the files of `export`.

use std::{collections::BTreeMap, fs, path::PathBuf, process::Command};

use crate::common::{self, Bench, CONFIG, Ended};
use serde::Deserialize;

const FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/weights");

fn json(ended: Ended) -> serde_json::Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.stdout))
}

/// PyTorch's result for a file on the 1,000 test images of fashion-mini.
#[derive(Deserialize)]
struct Expected {
    correct: i64,
    total: i64,
    loss: f64,
}

/// Evaluates files that PyTorch wrote (tests/weights/golden.py): wrappers, prefixes, half precision, PyTorch before 1.6, views
/// of one storage, safetensors.
#[test]
fn files_of_pytorch_have_the_accuracy_and_loss_of_pytorch() {
    let bench = Bench::new(CONFIG);
    let expected: BTreeMap<String, Expected> =
        serde_json::from_slice(&fs::read(format!("{FILES}/expected.json")).unwrap()).unwrap();
    assert_eq!(expected.len(), 5);
    for (name, expected) in expected {
        let file = format!("{FILES}/{name}");
        let arguments = ["eval", "--model", "lenet", "--weights", &file, "--data", "fashion-mini", "--json"];
        let result = json(bench.run(&arguments).expect(0));
        // The order of a sum may change the result of an image whose best two classes tie, so allow one image
        let correct = result["correct"].as_i64().unwrap();
        assert!((correct - expected.correct).abs() <= 1, "{name}: {correct}, in PyTorch {}", expected.correct);
        assert_eq!(result["total"], expected.total, "{name}");
        let loss = result["loss"].as_f64().unwrap();
        assert!((loss - expected.loss).abs() < 1e-5, "{name}: loss {loss}, in PyTorch {}", expected.loss);
    }
}

#[test]
fn the_screen_says_where_in_the_file_the_weights_were() {
    let bench = Bench::new(CONFIG);
    let file = format!("{FILES}/state_dict_half.pt");
    let text = bench.run(&["eval", "--model", "lenet", "--weights", &file, "--data", "fashion-mini"]).expect(0).stdout;
    assert!(text.starts_with(&format!("lenet ({file}, its `state_dict`) on fashion-mini: top-1 ")), "{text}");
}

#[test]
fn normalisation_and_size_can_be_set_by_flags() {
    let bench = Bench::new(CONFIG);
    let file = format!("{FILES}/bfloat16.safetensors");
    let eval = |more: &[&str]| {
        let fixed = ["eval", "--model", "lenet", "--weights", &file, "--data", "fashion-mini", "--json"];
        bench.run(&[&fixed[..], more].concat())
    };
    let usual = json(eval(&[]).expect(0));
    assert_eq!(usual, json(eval(&["--mean", "0.286", "--std", "0.353", "--image-size", "28"]).expect(0)));
    let other = json(eval(&["--mean", "0.5"]).expect(0));
    assert_ne!(usual["loss"], other["loss"]);
    // With 32x32 images, fc1 has 400 inputs instead of 256
    let larger = eval(&["--image-size", "32"]).expect(2).stderr;
    assert!(larger.contains("fc1.weight is [120, 256], the network's is [120, 400]"), "{larger}");
    for (flags, named) in [
        (["--mean", "0.1,0.2,0.3"], "3 values, the images have 1 channels"),
        (["--std", "0"], "--std 0"),
        (["--std", "nan"], "--std NaN"),
        (["--mean", "inf"], "--mean inf"),
    ] {
        let said = eval(&flags).expect(2).stderr;
        assert!(said.contains(named) && said.contains("hint:"), "{flags:?}: {said}");
    }
}

/// Trains a small, short run with averaged weights.
fn trained() -> (Bench, PathBuf) {
    let bench = Bench::new(CONFIG);
    bench.run(&["--config", "config.toml", "--quiet", "--epochs", "2", "--set", "train.ema=0.9"]).expect(0);
    let run = bench.only_run("runs");
    (bench, run)
}

#[test]
fn weights_that_are_not_finite_and_a_missing_average_are_refused() {
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &["--epochs", "1"]);
    let export = ["export", "--run", run.to_str().unwrap(), "--to", "model.safetensors"];
    let refused = bench.run(&[&export[..], &["--no-ema"]].concat()).expect(2).stderr;
    assert!(refused.contains("--no-ema: ") && refused.contains("hint: leave --no-ema out"), "{refused}");
    bench.run(&export).expect(0);
    // The last value of the file is one of a weight.
    let mut bytes = fs::read(bench.path("model.safetensors")).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(bench.path("model.safetensors"), bytes).unwrap();
    let eval = ["eval", "--model", "lenet", "--weights", "model.safetensors", "--data", "fashion-mini"];
    let refused = bench.run(&eval).expect(2).stderr;
    assert!(refused.contains("has the value NaN") && refused.contains("hint:"), "{refused}");
}

#[test]
fn exported_weights_evaluate_as_the_run_does() {
    let (bench, run) = trained();
    let run = run.to_str().unwrap();
    let eval = |weights: &str| {
        let arguments = ["eval", "--model", "lenet", "--weights", weights, "--data", "fashion-mini", "--json"];
        json(bench.run(&arguments).expect(0))
    };
    // Without a flag, the weights that the run evaluates are exported.
    let said = bench.run(&["export", "--run", run, "--checkpoint", "last", "--to", "ema.safetensors"]).expect(0);
    assert!(said.stdout.starts_with("ema.safetensors: averaged weights of "), "{}", said.stdout);
    let trained = ["export", "--run", run, "--checkpoint", "last", "--no-ema", "--to", "model.safetensors"];
    let said = bench.run(&trained).expect(0);
    assert!(said.stdout.starts_with("model.safetensors: weights of "), "{}", said.stdout);
    // For a checkpoint's folder, `eval` uses the averaged weights, as for its run
    let checkpoint = format!("{run}/checkpoints/last");
    assert_eq!(eval("ema.safetensors"), eval(&checkpoint));
    assert_ne!(eval("model.safetensors")["loss"], eval("ema.safetensors")["loss"]);
    assert_eq!(eval("model.safetensors"), eval(&format!("{checkpoint}/model.safetensors")));
    // `--checkpoint` selects a checkpoint. Without it, `export` takes the best one.
    bench.run(&["export", "--run", run, "--checkpoint", "epoch-2", "--to", "two.safetensors"]).expect(0);
    assert_eq!(fs::read(bench.path("two.safetensors")).unwrap(), fs::read(bench.path("ema.safetensors")).unwrap());
    bench.run(&["export", "--run", run, "--to", "best.safetensors"]).expect(0);
    bench.run(&["export", "--run", run, "--checkpoint", "best", "--to", "best.safetensors", "--force"]).expect(0);
    assert!(!bench.path("best.safetensors.tmp").exists());
}

#[test]
fn an_impossible_export_is_refused_and_writes_nothing() {
    let (bench, run) = trained();
    let run = run.to_str().unwrap();
    fs::write(bench.path("there.safetensors"), "mine").unwrap();
    fs::create_dir(bench.path("folder.safetensors")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, bench.path("pipe.onnx"), rustix::fs::Mode::RUSR).unwrap();
    let cases: [(&[&str], u8, &str); 11] = [
        (&["--to", "there.safetensors"], 2, "--force"),
        (&["--to", "weights.pth"], 2, "name the file weights.safetensors"),
        (&["--to", "folder.safetensors", "--force"], 2, "is a folder"),
        (&["--to", "new.safetensors", "--checkpoint", "epoch-9"], 2, "the run has best, epoch-1, epoch-2, last"),
        (&["--to", "none/new.safetensors"], 1, "cannot write"),
        (&["--to", "there.safetensors/new.safetensors"], 1, "cannot write"),
        (&["--to", "pipe.onnx", "--force"], 2, "is not a regular file"),
        (&["--to", "/dev/no_folder/new.onnx", "--force"], 2, "is not a regular file"),
        (&["--to", "/proc/no_folder/new.onnx", "--force"], 2, "is not a regular file"),
        (&["--to", "new.safetensors", "--checkpoint", ""], 2, "the run has best, epoch-1, epoch-2, last"),
        (&["--to", "new.safetensors", "--checkpoint", "../.."], 2, "the run has best, epoch-1, epoch-2, last"),
    ];
    for (flags, code, named) in cases {
        let said = bench.run(&[&["export", "--run", run], flags].concat()).expect(code.into()).stderr;
        assert!(said.contains(named) && said.contains("hint:"), "{flags:?}: {said}");
    }
    assert_eq!(fs::read(bench.path("there.safetensors")).unwrap(), b"mine");
    assert!(!fs::symlink_metadata(bench.path("pipe.onnx")).unwrap().is_file());
    let nowhere = bench.run(&["export", "--run", "runs", "--to", "new.safetensors"]).expect(2).stderr;
    assert!(nowhere.contains("is not a run folder") && nowhere.contains("hint:"), "{nowhere}");
    assert!(!bench.path("new.safetensors").exists());
}

/// Exchanges weights with PyTorch in both directions: weights_roundtrip.py, on the data set that the program contains.
#[test]
fn pytorch_and_trainer_evaluate_each_others_models() {
    let Some(python) = common::python_with(&["torch", "numpy", "safetensors"]) else { return };
    let bench = Bench::new(CONFIG);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/weights_roundtrip.py");
    let output = Command::new(python)
        .args([script, "--trainer", env!("CARGO_BIN_EXE_trainer"), "--data", "fashion-mini", "--steps", "200"])
        .args(["--models", "lenet", "--batch", "32"])
        .current_dir(bench.folder.path())
        .output()
        .expect("python starts");
    Ended::from(output).expect(0);
}

/// Exchanges weights with torchvision in both directions: torchvision_roundtrip.py, on pictures of 32x32.
#[test]
fn torchvision_and_trainer_evaluate_each_others_networks() {
    let Some(python) = common::python_with(&["torch", "torchvision", "safetensors", "PIL"]) else { return };
    let bench = Bench::new(CONFIG);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/torchvision_roundtrip.py");
    let output = Command::new(python)
        .args([script, "--trainer", env!("CARGO_BIN_EXE_trainer"), "--side", "32"])
        .args(["--models", "resnet18_imagenet,mobilenet_v2_imagenet,efficientnet_b0_imagenet"])
        .current_dir(bench.folder.path())
        .output()
        .expect("python starts");
    Ended::from(output).expect(0);
}
