//! Values from the command line take precedence over the file.

use insta::assert_snapshot;

use super::{BASE, read, set};
use data::augment::{Augment, Fill};

use crate::config::{Overrides, ScheduleKind};

#[test]
fn the_mode_flag_takes_precedence_over_the_file() {
    let text = format!("{BASE}[parallel]\nmode = \"ddp\"\n");
    let plan = read(&text, &Overrides { mode: Some("dp".into()), ..Overrides::default() }).unwrap();
    assert_eq!(plan.parallel.mode.to_string(), "dp");
}

#[test]
fn a_later_value_of_a_key_replaces_an_earlier_one() {
    let text = format!("{BASE}[train]\nepochs = 3\nseed = 1\n");
    let mut overrides = set(&["train.epochs=4", "train.epochs=5", "train.seed=2"]);
    assert_eq!(read(&text, &overrides).unwrap().train.epochs, 5);
    overrides.epochs = Some(6);
    let plan = read(&text, &overrides).unwrap();
    assert_eq!((plan.train.epochs, plan.train.seed), (6, 2));
}

#[test]
fn a_flag_replaces_a_wrong_value_of_the_file() {
    let text = format!("{BASE}[optimizer]\nlr = nan\n");
    assert_eq!(read(&text, &set(&["optimizer.lr=0.5"])).unwrap().optimizer.lr, 0.5);
}

#[test]
fn the_values_of_set_are_toml_or_words_without_quotes() {
    let values =
        [r#"data.augment=["crop:2","flip"]"#, "schedule.kind=constant", "data.dir=2024", "train.drop_last=true"];
    let plan = read(BASE, &set(&values)).unwrap();
    assert_eq!(plan.data.augment, [Augment::Crop { padding: 2, fill: Fill::Zero }, Augment::Flip]);
    assert_eq!(plan.schedule.kind, ScheduleKind::Constant);
    assert_eq!(plan.data.dir.as_deref(), Some("2024".as_ref()), "a number is a word where a word is wanted");
    assert!(plan.train.drop_last);
}

#[test]
fn the_value_of_the_data_dir_flag_is_not_parsed_as_toml() {
    let overrides = Overrides { data_dir: Some("\"quoted\" = [dir]".into()), ..Overrides::default() };
    assert_eq!(read(BASE, &overrides).unwrap().data.dir.as_deref(), Some("\"quoted\" = [dir]".as_ref()));
}

#[test]
fn a_flag_that_changes_the_kind_leaves_out_the_keys_of_the_other_kind() {
    let file = format!("{BASE}[schedule]\nkind = \"one-cycle\"\npct_start = 0.2\ndiv = 5\n");
    assert_snapshot!(read(&file, &set(&["schedule.kind=cosine"])).unwrap().notes().join("\n"), @"
    --set schedule.kind=cosine has no use for `schedule.pct_start` of configs/x.toml: left out
    --set schedule.kind=cosine has no use for `schedule.div` of configs/x.toml: left out
    ");
}
