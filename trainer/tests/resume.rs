//! A run that is killed or interrupted and resumed equals, bit for bit, the run that was never stopped.

use std::path::{Path, PathBuf};

use crate::common::{self, Bench, CONFIG, ENDLESS, assert_equal_runs, entries, losses, signal, wait_until};

/// A run with everything that has state: AdamW's moments, the weight average, mixing, accumulation, clipping.
const STATEFUL: &str = r#"
[model]
name = "lenet"
[data]
name = "fashion-mini"
augment = ["reflect-crop", "alternating-flip"]
limit_train = 530
limit_test = 200
[train]
epochs = 3
batch_size = 8
accumulate = 3
mixup = 0.2
cutmix = 1.0
cutout = 6
ema = 0.9
grad_clip = 1.0
[optimizer]
kind = "adamw"
lr = 0.002
[schedule]
kind = "cosine"
warmup_epochs = 0.5
"#;

fn train(bench: &Bench, root: &str) -> PathBuf {
    bench.run(&["--config", "config.toml", "--run-dir", root]).expect(0);
    bench.only_run(root)
}

/// Trains without a stop up to step `end` of an endless run.
fn train_up_to(bench: &Bench, end: &str) -> PathBuf {
    let arguments = ["--config", "config.toml", "--run-dir", "undisturbed", "--set", end];
    bench.run(&[&arguments[..], &ENDLESS].concat()).expect(0);
    bench.only_run("undisturbed")
}

#[test]
fn the_same_config_and_seed_give_the_same_bits() {
    let bench = Bench::new(CONFIG);
    let (one, two) = (train(&bench, "one"), train(&bench, "two"));
    assert_eq!(losses(&one).len(), 3 * 33);
    assert_equal_runs(&one, &two);
    bench.run(&["--config", "config.toml", "--run-dir", "three", "--seed", "1"]).expect(0);
    assert_ne!(losses(&one), losses(&bench.only_run("three")), "another seed is another run");
}

#[test]
fn a_run_killed_inside_an_epoch_resumes_to_the_same_end() {
    for (config, steps_per_epoch) in [(CONFIG, 33), (STATEFUL, 23)] {
        let bench = Bench::new(config);
        let killed = bench.signalled("killed", &[], steps_per_epoch + steps_per_epoch / 2, 9);
        assert_eq!(killed.code, None, "ended by the signal");
        let run = bench.only_run("killed");
        // Up to the end of another epoch, and into the next one.
        let end = format!("train.max_steps={}", losses_so_far(&run) + steps_per_epoch + 15);
        bench.run(&["--resume", run.to_str().unwrap(), "--set", &end]).expect(0);
        assert_equal_runs(&train_up_to(&bench, &end), &run);
    }
}

/// Returns the number of lines of a `metrics.jsonl` whose last line may be cut.
fn losses_so_far(run: &Path) -> usize {
    std::fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().count()
}

#[test]
fn an_interrupted_run_saves_a_checkpoint_and_resumes_to_the_same_end() {
    for (number, code) in [(2, 130), (15, 143)] {
        let bench = Bench::new(STATEFUL);
        let ended = bench.signalled("interrupted", &[], 11, number).expect(code);
        let run = bench.only_run("interrupted");
        let said = format!("{}{}", ended.stdout, ended.stderr);
        assert!(said.contains("--resume"), "it says how to continue:\n{said}");
        let names: Vec<_> = entries(&run.join("checkpoints"))
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert!(names.iter().any(|name| name.starts_with("step-")), "a checkpoint inside the epoch: {names:?}");
        let end = format!("train.max_steps={}", losses(&run).len() + 15);
        // Without a name, the newest run of the run directory is resumed.
        bench.run(&["--resume", "--run-dir", "interrupted", "--set", &end]).expect(0);
        assert_equal_runs(&train_up_to(&bench, &end), &run);
    }
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_is_used() {
    let bench = Bench::new(CONFIG);
    let undisturbed = train(&bench, "undisturbed");
    let damaged = train(&bench, "damaged");
    let file = damaged.join("checkpoints/epoch-3/model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let ended = bench.run(&["--resume", damaged.to_str().unwrap()]).expect(0);
    assert!(ended.stderr.contains("epoch-3/model.safetensors"), "{}", ended.stderr);
    assert!(ended.stderr.contains("epoch-2"), "{}", ended.stderr);
    assert_equal_runs(&undisturbed, &damaged);
}

/// Runs the command that the program has printed after `continue with: `, in a shell.
#[track_caller]
fn run_what_was_printed(bench: &Bench, stdout: &str, more: &str) -> common::Ended {
    let printed = stdout.lines().find_map(|line| Some(line.split_once("continue with: ")?.1));
    let printed = printed.unwrap_or_else(|| panic!("no command: {stdout}"));
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &format!("{printed} {more}")]).current_dir(bench.folder.path()).env_remove("TRAINER_DATA_DIR");
    shell.output().unwrap().into()
}

