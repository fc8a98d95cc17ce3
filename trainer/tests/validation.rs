//! A validation split selects the best epoch; the test split is evaluated once, after training, with that epoch's weights.

use std::{fs, path::Path};

use crate::common::{Bench, entries, pictures::save_png};
use crate::engine::{self, Disturbed, Purpose};
use serde_json::Value;
use trainer::{
    engine::{Loaders, RunOutcome, RunResult, checkpoint},
    report::RunFolder,
    signals::StopFlag,
};

const CONFIG: &str = r#"
[model]
name = "lenet"
[data]
name = "image-folder"
dir = "pictures"
[train]
epochs = 6
batch_size = 4
patience = 2
[optimizer]
lr = 0.01
[checkpoint]
keep_last = 1
"#;

/// Dark and light images. In `val` the classes are exchanged: the better the network is on `train` and `test`, the worse it is
/// on `val`.
fn pictures(bench: &Bench) {
    for (split, count, classes) in
        [("train", 12, ["dark", "light"]), ("val", 5, ["light", "dark"]), ("test", 3, ["dark", "light"])]
    {
        for (class, colour) in classes.into_iter().zip([10u8, 240]) {
            let folder = bench.path(&format!("pictures/{split}/{class}"));
            fs::create_dir_all(&folder).unwrap();
            for i in 0..count {
                let pixel = |x, y| [colour, (x * 7 + i) as u8, (y * 5) as u8];
                save_png(folder.join(format!("{i}.png")), 20, 20, pixel);
            }
        }
    }
}

fn result(run: &Path) -> Value {
    serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap()
}

#[test]
fn the_best_epoch_is_selected_on_val_and_test_is_evaluated_with_it() {
    let modes: [(&str, &[&str]); 3] =
        [("single", &[]), ("dp", &["--cpus", "2", "--mode", "dp"]), ("ddp", &["--cpus", "2"])];
    for (mode, flags) in modes {
        let bench = Bench::new(CONFIG);
        pictures(&bench);
        let ended = bench.run(&[&["--config", "config.toml"], flags].concat()).expect(0);
        assert!(ended.stdout.contains("24 + 10 + 6 images 3x20x20"), "{mode}: {}", ended.stdout);
        assert!(ended.stdout.contains("\nval best ") && ended.stdout.contains("\ntest "), "{mode}: {}", ended.stdout);
        let run = bench.only_run("runs");
        let summary = result(&run);
        let (best, last, test) = (&summary["best"], &summary["last"], &summary["test"]);
        assert_eq!((&best["total"], &last["total"], &test["total"]), (&10.into(), &10.into(), &6.into()), "{mode}");
        // Training makes `val` worse, so the first epoch is the best, and patience ends the run two epochs later.
        assert_eq!((&best["epoch"], &last["epoch"], &test["epoch"]), (&1.into(), &3.into(), &1.into()), "{mode}");
        assert_eq!((&best["correct"], &last["correct"], &test["correct"]), (&5.into(), &0.into(), &3.into()), "{mode}");

        let evaluated = bench.run(&["eval", "--run", run.to_str().unwrap(), "--json"]).expect(0).stdout;
        let evaluated: Value = serde_json::from_str(&evaluated).unwrap();
        for key in ["top1", "top5", "correct", "total"] {
            assert_eq!(evaluated[key], test[key], "{mode}: {key}");
        }
        let distance = (evaluated["loss"].as_f64().unwrap() - test["loss"].as_f64().unwrap()).abs();
        assert!(distance < 1e-5, "{mode}: {evaluated} against {test}");
        let last = ["eval", "--run", run.to_str().unwrap(), "--json", "--checkpoint", "last"];
        let evaluated: Value = serde_json::from_str(&bench.run(&last).expect(0).stdout).unwrap();
        assert_eq!(evaluated["correct"], 6, "{mode}: the classes of `train` and `test` agree: {evaluated}");

        // A finished run that is resumed evaluates again.
        let again = bench.run(&[&["--resume", run.to_str().unwrap()], flags].concat()).expect(0);
        assert!(again.stdout.contains("\ntest "), "{mode}: {}", again.stdout);
        assert_eq!(&result(&run)["test"], test, "{mode}");
    }
}

