//! Training on images that are decoded in each epoch: resume, evaluation, prediction, damaged images, archives.

use std::fs;
use std::path::Path;

use crate::common::{self, Bench, ENDLESS, assert_equal_runs, losses, pictures};
use crate::ddp::two_ranks_of_a_foreign_launcher;
use serde_json::Value;

const CONFIG: &str = r#"
[model]
name = "lenet"
[data]
name = "image-folder"
dir = "pictures"
image_size = 28
augment = ["random-resized-crop:0.25", "flip", "trivial-augment"]
[train]
epochs = 2
batch_size = 4
[optimizer]
lr = 0.01
"#;

/// Writes 12 images of each of two classes to train on and 5 to test, PNG and JPEG, of other sizes than the network's.
fn write_pictures(bench: &Bench) {
    for (split, count) in [("train", 12), ("test", 5)] {
        for (class, red) in [("dark", 20), ("light", 230)] {
            let folder = bench.path(&format!("pictures/{split}/{class}"));
            fs::create_dir_all(&folder).unwrap();
            for index in 0..count {
                let (width, height) = (36 + index, 60 - 2 * index);
                let pixel = |x: u32, y: u32| [red, (x * 7 + index * 9) as u8, (y * 5) as u8];
                if index % 2 == 0 {
                    pictures::save_png(folder.join(format!("{index:02}.png")), width, height, pixel);
                } else {
                    let pixels = pictures::rgb(width, height, pixel);
                    let jpeg = pictures::jpeg(width as u16, height as u16, &pixels);
                    fs::write(folder.join(format!("{index:02}.jpg")), jpeg).unwrap();
                }
            }
        }
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_stopped_run_resumes_to_the_same_bits_and_eval_and_predict_agree() {
    let bench = Bench::new(CONFIG);
    write_pictures(&bench);
    let run = bench.stopped("stopped", &["--cpus", "2"], 8);
    let end = format!("train.max_steps={}", losses(&run).len() + 9);
    let name = run.display().to_string();
    bench.run(&["--resume", &name, "--set", &end]).expect(0);
    let arguments = ["--config", "config.toml", "--run-dir", "whole", "--cpus", "2", "--set", &end];
    let ended = bench.run(&[&arguments[..], &ENDLESS].concat()).expect(0);
    assert!(ended.stdout.contains("24 + 10 images 3x28x28, decoded in each epoch"), "{}", ended.stdout);
    let whole = bench.only_run("whole");
    assert_equal_runs(&whole, &run);
    let config = fs::read_to_string(whole.join("config.toml")).unwrap();
    assert!(config.contains("decode = \"epoch\"\n") && config.contains("resize = 32\n"), "{config}");

    let summary = json(&whole.join("summary.json"));
    assert!(summary["replaced_images"].is_null(), "{summary}");
    let stdout = bench.run(&["eval", "--run", &name, "--json"]).expect(0).stdout;
    let evaluated: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(evaluated["top1"], summary["best"]["top1"], "{evaluated} {summary}");
    let stdout = bench.run(&["predict", "--run", &name, "--format", "jsonl", "pictures/test"]).expect(0).stdout;
    let right = stdout.lines().filter(|line| {
        let line: Value = serde_json::from_str(line).unwrap();
        line["path"].as_str().unwrap().contains(line["predictions"][0]["class"].as_str().unwrap())
    });
    assert_eq!(Some(right.count() as u64), evaluated["correct"].as_u64());

    // Crops of 28 pixels out of images whose shorter side is 32.
    let stdout = bench.run(&["eval", "--run", &name, "--tta", "ten-crop", "--json"]).expect(0).stdout;
    let ten: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&ten["top1"], &ten["total"]), (&evaluated["top1"], &evaluated["total"]), "the plain figure stays");
    let predict =
        ["predict", "--run", &name, "--format", "jsonl", "--batch-size", "3", "pictures/test", "--tta", "ten-crop"];
    let stdout = bench.run(&predict).expect(0).stdout;
    let right = stdout.lines().filter(|line| {
        let line: Value = serde_json::from_str(line).unwrap();
        line["path"].as_str().unwrap().contains(line["tta"]["class"].as_str().unwrap())
    });
    assert_eq!(ten["tta_top1"], 10.0 * right.count() as f64, "of ten images");
    let said = bench.run(&["eval", "--run", &name, "--tta", "ten-crop"]).expect(0).stdout;
    assert!(said.contains("; with ten crops top-1 "), "{said}");
    let weights = format!("{name}/checkpoints/best");
    let file = ["eval", "--model", "lenet", "--weights", &weights, "--data", "image-folder", "--data-dir", "pictures"];
    let whole = ["--image-size", "28", "--tta", "ten-crop"];
    let said = bench.run(&[&file[..], &whole].concat()).expect(2).stderr;
    assert!(
        said.contains("--tta ten-crop: ten crops need images that are larger") && said.contains("--resize"),
        "{said}"
    );
    bench.run(&[&file[..], &whole, &["--resize", "32"]].concat()).expect(0);
}

