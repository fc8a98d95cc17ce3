//! Text that is not TOML, sections and keys that do not exist, and the excerpt with its caret.

use insta::assert_snapshot;

use super::{mistake, mistake_after_base};

#[test]
fn unquoted_string() {
    assert_snapshot!(mistake("[model]\nname = resnet18\n"), @r#"
    error: not valid TOML: resnet18 is neither a number nor a quoted string
     --> configs/x.toml:2:8
      |
    2 | name = resnet18
      |        ^^^^^^^^
      hint: put it in quotes: "resnet18"
    "#);
}

#[test]
fn python_boolean() {
    assert_snapshot!(mistake_after_base("[train]\ndrop_last = True\n"), @"
    error: not valid TOML: invalid boolean, expected `true`
     --> configs/x.toml:6:13
      |
    6 | drop_last = True
      |             ^^^^
      hint: truth values are written true and false
    ");
}

#[test]
fn colon_instead_of_equals() {
    assert_snapshot!(mistake("[model]\nname: \"resnet18\"\n"), @r#"
    error: not valid TOML: invalid unquoted key, expected letters, numbers, `-`, `_`
     --> configs/x.toml:2:5
      |
    2 | name: "resnet18"
      |     ^
      hint: a key is set with an equals sign: lr = 0.1
    "#);
}

#[test]
fn unclosed_section() {
    assert_snapshot!(mistake("[model\nname = \"resnet18\"\n"), @"
    error: not valid TOML: unclosed table, expected `]`
     --> configs/x.toml:1:7
      |
    1 | [model
      |       ^
      hint: a section is opened with its name in brackets: [optimizer]
    ");
}

#[test]
fn unclosed_array() {
    assert_snapshot!(mistake_after_base("augment = [\"crop\",\n"), @r#"
    error: not valid TOML: unclosed array, expected `]`
     --> configs/x.toml:5:19
      |
    5 | augment = ["crop",
      |                   ^
      hint: close the array with a bracket: [0.5, 0.75]
    "#);
}

#[test]
fn unclosed_string() {
    assert_snapshot!(mistake("[model]\nname = \"resnet18\n"), @r#"
    error: not valid TOML: invalid basic string, expected `"`
     --> configs/x.toml:2:17
      |
    2 | name = "resnet18
      |                 ^
      hint: a string stands in quotes, on one line: "resnet18"
    "#);
}

#[test]
fn bare_decimal_point() {
    assert_snapshot!(mistake_after_base("[optimizer]\nlr = .1\n"), @"
    error: not valid TOML: invalid mantissa, expected digits
     --> configs/x.toml:6:6
      |
    6 | lr = .1
      |      ^
      hint: numbers are written 10, 0.1 or 5e-4
    ");
}

#[test]
fn duplicate_key() {
    assert_snapshot!(mistake_after_base("[train]\nepochs = 1\nepochs = 2\n"), @"
    error: not valid TOML: `epochs` is there twice
     --> configs/x.toml:7:1
      |
    7 | epochs = 2
      | ^^^^^^
      hint: keep one of the two; a section is opened once and holds all its keys
    ");
}

#[test]
fn duplicate_section() {
    assert_snapshot!(mistake_after_base("[train]\nepochs = 1\n[log]\n[train]\nseed = 2\n"), @"
    error: not valid TOML: `train` is there twice
     --> configs/x.toml:8:2
      |
    8 | [train]
      |  ^^^^^
      hint: keep one of the two; a section is opened once and holds all its keys
    ");
}

#[test]
fn nested_too_deep() {
    assert_snapshot!(mistake(&format!("x = {}", "[".repeat(1000))), @"
    error: not valid TOML: cannot recurse further; max recursion depth met
     --> configs/x.toml:1:85
      |
    1 | …[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[…
      |                                                                                  ^
      hint: nothing in a configuration is nested deeper than an array in a section
    ");
}

#[test]
fn unknown_key() {
    assert_snapshot!(mistake_after_base("[optimizer]\nlearning_rate = 0.1\n"), @"
    error: unknown key `learning_rate` in [optimizer]
     --> configs/x.toml:6:1
      |
    6 | learning_rate = 0.1
      | ^^^^^^^^^^^^^
      hint: did you mean `lr`? keys of [optimizer]: kind, lr, momentum, nesterov, betas, eps, weight_decay, decay_norm_and_bias, lr_scale
    ");
}

#[test]
fn misspelt_key() {
    assert_snapshot!(mistake_after_base("[optimizer]\nmomentun = 0.9\n"), @"
    error: unknown key `momentun` in [optimizer]
     --> configs/x.toml:6:1
      |
    6 | momentun = 0.9
      | ^^^^^^^^
      hint: did you mean `momentum`? keys of [optimizer]: kind, lr, momentum, nesterov, betas, eps, weight_decay, decay_norm_and_bias, lr_scale
    ");
}

#[test]
fn key_of_another_section() {
    assert_snapshot!(mistake_after_base("[train]\nlr = 0.1\n"), @"
    error: unknown key `lr` in [train]
     --> configs/x.toml:6:1
      |
    6 | lr = 0.1
      | ^^
      hint: `lr` is a key of [optimizer]; keys of [train]: epochs, batch_size, batch_scope, precision, seed, label_smoothing, mixup, cutmix, cutout, ema, grad_clip, accumulate, drop_last, eval_every, max_steps, max_time_s, patience
    ");
}

#[test]
fn unknown_section() {
    assert_snapshot!(mistake_after_base("[optimiser]\nlr = 0.1\nmomentum = 0.9\n"), @"
    error: unknown section [optimiser]
     --> configs/x.toml:5:2
      |
    5 | [optimiser]
      |  ^^^^^^^^^
      hint: did you mean [optimizer]? sections: [model], [data], [train], [optimizer], [schedule], [parallel], [checkpoint], [log]
    ");
}

#[test]
fn key_outside_of_any_section() {
    assert_snapshot!(mistake("lr = 0.1\n[model]\nname = \"lenet\"\n[data]\nname = \"mnist\"\n"), @"
    error: unknown key `lr` outside of any section
     --> configs/x.toml:1:1
      |
    1 | lr = 0.1
      | ^^
      hint: put `lr` below `[optimizer]`
    ");
}

#[test]
fn section_that_is_a_value() {
    assert_snapshot!(mistake("train = 3\n[model]\nname = \"lenet\"\n[data]\nname = \"mnist\"\n"), @"
    error: `train`: expected a section, found a value
     --> configs/x.toml:1:1
      |
    1 | train = 3
      | ^^^^^
      hint: write its keys on the lines below `[train]`
    ");
}

#[test]
fn section_in_double_brackets() {
    assert_snapshot!(mistake_after_base("[[train]]\nepochs = 3\n"), @"
    error: `train`: expected a section, found an array
     --> configs/x.toml:5:3
      |
    5 | [[train]]
      |   ^^^^^
      hint: write its keys on the lines below `[train]`
    ");
}

#[test]
fn section_in_a_section() {
    assert_snapshot!(mistake_after_base("[train.optimizer]\nlr = 3\n"), @"
    error: unknown key `optimizer` in [train]
     --> configs/x.toml:5:8
      |
    5 | [train.optimizer]
      |        ^^^^^^^^^
      hint: keys of [train]: epochs, batch_size, batch_scope, precision, seed, label_smoothing, mixup, cutmix, cutout, ema, grad_clip, accumulate, drop_last, eval_every, max_steps, max_time_s, patience
    ");
}

#[test]
fn missing_model_name() {
    assert_snapshot!(mistake("[model]\nnum_classes = 10\n[data]\nname = \"cifar10\"\n"), @r#"
    error: missing key `name` in [model]
     --> configs/x.toml:1:2
      |
    1 | [model]
      |  ^^^^^
      hint: write `name = "lenet"` below `[model]`; names: lenet, vgg11, vgg16, resnet18, resnet50, resnet101
    "#);
}

#[test]
fn missing_sections() {
    assert_snapshot!(mistake("# nothing yet\n"), @r#"
    error: missing section [model]
      --> configs/x.toml
      hint: write `name = "lenet"` below `[model]`; names: lenet, vgg11, vgg16, resnet18, resnet50, resnet101

    error: missing section [data]
      --> configs/x.toml
      hint: write `name = "cifar10"` below `[data]`; names: cifar10, cifar100, mnist, fashion-mnist, fashion-mini, image-folder
    "#);
}

#[test]
fn missing_data_section() {
    assert_snapshot!(mistake("[model]\nname = \"lenet\"\n"), @r#"
    error: missing section [data]
      --> configs/x.toml
      hint: write `name = "cifar10"` below `[data]`; names: cifar10, cifar100, mnist, fashion-mnist, fashion-mini, image-folder
    "#);
}

#[test]
fn caret_after_wide_characters() {
    // Two columns a character on the screen, one character a column in the place.
    assert_snapshot!(mistake_after_base("[log]\n\"学習率\" = 1 # 学習\n"), @r#"
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
    assert_snapshot!(mistake("[model]\nname = \"é\" # ok\n[data]\n\"学習\" = \"学習\" x\n"), @r#"
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
    assert_snapshot!(mistake_after_base("[train]\n\t\tepochs\t=\t-1\t# few\n"), @"
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
    assert_snapshot!(mistake("[model]\r\nname = \"lenet\"\r\n[data]\r\nname = \"mnist\"\r\n[train]\r\nepochs = \"x\"\r\n"), @r#"
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
    assert_snapshot!(mistake("﻿name = \"lenet\"\n"), @r#"
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
fn control_character() {
    // The terminal must not be told to do anything.
    assert_snapshot!(mistake_after_base("[train]\nepochs = \"\u{1b}[31m\"\n"), @r#"
    error: not valid TOML: invalid basic string, expected non-double-quote visible characters, `\`
     --> configs/x.toml:6:11
      |
    6 | epochs = "�[31m"
      |           ^
      hint: a string stands in quotes, on one line: "resnet18"
    "#);
}

#[test]
fn long_line() {
    assert_snapshot!(mistake_after_base(&format!("[train]\nbatch_scope = {0}\"global\" # {0}\n", " ".repeat(300)).replace("global", "globe")), @r#"
    error: `train.batch_scope`: unknown value "globe"
     --> configs/x.toml:6:315
      |
    6 | …                                                                                "globe" #                                                                       …
      |                                                                                  ^^^^^^^
      hint: did you mean `global`? choices: global, per_worker
    "#);
}

#[test]
fn several_mistakes_in_the_order_of_the_file() {
    assert_snapshot!(mistake_after_base("[train]\nepochs = -1\nbatch = 2\n[optimizer]\nlr = 0\n"), @"
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
      hint: did you mean `batch_size`? keys of [train]: epochs, batch_size, batch_scope, precision, seed, label_smoothing, mixup, cutmix, cutout, ema, grad_clip, accumulate, drop_last, eval_every, max_steps, max_time_s, patience

    error: `optimizer.lr`: expected a number above 0 and at most 1000, found 0
     --> configs/x.toml:9:6
      |
    9 | lr = 0
      |      ^
      hint: the schedule's highest learning rate; default 0.1
    ");
}