/// The run folder's name needs quotes in a shell.
#[test]
fn the_printed_command_continues_with_the_workers_and_the_mode_of_the_run() {
    let bench = Bench::new(CONFIG);
    for (mode, flags) in [
        ("single x1", &[][..]),
        ("ddp x2", &["--cpus", "2"][..]),
        ("ddp x2", &["--cpus", "2", "--max-restarts", "1"]),
        ("dp x3", &["--mode", "dp", "--cpus", "3"]),
    ] {
        let root = format!("{}'s {}", mode, flags.len());
        let start = ["--config", "config.toml", "--run-dir", &root];
        let child = bench.spawn(&[&start[..], &ENDLESS, flags].concat());
        wait_until("metrics", || {
            let run = entries(&bench.path(&root)).into_iter().next();
            run.is_some_and(|run| run.join("metrics.jsonl").exists() && losses_so_far(&run) >= 5)
        });
        signal(&child, 2);
        let ended = common::Ended::from(child.wait_with_output().unwrap()).expect(130);
        let run = bench.only_run(&root);
        let end = format!("train.max_steps={}", losses(&run).len() + 20);
        run_what_was_printed(&bench, &ended.stdout, &format!("--set {end}")).expect(0);
        let environment = std::fs::read_to_string(run.join("env.json")).unwrap();
        let environment: serde_json::Value = serde_json::from_str(&environment).unwrap();
        for start in [&environment, &environment["resumed"][0]] {
            let device = start["device"].as_str().unwrap();
            assert!(device.ends_with(mode), "{root}: {device}");
        }
        let undisturbed = format!("undisturbed {root}");
        let start = ["--config", "config.toml", "--run-dir", &undisturbed, "--set", &end];
        bench.run(&[&start[..], &ENDLESS, flags].concat()).expect(0);
        assert_equal_runs(&bench.only_run(&undisturbed), &run);
    }
}

#[test]
fn the_command_that_the_time_limit_prints_continues_the_run() {
    let bench = Bench::new(CONFIG);
    let limits = ["--set", "train.epochs=100000", "--set", "train.max_time_s=1"];
    let ended = bench.run(&[&["--config", "config.toml"], &limits[..]].concat()).expect(0);
    let steps = losses(&bench.only_run("runs")).len();
    run_what_was_printed(&bench, &ended.stdout, "").expect(0);
    assert!(losses(&bench.only_run("runs")).len() > steps, "the run continued for another second");
}

/// A run of one step per epoch always ends at an epoch's end. The resumed run evaluates and ends again.
#[test]
fn the_evaluation_of_a_run_whose_time_was_over_counts_for_its_time() {
    let bench = Bench::new(&CONFIG.replace("limit_train = 520", "limit_train = 16"));
    let limits = ["--set", "train.epochs=1000000", "--set", "train.max_time_s=1", "--set", "checkpoint.every=0"];
    let run = bench.train("runs", &limits);
    let state = || -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(run.join("checkpoints/last/state.json")).unwrap()).unwrap()
    };
    let before = state();
    bench.run(&["--resume", run.to_str().unwrap()]).expect(0);
    let after = state();
    assert_eq!((&before["progress"]["batch"], &after["progress"]["step"]), (&0.into(), &before["progress"]["step"]));
    let seconds = |state: &serde_json::Value| state["progress"]["elapsed_s"].as_f64().unwrap();
    assert!(seconds(&after) > seconds(&before), "{before} {after}");
}

/// Evaluations every 1,000 epochs, so the one at the time limit is the only one.
#[test]
fn the_evaluation_at_the_time_limit_is_in_the_table_of_epochs() {
    let bench = Bench::new(&CONFIG.replace("limit_train = 520", "limit_train = 16"));
    let limits = ["--set", "train.epochs=1000000", "--set", "train.max_time_s=1", "--set", "train.eval_every=1000000"];
    let one_step = ["--set", "train.batch_size=16", "--set", "checkpoint.every=0"];
    bench.run(&[&["--config", "config.toml"], &one_step[..], &limits].concat()).expect(0);
    let table = std::fs::read_to_string(bench.only_run("runs").join("summary.csv")).unwrap();
    let mut rows = table.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let column = rows.next().unwrap().iter().position(|name| *name == "eval_top1").unwrap();
    let evaluated: Vec<bool> = rows.map(|row| !row[column].is_empty()).collect();
    let before = evaluated.len() - 1;
    assert!(evaluated[before] && !evaluated[..before].contains(&true), "{table}");
}

