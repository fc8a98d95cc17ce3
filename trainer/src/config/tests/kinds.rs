//! Keys that the chosen kind has no use for.

use insta::assert_snapshot;

use super::{BASE, mistake_after_base, read, set};

#[test]
fn nesterov_for_adamw() {
    assert_snapshot!(mistake_after_base("[optimizer]\nkind = \"adamw\"\nnesterov = true\n"), @r#"
    error: `optimizer.nesterov` has no meaning for kind = "adamw"
     --> configs/x.toml:7:1
      |
    7 | nesterov = true
      | ^^^^^^^^
      hint: remove it, or use kind = "sgd"
    "#);
}

#[test]
fn betas_for_sgd() {
    assert_snapshot!(mistake_after_base("[optimizer]\nbetas = [0.9, 0.99]\n"), @r#"
    error: `optimizer.betas` has no meaning for kind = "sgd"
     --> configs/x.toml:6:1
      |
    6 | betas = [0.9, 0.99]
      | ^^^^^
      hint: remove it, or use kind = "adamw"
    "#);
}

#[test]
fn milestones_for_cosine() {
    assert_snapshot!(mistake_after_base("[schedule]\nkind = \"cosine\"\nmilestones = [0.5]\n"), @r#"
    error: `schedule.milestones` has no meaning for kind = "cosine"
     --> configs/x.toml:7:1
      |
    7 | milestones = [0.5]
      | ^^^^^^^^^^
      hint: remove it, or use kind = "multi-step"
    "#);
}

#[test]
fn warmup_for_one_cycle() {
    assert_snapshot!(mistake_after_base("[schedule]\nkind = \"one-cycle\"\nwarmup_epochs = 5\n"), @r#"
    error: `schedule.warmup_epochs` has no meaning for kind = "one-cycle"
     --> configs/x.toml:7:1
      |
    7 | warmup_epochs = 5
      | ^^^^^^^^^^^^^
      hint: remove it, or use kind = "cosine" or "multi-step" or "constant"
    "#);
}

#[test]
fn one_cycle_keys_for_constant() {
    assert_snapshot!(mistake_after_base("[schedule]\nkind = \"constant\"\npct_start = 0.2\ndiv = 5\n"), @r#"
    error: `schedule.pct_start` has no meaning for kind = "constant"
     --> configs/x.toml:7:1
      |
    7 | pct_start = 0.2
      | ^^^^^^^^^
      hint: remove it, or use kind = "one-cycle"

    error: `schedule.div` has no meaning for kind = "constant"
     --> configs/x.toml:8:1
      |
    8 | div = 5
      | ^^^
      hint: remove it, or use kind = "one-cycle"
    "#);
}

#[test]
fn nesterov_without_momentum() {
    assert_snapshot!(mistake_after_base("[optimizer]\nmomentum = 0\nnesterov = true\n"), @"
    error: `optimizer.nesterov`: Nesterov momentum needs a momentum, found momentum = 0
     --> configs/x.toml:7:12
      |
    7 | nesterov = true
      |            ^^^^
      hint: set momentum = 0.9, or nesterov = false
    ");
}

#[test]
fn misspelt_kind_blames_no_other_key() {
    assert_snapshot!(mistake_after_base("[schedule]\nkind = \"onecicle\"\npct_start = 0.2\n"), @r#"
    error: `schedule.kind`: unknown value "onecicle"
     --> configs/x.toml:6:8
      |
    6 | kind = "onecicle"
      |        ^^^^^^^^^^
      hint: did you mean `one-cycle`? choices: one-cycle, cosine, multi-step, constant
    "#);
}

#[test]
fn flag_for_another_kind() {
    assert_snapshot!(read(BASE, &set(&["schedule.gamma=0.5"])).unwrap_err(), @r#"
    error: `schedule.gamma` has no meaning for kind = "cosine"
      --> --set schedule.gamma=0.5
      hint: remove it, or use kind = "multi-step"
    "#);
}

#[test]
fn flag_that_changes_the_kind_leaves_keys_out() {
    let file = format!("{BASE}[schedule]\nkind = \"one-cycle\"\npct_start = 0.2\ndiv = 5\n");
    assert_snapshot!(read(&file, &set(&["schedule.kind=cosine"])).unwrap().notes().join("\n"), @"
    --set schedule.kind=cosine has no use for `schedule.pct_start` of configs/x.toml: left out
    --set schedule.kind=cosine has no use for `schedule.div` of configs/x.toml: left out
    ");
}
