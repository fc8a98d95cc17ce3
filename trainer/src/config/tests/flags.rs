//! Mistakes on the command line point at the flag; what is set there wins.

use insta::assert_snapshot;

use super::{BASE, read, set};
use crate::config::{Augmentation, Overrides, ScheduleName};

/// What the user reads about `--set` for each of the texts.
fn wrong(values: &[&str]) -> String {
    read(BASE, &set(values)).expect_err("the flag is wrong")
}

#[test]
fn nan_lr() {
    assert_snapshot!(wrong(&["optimizer.lr=nan"]), @"
    error: `optimizer.lr`: expected a finite number, found nan
      --> --set optimizer.lr=nan
      hint: the schedule's highest learning rate; default 0.1
    ");
}

#[test]
fn unknown_key() {
    assert_snapshot!(wrong(&["train.epoch=3"]), @"
    error: unknown key `epoch` in [train]
      --> --set train.epoch=3
      hint: did you mean `epochs`? keys of [train]: epochs, batch_size, batch_scope, precision, seed, label_smoothing, mixup, cutmix, cutout, ema, grad_clip, accumulate, drop_last, eval_every, max_steps, max_time_s, patience
    ");
}

#[test]
fn unknown_section() {
    assert_snapshot!(wrong(&["optimiser.lr=3"]), @"
    error: unknown section [optimiser]
      --> --set optimiser.lr=3
      hint: did you mean [optimizer]? sections: [model], [data], [train], [optimizer], [schedule], [parallel], [checkpoint], [log]
    ");
}

#[test]
fn key_without_its_section() {
    assert_snapshot!(wrong(&["lr=3"]), @"
    error: unknown key `lr` outside of any section
      --> --set lr=3
      hint: write --set optimizer.lr=…
    ");
}

#[test]
fn path_of_three() {
    assert_snapshot!(wrong(&["train.optimizer.lr=3"]), @"
    error: expected section.key=value, found the path `train.optimizer.lr`
      --> --set train.optimizer.lr=3
      hint: write it like --set optimizer.lr=0.1
    ");
}

#[test]
fn no_equals_sign() {
    assert_snapshot!(wrong(&["optimizer.lr"]), @"
    error: expected section.key=value, found no equals sign
      --> --set optimizer.lr
      hint: write it like --set optimizer.lr=0.1
    ");
}

#[test]
fn no_value() {
    assert_snapshot!(wrong(&["optimizer.lr="]), @"
    error: no value for `optimizer.lr`
      --> --set optimizer.lr=
      hint: write it like --set optimizer.lr=0.1
    ");
}

#[test]
fn empty() {
    assert_snapshot!(wrong(&[""]), @"
    error: expected section.key=value, found no equals sign
      --> --set
      hint: write it like --set optimizer.lr=0.1
    ");
}

#[test]
fn decimal_comma() {
    assert_snapshot!(wrong(&["optimizer.lr=0,1"]), @"
    error: `optimizer.lr`: expected a number, found string 0,1
      --> --set optimizer.lr=0,1
      hint: write it with a decimal point: 0.1
    ");
}

#[test]
fn list_without_brackets() {
    assert_snapshot!(wrong(&["data.augment=crop"]), @r#"
    error: `data.augment`: expected an array of strings, found string crop
      --> --set data.augment=crop
      hint: put it in brackets: ["crop"]
    "#);
}

#[test]
fn brackets_without_quotes() {
    assert_snapshot!(wrong(&["data.augment=[crop]"]), @r#"
    error: not valid TOML: crop is neither a number nor a quoted string
      --> --set data.augment=[crop]
      hint: keep the shell from taking quotes away: --set 'data.augment=["crop", "flip"]'
    "#);
}

#[test]
fn element_of_a_list() {
    assert_snapshot!(wrong(&[r#"data.augment=["crop", "flop"]"#]), @r#"
    error: `data.augment`: unknown augmentation "flop"
      --> --set data.augment=["crop", "flop"]
      hint: did you mean `flip`? augmentations: flip, crop, reflect-crop, alternating-flip
    "#);
}

#[test]
fn value_with_line_feed() {
    assert_snapshot!(wrong(&["model.name=a\nb"]), @r#"
    error: `model.name`: no model is called "a\nb"
      --> --set model.name=a\nb
      hint: names: lenet, vgg11, vgg16, resnet18, resnet50, resnet101
    "#);
}

#[test]
fn epochs_flag() {
    assert_snapshot!(read(BASE, &Overrides { epochs: Some(0), ..Overrides::default() }).unwrap_err(), @"
    error: `train.epochs`: 0 epochs train nothing
      --> --epochs 0
      hint: give 1 or more, or limit the run by `max_steps`
    ");
}

#[test]
fn seed_that_toml_cannot_hold() {
    assert_snapshot!(read(BASE, &Overrides { seed: Some(u64::MAX), ..Overrides::default() }).unwrap_err(), @"
    error: `train.seed`: expected an integer up to 9223372036854775807, found 18446744073709551615
      --> --seed 18446744073709551615
      hint: of weights, shuffling and augmentation; default 0
    ");
}

#[test]
fn mode_flag() {
    assert_snapshot!(read(BASE, &Overrides { mode: Some("ddpp".into()), ..Overrides::default() }).unwrap_err(), @r#"
    error: `parallel.mode`: unknown value "ddpp"
      --> --mode ddpp
      hint: did you mean `ddp`? choices: ddp, single, dp
    "#);
}

#[test]
fn mode_flag_wins() {
    let text = format!("{BASE}[parallel]\nmode = \"ddp\"\n");
    let plan = read(&text, &Overrides { mode: Some("dp".into()), ..Overrides::default() }).unwrap();
    assert_eq!(plan.parallel.mode.to_string(), "dp");
}

#[test]
fn backend_flag() {
    assert_snapshot!(read(BASE, &Overrides { backend: Some("gloo".into()), ..Overrides::default() }).unwrap_err(), @r#"
    error: `parallel.backend`: unknown value "gloo"
      --> --backend gloo
      hint: choices: auto, shm, tcp, cuda, nccl, mpi
    "#);
}

#[test]
fn later_wins() {
    let text = format!("{BASE}[train]\nepochs = 3\nseed = 1\n");
    let mut overrides = set(&["train.epochs=4", "train.epochs=5", "train.seed=2"]);
    assert_eq!(read(&text, &overrides).unwrap().train.epochs, 5);
    overrides.epochs = Some(6);
    let plan = read(&text, &overrides).unwrap();
    assert_eq!((plan.train.epochs, plan.train.seed), (6, 2));
}

#[test]
fn mistake_in_the_file_is_mended_by_a_flag() {
    let text = format!("{BASE}[optimizer]\nlr = nan\n");
    assert_eq!(read(&text, &set(&["optimizer.lr=0.5"])).unwrap().optimizer.lr, 0.5);
}

#[test]
fn values_are_toml_or_bare_words() {
    let values =
        [r#"data.augment=["crop:2","flip"]"#, "schedule.kind=constant", "data.dir=2024", "train.drop_last=true"];
    let plan = read(BASE, &set(&values)).unwrap();
    assert_eq!(plan.data.augment, [Augmentation::Crop { padding: 2 }, Augmentation::Flip]);
    assert_eq!(plan.schedule.name(), ScheduleName::Constant);
    assert_eq!(plan.data.dir.as_deref(), Some("2024".as_ref()), "a number is a word where a word is wanted");
    assert!(plan.train.drop_last);
}

#[test]
fn data_dir_is_taken_as_it_is() {
    let overrides = Overrides { data_dir: Some("\"quoted\" = [dir]".into()), ..Overrides::default() };
    assert_eq!(read(BASE, &overrides).unwrap().data.dir.as_deref(), Some("\"quoted\" = [dir]".as_ref()));
}
