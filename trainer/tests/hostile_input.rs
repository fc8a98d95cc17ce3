//! Input that was made to harm: names with terminal escapes, pipes and devices in place of files, sizes beyond all memory.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use crate::common::{
    Bench, Ended,
    pictures::{save_grey_png, save_png},
};

/// Sets a terminal's title, erases its screen, and turns text around.
const ESCAPES: &str = "\u{1b}]0;owned\u{7}\u{9b}2J\r\u{202e}";

/// Asserts that the screen shows the escapes spelled out, and no control character but newlines.
#[track_caller]
fn assert_spelled(ended: &Ended) {
    let screen = format!("{}{}", ended.stdout, ended.stderr);
    let control = |symbol: char| (symbol.is_control() && symbol != '\n') || symbol == '\u{202e}';
    assert!(!screen.contains(control), "{screen:?}");
    assert!(screen.contains(r"\u{1b}]0;owned\u{7}\u{9b}2J\r\u{202e}"), "{screen}");
}

const PICTURES: &str = "[model]\nname = \"lenet\"\n[data]\nname = \"image-folder\"\ndir = \"pictures\"\n\
                        [train]\nepochs = 1\nbatch_size = 2\n";

/// Writes an image folder of the classes `dog` and `class`, with one image of 20x20 pixels per class in train and test.
fn pictures(bench: &Bench, class: &str) {
    for folder in ["train", "test"].map(|split| bench.path("pictures").join(split)) {
        for class in ["dog", class] {
            fs::create_dir_all(folder.join(class)).unwrap();
            save_png(folder.join(class).join("1.png"), 20, 20, |_, _| [0; 3]);
        }
    }
}

fn pipe(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
}

#[test]
fn escape_sequences_in_class_names_are_shown_as_text() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, ESCAPES);
    assert_spelled(&bench.run(&["--config", "config.toml"]).expect(0));
    assert_spelled(&bench.run(&["--config", "config.toml", "--cpus", "2", "--run-dir", "ddp"]).expect(0));
    let run = bench.only_run("runs");
    assert_spelled(&bench.run(&["eval", "--run", run.to_str().unwrap()]).expect(0));
}

#[test]
fn escape_sequences_in_file_names_are_shown_as_text() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, "cat");
    fs::write(bench.path("pictures/train/cat").join(format!("{ESCAPES}.png")), "no picture").unwrap();
    for arguments in [&["--config", "config.toml"][..], &["--config", "config.toml", "--cpus", "2"]] {
        assert_spelled(&bench.run(arguments).expect(2));
    }
    assert_spelled(&bench.run(&["table", ESCAPES]).expect(2));
    assert_spelled(&bench.run(&["eval", "--model", ESCAPES, "--weights", "w", "--data", "mnist"]).expect(2));
}

#[test]
fn escape_sequences_in_weight_files_are_shown_as_text() {
    let bench = Bench::new(PICTURES);
    let values = [0; 4];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &values).unwrap();
    fs::write(bench.path("w.safetensors"), safetensors::serialize([(ESCAPES, view)], None).unwrap()).unwrap();
    let arguments = ["eval", "--model", "lenet", "--weights", "w.safetensors", "--data", "fashion-mini"];
    assert_spelled(&bench.run(&arguments).expect(2));
}

#[test]
fn escape_sequences_in_summaries_are_shown_as_text() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, "cat");
    bench.run(&["--config", "config.toml", "--quiet"]).expect(0);
    let result = bench.only_run("runs").join("summary.json");
    let text = fs::read_to_string(&result).unwrap();
    let mut summary: serde_json::Value = serde_json::from_str(&text).unwrap();
    summary["device"] = ESCAPES.into();
    fs::write(&result, summary.to_string()).unwrap();
    assert_spelled(&bench.run(&["table", "runs"]).expect(0));
}

/// Runs the program, and fails if it is not done after some time: then it waits for a pipe or reads a device without an end.
#[track_caller]
fn run_to_an_end(bench: &Bench, arguments: &[&str]) -> Ended {
    let mut child = bench.spawn(arguments);
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(300) {
            child.kill().unwrap();
            panic!("{arguments:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap().into()
}

#[test]
fn pipes_and_devices_in_place_of_files_end_at_once() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, "cat");
    bench.run(&["--config", "config.toml", "--quiet", "--set", "train.epochs=2"]).expect(0);
    let run = bench.only_run("runs");
    pipe(&bench.path("pipe"));
    for target in [bench.path("pipe").as_path(), Path::new("/dev/zero")] {
        let weights = ["eval", "--model", "lenet", "--data", "fashion-mini", "--weights", target.to_str().unwrap()];
        let ended = run_to_an_end(&bench, &weights).expect(2);
        assert!(ended.stderr.contains(": it is a ") && ended.stderr.contains("hint:"), "{}", ended.stderr);

        let image = bench.path("pictures/train/cat/2.png");
        symlink(target, &image).unwrap();
        let ended = run_to_an_end(&bench, &["--config", "config.toml"]).expect(2);
        assert!(ended.stderr.contains("2.png: cannot be read: it is a "), "{}", ended.stderr);
        fs::remove_file(image).unwrap();

        // The newest checkpoint is passed over.
        for file in ["manifest.json", "model.safetensors"] {
            let file = run.join("checkpoints/epoch-2").join(file);
            let bytes = fs::read(&file).unwrap();
            fs::remove_file(&file).unwrap();
            symlink(target, &file).unwrap();
            let arguments = ["--resume", run.to_str().unwrap(), "--set", "train.epochs=2"];
            let ended = run_to_an_end(&bench, &arguments).expect(0);
            assert!(ended.stderr.contains(": it is a "), "{}", ended.stderr);
            // The run has saved this checkpoint again.
            assert_eq!(fs::symlink_metadata(&file).unwrap().len(), bytes.len() as u64, "{}", file.display());
        }
    }
}

#[test]
fn sizes_beyond_all_memory_are_refused() {
    let bench = Bench::new("[model]\nname = \"lenet\"\n[data]\nname = \"fashion-mini\"\n");
    let all = ["--config", "config.toml", "--set", "data.image_size=16384"];
    let ended = bench.run(&all).expect(2);
    assert!(ended.stderr.contains("GiB of memory, ") && ended.stderr.contains("hint:"), "{}", ended.stderr);
    // One image fits, but the network for it does not.
    let one = ["--set", "data.limit_train=1", "--set", "data.limit_test=1"];
    for extra in [&one[..], &["--dry-run"], &["--dry-run", "--set", "model.name=resnet18"]] {
        let ended = bench.run(&[&all[..], extra].concat()).expect(2);
        assert!(ended.stderr.contains("pixels needs at least "), "{}", ended.stderr);
        assert!(ended.stderr.contains("--> --set data.image_size=16384"), "{}", ended.stderr);
    }
}

/// The first image is large and the second one small: nothing large may be decoded before the mistake is found.
#[test]
fn a_huge_first_image_costs_no_memory() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, "cat");
    save_grey_png(bench.path("pictures/train/cat/0.png"), 16_000, 16_000, &vec![0; 16_000 * 16_000]);
    let limited = ["-c", "ulimit -v 2000000; exec \"$0\" --config config.toml", env!("CARGO_BIN_EXE_trainer")];
    let mut command = Command::new("sh");
    // Every thread reserves addresses.
    command.args(limited).current_dir(bench.folder.path()).env("RAYON_NUM_THREADS", "2");
    let output = command.output().unwrap();
    let ended = Ended::from(output).expect(2);
    assert!(ended.stderr.contains("is 20x20 pixels, the first image is 16000x16000"), "{}", ended.stderr);
}
