//! The screen of a mistake, whole: place, excerpt, caret and hint.

use insta::assert_snapshot;

use super::{BASE, read, screen, screen_after_base, set};

#[test]
fn several_mistakes_in_the_order_of_the_file_and_then_flags() {
    let text = format!("{BASE}[train]\nepochs = -1\nbatch = 2\n[checkpoint]\n[optimizer]\nlr = 0\n");
    assert_snapshot!(read(&text, &set(&["log.every=0"])).unwrap_err(), @"
    error: `train.epochs`: expected an integer from 0 to 1000000, found -1
     --> configs/x.toml:6:10
      |
    6 | epochs = -1
      |          ^^
      hint: passes over the training set; 0 only with `max_steps`; default 10

    error: unknown key `batch` in [train]
     --> configs/x.toml:7:1
      |
    7 | batch = 2
      | ^^^^^
      hint: did you mean `batch_size`? keys of [train]: batch_size, epochs, batch_scope, precision, seed, label_smoothing, mixup, cutmix, cutout, ema, grad_clip, accumulate, drop_last, eval_every, max_steps, max_time_s, patience

    error: `optimizer.lr`: expected a number above 0 and at most 1000, found 0
      --> configs/x.toml:10:6
       |
    10 | lr = 0
       |      ^
      hint: the schedule's highest learning rate; default 0.1

    error: `log.every`: expected an integer from 1 to 1000000000, found 0
      --> --set log.every=0
      hint: steps between plain progress lines; default 50
    ");
}

#[test]
fn caret_after_wide_characters() {
    // Two columns a character on the screen, one character a column in the location.
    assert_snapshot!(screen_after_base("[log]\n\"学習率\" = 1 # 学習\n"), @r#"
    error: unknown key `学習率` in [log]
     --> configs/x.toml:6:1
      |
    6 | "学習率" = 1 # 学習
      | ^^^^^^^^
      hint: keys of [log]: every, tensorboard, timeline
    "#);
}

#[test]
fn caret_after_accents() {
    assert_snapshot!(screen("[model]\nname = \"é\" # ok\n[data]\n\"学習\" = \"学習\" x\n"), @r#"
    error: not valid TOML: unexpected key or value, expected newline, `#`
     --> configs/x.toml:4:13
      |
    4 | "学習" = "学習" x
      |                 ^
      hint: a line is `[section]`, `key = value` or `# comment`; strings stand in quotes, arrays in brackets
    "#);
}

#[test]
fn caret_after_tabs() {
    // Tabs become four spaces in the excerpt.
    assert_snapshot!(screen_after_base("[train]\n\t\tepochs\t=\t-1\t# few\n"), @"
    error: `train.epochs`: expected an integer from 0 to 1000000, found -1
     --> configs/x.toml:6:12
      |
    6 |         epochs    =    -1    # few
      |                        ^^
      hint: passes over the training set; 0 only with `max_steps`; default 10
    ");
}

#[test]
fn windows_line_ends() {
    assert_snapshot!(screen("[model]\r\nname = \"lenet\"\r\n[data]\r\nname = \"mnist\"\r\n[train]\r\nepochs = \"x\"\r\n"), @r#"
    error: `train.epochs`: expected an integer, found string "x"
     --> configs/x.toml:6:10
      |
    6 | epochs = "x"
      |          ^^^
      hint: passes over the training set; 0 only with `max_steps`; default 10
    "#);
}

#[test]
fn byte_order_mark() {
    assert_snapshot!(screen("\u{feff}name = \"lenet\"\n"), @r#"
    error: missing section [model]
      --> configs/x.toml
      hint: write `name = "lenet"` below `[model]`; names: lenet, vgg11, vgg16, resnet18, resnet50, resnet101

    error: missing section [data]
      --> configs/x.toml
      hint: write `name = "cifar10"` below `[data]`; names: cifar10, cifar100, mnist, fashion-mnist, fashion-mini, image-folder

    error: unknown key `name` outside of any section
     --> configs/x.toml:1:1
      |
    1 | name = "lenet"
      | ^^^^
      hint: put `name` below `[model]`
    "#);
}

#[test]
fn control_characters_are_spelt_out() {
    assert_snapshot!(read(BASE, &set(&["model.name=a\nb"])).unwrap_err(), @r#"
    error: `model.name`: no model is called "a\nb"
      --> --set model.name=a\nb
      hint: names: lenet, vgg11, vgg16, resnet18, resnet50, resnet101
    "#);
}

#[test]
fn long_line() {
    let spaces = " ".repeat(300);
    assert_snapshot!(screen_after_base(&format!("[train]\nbatch_scope = {spaces}\"globe\" # {spaces}\n")), @r#"
    error: `train.batch_scope`: unknown value "globe"
     --> configs/x.toml:6:315
      |
    6 | …                                                                                "globe" #                                                                       …
      |                                                                                  ^^^^^^^
      hint: did you mean `global`? choices: global, per_worker
    "#);
}

#[test]
fn nested_too_deep() {
    assert_snapshot!(screen(&format!("x = {}", "[".repeat(1000))), @"
    error: not valid TOML: cannot recurse further; max recursion depth met
     --> configs/x.toml:1:85
      |
    1 | …[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[…
      |                                                                                  ^
      hint: nothing in a configuration is nested deeper than an array in a section
    ");
}
