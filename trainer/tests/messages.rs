//! Compares the complete error message for each kind of wrong input.

use std::fs;

use crate::common::{Bench, pictures::save_png};

/// Runs `--config config.toml` with `extra` arguments, and returns the screen of a run that must end with exit code 2.
fn screen(config: &str, extra: &[&str], prepare: impl FnOnce(&Bench)) -> String {
    let bench = Bench::new(config);
    prepare(&bench);
    let ended = bench.run(&[&["--config", "config.toml"], extra].concat()).expect(2);
    assert_eq!(ended.stdout, "", "errors belong on stderr");
    ended.stderr
}

const MINI: &str = "[model]\nname = \"lenet\"\n\n[data]\nname = \"fashion-mini\"\n\n[train]\nbatch_size = 64\n\n[optimizer]\nlr = 0.05\n";

fn of_config(from: &str, to: &str) -> String {
    assert!(MINI.contains(from));
    screen(&MINI.replace(from, to), &[], |_| {})
}

/// Writes an image folder with two classes whose last test image has another size.
fn pictures(bench: &Bench, last: u32) {
    for (split, class, side) in [("train", "cat", 20), ("train", "dog", 20), ("test", "cat", 20), ("test", "dog", last)]
    {
        let folder = bench.path(&format!("pictures/{split}/{class}"));
        fs::create_dir_all(&folder).unwrap();
        save_png(folder.join("1.png"), side, side, |_, _| [0; 3]);
    }
}

const PICTURES: &str = "[model]\nname = \"lenet\"\n\n[data]\nname = \"image-folder\"\ndir = \"pictures\"\n";

#[test]
fn unknown_key() {
    insta::assert_snapshot!(of_config("lr = 0.05", "learning_rate = 0.05"));
}

#[test]
fn wrong_type() {
    insta::assert_snapshot!(of_config("lr = 0.05", "lr = \"high\""));
}

#[test]
fn impossible_value() {
    insta::assert_snapshot!(of_config("batch_size = 64", "label_smoothing = 1.5"));
}

#[test]
fn zero_batch() {
    insta::assert_snapshot!(of_config("batch_size = 64", "batch_size = 0"));
}

#[test]
fn learning_rate_not_a_number() {
    insta::assert_snapshot!(of_config("lr = 0.05", "lr = nan"));
}

#[test]
fn missing_config() {
    let bench = Bench::new(MINI);
    insta::assert_snapshot!(bench.run(&["--config", "confg.toml"]).expect(2).stderr);
}

#[test]
fn missing_data_folder() {
    let config = MINI.replace("fashion-mini", "cifar10");
    insta::assert_snapshot!(screen(&config, &["--data-dir", "nowhere"], |_| {}));
}

#[test]
fn truncated_data_file() {
    let config = MINI.replace("fashion-mini", "cifar10");
    insta::assert_snapshot!(screen(&config, &["--data-dir", "."], |bench| {
        let folder = bench.path("cifar-10-batches-bin");
        fs::create_dir(&folder).unwrap();
        for name in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"] {
            fs::write(folder.join(format!("{name}.bin")), vec![1; 3073 * 10_000]).unwrap();
        }
        fs::write(folder.join("data_batch_2.bin"), vec![1; 3073 * 7 + 100]).unwrap();
    }));
}

#[test]
fn wrong_image_size() {
    insta::assert_snapshot!(screen(PICTURES, &[], |bench| pictures(bench, 24)));
}

#[test]
fn images_too_small_for_the_model() {
    insta::assert_snapshot!(of_config("lenet", "vgg16"));
}

#[test]
fn fewer_classes_than_the_model() {
    insta::assert_snapshot!(of_config("name = \"lenet\"", "name = \"lenet\"\nnum_classes = 12"));
}

#[test]
fn fewer_classes_than_the_model_in_a_folder() {
    let config = PICTURES.replace("name = \"lenet\"", "name = \"lenet\"\nnum_classes = 3");
    insta::assert_snapshot!(screen(&config, &[], |bench| pictures(bench, 20)));
}

#[test]
fn damaged_image() {
    insta::assert_snapshot!(screen(PICTURES, &[], |bench| {
        pictures(bench, 20);
        fs::write(bench.path("pictures/train/cat/2.png"), b"not a picture").unwrap();
    }));
}

