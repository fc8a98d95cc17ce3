//! The resolved plan: its defaults, its text, its table, and the way back.

use insta::assert_snapshot;

use super::{plan_after_base, read};
use crate::config::{Overrides, RunPlan};

/// The plan that its own text resolves to.
fn read_back(plan: &RunPlan) -> RunPlan {
    let text = plan.to_toml();
    read(&text, &Overrides::default()).unwrap_or_else(|errors| panic!("{errors}\n{text}"))
}

#[test]
fn every_default_is_visible() {
    assert_snapshot!(plan_after_base("").to_toml());
}

#[test]
fn adamw_and_multi_step_show_their_own_keys() {
    let plan = plan_after_base("[optimizer]\nkind = \"adamw\"\n[schedule]\nkind = \"multi-step\"\n");
    let text = plan.to_toml();
    let shown: Vec<&str> =
        text.lines().skip_while(|line| *line != "[optimizer]").take_while(|line| *line != "[parallel]").collect();
    assert_snapshot!(shown.join("\n"));
}

#[test]
fn every_kind_reads_back() {
    for kind in ["cosine", "one-cycle", "multi-step", "constant"] {
        for optimizer in ["sgd", "adamw", "muon"] {
            let lines = format!("[optimizer]\nkind = \"{optimizer}\"\n[schedule]\nkind = \"{kind}\"\n");
            let plan = plan_after_base(&lines);
            assert_eq!(read_back(&plan), plan);
        }
    }
}

#[test]
fn everything_set_reads_back() {
    let plan = plan_after_base(
        r#"
        dir = 'C:\data "sets"'
        augment = ["reflect-crop:3", "alternating-flip"]
        mean = [0.1, 0.2, 0.3]
        std = [0.123456789, 1e-7, 1]
        image_size = 40
        workers = 1
        limit_train = 1000
        limit_test = 10
        [train]
        epochs = 0
        max_steps = 7
        batch_size = 1
        batch_scope = "per_worker"
        seed = 9223372036854775807
        label_smoothing = 0.1
        mixup = 0.2
        cutmix = 1
        cutout = 12
        ema = 0.999
        grad_clip = 5e-324
        accumulate = 3
        drop_last = true
        eval_every = 5
        [optimizer]
        kind = "sgd"
        lr = 0.30000000000000004
        momentum = 0
        weight_decay = 0
        decay_norm_and_bias = false
        lr_scale = "sqrt"
        [schedule]
        kind = "multi-step"
        milestones = [60, 120, 160.5]
        gamma = 0.2
        warmup_epochs = 0.5
        warmup_start = 0
        [parallel]
        backend = "shm"
        bucket_mb = 0.5
        first_bucket_mb = 2
        overlap = false
        compression = "bf16"
        batch_norm = "sync"
        timeout_s = 1
        check_sync_every = 100
        [checkpoint]
        every = 0
        every_steps = 500
        keep_last = 1
        keep_best = false
        [log]
        every = 1
        tensorboard = false
        "#,
    );
    assert_eq!(plan.train.seed, i64::MAX as u64);
    assert_eq!(plan.train.grad_clip, 5e-324);
    assert_eq!(read_back(&plan), plan);
}

#[test]
fn layers_read_back() {
    let text = "[model]\nname = \"resnet18\"\nweights = 'C:\\w \"1\".pth'\nfreeze = [\"conv1\", \"layer1.0\"]\n\
        [data]\nname = \"cifar10\"\n[optimizer.lr_factors]\nfc = 10\n\"layer1.1\" = 0.1\n";
    let plan = read(text, &Overrides::default()).unwrap();
    assert_eq!(plan.optimizer.lr_factors, [("layer1.1".to_owned(), 0.1), ("fc".to_owned(), 10.0)].into());
    assert_eq!(plan.model.freeze, ["conv1", "layer1.0"]);
    assert_eq!(read_back(&plan), plan);
    // The inline form, and that of the command line.
    let inline = "[model]\nname = \"resnet18\"\n[data]\nname = \"cifar10\"\n[optimizer]\nlr_factors = { fc = 10.0 }\n";
    let flag = super::set(&["optimizer.lr_factors={ \"layer1.1\" = 0.1, fc = 10 }", "model.freeze=[\"conv1\"]"]);
    assert_eq!(read(inline, &Overrides::default()).unwrap().optimizer.lr_factors, [("fc".to_owned(), 10.0)].into());
    let set = read(inline, &flag).unwrap();
    assert_eq!((&set.optimizer.lr_factors, set.model.freeze.len()), (&plan.optimizer.lr_factors, 1));
    assert_eq!(read_back(&set), set);
}