#[test]
fn flags_take_precedence_over_the_devices_of_the_resumed_run() {
    let bench = Bench::new(CONFIG);
    let short = ["--config", "config.toml", "--set", "train.max_steps=4", "--cpus", "2"];
    bench.run(&short).expect(0);
    let run = bench.only_run("runs");
    let resume = ["--resume", run.to_str().unwrap(), "--dry-run"];
    for (flags, expected) in [
        (&[][..], "mode ddp devices cpus:2"),
        (&["--cpus", "3"], "mode ddp devices cpus:3"),
        (&["--mode", "dp"], "mode dp devices cpus:2"),
        (&["--mode", "single"], "mode single checkpoint"),
        (&["--config", "config.toml", "--set", "train.max_steps=4"], "mode ddp devices cpus:2"),
    ] {
        let screen = bench.run(&[&resume[..], flags].concat()).expect(0).stdout;
        let words: Vec<_> = screen.split_whitespace().collect();
        assert!(words.join(" ").contains(expected), "{flags:?}: {screen}");
    }
    // A TOML may have the key too.
    std::fs::write(bench.path("two.toml"), format!("{CONFIG}[parallel]\ndevices = \"cpus:2\"\n")).unwrap();
    bench.run(&["--config", "two.toml", "--run-dir", "two", "--set", "train.max_steps=4"]).expect(0);
    assert!(bench.only_run("two").to_string_lossy().ends_with("-lenet-ddpx2"));
}