#[test]
fn a_run_that_diverges_ends_with_1() {
    let bench = Bench::new(&MINI.replace("lr = 0.05", "lr = 1000.0"));
    let ended = bench.run(&["--config", "config.toml", "--quiet"]).expect(1);
    assert!(
        ended.stderr.contains("epoch 1, step ") && ended.stderr.contains("hint: training diverged"),
        "{}",
        ended.stderr
    );
}

/// Returns the screen of `eval` for a weight file that it must refuse. `prepare` writes the file to `weights.pth`.
fn screen_of_weights(model: &str, data: &str, prepare: impl FnOnce(&Bench)) -> String {
    let bench = Bench::new(MINI);
    prepare(&bench);
    let ended = bench.run(&["eval", "--model", model, "--weights", "weights.pth", "--data", data]).expect(2);
    assert_eq!(ended.stdout, "", "errors belong on stderr");
    ended.stderr
}

/// A LeNet for 1x28x28 images, saved by PyTorch.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/weights/net_module.pth");

#[test]
fn weights_of_another_model() {
    insta::assert_snapshot!(screen_of_weights("resnet18", "fashion-mini", |bench| {
        fs::copy(GOLDEN, bench.path("weights.pth")).unwrap();
    }));
}

#[test]
fn weights_cut_short() {
    insta::assert_snapshot!(screen_of_weights("lenet", "fashion-mini", |bench| {
        let bytes = fs::read(GOLDEN).unwrap();
        fs::write(bench.path("weights.pth"), &bytes[..bytes.len() / 2]).unwrap();
    }));
}

#[test]
fn weights_in_an_unknown_format() {
    insta::assert_snapshot!(screen_of_weights("lenet", "fashion-mini", |bench| {
        fs::write(bench.path("weights.pth"), "<html>404</html>").unwrap();
    }));
}

#[test]
fn weights_of_an_unknown_model() {
    insta::assert_snapshot!(screen_of_weights("lenet5", "fashion-mini", |_| {}));
}

#[test]
fn table_without_a_run() {
    let bench = Bench::new(MINI);
    insta::assert_snapshot!(bench.run(&["table"]).expect(2).stderr);
}

#[test]
fn export_of_a_folder_that_is_not_a_run() {
    let bench = Bench::new(MINI);
    insta::assert_snapshot!(bench.run(&["export", "--run", "nowhere", "--to", "a.safetensors"]).expect(2).stderr);
}

#[test]
fn export_to_an_unknown_ending() {
    let bench = Bench::new(MINI);
    let said = bench.run(&["export", "--run", "nowhere", "--to", "weights.pth"]).expect(2).stderr;
    insta::assert_snapshot!(said, @r"
    error: --to weights.pth: unknown file extension
      hint: name the file weights.safetensors (weights for PyTorch) or weights.onnx (ONNX)
    ");
}

#[test]
fn export_to_the_ending_of_another_format() {
    let bench = Bench::new(MINI);
    let said = bench.run(&["export", "--run", "nowhere", "--format", "onnx", "--to", "a.safetensors"]).expect(2).stderr;
    insta::assert_snapshot!(said, @r"
    error: --to a.safetensors: --format onnx writes a file with the ending .onnx
      hint: name the file a.onnx
    ");
    let said = bench.run(&["export", "--run", "nowhere", "--format", "torch", "--to", "a.onnx"]).expect(2).stderr;
    assert!(said.contains("[possible values: safetensors, onnx]"), "{said}");
}

#[test]
fn export_of_a_run_without_weights() {
    let bench = Bench::new(MINI);
    let run = bench.train("runs", &["--quiet", "--epochs", "1", "--set", "data.limit_train=64"]);
    fs::rename(run, bench.path("run")).unwrap();
    fs::remove_dir_all(bench.path("run/checkpoints")).unwrap();
    let said = bench.run(&["export", "--run", "run", "--to", "a.onnx"]).expect(2).stderr;
    insta::assert_snapshot!(said, @r"
    error: run: the run has no checkpoint yet
      hint: let it train until its first checkpoint, and name this folder then
    ");
    assert_eq!(bench.run(&["export", "--run", "run", "--to", "a.safetensors"]).expect(2).stderr, said);
}
