//! Progressive resizing: the first epochs have smaller images (`train.image_sizes`).

use crate::common::{Bench, CONFIG, ENDLESS, assert_equal_runs, losses};

/// Three steps per epoch.
const GROWING: &str = r#"
[model]
name = "shufflenetv2_x0_5"
[data]
name = "fashion-mini"
augment = ["crop", "flip"]
limit_train = 48
limit_test = 32
[train]
epochs = 5
batch_size = 16
image_sizes = [12, 20]
image_milestones = [2, 4]
[optimizer]
lr = 0.05
[schedule]
kind = "constant"
"#;

/// The run is stopped in an epoch with small images and continues beyond the change of their size, on two workers too.
#[test]
fn a_run_resumed_before_the_images_grow_has_the_same_bits() {
    for workers in ["1", "2"] {
        let bench = Bench::new(GROWING);
        let options = ["--cpus", workers, "--set", "train.image_milestones=[20, 40]"];
        let run = bench.stopped("stopped", &options, 4);
        // At least until the second change.
        let end = format!("train.max_steps={}", losses(&run).len().max(3 * 40) + 4);
        bench.run(&["--resume", run.to_str().unwrap(), "--set", &end]).expect(0);
        let undisturbed = bench.train("undisturbed", &[&options[..], &ENDLESS, &["--set", &end]].concat());
        assert_equal_runs(&undisturbed, &run);
    }
}

/// The first epochs are the same with whole images only after the last milestone.
#[test]
fn the_size_changes_at_the_milestones() {
    let bench = Bench::new(GROWING);
    let curve = |name: &str, milestones: &str| {
        let setting = format!("train.image_milestones={milestones}");
        losses(&bench.train(name, &["--set", &setting, "--set", "log.every=1"]))
    };
    let (growing, later) = (curve("growing", "[2, 4]"), curve("later", "[2, 5]"));
    assert_eq!(growing.len(), 15);
    assert_eq!(growing[..12], later[..12], "sides of 12 and 20 pixels in both");
    assert_ne!(growing[12], later[12], "whole images, and a side of 20");
    assert_eq!(growing, curve("fractions", "[0.4, 0.8]"));
}

#[test]
fn a_part_of_the_network_may_be_frozen() {
    let freeze = ["--set", "model.freeze=[\"conv1\"]", "--dry-run"];
    Bench::new(GROWING).run(&[&["--config", "config.toml"], &freeze[..]].concat()).expect(0);
}

#[test]
fn a_network_whose_weights_depend_on_the_size_is_refused() {
    let sizes = ["--set", "train.image_sizes=[20]", "--set", "train.image_milestones=[0.5]"];
    let ended = Bench::new(CONFIG).run(&[&["--config", "config.toml"], &sizes[..]].concat()).expect(2);
    assert!(
        ended.stderr.contains("lenet for images of 20x20 pixels has other weights than for 28x28"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("train.image_sizes") && ended.stderr.contains("hint:"), "{}", ended.stderr);
    let small = ["--set", "train.image_sizes=[2]", "--set", "train.image_milestones=[0.5]"];
    let ended = Bench::new(CONFIG).run(&[&["--config", "config.toml"], &small[..]].concat()).expect(2);
    assert!(ended.stderr.contains("train.image_sizes") && ended.stderr.contains("hint:"), "{}", ended.stderr);
    let large = ["--set", "train.image_sizes=[28]", "--set", "train.image_milestones=[0.5]"];
    let ended = Bench::new(GROWING).run(&[&["--config", "config.toml"], &large[..]].concat()).expect(2);
    assert!(ended.stderr.contains("cannot be resized to a smaller side of 28"), "{}", ended.stderr);
}
