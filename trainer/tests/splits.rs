//! A held-out part of the training set, a fraction of it, and CSV manifests.

use std::{fs, path::Path};

use crate::common::{Bench, CONFIG, ENDLESS, assert_equal_runs, losses, pictures::save_png};
use data::sampler::permutation;
use serde_json::Value;

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

const HOLD_OUT: [&str; 2] = ["--set", "data.validation=0.1"];

/// The split depends on the seed alone. `best` is that of the validation split, and the test set is evaluated once.
#[test]
fn a_part_of_the_training_set_selects_the_best_epoch_in_every_mode() {
    let bench = Bench::new(CONFIG);
    let modes: [(&str, &[&str]); 3] =
        [("single", &[]), ("dp", &["--cpus", "2", "--mode", "dp"]), ("ddp", &["--cpus", "3"])];
    let mut splits = Vec::new();
    for (mode, flags) in modes {
        let ended = bench.run(&[&["--config", "config.toml", "--run-dir", mode][..], &HOLD_OUT, flags].concat());
        let screen = ended.expect(0).stdout;
        assert!(screen.contains("468 + 52 + 200 images"), "{mode}: {screen}");
        assert!(screen.contains("\nval best") && screen.contains("\ntest "), "{mode}: {screen}");
        let run = bench.only_run(mode);
        let summary = json(&run.join("summary.json"));
        assert_eq!((&summary["best"]["total"], &summary["test"]["total"]), (&52.into(), &200.into()), "{mode}");
        assert_eq!(summary["best"]["epoch"], summary["test"]["epoch"], "{mode}: the selected weights");
        let counted =
            |key: &str| summary[key]["counts"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum::<u64>();
        assert_eq!((counted("confusion"), counted("test_confusion")), (52, 200), "{mode}");
        splits.push(fs::read_to_string(run.join("split.json")).unwrap());
    }
    assert_eq!((&splits[0], &splits[0]), (&splits[1], &splits[2]));
    // The recipe of docs/data.md. The labels are those of the program's own data set.
    let request =
        data::formats::LoadRequest { name: "fashion-mini".into(), limit_train: Some(520), ..Default::default() };
    let labels = data::formats::load(&request).unwrap().train.labels;
    let mut expected: Vec<u32> = Vec::new();
    for class in 0..10 {
        let of_class: Vec<u32> = permutation(520, 0).into_iter().filter(|&id| labels[id as usize] == class).collect();
        let count = (of_class.len() as f64 * 0.1).round() as usize;
        expected.extend(&of_class[..count]);
    }
    expected.sort_unstable();
    let split: Value = serde_json::from_str(&splits[0]).unwrap();
    assert_eq!(split, serde_json::json!({"seed": 0, "images": 520, "validation": expected, "unused": []}));
    let other = bench.train("other", &[&HOLD_OUT[..], &["--seed", "1", "--epochs", "1"]].concat());
    assert_ne!(fs::read_to_string(other.join("split.json")).unwrap(), splits[0]);
}

#[test]
fn a_resumed_run_has_the_same_split_and_the_same_bits() {
    let bench = Bench::new(CONFIG);
    let parts = [&HOLD_OUT[..], &["--set", "data.fraction=0.5", "--set", "data.sampler_weights=balanced"]].concat();
    let run = bench.stopped("stopped", &parts, 25);
    let resume = ["--resume", run.to_str().unwrap()];
    // What was trained on cannot validate.
    for other in ["data.validation=0.2", "data.fraction=1", "data.limit_train=500"] {
        let refused = bench.run(&[&resume[..], &["--set", other]].concat()).expect(2).stderr;
        assert!(refused.contains("split.json: the run was started with another split"), "{other}: {refused}");
        assert!(refused.contains("hint:"), "{refused}");
    }
    let (file, aside) = (run.join("split.json"), bench.path("aside"));
    fs::rename(&file, &aside).unwrap();
    let refused = bench.run(&resume).expect(2).stderr;
    assert!(refused.contains("split.json: the file is missing or empty"), "{refused}");
    assert!(refused.contains("hint: restore the file"), "{refused}");
    fs::rename(&aside, &file).unwrap();
    let end = format!("train.max_steps={}", losses(&run).len() + 20);
    bench.run(&[&resume[..], &["--set", &end]].concat()).expect(0);
    let undisturbed = bench.train("undisturbed", &[&parts[..], &ENDLESS, &["--set", &end]].concat());
    assert_equal_runs(&undisturbed, &run);
    assert_eq!(json(&undisturbed.join("split.json")), json(&run.join("split.json")));
    assert_eq!(json(&undisturbed.join("summary.json"))["test"], json(&run.join("summary.json"))["test"]);
}

const PICTURES: &str = r#"
[model]
name = "lenet"
[data]
name = "manifest"
dir = "pictures/labels.csv"
[train]
epochs = 3
batch_size = 4
[optimizer]
lr = 0.01
"#;

/// Writes 30 dark and 10 light images and a manifest with `header` and the columns of `row` (index, class).
fn pictures(bench: &Bench, header: &str, row: impl Fn(u8, &str) -> String) {
    fs::create_dir(bench.path("pictures")).unwrap();
    let mut text = format!("{header}\n");
    for i in 0..40u8 {
        let (class, colour) = if i % 4 == 3 { ("light", 240) } else { ("dark", 10) };
        let pixel = |x: u32, y: u32| [colour, (x * 7) as u8 + i, (y * 5) as u8];
        save_png(bench.path(&format!("pictures/{i}.png")), 20, 20, pixel);
        text += &format!("{i}.png,{}\n", row(i, class));
    }
    fs::write(bench.path("pictures/labels.csv"), text).unwrap();
}

#[test]
fn a_manifest_with_splits_trains_evaluates_and_verifies() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, "path,label,split", |i, class| {
        format!("{class},{}", ["train", "train", "val", "test"][usize::from(i / 10)])
    });
    let ended = bench.run(&["--config", "config.toml"]).expect(0);
    assert!(ended.stdout.contains("20 + 10 + 10 images 3x20x20"), "{}", ended.stdout);
    let run = bench.only_run("runs");
    let summary = json(&run.join("summary.json"));
    assert_eq!(summary["confusion"]["classes"], serde_json::json!(["dark", "light"]));
    let evaluated = bench.run(&["eval", "--run", run.to_str().unwrap(), "--json"]).expect(0).stdout;
    let evaluated: Value = serde_json::from_str(&evaluated).unwrap();
    for key in ["correct", "total", "balanced_accuracy"] {
        assert_eq!(evaluated[key], summary["test"][key], "{key}");
    }
    let verified = bench.run(&["data", "verify", "manifest", "--data-dir", "pictures/labels.csv"]).expect(0).stdout;
    assert!(verified.starts_with("pictures/labels.csv: ok (structure)\n"), "{verified}");
    // The file of the data set may be given with the flag as well.
    fs::write(bench.path("config.toml"), PICTURES.replace("dir = \"pictures/labels.csv\"", "")).unwrap();
    bench.run(&["--config", "config.toml", "--data-dir", "pictures/labels.csv", "--epochs", "1"]).expect(0);
}

