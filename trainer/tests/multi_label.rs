//! Images with several classes each: training in every world, average precision, resuming, predictions, mistakes.

use std::fs;
use std::path::Path;

use crate::common::{
    Bench, ENDLESS, assert_equal_runs, assert_same_curve, entries, loss_values, losses, pictures::save_png,
};
use serde_json::Value;

const CONFIG: &str = r#"
[model]
name = "lenet"
[data]
name = "manifest"
dir = "pictures/labels.csv"
label_delim = ";"
[train]
epochs = 4
batch_size = 16
[optimizer]
lr = 0.05
[log]
every = 100
"#;

/// Not a multiple of two or three: ranks evaluate different numbers of images.
const TESTED: u32 = 41;
const CLASSES: [&str; 3] = ["left", "top", "white"];

/// Returns the classes of image `index`: an eighth of the images has none.
fn classes(index: u32) -> Vec<&'static str> {
    (0..3).filter(|bit| index >> bit & 1 == 1).map(|bit| CLASSES[bit as usize]).collect()
}

/// Writes 18 x 18 noisy images, `train` of them to train on: brighter at the left or at the top, blue or white.
fn pictures(bench: &Bench, train: u32) {
    fs::create_dir(bench.path("pictures")).unwrap();
    let mut text = "path,label,split\n".to_owned();
    for (split, count) in [("train", train), ("test", TESTED)] {
        for i in 0..count {
            let has = |class| classes(i).contains(&class);
            let (left, top, white) = (has("left"), has("top"), has("white"));
            let name = format!("{split}-{i}.png");
            save_png(bench.path("pictures").join(&name), 18, 18, |x, y| {
                let noise = (x * 7919 + y * 104_729 + i * 31 + (x * y + i) * 613) % 120;
                let level = 60 + noise + 30 * u32::from(left && x < 9) + 30 * u32::from(top && y < 9);
                let grey = if white { level as u8 } else { (level - level / 8) as u8 };
                [grey, grey, level as u8]
            });
            text += &format!("{name},{},{split}\n", classes(i).join(";"));
        }
    }
    fs::write(bench.path("pictures/labels.csv"), text).unwrap();
}