/// The links of the checkpoints are lost in a copy, or the best checkpoint is damaged: both runs end with a test of the best
/// weights that there are.
#[test]
fn a_resumed_run_tests_the_best_weights_that_are_left() {
    let bench = Bench::new(CONFIG);
    pictures(&bench);
    bench.run(&["--config", "config.toml"]).expect(0);
    let run = bench.only_run("runs");
    let (test, checkpoints) = (result(&run)["test"].clone(), run.join("checkpoints"));
    let go_on = |flags: &[&str]| bench.run(&[&["--resume", run.to_str().unwrap()], flags].concat()).expect(0);
    for link in ["best", "last"] {
        fs::remove_file(checkpoints.join(link)).unwrap();
    }
    let evaluated = bench.run(&["eval", "--run", run.to_str().unwrap()]).expect(0).stderr;
    assert!(evaluated.contains("has no checkpoint of its best epoch, 1: the newest checkpoint is used"), "{evaluated}");
    let ended = go_on(&["--epochs", "4", "--set", "train.patience=0"]);
    assert!(!ended.stderr.contains("warning:"), "{}", ended.stderr);
    assert_eq!(result(&run)["test"], test);
    let best = fs::read_link(checkpoints.join("best")).unwrap();
    assert_eq!(best.to_str(), Some("epoch-1"));
    fs::write(checkpoints.join("best/model.safetensors"), "cut").unwrap();
    let ended = go_on(&["--epochs", "5", "--set", "train.patience=0"]);
    let warning = "warning: the best checkpoint so far, of epoch 1, is lost";
    assert!(ended.stderr.contains(warning) && ended.stderr.contains("3 bytes"), "{}", ended.stderr);
    assert_eq!(result(&run)["test"]["correct"], 6, "the later weights agree with `test`");
    assert_eq!(result(&run)["best"]["epoch"], 4, "the best one that was left");
}

#[test]
fn without_a_best_checkpoint_test_is_evaluated_with_the_last_weights() {
    let bench = Bench::new(&format!("{CONFIG}keep_best = false\n"));
    pictures(&bench);
    bench.run(&["--config", "config.toml"]).expect(0);
    let summary = result(&bench.only_run("runs"));
    assert_eq!((&summary["best"]["epoch"], &summary["test"]["epoch"]), (&1.into(), &3.into()));
    assert_eq!(summary["test"]["correct"], 6, "the classes of `train` and `test` agree: {summary}");
}

/// The test split is evaluated only after training, so the table has no accuracy of this run.
#[test]
fn an_interrupted_run_has_no_test_accuracy() {
    let bench = Bench::new(CONFIG);
    pictures(&bench);
    // An epoch has 6 steps, so the run stops after the first evaluation.
    let ended = bench.signalled("runs", &["--set", "train.patience=0"], 8, 15).expect(143);
    assert!(ended.stdout.contains("\nval best ") && !ended.stdout.contains("\ntest "), "{}", ended.stdout);
    let run = bench.only_run("runs");
    let summary = result(&run);
    assert_eq!((&summary["evaluated"], &summary["test"]), (&"validation".into(), &Value::Null), "{summary}");
    assert_eq!(summary["best"]["total"], 10, "{summary}");
    let table = bench.run(&["table", "runs", "--json"]).expect(0);
    let rows: Value = serde_json::from_str(&table.stdout).unwrap();
    assert!(rows.as_array().unwrap().iter().all(|row| row["runs"] == 0), "{rows}");
    assert!(table.stderr.contains("no result yet, left out"), "{}", table.stderr);
}

#[test]
fn without_val_there_is_no_evaluation_after_training() {
    let bench = Bench::new(CONFIG);
    pictures(&bench);
    fs::remove_dir_all(bench.path("pictures/val")).unwrap();
    let ended = bench.run(&["--config", "config.toml"]).expect(0);
    assert!(ended.stdout.contains("24 + 6 images") && !ended.stdout.contains("\ntest "), "{}", ended.stdout);
    let summary = result(&bench.only_run("runs"));
    assert!(summary.get("test").is_none() && summary["best"]["total"] == 6, "{summary}");
}