/// What is held out of a manifest without other splits is evaluated in each epoch; `eval` finds the same images.
#[test]
fn a_manifest_without_splits_is_evaluated_on_the_held_out_images() {
    let bench = Bench::new(PICTURES);
    pictures(&bench, "path,label", |_, class| if class == "dark" { "0".into() } else { "1".into() });
    let refused = bench.run(&["--config", "config.toml"]).expect(2).stderr;
    assert!(refused.contains("pictures/labels.csv: no line has the split test or val"), "{refused}");
    assert!(refused.contains("hint: add a column split, or set data.validation = 0.1"), "{refused}");
    let verified = bench.run(&["data", "verify", "manifest", "--data-dir", "pictures/labels.csv"]).expect(0).stdout;
    assert!(verified.contains("manifest: verified"), "{verified}");

    let ended = bench.run(&["--config", "config.toml", "--set", "data.validation=0.2", "--cpus", "2"]).expect(0);
    assert!(ended.stdout.contains("32 + 8 images") && !ended.stdout.contains("\ntest "), "{}", ended.stdout);
    let run = bench.only_run("runs");
    let summary = json(&run.join("summary.json"));
    let evaluated = bench.run(&["eval", "--run", run.to_str().unwrap(), "--json"]).expect(0).stdout;
    let evaluated: Value = serde_json::from_str(&evaluated).unwrap();
    assert_eq!((&evaluated["total"], &evaluated["correct"]), (&8.into(), &summary["best"]["correct"]), "{summary}");
}

#[test]
fn impossible_splits_and_manifests_are_refused_with_place_and_hint() {
    let bench = Bench::new(CONFIG);
    let cases = [
        ("data.validation=0", "`data.validation`: expected a number above 0 and below 1, found 0"),
        ("data.validation=1", "`data.validation`: expected a number above 0 and below 1, found 1"),
        ("data.validation=0.001", "`data.validation`: 0.001 of the "),
        ("data.validation=0.9999", "`data.validation`: 0.9999 holds out all "),
        ("data.fraction=0", "`data.fraction`: expected a number above 0 and at most 1, found 0"),
        ("data.fraction=0.001", "`data.fraction`: 0.001 of the "),
    ];
    for (set, said) in cases {
        for flags in [&[][..], &["--cpus", "2"]] {
            let refused = bench.run(&[&["--config", "config.toml", "--set", set], flags].concat()).expect(2).stderr;
            let place = format!("--> --set {set}");
            assert!(
                refused.contains(said) && refused.contains(&place) && refused.contains("hint: "),
                "{set}: {refused}"
            );
        }
    }
    assert!(!bench.path("runs").exists(), "nothing was written");

    let bench = Bench::new(PICTURES);
    pictures(&bench, "path,label,split", |i, class| format!("{class},{}", if i == 7 { "tset" } else { "train" }));
    let refused = bench.run(&["--config", "config.toml"]).expect(2).stderr;
    assert!(refused.contains("pictures/labels.csv: line 9: unknown split \"tset\""), "{refused}");
    assert!(refused.contains("hint: splits: train, val, test"), "{refused}");
}
