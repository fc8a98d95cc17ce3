//! Class weights in the loss and the weighted sampler: the same training for any number of workers, and after a resume.

use std::fs;

use crate::common::{
    Bench, CONFIG, ENDLESS, assert_equal_runs, assert_same_curve, loss_values, losses, pictures::save_png,
};

const WEIGHTS: [&str; 2] = ["--set", "train.class_weights=[0.1, 3, 1, 1, 0, 1, 2, 1, 0.5, 8]"];
const SAMPLER: [&str; 2] = ["--set", "data.sampler_weights=[1, 1, 2, 1, 0, 1, 20, 1, 1, 0.1]"];
const STEPS: [&str; 2] = ["--set", "train.max_steps=20"];

/// With one process, two and three processes, and two devices of one process. The shares of three are unequal.
fn every_world_trains_alike(options: &[&str]) -> Vec<f64> {
    let bench = Bench::new(CONFIG);
    let one = loss_values(&bench.train("one", &[options, &STEPS].concat()));
    assert_eq!(one.len(), 20);
    let worlds: [&[&str]; 3] = [&["--cpus", "2"], &["--cpus", "3"], &["--cpus", "2", "--mode", "dp"]];
    for (index, world_size) in worlds.into_iter().enumerate() {
        let several = loss_values(&bench.train(&index.to_string(), &[options, &STEPS, world_size].concat()));
        assert_same_curve(&format!("{world_size:?}"), &one, &several, 1e-4);
    }
    one
}

/// The weighted mean divides by the weights of the global batch. The mean of the ranks' weighted means would be another number,
/// because the shares of the ranks have different classes.
#[test]
fn the_weighted_mean_is_that_of_the_global_batch() {
    let weighted = every_world_trains_alike(&WEIGHTS);
    let bench = Bench::new(CONFIG);
    let plain = loss_values(&bench.train("plain", &STEPS));
    assert!(weighted.iter().zip(&plain).all(|(a, b)| (a - b).abs() > 1e-4), "{weighted:?} and {plain:?}");
}

#[test]
fn accumulated_batches_share_one_weighted_mean_for_every_world_size() {
    let accumulated = every_world_trains_alike(
        &[&WEIGHTS[..], &["--set", "train.accumulate=2", "--set", "train.batch_size=8"]].concat(),
    );
    // 2 x 8 images of the same order are the batches of 16 images.
    let bench = Bench::new(CONFIG);
    let whole = loss_values(&bench.train("whole", &[&WEIGHTS[..], &STEPS].concat()));
    assert_same_curve("accumulation", &whole, &accumulated, 1e-4);
}

#[test]
fn class_weights_with_mixing_do_not_depend_on_the_world_size() {
    every_world_trains_alike(&[&WEIGHTS[..], &["--set", "train.mixup=0.4"]].concat());
}

#[test]
fn the_bf16_loss_equals_the_f32_loss_within_its_precision() {
    let bench = Bench::new(CONFIG);
    let f32 = loss_values(&bench.train("f32", &[&WEIGHTS[..], &STEPS].concat()));
    let bf16 = loss_values(&bench.train("bf16", &[&WEIGHTS[..], &STEPS, &["--set", "train.precision=bf16"]].concat()));
    assert_ne!(f32, bf16);
    for (step, (a, b)) in f32.iter().zip(&bf16).enumerate() {
        assert!((a - b).abs() < 0.02 * a, "step {step}: {a} against {b}");
    }
}

#[test]
fn the_weighted_sampler_draws_the_same_samples_for_every_world_size() {
    every_world_trains_alike(&SAMPLER);
    let both = [&SAMPLER[..], &WEIGHTS].concat();
    every_world_trains_alike(&both);
}

#[test]
fn a_weighted_run_resumed_in_an_epoch_has_the_same_bits() {
    let bench = Bench::new(CONFIG);
    let options = [&SAMPLER[..], &WEIGHTS, &["--cpus", "2"]].concat();
    let run = bench.stopped("stopped", &options, 45);
    let end = format!("train.max_steps={}", losses(&run).len() + 40);
    bench.run(&["--resume", run.to_str().unwrap(), "--set", &end]).expect(0);
    let undisturbed = bench.train("undisturbed", &[&options[..], &ENDLESS, &["--set", &end]].concat());
    assert_equal_runs(&undisturbed, &run);
}

/// Writes 18 x 18 grey images of two classes of other brightness: 90 of `common` for 6 of `rare` to train on, 30 of each to test.
fn unbalanced(bench: &Bench) {
    let mut text = "path,label,split\n".to_owned();
    fs::create_dir(bench.path("pictures")).unwrap();
    let counts = [("train", "common", 90), ("train", "rare", 6), ("test", "common", 30), ("test", "rare", 30)];
    for (split, class, count) in counts {
        for i in 0..count {
            let name = format!("{split}-{class}-{i}.png");
            let level = if class == "rare" { 180u32 } else { 100 };
            let noise = |x: u32, y: u32| (x * 7919 + y * 104_729 + i * 31 + (x * y + i) * 613) % 71;
            save_png(bench.path("pictures").join(&name), 18, 18, |x, y| [(level + noise(x, y)) as u8; 3]);
            text += &format!("{name},{class},{split}\n");
        }
    }
    fs::write(bench.path("pictures/labels.csv"), text).unwrap();
}