#[test]
fn adamw_and_muon_have_the_defaults_of_pytorch() {
    let adamw = plan_after_base("[optimizer]\nkind = \"adamw\"\n").optimizer;
    assert_eq!((adamw.lr, adamw.weight_decay), (1e-3, 1e-2));
    let muon = plan_after_base("[optimizer]\nkind = \"muon\"\n").optimizer;
    assert_eq!((muon.lr, muon.weight_decay, muon.momentum, muon.nesterov), (1e-3, 0.1, 0.95, true));
    let sgd = plan_after_base("").optimizer;
    assert_eq!((sgd.lr, sgd.weight_decay), (0.1, 5e-4));
}

#[test]
fn milestones_that_are_never_reached_are_noted() {
    let plan = plan_after_base("[schedule]\nkind = \"multi-step\"\nmilestones = [5, 30]\n");
    assert_eq!(plan.notes(), ["`schedule.milestones`: epoch 30 is never reached in 10 epochs"]);
}

#[test]
fn sizes_of_images_that_no_epoch_has_are_noted() {
    let notes = |epochs: usize, milestones: &str| {
        let milestones = format!("image_sizes = [16, 24]\nimage_milestones = {milestones}\n");
        plan_after_base(&format!("[train]\nepochs = {epochs}\n{milestones}")).notes().to_vec()
    };
    assert_eq!(notes(10, "[0.3, 0.6]"), [] as [String; 0]);
    let unused = |epochs, milestone, size| {
        format!(
            "`train.image_milestones`: no epoch of {epochs} ends at {milestone}, so none has images of {size} pixels"
        )
    };
    assert_eq!(notes(1, "[0.3, 0.6]"), [unused(1, "0.3", 16), unused(1, "0.6", 24)]);
    assert_eq!(notes(10, "[0.3, 0.34]"), [unused(10, "0.34", 24)]);
}

#[test]
fn a_scaled_learning_rate_without_a_growing_batch_is_noted() {
    let notes = |lines: &str| plan_after_base(&format!("[optimizer]\nlr_scale = \"sqrt\"\n{lines}")).notes().to_vec();
    let [note] = notes("").try_into().unwrap();
    assert!(note.starts_with("`optimizer.lr_scale`: the global batch does not grow with the workers"), "{note}");
    assert_eq!(notes("[train]\nbatch_scope = \"per_worker\"\n"), [] as [String; 0]);
}

#[test]
fn the_table_has_one_row_per_section() {
    let plan = plan_after_base("augment = [\"crop\", \"flip\"]\n[optimizer]\nnesterov = true\n");
    let row = |(section, pairs): (&str, Vec<(&str, String)>)| {
        let pairs: Vec<String> = pairs.into_iter().map(|(key, value)| format!("{key}={value}")).collect();
        format!("{section}: {}", pairs.join(", "))
    };
    let rows: Vec<String> = plan.table().into_iter().map(row).collect();
    assert_snapshot!(rows.join("\n"), @"
    model: name=resnet18, num_classes=10
    data: name=cifar10, augment=crop:4 flip, mean=0.4914 0.4822 0.4465, std=0.2023 0.1994 0.201, image_size=32, workers=2, off=limit_train limit_test sampler_weights
    train: epochs=10, batch_size=128, batch_scope=global, precision=f32, seed=0, accumulate=1, eval_every=1, off=label_smoothing class_weights mixup cutmix cutout ema grad_clip drop_last tta max_steps max_time_s patience
    optimizer: kind=sgd, momentum=0.9, nesterov=true, lr=0.1, weight_decay=0.0005, decay_norm_and_bias=true, norm_bias_lr_factor=1, off=lr_scale
    schedule: kind=cosine, warmup_start=0.01, min_lr=0, off=warmup_epochs
    parallel: mode=single
    checkpoint: every=1, keep_last=2, keep_best=true, off=every_steps
    log: every=50, tensorboard=true, off=timeline
    ");
}

/// `log.every = 50` is the default: the text of a plan has the line `every = 50` in it, whatever `checkpoint.every` is.
#[test]
fn plans_are_compared_key_by_key() {
    let run = plan_after_base("");
    assert_eq!(run.first_difference(&run), None);
    let (asked, of_run) = plan_after_base("[checkpoint]\nevery = 50\n").first_difference(&run).unwrap();
    assert_eq!(asked.to_string(), "checkpoint.every = 50");
    assert_eq!(of_run.unwrap().to_string(), "checkpoint.every = 1");

    let (asked, of_run) = plan_after_base("dir = \"here\"\n").first_difference(&run).unwrap();
    assert_eq!((asked.to_string().as_str(), of_run), ("data.dir = \"here\"", None));
    assert_eq!(run.first_difference(&plan_after_base("dir = \"here\"\n")), None, "the run has more keys");
}