/// The rest of the epoch does not improve the accuracy. Its checkpoint must not replace the best one, which is of the same epoch.
#[test]
fn the_best_checkpoint_may_be_inside_an_epoch() {
    let bench = Bench::new(CONFIG);
    bench.run(&["--config", "config.toml", "--set", "train.max_steps=20"]).expect(0);
    let run = bench.only_run("runs");
    let steps = |link: &str| {
        let state = std::fs::read_to_string(run.join("checkpoints").join(link).join("state.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&state).unwrap()["progress"]["step"].as_u64()
    };
    assert_eq!((steps("best"), steps("last")), (Some(20), Some(20)));
    let rest = ["--set", "train.max_steps=33", "--set", "optimizer.lr=1e-30"];
    bench.run(&[&["--resume", run.to_str().unwrap()], &rest[..]].concat()).expect(0);
    assert_eq!((steps("best"), steps("last")), (Some(20), Some(33)));
}

/// The length of a run is counted in steps, so with fewer steps per epoch the run would have more epochs.
#[test]
fn a_resume_with_other_steps_per_epoch_is_refused() {
    let bench = Bench::new(CONFIG);
    let run = bench.stopped("runs", &[], 40);
    let resume = ["--resume", run.to_str().unwrap(), "--set", "train.epochs=2"];
    for other in ["train.batch_size=64", "train.accumulate=2", "data.limit_train=100"] {
        let refused = bench.run(&[&resume[..], &["--set", other]].concat()).expect(2).stderr;
        assert!(refused.contains("an epoch of this run had 33 steps, and has "), "{other}: {refused}");
    }
    bench.run(&resume).expect(0);
}

/// 500, 501 and 512 images are 32 batches of 16. But the order of the images differs, so the next batch would have other images.
#[test]
fn a_resume_inside_an_epoch_with_other_images_or_batches_is_refused() {
    let bench = Bench::new(&CONFIG.replace("limit_train = 520", "limit_train = 500"));
    bench.run(&["--config", "config.toml", "--set", "train.max_steps=20"]).expect(0);
    let run = bench.only_run("runs");
    let resume = ["--resume", run.to_str().unwrap(), "--set", "train.max_steps=0", "--set"];
    for (other, cause) in [
        ("data.limit_train=501", "an epoch of this run had 500 images, and has 501 now"),
        ("data.limit_train=512", "an epoch of this run had 500 images, and has 512 now"),
    ] {
        let refused = bench.run(&[&resume[..], &[other]].concat()).expect(2).stderr;
        assert!(refused.contains(cause), "{refused}");
    }
    let other = [&resume[..], &["data.limit_train=497", "--set", "train.batch_size=15", "--set", "train.accumulate=1"]]
        .concat();
    let refused = bench.run(&other).expect(2).stderr;
    assert!(refused.contains("an epoch of this run had 32 steps, and has 34 now"), "{refused}");
    bench.run(&[&resume[..], &["data.limit_train=500"]].concat()).expect(0);
}

/// The evaluation after the time limit counts like any other: it may be the best.
#[test]
fn the_evaluation_at_the_time_limit_is_recorded() {
    let bench = Bench::new(&CONFIG.replace("[train]", "[train]\neval_every = 100000"));
    let limits = ["--set", "train.epochs=100000", "--set", "train.max_time_s=1"];
    let said = bench.run(&[&["--config", "config.toml"], &limits[..]].concat()).expect(0).stdout;
    assert!(said.contains("best = last"), "{said}");
    let run = bench.only_run("runs");
    let result: serde_json::Value = serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    assert_eq!(result["best"], result["last"]);
    let link = |name: &str| std::fs::read_link(run.join("checkpoints").join(name)).unwrap();
    assert_eq!(link("best"), link("last"));
}

/// After two steps of this learning rate the weights are not finite, which only a third step would see in its training loss.
#[test]
fn weights_that_are_not_finite_are_not_saved() {
    let bench = Bench::new(&CONFIG.replace("one-cycle", "constant"));
    bench.run(&["--config", "config.toml", "--epochs", "1"]).expect(0);
    let run = bench.only_run("runs");
    let resume = ["--resume", run.to_str().unwrap(), "--epochs", "2", "--set"];
    let diverging = ["train.max_steps=35", "--set", "optimizer.lr=1000"];
    let refused = bench.run(&[&resume[..], &diverging].concat()).expect(1).stderr;
    assert!(refused.contains("the loss of the evaluation is NaN"), "{refused}");
    assert!(refused.contains("hint: training diverged: lower optimizer.lr"), "{refused}");
    // The run goes on from the checkpoint before.
    bench.run(&[&resume[..], &["train.max_steps=0", "--set", "optimizer.lr=0.05"]].concat()).expect(0);
}

#[test]
fn a_dry_run_with_resume_reads_the_checkpoint() {
    let bench = Bench::new(CONFIG);
    let run = train(&bench, "runs");
    let resume = |more: &[&str]| bench.run(&[&["--resume", run.to_str().unwrap(), "--dry-run"], more].concat());
    let said = resume(&["--epochs", "5"]).expect(0).stdout;
    let words: String = said.split_whitespace().collect();
    assert!(words.contains("checkpoints/epoch-3after99steps"), "{said}");
    for (more, cause) in [
        (
            &["--set", "optimizer.kind=adamw", "--set", "optimizer.lr=0.001"][..],
            "is state of another optimizer, which adamw cannot continue",
        ),
        (&["--set", "model.name=vgg11", "--set", "data.image_size=32"], "a run keeps its model and its optimizer"),
        (&["--epochs", "2"], "the run has trained 3 epochs, more than 2"),
        (&["--seed", "9"], "was trained with seed 0, not 9"),
    ] {
        let refused = resume(more).expect(2).stderr;
        assert!(refused.contains(cause) && refused.contains("hint:"), "{more:?}: {refused}");
    }
    assert!(
        bench
            .run(&["--resume", run.to_str().unwrap(), "--epochs", "2"])
            .expect(2)
            .stderr
            .contains("3 epochs, more than 2")
    );
}

#[test]
fn resume_without_anything_to_resume_is_a_clear_error() {
    let bench = Bench::new(CONFIG);
    let nothing = bench.run(&["--resume", "--run-dir", "nowhere"]).expect(2);
    assert!(nothing.stderr.contains("nowhere") && nothing.stderr.contains("hint:"), "{}", nothing.stderr);
    let missing = bench.run(&["--resume", "runs/missing"]).expect(2);
    assert!(missing.stderr.contains("runs/missing") && missing.stderr.contains("hint:"), "{}", missing.stderr);
}

/// The run's config.toml has the line `every = 5`: that of `[log]`.
#[test]
fn a_config_that_differs_from_the_resumed_run_is_refused() {
    let bench = Bench::new(CONFIG);
    let run = train(&bench, "runs");
    std::fs::write(bench.path("other.toml"), format!("{CONFIG}[checkpoint]\nevery = 5\n")).unwrap();
    let resume = ["--resume", run.to_str().unwrap(), "--dry-run", "--config"];
    bench.run(&[&resume[..], &["config.toml"]].concat()).expect(0);
    let ended = bench.run(&[&resume[..], &["other.toml"]].concat()).expect(2);
    let said = "other.toml: `checkpoint.every = 5` is not what";
    assert!(ended.stderr.contains(said) && ended.stderr.contains("`checkpoint.every = 1`"), "{}", ended.stderr);
}
