use std::{fs, path::Path};

use super::*;

const PUBLISHED: [Published; 4] = [("lenet", None), ("vgg16", Some(92.64)), ("resnet18", Some(93.02)), ("vgg11", None)];

/// Creates a run folder as a run does. `config` is put below `[train]`.
fn run(root: &Path, name: &str, model: &str, config: &str, best: Option<f64>) {
    let folder = root.join(name);
    fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: String| fs::write(folder.join(name), text).unwrap();
    write(
        "config.toml",
        format!("[data]\nname = \"cifar10\"\ndir = \"/data/{name}\"\nlimit_test = 0\n[train]\n{config}\n"),
    );
    let eval = best.map(|top1| serde_json::json!({"epoch": 2, "top1": top1, "loss": 1.0, "correct": 5, "total": 10}));
    let summary = serde_json::json!({
        "model": model, "dataset": "cifar10", "device": "CPU, single x1", "epochs": 3, "planned_epochs": 3,
        "best": eval, "last": eval, "seconds": 90.0, "confusion": {"classes": ["a"], "counts": [1]},
        "test_confusion": {"classes": ["a"], "counts": [2]},
    });
    write("summary.json", summary.to_string());
    let header = crate::report::summary_csv::HEADER;
    write("summary.csv", format!("{header}\n1,1,1,1,1,1,1,1,1\n2,1,1,1,1,1,1,1,1\n3,1,1,1,1,1,1,1,1\n"));
    let env = serde_json::json!({
        "started": "2026-01-31T09:30:05Z", "command": ["/home/me/bin/trainer", "--config", "configs/a.toml", "--set", "data.dir=/home/me/d/"],
        "working_dir": "/home/me", "host": "mine", "git_commit": "8d5a1f6f0c6e4b6d9a3f2e1d0c9b8a7968574635",
        "resumed": [{"started": "2026-02-01T09:30:05Z", "host": "mine", "command": ["/home/me/trainer"]}],
    });
    write("env.json", env.to_string());
}

fn table(root: &Path) -> Vec<AccuracyRow> {
    rows(&PUBLISHED, &read_runs(&[root.to_owned()]).unwrap().runs)
}