#[test]
fn ten_crops_need_files_of_larger_images() {
    let bench = Bench::new(common::CONFIG);
    let run = bench.train("runs", &["--quiet", "--epochs", "1"]);
    let run = run.to_str().unwrap();
    let said = bench.run(&["eval", "--run", run, "--tta", "ten-crop"]).expect(2).stderr;
    assert!(said.contains("the images of `fashion-mini` are in memory") && said.contains("hint: "), "{said}");
    pictures::save_grey_png(bench.path("a.png"), 28, 28, &[7; 28 * 28]);
    let said = bench.run(&["predict", "--run", run, "a.png", "--tta", "ten-crop"]).expect(2).stderr;
    assert!(said.contains("--tta ten-crop: the run's images are not cut out of larger ones"), "{said}");
    let said = bench.run(&["predict", "--run", run, "--tta", "tencrop", "a.png"]).expect(2).stderr;
    assert!(said.contains("flip, ten-crop"), "{said}");
}

#[test]
fn decoding_once_and_decoding_in_each_epoch_train_to_the_same_bits() {
    let bench = Bench::new(&CONFIG.replace("random-resized-crop:0.25", "crop"));
    write_pictures(&bench);
    let memory = bench.train("memory", &["--set", "data.resize=30"]);
    assert!(fs::read_to_string(memory.join("config.toml")).unwrap().contains("decode = \"memory\"\n"));
    let epoch = bench.train("epoch", &["--set", "data.resize=30", "--set", "data.decode=epoch"]);
    assert_equal_runs(&memory, &epoch);
    // The memory is that of all ranks where they share some, and each rank's own where they do not.
    let two = ["--set", "data.resize=30", "--cpus", "2", "--set", "data.validation=0.3"];
    let epoch = bench.train("epoch-2", &[&two[..], &["--set", "data.decode=epoch"]].concat());
    for backend in ["shm", "tcp"] {
        let memory = ["--set", "data.decode=memory", "--backend", backend];
        assert_equal_runs(&epoch, &bench.train(backend, &[&two[..], &memory].concat()));
    }
}

#[test]
fn a_damaged_image_ends_all_ranks_that_share_the_pixels() {
    let bench = Bench::new(&CONFIG.replace("random-resized-crop:0.25", "crop"));
    write_pictures(&bench);
    for damaged in ["pictures/train/light/03.jpg", "pictures/test/dark/04.png"] {
        let bytes = fs::read(bench.path(damaged)).unwrap();
        fs::write(bench.path(damaged), &bytes[..bytes.len() / 2]).unwrap();
        for devices in [&["--cpus", "2"][..], &["--cpus", "3"], &["--cpus", "2", "--backend", "tcp"]] {
            let arguments = ["--config", "config.toml", "--run-dir", "failed", "--set", "data.decode=memory"];
            let ended = bench.run(&[&arguments[..], devices].concat()).expect(2);
            assert!(ended.stderr.contains(&format!("{damaged}: cannot be decoded: ")), "{}", ended.stderr);
            assert!(ended.stderr.contains("hint: the image is damaged"), "{}", ended.stderr);
        }
        fs::write(bench.path(damaged), bytes).unwrap();
    }
}