const UNBALANCED: &str = r#"
[model]
name = "lenet"
[data]
name = "manifest"
dir = "pictures/labels.csv"
[train]
epochs = 10
batch_size = 16
[optimizer]
lr = 0.02
"#;

/// Without weights the network ignores the rare class. Weights in the loss correct this, and so does the sampler.
#[test]
fn class_weights_and_the_sampler_each_raise_the_balanced_accuracy() {
    let bench = Bench::new(UNBALANCED);
    unbalanced(&bench);
    let balanced = |root: &str, extra: &[&str]| {
        let run = bench.train(root, extra);
        let summary: serde_json::Value = serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap();
        let recall =
            summary["confusion"]["recall"].as_array().unwrap().iter().map(|r| r.as_f64().unwrap()).sum::<f64>();
        let reported = summary["last"]["balanced_accuracy"].as_f64().unwrap();
        assert!((reported - recall / 2.0).abs() < 1e-9, "{summary}");
        reported
    };
    let plain = balanced("plain", &[]);
    let weights = balanced("weights", &["--set", "train.class_weights=balanced"]);
    let sampler = balanced("sampler", &["--set", "data.sampler_weights=balanced"]);
    assert!(plain < 60.0 && weights > 75.0 && sampler > 75.0, "{plain}, {weights}, {sampler}");

    let both = ["--set", "train.class_weights=balanced", "--set", "data.sampler_weights=balanced", "--epochs", "1"];
    let said = bench.run(&[&["--config", "config.toml", "--run-dir", "both"], &both[..]].concat()).expect(0).stderr;
    assert!(said.contains("are both \"balanced\": one of them is sufficient"), "{said}");
}

#[test]
fn checkpoint_best_selects_the_measure_of_the_best_epoch() {
    let bench = Bench::new(UNBALANCED);
    unbalanced(&bench);
    let train = |best: &str| {
        let run = bench.train(best, &["--set", &format!("checkpoint.best={best}"), "--epochs", "6"]);
        let summary: serde_json::Value = serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap();
        let text = fs::read_to_string(run.join("summary.csv")).unwrap();
        let rows: Vec<Vec<f64>> =
            text.lines().skip(1).map(|line| line.split(',').map(|cell| cell.parse().unwrap()).collect()).collect();
        (summary, rows)
    };
    let (by_loss, rows) = train("loss");
    // Of equal ones the first.
    let first = |best: &dyn Fn(&[f64], &[f64]) -> bool| {
        (1..rows.len()).fold(0, |so_far, row| if best(&rows[row], &rows[so_far]) { row } else { so_far }) + 1
    };
    assert_eq!(by_loss["best"]["epoch"], first(&|row, best| row[3] < best[3]), "{rows:?}");
    let (by_accuracy, _) = train("accuracy");
    assert_eq!(by_accuracy["best"]["epoch"], first(&|row, best| row[4] > best[4]), "{rows:?}");
    let (balanced, _) = train("balanced-accuracy");
    let number = |of: &str| balanced[of]["balanced_accuracy"].as_f64().unwrap();
    assert!(number("best") >= number("last"), "{balanced}");
    // Training is the same: only the choice differs.
    assert_eq!(balanced["last"]["loss"], by_loss["last"]["loss"]);

    let said = bench.run(&["--config", "config.toml", "--set", "checkpoint.best=f1"]).expect(2).stderr;
    assert!(said.contains("unknown value \"f1\"") && said.contains("accuracy, balanced-accuracy, map, loss"), "{said}");
}

#[test]
fn impossible_weights_are_refused_with_place_and_hint() {
    let bench = Bench::new(CONFIG);
    for key in ["train.class_weights", "data.sampler_weights"] {
        let cases = [
            ("[1, 2]", "has 2 weights, but data set \"fashion-mini\" has 10 classes"),
            ("[1, -1, 1, 1, 1, 1, 1, 1, 1, 1]", "expected a number from 0 to 1000000, found -1"),
            ("[0, 0, 0, 0, 0, 0, 0, 0, 0, 0]", "expected a weight above 0, found none"),
            ("[]", "expected one number per class, found none"),
            ("balance", "unknown value \"balance\""),
            ("2", "unknown value \"2\""),
            ("[1, \"x\"]", "expected a number, found"),
        ];
        for (value, said) in cases {
            let set = format!("{key}={value}");
            let refused = bench.run(&["--config", "config.toml", "--set", &set]).expect(2).stderr;
            let place = format!("--> --set {key}=");
            assert!(
                refused.contains(said) && refused.contains(&place) && refused.contains("hint: "),
                "{set}: {refused}"
            );
        }
        // The first eight images have no image of some classes.
        let set = format!("{key}=balanced");
        let few = ["--config", "config.toml", "--set", "data.limit_train=8", "--set", &set];
        let refused = bench.run(&few).expect(2).stderr;
        assert!(
            refused.contains("has no training image to balance") && refused.contains("limit_train leaves out"),
            "{refused}"
        );
    }
    let unseen = "data.sampler_weights=[0, 1, 0, 0, 0, 0, 0, 0, 0, 0]";
    let few = ["--config", "config.toml", "--set", "data.limit_train=1", "--set", unseen, "--cpus", "2"];
    let refused = bench.run(&few).expect(2).stderr;
    assert!(refused.contains("all training images have the weight 0") && refused.contains("hint: "), "{refused}");
}
