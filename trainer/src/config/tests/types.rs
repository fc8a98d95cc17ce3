//! Values of the wrong type, and words that are no choice.

use insta::assert_snapshot;

use super::{mistake, mistake_after_base};

#[test]
fn string_for_an_integer() {
    assert_snapshot!(mistake_after_base("[train]\nepochs = \"abc\"\n"), @r#"
    error: `train.epochs`: expected an integer, found string "abc"
     --> configs/x.toml:6:10
      |
    6 | epochs = "abc"
      |          ^^^^^
      hint: passes over the training set; 0 only with `max_steps`; default 10
    "#);
}

#[test]
fn quoted_number() {
    assert_snapshot!(mistake_after_base("[optimizer]\nlr = \"0.1\"\n"), @r#"
    error: `optimizer.lr`: expected a number, found string "0.1"
     --> configs/x.toml:6:6
      |
    6 | lr = "0.1"
      |      ^^^^^
      hint: write it without quotes: 0.1
    "#);
}

#[test]
fn float_for_an_integer() {
    assert_snapshot!(mistake_after_base("[train]\nbatch_size = 128.0\n"), @"
    error: `train.batch_size`: expected an integer, found float 128.0
     --> configs/x.toml:6:14
      |
    6 | batch_size = 128.0
      |              ^^^^^
      hint: write it without the point: 128
    ");
}

#[test]
fn integer_for_a_boolean() {
    assert_snapshot!(mistake_after_base("[train]\ndrop_last = 1\n"), @"
    error: `train.drop_last`: expected true or false, found integer 1
     --> configs/x.toml:6:13
      |
    6 | drop_last = 1
      |             ^
      hint: leaves out an incomplete last batch; default false
    ");
}

#[test]
fn number_for_a_name() {
    assert_snapshot!(mistake("[model]\nname = 18\n[data]\nname = \"cifar10\"\n"), @r#"
    error: `model.name`: expected a string, found integer 18
     --> configs/x.toml:2:8
      |
    2 | name = 18
      |        ^^
      hint: put it in quotes: "18"
    "#);
}

#[test]
fn string_for_an_array() {
    assert_snapshot!(mistake_after_base("augment = \"crop\"\n"), @r#"
    error: `data.augment`: expected an array of strings, found string "crop"
     --> configs/x.toml:5:11
      |
    5 | augment = "crop"
      |           ^^^^^^
      hint: put it in brackets: ["crop"]
    "#);
}

#[test]
fn number_in_an_array_of_strings() {
    assert_snapshot!(mistake_after_base("augment = [\"crop\", 4]\n"), @r#"
    error: `data.augment`: expected a string, found integer 4
     --> configs/x.toml:5:20
      |
    5 | augment = ["crop", 4]
      |                    ^
      hint: put it in quotes: "4"
    "#);
}

#[test]
fn table_for_a_number() {
    assert_snapshot!(mistake_after_base("[optimizer]\nlr = { peak = 0.1 }\n"), @"
    error: `optimizer.lr`: expected a number, found a table
     --> configs/x.toml:6:6
      |
    6 | lr = { peak = 0.1 }
      |      ^^^^^^^^^^^^^^
      hint: the schedule's highest learning rate; default 0.1
    ");
}

#[test]
fn date_for_a_number() {
    assert_snapshot!(mistake_after_base("[train]\nseed = 2024-01-01\n"), @"
    error: `train.seed`: expected an integer, found datetime 2024-01-01
     --> configs/x.toml:6:8
      |
    6 | seed = 2024-01-01
      |        ^^^^^^^^^^
      hint: of weights, shuffling and augmentation; default 0
    ");
}

#[test]
fn integer_beyond_64_bits() {
    assert_snapshot!(mistake_after_base("[train]\nseed = 18446744073709551616\n"), @"
    error: `train.seed`: expected an integer up to 9223372036854775807, found 18446744073709551616
     --> configs/x.toml:6:8
      |
    6 | seed = 18446744073709551616
      |        ^^^^^^^^^^^^^^^^^^^^
      hint: of weights, shuffling and augmentation; default 0
    ");
}

#[test]
fn unknown_choice() {
    assert_snapshot!(mistake_after_base("[schedule]\nkind = \"onecycle_lr\"\n"), @r#"
    error: `schedule.kind`: unknown value "onecycle_lr"
     --> configs/x.toml:6:8
      |
    6 | kind = "onecycle_lr"
      |        ^^^^^^^^^^^^^
      hint: did you mean `one-cycle`? choices: one-cycle, cosine, multi-step, constant
    "#);
}

#[test]
fn peers_word_for_a_choice() {
    assert_snapshot!(mistake_after_base("[train]\nprecision = \"fp32\"\n"), @r#"
    error: `train.precision`: unknown value "fp32"
     --> configs/x.toml:6:13
      |
    6 | precision = "fp32"
      |             ^^^^^^
      hint: did you mean `f32`? choices: f32, bf16
    "#);
}

#[test]
fn choice_nobody_could_have_meant() {
    assert_snapshot!(mistake_after_base("[optimizer]\nkind = \"lion\"\n"), @r#"
    error: `optimizer.kind`: unknown value "lion"
     --> configs/x.toml:6:8
      |
    6 | kind = "lion"
      |        ^^^^^^
      hint: choices: sgd, adamw
    "#);
}