/// Ranks that decode at other times make other calls, so they compare their settings before.
#[test]
fn ranks_with_different_settings_of_data_decode_are_reported() {
    let config = CONFIG.replace("random-resized-crop:0.25", "crop");
    let bench = Bench::new(&config.replace("image_size = 28", "image_size = 28\ndecode = \"memory\""));
    write_pictures(&bench);
    for (set, said) in [
        ("data.decode=epoch", "rank 0 has data.decode = \"memory\" where rank 1 has data.decode = \"epoch\""),
        ("data.limit_train=6", "rank 0 has data.limit_train = 0 where rank 1 has data.limit_train = 6"),
    ] {
        let ended = two_ranks_of_a_foreign_launcher(&bench, &["--set", set]);
        let all = ended.map(|rank| rank.stderr).join("\n");
        assert!(all.contains(said), "{set}: {all}");
    }
    // A rank without a choice, such as one of a resumed run whose folder another rank has, takes that of the others.
    let bench = Bench::new(&config);
    write_pictures(&bench);
    for ended in two_ranks_of_a_foreign_launcher(&bench, &["--set", "data.decode=epoch"]) {
        ended.expect(0);
    }
    assert!(fs::read_to_string(bench.only_run("runs").join("config.toml")).unwrap().contains("decode = \"epoch\"\n"));
}

/// The steps of an epoch before an image that cannot be read are not lost.
#[test]
fn a_damaged_training_image_leaves_a_checkpoint() {
    let bench = Bench::new(CONFIG);
    write_pictures(&bench);
    let damaged = bench.path("pictures/train/light/03.jpg");
    let bytes = fs::read(&damaged).unwrap();
    let whole = bench.train("whole", &["--set", "train.batch_size=1"]);
    fs::write(&damaged, &bytes[..bytes.len() / 2]).unwrap();
    let one = ["--config", "config.toml", "--run-dir", "failed", "--set", "train.batch_size=1"];
    bench.run(&one).expect(2);
    let run = bench.only_run("failed");
    let steps = losses(&run).len();
    assert!(steps > 0 && run.join(format!("checkpoints/step-{steps}")).is_dir(), "{steps} steps");
    fs::write(&damaged, bytes).unwrap();
    bench.run(&["--resume", run.to_str().unwrap()]).expect(0);
    assert_eq!(losses(&run), losses(&whole), "the run continued to the same bits");
}

#[test]
fn a_damaged_image_ends_all_ranks_or_is_replaced() {
    let bench = Bench::new(CONFIG);
    write_pictures(&bench);
    for damaged in ["pictures/train/light/03.jpg", "pictures/test/dark/04.png"] {
        let bytes = fs::read(bench.path(damaged)).unwrap();
        fs::write(bench.path(damaged), &bytes[..bytes.len() / 2]).unwrap();
        for devices in [&[][..], &["--cpus", "2"]] {
            let arguments = ["--config", "config.toml", "--run-dir", "failed"];
            let ended = bench.run(&[&arguments[..], devices].concat()).expect(2);
            assert!(ended.stderr.contains(&format!("{damaged}: cannot be decoded: ")), "{}", ended.stderr);
            assert!(ended.stderr.contains("hint: the image is damaged"), "{}", ended.stderr);
        }
        let skip = ["--set", "data.on_error=skip"];
        let run = bench.train(&damaged.replace('/', "-"), &skip);
        // Once in each of the two epochs.
        assert_eq!(json(&run.join("summary.json"))["replaced_images"], 2);
        fs::write(bench.path(damaged), bytes).unwrap();
    }
}