fn bench() -> Bench {
    let bench = Bench::new(CONFIG);
    pictures(&bench, 160);
    bench
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn summary(run: &Path) -> Value {
    json(&fs::read_to_string(run.join("summary.json")).unwrap())
}

/// Returns the classes and probabilities of each test image, by `trainer predict`.
fn predicted(bench: &Bench, run: &Path) -> Vec<Value> {
    let paths: Vec<String> = (0..TESTED).map(|i| format!("pictures/test-{i}.png")).collect();
    let mut arguments = vec!["predict", "--run", run.to_str().unwrap(), "--format", "jsonl"];
    arguments.extend(paths.iter().map(String::as_str));
    bench.run(&arguments).expect(0).stdout.lines().map(json).collect()
}

/// The mean over the images that have the class of the precision at their score: the definition, without sorting.
fn average_precision(scores: &[(f64, bool)]) -> f64 {
    let positives = scores.iter().filter(|(_, has)| *has);
    let precision = |&(at, _): &(f64, bool)| {
        let reached: Vec<bool> = scores.iter().filter(|(score, _)| *score >= at).map(|(_, has)| *has).collect();
        reached.iter().filter(|has| **has).count() as f64 / reached.len() as f64
    };
    positives.clone().map(precision).sum::<f64>() / positives.count() as f64
}

/// Trains, evaluates and predicts. `extra` are flags of the run. Returns the losses.
fn check(bench: &Bench, root: &str, extra: &[&str]) -> Vec<f64> {
    let run = bench.train(root, extra);
    // The run's evaluation was shared by its processes; this one is by one process, of the same weights.
    let report = json(&bench.run(&["eval", "--run", run.to_str().unwrap(), "--json"]).expect(0).stdout);
    let own = summary(&run);
    let close = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-5;
    for key in ["mean_average_precision", "loss", "top1", "correct", "total"] {
        assert!(close(&report[key], &own["best"][key]), "{key} of {extra:?}: {report} and {}", own["best"]);
    }
    assert_eq!(report["total"], TESTED);
    // What the evaluation counts follows from the predictions.
    let lines = predicted(bench, &run);
    let mut mean = 0.0;
    for (class, name) in CLASSES.iter().enumerate() {
        let score = |line: &Value| {
            let all = line["predictions"].as_array().unwrap();
            all.iter().find(|one| one["index"] == class).unwrap()["probability"].as_f64().unwrap()
        };
        let scores: Vec<_> = lines.iter().zip(0..).map(|(line, i)| (score(line), classes(i).contains(name))).collect();
        let expected = 100.0 * average_precision(&scores);
        let found = &report["average_precision"]["average_precision"][class];
        assert!((found.as_f64().unwrap() - expected).abs() < 1e-6, "{name} of {extra:?}: {found} and {expected}");
        mean += expected / 3.0;
    }
    assert!((report["mean_average_precision"].as_f64().unwrap() - mean).abs() < 1e-6, "{report} and {mean}");
    let right = lines.iter().zip(0..).filter(|(line, i)| line["classes"] == serde_json::json!(classes(*i))).count();
    assert_eq!(report["correct"], right);
    loss_values(&run)
}

#[test]
fn training_and_evaluation_do_not_depend_on_the_world_size() {
    let bench = bench();
    let one = check(&bench, "one", &[]);
    let worlds: [&[&str]; 3] = [&["--cpus", "2"], &["--cpus", "3"], &["--cpus", "2", "--mode", "dp"]];
    for (index, world_size) in worlds.into_iter().enumerate() {
        assert_same_curve(&format!("{world_size:?}"), &one, &check(&bench, &index.to_string(), world_size), 1e-4);
    }
    let weights = ["--set", "train.pos_weight=[2, 0.5, 4]"];
    let weighted = check(&bench, "weighted", &weights);
    assert!((weighted[0] - one[0]).abs() > 0.1, "{} and {}", weighted[0], one[0]);
    let several = check(&bench, "weighted-2", &[&weights[..], &["--cpus", "2"]].concat());
    assert_same_curve("weights", &weighted, &several, 1e-4);
}

#[test]
fn the_network_learns_and_the_best_epoch_has_the_highest_precision() {
    let bench = bench();
    let run = bench.train("runs", &["--epochs", "12", "--set", "data.decode=epoch"]);
    let result = summary(&run);
    assert!(result["best"]["mean_average_precision"].as_f64().unwrap() > 80.0, "{}", result["best"]);
    assert_eq!(result["average_precision"]["images"].as_array().unwrap().len(), 3);
    assert!(result["confusion"].is_null() && result["best"]["top5"].is_null(), "{result}");
    let text = fs::read_to_string(run.join("summary.csv")).unwrap();
    let mut lines = text.lines();
    assert!(lines.next().unwrap().ends_with(",seconds,eval_map"));
    let map: Vec<f64> = lines.map(|line| line.rsplit(',').next().unwrap().parse().unwrap()).collect();
    // Of equal ones the first.
    let highest = (0..map.len()).rev().max_by(|&a, &b| map[a].total_cmp(&map[b])).unwrap() + 1;
    assert_eq!(result["best"]["epoch"], highest, "{map:?}");
    assert!(bench.path("runs").join(&run).join("curves.svg").is_file());

    let csv = bench.run(&["predict", "--run", run.to_str().unwrap(), "pictures/test-7.png"]).expect(0).stdout;
    let rows: Vec<&str> = csv.lines().collect();
    assert_eq!((rows.len(), rows[0]), (2, "path,label,left,top,white"));
    assert!(rows[1].starts_with("pictures/test-7.png,") && rows[1].split(',').count() == 5, "{csv}");
    let file = run.join("checkpoints/best");
    let weights = ["eval", "--model", "lenet", "--weights", file.to_str().unwrap(), "--data", "manifest", "--data-dir"];
    let said = bench.run(&[&weights[..], &["pictures/labels.csv", "--label-delim", ";"]].concat()).expect(0).stdout;
    assert!(said.contains(": mAP ") && said.contains("\naverage precision\nleft "), "{said}");
}

#[test]
fn a_resumed_run_has_the_same_bits() {
    let bench = bench();
    let run = bench.stopped("stopped", &["--cpus", "2"], 25);
    let end = format!("train.max_steps={}", losses(&run).len() + 15);
    bench.run(&["--resume", run.to_str().unwrap(), "--set", &end]).expect(0);
    let undisturbed = bench.train("undisturbed", &[&["--cpus", "2", "--set", &end], &ENDLESS[..]].concat());
    assert_equal_runs(&undisturbed, &run);
    let map = |run: &Path| fs::read_to_string(run.join("summary.csv")).unwrap().lines().count();
    assert_eq!(map(&run), map(&undisturbed));
}

#[test]
fn settings_that_need_one_class_per_image_are_refused() {
    let bench = bench();
    let refused = |extra: &[&str], said: &str| {
        let error = bench.run(&[&["--config", "config.toml"], extra].concat()).expect(2).stderr;
        assert!(error.contains(said) && error.contains("hint: "), "{extra:?}: {error}");
    };
    for set in ["train.label_smoothing=0.1", "train.mixup=0.2", "train.cutmix=1", "train.class_weights=balanced"] {
        let key = set.split_once('=').unwrap().0;
        let said = format!("`{key}`: this needs one class per image, and `data.label_delim` allows several");
        refused(&["--set", set], &said);
    }
    refused(&["--set", "train.tta=flip"], "`train.tta`: this needs one class per image");
    refused(&["--set", "data.sampler_weights=[1, 2, 3]"], "`data.sampler_weights`: this needs one class per image");
    refused(&["--set", "checkpoint.best=balanced-accuracy"], "\"balanced-accuracy\" needs one class per image");
    refused(&["--set", "train.pos_weight=[1, 2]"], "has 2 weights, but data set \"manifest\" has 3 classes");
    refused(&["--set", "data.name=fashion-mini"], "\"fashion-mini\" has one class per image");
    for delim in ["x", ";;", "\\\""] {
        refused(&["--set", &format!("data.label_delim=\"{delim}\"")], "expected one character between two classes");
    }
    fs::write(bench.path("single.toml"), CONFIG.replace("label_delim = \";\"\n", "")).unwrap();
    let single = |extra: &[&str]| bench.run(&[&["--config", "single.toml"], extra].concat()).expect(2).stderr;
    let said = single(&["--set", "train.pos_weight=balanced"]);
    assert!(said.contains("`train.pos_weight` is for images that have several classes each"), "{said}");
    assert!(
        single(&["--set", "checkpoint.best=map"]).contains("\"map\" is measured where images have several classes")
    );
    // The first image has no class, so its label is empty.
    let said = single(&[]);
    assert!(said.contains("labels.csv: line 2: the label is empty") && said.contains("label_delim = \";\""), "{said}");
    assert_eq!(entries(&bench.path("runs")).len(), 0, "nothing was trained");

    let path = bench.path("pictures/labels.csv");
    let good = fs::read_to_string(&path).unwrap();
    for (label, said) in [
        ("left;left", "line 2: the label \"left;left\" names the class `left` twice"),
        ("left;;top", "line 2: the label \"left;;top\" has a class without a name"),
    ] {
        fs::write(&path, good.replacen("train-0.png,,", &format!("train-0.png,{label},"), 1)).unwrap();
        refused(&[], said);
    }
    fs::write(&path, good.replacen("test-0.png,,", "test-0.png,sea,", 1)).unwrap();
    refused(&["--cpus", "2"], "line 162: the class `sea` has no training image");
    fs::write(&path, &good).unwrap();

    let run = bench.train("runs", &["--quiet", "--epochs", "1"]);
    let run = run.to_str().unwrap();
    let said = bench.run(&["eval", "--run", run, "--tta"]).expect(2).stderr;
    assert!(said.contains("--tta needs one class per image") && said.contains("hint: "), "{said}");
    let said = bench.run(&["predict", "--run", run, "pictures/test-1.png", "--top-k", "2"]).expect(2).stderr;
    assert!(said.contains("the CSV file has a column for each class") && said.contains("--format jsonl"), "{said}");
    let verify = ["data", "verify", "manifest", "--data-dir", "pictures/labels.csv", "--label-delim"];
    bench.run(&[&verify[..], &[";"]].concat()).expect(0);
    let table = bench.run(&["table", run]).expect(0).stdout;
    assert!(table.contains("manifest, exact match"), "{table}");
}
