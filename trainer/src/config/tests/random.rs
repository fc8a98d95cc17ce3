//! Any text and any flags result in a plan that reads back, or in errors that can be shown; never in a panic.

use std::path::Path;

use proptest::prelude::*;

use super::load;
use super::{facts, read, registry, set};
use crate::config::{DatasetFacts, Overrides};

/// A configuration with something of everything, to be mutated.
const FULL: &str = r#"# é 学習
[model]
name = "resnet18"
num_classes = 10
[data]
name = "cifar10"
augment = ["reflect-crop:4", "flip"]
mean = [0.5, 0.5, 0.5]
[train]
epochs = 30
batch_size = 512
label_smoothing = 0.1
cutout = 12
[optimizer]
kind = "sgd"
lr = 0.2
nesterov = true
[schedule]
kind = "one-cycle"
pct_start = 0.2
final_div = 1e4
[checkpoint]
every = 0
[log]
every = 10
"#;

/// Pieces that make mutations hit more than syntax errors.
const PIECES: &[&str] = &[
    "nan",
    "-1",
    "0",
    "1e999",
    "inf",
    "\"\"",
    "[]",
    "[[",
    "]",
    "\n",
    "\t",
    "=",
    ".",
    "\"",
    "'''",
    "\u{feff}",
    "學",
    "\r\n",
    "99999999999999999999",
    "true",
    "{}",
    "[train]",
    "[x]",
    "a.b.c = 1\n",
    "2024-01-01",
    "\u{0}",
    "multi-step",
    "adamw",
];

/// Resolves the text. The plan must read back as the same plan, or the errors must be printable.
fn assert_round_trip_or_errors(text: &str, overrides: &Overrides) {
    match read(text, overrides) {
        Ok(mut plan) => {
            let again = read(&plan.to_toml(), &Overrides::default()).expect("a plan's own text is right");
            assert_eq!(again, plan);
            assert_eq!(plan.first_difference(&again), None);
            assert!(!plan.table().is_empty());
            let other = DatasetFacts { channels: 1, height: 3, width: 2, classes: 2, ..facts("mnist").unwrap() };
            assert!(plan.check_against(&other).is_err());
        }
        Err(errors) => {
            let shown = errors.to_string();
            assert!(shown.starts_with("error: "));
            assert!(shown.contains("\n  hint: "));
            assert!(!shown.contains(|symbol: char| symbol.is_control() && symbol != '\n'), "{shown:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn any_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.toml");
        std::fs::write(&path, bytes).unwrap();
        if let Err(errors) = load(Path::new(&path), &Overrides::default(), &registry()) {
            prop_assert!(errors.to_string().starts_with("error: "));
        }
    }

    #[test]
    fn any_text_and_flag_do_not_panic(text in "\\PC{0,100}", flag in "\\PC{0,30}") {
        assert_round_trip_or_errors(&text, &set(&[&flag]));
    }

    #[test]
    fn a_mutated_configuration_does_not_panic(
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0usize..12, prop::sample::select(PIECES)), 1..4),
    ) {
        let mut text: Vec<char> = FULL.chars().collect();
        for (at, length, piece) in cuts {
            let start = at.index(text.len() + 1);
            let end = (start + length).min(text.len());
            text.splice(start..end, piece.chars());
        }
        assert_round_trip_or_errors(&text.into_iter().collect::<String>(), &Overrides::default());
    }

    #[test]
    fn a_replaced_value_does_not_panic(
        line in any::<prop::sample::Index>(),
        value in prop_oneof![
            prop::sample::select(PIECES).prop_map(str::to_owned),
            any::<f64>().prop_map(|number| format!("{number:?}")),
            (0.0..1.0f64).prop_map(|number| format!("{number:?}")),
            any::<i64>().prop_map(|number| number.to_string()),
            (0..300i64).prop_map(|number| number.to_string()),
            prop::collection::vec(0.0..1.0f32, 3).prop_map(|numbers| format!("{numbers:?}")),
        ],
    ) {
        let keys: Vec<&str> = FULL.lines().filter(|line| line.contains(" = ")).collect();
        let old = keys[line.index(keys.len())];
        let (key, _) = old.split_once(" = ").unwrap();
        assert_round_trip_or_errors(&FULL.replace(old, &format!("{key} = {value}")), &Overrides::default());
        let section = FULL[..FULL.find(old).unwrap()].rsplit_once('[').unwrap().1.split(']').next().unwrap();
        assert_round_trip_or_errors(FULL, &set(&[&format!("{section}.{key}={value}")]));
    }
}