#[test]
fn data_verify_names_all_splits() {
    let bench = Bench::new(CONFIG);
    pictures(&bench);
    let verify = ["data", "verify", "image-folder", "--data-dir", "pictures"];
    let stdout = bench.run(&verify).expect(0).stdout;
    let lines: Vec<_> = stdout.lines().collect();
    let expected = ["pictures/train: ok (structure)", "pictures/val: ok (structure)", "pictures/test: ok (structure)"];
    assert_eq!(lines[..3], expected);
    fs::remove_dir_all(bench.path("pictures/val/dark")).unwrap();
    let refused = bench.run(&["--config", "config.toml"]).expect(2).stderr;
    assert!(refused.contains("pictures/val/dark: there is no such folder") && refused.contains("hint:"), "{refused}");
}

/// Runs the engine in `folder`, from its newest checkpoint if there is one, and stops in evaluation `at`.
fn run(folder: &RunFolder, at: usize) -> RunResult {
    let (plan, stop) = (engine::plan(""), StopFlag::never());
    let signal = stop.clone();
    let mut strategy = Disturbed::new(engine::single(&plan), at, move || signal.request(15));
    engine::run(folder, &plan, &mut strategy, loaders(), stop).unwrap()
}

/// Returns 40 images to train on, 20 to select the best epoch and 30 to test.
fn loaders() -> Loaders {
    let train = engine::loader(40, 0, Purpose::Training);
    let [eval, test] = [(20, 1), (30, 2)].map(|(count, shift)| engine::loader(count, shift, Purpose::Evaluation));
    Loaders { train, eval, test: Some(test) }
}

#[test]
fn a_run_stopped_in_the_evaluation_of_test_resumes_there() {
    let root = tempfile::tempdir().unwrap();
    let folder = |name: &str| RunFolder::create(&root.path().join(name), "lenet", "single", 1).unwrap();
    let undisturbed = run(&folder("undisturbed"), 0);
    assert!(matches!(undisturbed.outcome, RunOutcome::Finished(_)), "{:?}", undisturbed.outcome);
    let expected = undisturbed.test.expect("an evaluation of the test split");
    assert_eq!(expected.eval.total, 30);

    // Evaluations 1 and 2 end the epochs, evaluation 3 is that of `test`.
    let stopped = folder("stopped");
    let end = run(&stopped, 3);
    assert!(matches!(end.outcome, RunOutcome::Interrupted { signal: 15, step: 10 }), "{:?}", end.outcome);
    assert_eq!(end.test, None);
    // The stop saves nothing: the weights are those of the best epoch, perhaps not of the last.
    let names: Vec<_> =
        entries(&stopped.checkpoints()).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
    assert_eq!(names, ["best", "epoch-1", "epoch-2", "last"]);
    let newest = checkpoint::load_newest(&stopped.checkpoints()).unwrap().0.progress;
    assert_eq!((newest.epoch, newest.step), (end.progress.epoch, end.progress.step));

    let resumed = run(&stopped, 0);
    assert!(matches!(resumed.outcome, RunOutcome::Finished(_)), "{:?}", resumed.outcome);
    assert_eq!(resumed.test, Some(expected));
}

/// The learning rate is so small that the first epoch stays the best. Its checkpoint is damaged while the second one is evaluated.
#[test]
fn a_best_checkpoint_damaged_during_training_is_named_with_the_way_to_another_one() {
    let root = tempfile::tempdir().unwrap();
    let folder = RunFolder::create(root.path(), "lenet", "single", 1).unwrap();
    let file = folder.checkpoints().join("epoch-1/model.safetensors");
    let plan = engine::plan("[optimizer]\nlr = 1e-30\n");
    let mut strategy = Disturbed::new(engine::single(&plan), 2, move || fs::write(&file, "cut").unwrap());
    let Err(failure) = engine::run(&folder, &plan, &mut strategy, loaders(), StopFlag::never()) else {
        panic!("damaged")
    };
    assert!(failure.message.contains("best/model.safetensors"), "{failure:?}");
    let hint = failure.hint.unwrap();
    assert!(hint.contains("--resume evaluates the test images again, and writes the summary"), "{hint}");
}