#[test]
fn rows_have_published_and_own_accuracy() {
    let root = tempfile::tempdir().unwrap();
    for (name, seed, top1) in [("1-resnet18", 0, 93.0), ("2-resnet18", 1, 93.4), ("3-resnet18", 2, 93.2)] {
        // Autotuning may choose another bucket in each run
        let config = format!("seed = {seed}\nepochs = 3\n[parallel]\nbucket_mb = {}.0", 1 + seed);
        run(root.path(), name, "resnet18", &config, Some(top1));
    }
    run(root.path(), "4-resnet18", "resnet18", "seed = 0\nepochs = 3\nema = 0.9", Some(94.0));
    // A run from another run's weights is not a repetition
    let config = "seed = 3\nepochs = 3\n[model]\nweights = \"/home/me/runs/1-resnet18/checkpoints/best\"";
    run(root.path(), "6-resnet18", "resnet18", config, Some(95.0));
    run(root.path(), "5-lenet", "lenet", "", Some(74.5));
    let rows = table(root.path());
    insta::assert_snapshot!(text(&rows), @r"
        model     data     published             reached          epochs  device          minutes  commit     run
        lenet     cifar10          –               74.50               3  CPU, single x1      1.5  8d5a1f6f0  5-lenet
        vgg16     cifar10      92.64              no run               –  –                     –  –          –
        resnet18  cifar10      93.02               95.00  3 from weights  CPU, single x1      1.5  8d5a1f6f0  6-resnet18
        resnet18  cifar10      93.02               94.00               3  CPU, single x1      1.5  8d5a1f6f0  4-resnet18
        resnet18  cifar10      93.02  93.20 ± 0.20 (n=3)               3  CPU, single x1      1.5  8d5a1f6f0  1-resnet18 +2
        ");
    insta::assert_snapshot!(markdown(&rows), @r"
        | model | data | published | reached | epochs | device | minutes | commit | run |
        | --- | --- | ---: | ---: | ---: | --- | ---: | --- | --- |
        | lenet | cifar10 | – | 74.50 | 3 | CPU, single x1 | 1.5 | 8d5a1f6f0 | 5-lenet |
        | vgg16 | cifar10 | 92.64 | no run | – | – | – | – | – |
        | resnet18 | cifar10 | 93.02 | 95.00 | 3 from weights | CPU, single x1 | 1.5 | 8d5a1f6f0 | 6-resnet18 |
        | resnet18 | cifar10 | 93.02 | 94.00 | 3 | CPU, single x1 | 1.5 | 8d5a1f6f0 | 4-resnet18 |
        | resnet18 | cifar10 | 93.02 | 93.20 ± 0.20 (n=3) | 3 | CPU, single x1 | 1.5 | 8d5a1f6f0 | 1-resnet18 +2 |
        ");
    let json = serde_json::to_value(&rows).unwrap();
    let three = &json[4];
    assert_eq!(
        (&three["model"], &three["published_top1"], &three["runs"]),
        (&"resnet18".into(), &93.02.into(), &3.into())
    );
    assert!((three["top1"].as_f64().unwrap() - 93.2).abs() < 1e-9);
    assert!((three["deviation"].as_f64().unwrap() - 0.2).abs() < 1e-9);
    assert_eq!(
        (&three["epochs"], &three["device"], &three["minutes"]),
        (&3.into(), &"CPU, single x1".into(), &1.5.into())
    );
    let none = &json[1];
    assert_eq!((&none["model"], &none["top1"], &none["runs"]), (&"vgg16".into(), &serde_json::Value::Null, &0.into()));
}

/// `save` removes the devices and the folder of the weights from the configuration.
#[test]
fn a_saved_summary_and_a_later_repetition_are_one_row() {
    let root = tempfile::tempdir().unwrap();
    let config = |seed: usize, weights: &str, devices: &str| {
        format!("seed = {seed}\n[model]\nweights = \"{weights}\"\n[parallel]\n{devices}")
    };
    run(root.path(), "1-lenet", "lenet", &config(0, "start.pth", ""), Some(74.0));
    run(root.path(), "2-lenet", "lenet", &config(1, "/home/me/start.pth", "devices = \"cpu:2\""), Some(75.0));
    run(root.path(), "3-lenet", "lenet", &config(1, "/home/me/other.pth", "devices = \"cpu:2\""), Some(76.0));
    let rows = table(root.path());
    let counts: Vec<_> = rows.iter().filter(|row| row.model == "lenet").map(|row| row.runs).collect();
    assert_eq!(counts, [1, 2]);
}

/// The run folders of a sweep are in one folder per run.
#[test]
fn a_sweep_has_the_runs_of_its_folder() {
    let root = tempfile::tempdir().unwrap();
    run(&root.path().join("runs/001"), "1-lenet", "lenet", "seed = 0", Some(74.5));
    run(&root.path().join("runs/002"), "2-lenet", "lenet", "seed = 1", Some(75.5));
    fs::write(root.path().join("sweep.json"), "{}").unwrap();
    fs::write(root.path().join("config.toml"), "").unwrap();
    let names: Vec<String> =
        read_runs(&[root.path().to_owned()]).unwrap().runs.into_iter().map(|run| run.name).collect();
    assert_eq!(names, ["1-lenet", "2-lenet"]);
}

#[test]
fn runs_on_part_of_the_data_have_their_own_row() {
    let root = tempfile::tempdir().unwrap();
    run(root.path(), "1", "vgg16", "", Some(90.0));
    let config = root.path().join("1/config.toml");
    fs::write(&config, fs::read_to_string(&config).unwrap().replace("limit_test = 0", "limit_test = 100")).unwrap();
    let rows = table(root.path());
    let of = |dataset: &str| rows.iter().find(|row| row.model == "vgg16" && row.dataset == dataset).unwrap();
    assert_eq!((of("cifar10").runs, of("cifar10").published_top1), (0, Some(92.64)));
    assert_eq!((of("cifar10, part").runs, of("cifar10, part").published_top1), (1, None));
    // A part of the training images is held out.
    fs::write(&config, fs::read_to_string(&config).unwrap().replace("limit_test = 100", "validation = 0.1")).unwrap();
    let rows = table(root.path());
    let names: Vec<_> = rows.iter().filter(|row| row.runs > 0).map(|row| row.dataset.as_str()).collect();
    assert_eq!(names, ["cifar10, part"]);
}

#[test]
fn a_run_that_ended_early_says_so() {
    let root = tempfile::tempdir().unwrap();
    run(root.path(), "1", "vgg16", "max_steps = 3", Some(9.0));
    let csv = root.path().join("1/summary.csv");
    let text = fs::read_to_string(&csv).unwrap();
    fs::write(&csv, text.lines().take(2).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let rows = table(root.path());
    let row = rows.iter().find(|row| row.runs == 1).unwrap();
    assert_eq!((row.epochs, row.planned_epochs), (Some(1), Some(3)));
    assert!(super::text(&rows).contains("1 of 3"));
}

#[test]
fn a_summary_that_is_saved_counts_as_its_run_and_names_no_machine() {
    let root = tempfile::tempdir().unwrap();
    let (runs, results) = (root.path().join("runs"), root.path().join("results"));
    run(&runs, "1-lenet", "lenet", "seed = 0", Some(74.5));
    let found = read_runs(std::slice::from_ref(&runs)).unwrap();
    let saved = save(&found.runs[0], "[data]\nname = \"cifar10\"\n[train]\nseed = 0\n", &results).unwrap();
    assert_eq!(saved, results.join("1-lenet"));
    let mut names: Vec<_> = fs::read_dir(&saved).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["config.toml", "env.json", "summary.csv", "summary.json"]);
    for name in names {
        let text = fs::read_to_string(saved.join(&name)).unwrap();
        for secret in ["/home", "mine", "confusion", "/data"] {
            assert!(!text.contains(secret), "{name:?} has {secret}: {text}");
        }
    }
    let env: serde_json::Value = serde_json::from_slice(&fs::read(saved.join("env.json")).unwrap()).unwrap();
    assert_eq!(env["command"], serde_json::json!(["trainer", "--config", "a.toml", "--set", "data.dir=d"]));
    let both = read_runs(&[runs, results.clone()]).unwrap().runs;
    assert_eq!(both.len(), 1, "a run and its committed summary are one");
    let again = read_runs(&[results]).unwrap().runs;
    assert_eq!((again[0].top1, &again[0].commit), (both[0].top1, &both[0].commit));
}

#[test]
fn a_path_in_a_command_is_shortened_and_its_key_stays() {
    for (word, shortened) in [
        ("configs/a.toml", "a.toml"),
        ("model.weights=/home/me/w.pth", "model.weights=w.pth"),
        ("--run-dir=runs/", "--run-dir=runs"),
        ("/home/a=b/c.toml", "c.toml"),
        ("train.seed=1", "train.seed=1"),
        ("/", "/"),
    ] {
        assert_eq!(read::without_folders(word), shortened, "{word}");
    }
}

#[test]
fn two_runs_with_the_same_name_stay_separate() {
    let root = tempfile::tempdir().unwrap();
    let (first, second, results) = (root.path().join("a"), root.path().join("b"), root.path().join("results"));
    run(&first, "1-lenet", "lenet", "seed = 0", Some(74.5));
    run(&second, "1-lenet", "lenet", "seed = 1", Some(75.5));
    let csv = second.join("1-lenet/summary.csv");
    fs::write(&csv, fs::read_to_string(&csv).unwrap().replace(",1,1", ",2,2")).unwrap();
    let runs = read_runs(&[first.clone(), second]).unwrap().runs;
    assert_eq!(runs.iter().map(|run| run.top1).collect::<Vec<_>>(), [74.5, 75.5]);

    let saved = save(&runs[0], "seed = 0", &results).unwrap();
    let error = save(&runs[1], "seed = 1", &results).unwrap_err();
    assert_eq!(error.path, saved);
    assert!(error.cause.contains("another run") && error.hint.contains("rename"), "{error:?}");
    assert_eq!(fs::read_to_string(saved.join("config.toml")).unwrap(), "seed = 0");

    // The first run, which ended inside its third epoch, goes on
    let csv = first.join("1-lenet/summary.csv");
    let longer = fs::read_to_string(&csv).unwrap().replace("3,1", "3,2") + "4,1,1,1,1,1,1,1,1\n";
    fs::write(&csv, longer).unwrap();
    save(&runs[0], "seed = 0", &results).unwrap();
    assert!(fs::read_to_string(saved.join("summary.csv")).unwrap().contains("\n4,1"));
    assert_eq!(read_runs(&[first, results]).unwrap().runs.len(), 1);
}

/// A run that ended inside its first epoch writes this epoch's row again, so no row stays.
#[test]
fn a_run_that_was_saved_inside_its_first_epoch_is_the_same_after_it_has_continued() {
    let root = tempfile::tempdir().unwrap();
    let (runs, others, results) = (root.path().join("runs"), root.path().join("others"), root.path().join("results"));
    let record = |folder: &Path| read_runs(&[folder.to_owned()]).unwrap().runs.remove(0);
    let write = |folder: &Path, name: &str, text: &str| fs::write(folder.join("1-lenet").join(name), text).unwrap();
    let header = crate::report::summary_csv::HEADER;
    run(&runs, "1-lenet", "lenet", "seed = 0", Some(74.5));
    write(&runs, "summary.csv", &format!("{header}\n1,3,3,3,3,3,3,3,3\n"));
    let saved = save(&record(&runs), "seed = 0", &results).unwrap();
    write(&runs, "summary.csv", &format!("{header}\n1,2,2,2,2,2,2,2,2\n2,2,2,2,2,2,2,2,2\n"));
    assert_eq!(read_runs(&[runs.clone(), results.clone()]).unwrap().runs.len(), 1);

    // Another run that was started in the same second.
    run(&others, "1-lenet", "lenet", "seed = 0", Some(75.5));
    let env = fs::read_to_string(others.join("1-lenet/env.json")).unwrap();
    write(&others, "env.json", &env.replace("a.toml", "b.toml"));
    assert_eq!(read_runs(&[others.clone(), results.clone()]).unwrap().runs.len(), 2);
    assert!(save(&record(&others), "seed = 0", &results).unwrap_err().cause.contains("another run"));

    save(&record(&runs), "seed = 0", &results).unwrap();
    assert!(fs::read_to_string(saved.join("summary.csv")).unwrap().contains("\n2,2"));
}

#[test]
fn unfinished_and_damaged_runs_are_reported() {
    let root = tempfile::tempdir().unwrap();
    run(root.path(), "1", "lenet", "", None);
    run(root.path(), "2", "lenet", "", Some(70.0));
    run(root.path(), "3", "lenet", "", Some(70.0));
    fs::remove_file(root.path().join("3/summary.json")).unwrap();
    let found = read_runs(&[root.path().to_owned()]).unwrap();
    assert_eq!(found.runs.len(), 1);
    assert_eq!(found.unfinished, [root.path().join("1"), root.path().join("3")]);
    // A run that was interrupted before the test split was evaluated.
    let summary = fs::read_to_string(root.path().join("2/summary.json")).unwrap();
    let of_validation = summary.replacen('{', "{\"evaluated\": \"validation\",", 1);
    fs::write(root.path().join("2/summary.json"), &of_validation).unwrap();
    assert!(read_runs(&[root.path().to_owned()]).unwrap().runs.is_empty());
    let tested = of_validation.replacen('{', "{\"test\": {\"top1\": 65.0},", 1);
    fs::write(root.path().join("2/summary.json"), tested).unwrap();
    assert_eq!(read_runs(&[root.path().to_owned()]).unwrap().runs[0].top1, 65.0);
    fs::write(root.path().join("2/summary.json"), "{").unwrap();
    let error = read_runs(&[root.path().to_owned()]).unwrap_err();
    assert_eq!(error.path, root.path().join("2/summary.json"));
    assert!(error.cause.starts_with("not what a run writes: "), "{error}");
    let error = read_runs(&[root.path().join("none")]).unwrap_err();
    assert_eq!(error.cause, "no such run folder");
}
