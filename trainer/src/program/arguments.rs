//! Arguments that users of other programs write: torchrun's and mpirun's spelling, and flags of PyTorch's and timm's training
//! scripts.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::cli::normalize_flags;
use crate::config;
use crate::failure::Failure;

/// Flags of torchrun, of PyTorch's examples and of timm, each with the flag of this program as a hint.
const FOREIGN_FLAGS: [(&str, &str); 22] = [
    (
        "--nproc-per-node",
        "write --gpus N for N processes with a GPU each, or --cpus N for N processes that share the cores",
    ),
    ("--nproc", "write --gpus N for N processes with a GPU each, or --cpus N for N processes that share the cores"),
    ("--device", "write --gpus N to train on N GPUs, or --cpus N for N processes on the CPU"),
    ("--world-size", "write --nnodes N for N machines; --gpus N or --cpus N for N processes on each"),
    ("--rank", "write --node-rank R for the index of this machine"),
    (
        "--local-rank",
        "torchrun and mpirun set variables instead of this flag: start the program with one of them, or alone",
    ),
    ("--dist-url", "write --master-addr ADDR and --master-port PORT"),
    ("--dist-backend", "write --backend NAME"),
    ("--multiprocessing-distributed", "write --gpus N for N processes with a GPU each"),
    ("--evaluate", "write trainer eval --run RUN"),
    ("--output", "write --run-dir DIR for the folder in which run folders are created"),
    ("--output-dir", "write --run-dir DIR for the folder in which run folders are created"),
    ("--data-path", "write --data-dir DIR"),
    ("--amp", "write --set train.precision=bf16"),
    ("--model", "write --set model.name=NAME"),
    ("-a", "write --set model.name=NAME"),
    ("-b", "write --set train.batch_size=N"),
    ("-j", "write --set data.workers=N"),
    ("--opt", "write --set optimizer.kind=NAME"),
    ("--optimizer", "write --set optimizer.kind=NAME"),
    ("--sched", "write --set schedule.kind=NAME"),
    ("--lr-scheduler", "write --set schedule.kind=NAME"),
];

/// Rewrites arguments that clap would read in another way than the user means them.
///
/// # Errors
/// See [`normalize_flags`].
pub(super) fn normalized(arguments: impl IntoIterator<Item = OsString>) -> Result<Vec<OsString>, Failure> {
    let arguments = log_level_after_command(arguments.into_iter().collect());
    let arguments = normalize_flags(arguments).map_err(|flag| Failure::usage(flag.message, flag.hint))?;
    Ok(with_tta_value(arguments))
}

/// Reads `--log-level LEVEL COMMAND` as `COMMAND --log-level LEVEL`: clap takes a flag before a command for one of `train`.
fn log_level_after_command(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let count = match word(&arguments, 1) {
        "--log-level" => 2,
        flag if flag.starts_with("--log-level=") => 1,
        _ => return arguments,
    };
    let command = word(&arguments, 1 + count);
    if !command.is_empty() && !command.starts_with('-') {
        arguments[1..=1 + count].rotate_left(count);
    }
    arguments
}

/// Reads `predict --tta PATH` as `--tta=flip PATH`: the value of `--tta` may be left out, and clap would take the path for it.
fn with_tta_value(mut arguments: Vec<OsString>) -> Vec<OsString> {
    if arguments.get(1).is_none_or(|command| command != "predict") {
        return arguments;
    }
    let flags_end = arguments.iter().position(|argument| argument == "--").unwrap_or(arguments.len());
    for at in 1..flags_end.saturating_sub(1) {
        if arguments[at] == "--tta" && is_path(&arguments[at + 1]) {
            arguments[at] = "--tta=flip".into();
        }
    }
    arguments
}

/// Returns whether the word after `--tta` is a path. A name of views is not a path, even if the name is misspelt.
fn is_path(word: &OsStr) -> bool {
    let is_views = word == "flip" || word == "ten-crop";
    let looks_like_path = word.as_encoded_bytes().iter().any(|byte| [b'/', b'.'].contains(byte));
    !is_views && !word.as_encoded_bytes().starts_with(b"-") && (looks_like_path || Path::new(word).exists())
}

/// Explains a flag that other training programs have. Returns `None` for other mistakes, which clap explains.
pub(super) fn explain(mistake: &clap::Error, arguments: &[OsString]) -> Option<Failure> {
    let Some(ContextValue::String(flag)) = mistake.get(ContextKind::InvalidArg) else { return None };
    if mistake.kind() != ErrorKind::UnknownArgument || !takes_settings(arguments) {
        return None;
    }
    let value = value_of(flag, arguments);
    let dashes = flag.replace('_', "-");
    let hint = match FOREIGN_FLAGS.iter().find(|(other, _)| *other == dashes) {
        // Except for `--set`, only `train` has the flags that the hints name.
        Some((_, hint)) if !trains(arguments) && !hint.starts_with("write --set") => return None,
        Some((_, hint)) => (*hint).to_owned(),
        None => {
            let key = config::key_called(flag.strip_prefix("--")?)?;
            format!("write --set {key}={}; the keys of the TOML are in configs/README.md", value.unwrap_or("VALUE"))
        }
    };
    let shown = value.map_or_else(|| flag.clone(), |value| format!("{flag} {value}"));
    Some(Failure::usage(format!("{shown}: unknown flag"), hint))
}

/// Returns an argument, or an empty text if there are fewer.
fn word(arguments: &[OsString], at: usize) -> &str {
    arguments.get(at).and_then(|word| word.to_str()).unwrap_or_default()
}

/// Returns whether the command is `train`, which is the default.
fn trains(arguments: &[OsString]) -> bool {
    word(arguments, 1).starts_with('-') || word(arguments, 1) == "train"
}

/// Returns whether the command has `--set`.
fn takes_settings(arguments: &[OsString]) -> bool {
    let words = [word(arguments, 1), word(arguments, 2)];
    trains(arguments) || ["compare", "sweep"].contains(&words[0]) || words == ["bench", "scaling"]
}

/// Returns the value of a flag: the text after `=`, or the next argument.
fn value_of<'a>(flag: &str, arguments: &'a [OsString]) -> Option<&'a str> {
    let words: Vec<&str> = arguments.iter().map(|word| word.to_str().unwrap_or_default()).collect();
    let joined = words.iter().find_map(|word| word.strip_prefix(flag)?.strip_prefix('='));
    let next = || words.iter().position(|word| *word == flag).and_then(|at| words.get(at + 1)).copied();
    joined.or_else(next).filter(|value| !value.is_empty() && !value.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn explained(line: &str) -> String {
        let arguments = words(line);
        let mistake = Cli::try_parse_from(&arguments).unwrap_err();
        explain(&mistake, &arguments).map_or_else(|| "none".to_owned(), |failure| failure.to_string())
    }

    #[test]
    fn flags_of_other_training_programs_are_explained() {
        let lines = [
            "trainer --config x.toml --lr 0.1",
            "trainer train --config x.toml --batch-size=64",
            "trainer --config x.toml --batch_size 64",
            "trainer --config x.toml --weight-decay 1e-4",
            "trainer --config x.toml --num-workers 4",
            "trainer --config x.toml --amp",
            "trainer --config x.toml --pretrained",
            "trainer --config x.toml --nproc_per_node 4",
            "trainer --config x.toml --nproc-per-node=4",
            "trainer --config x.toml -b 64",
            "trainer sweep --config x.toml --cpus 2 --lr 0.1,0.2",
            "trainer bench scaling --config x.toml --momentum 0.9",
        ];
        insta::assert_snapshot!(lines.map(explained).join("\n"));
        // Other commands have no keys, and a misspelt flag of this program is explained by clap.
        for line in [
            "trainer eval --run x --lr 0.1",
            "trainer --config x.toml --max-restart 1",
            "trainer --epochs x",
            "trainer sweep --config x.toml --output-dir y",
        ] {
            assert_eq!(explained(line), "none", "{line}");
        }
    }

    #[test]
    fn the_log_level_may_come_before_a_command() {
        for level in ["--log-level debug", "--log-level=debug"] {
            for command in
                ["launch --cpus 1 -- true", "bench scaling --config x.toml --cpus 2", "models", "--config x.toml"]
            {
                let arguments = normalized(words(&format!("trainer {level} {command}"))).unwrap();
                let cli = Cli::try_parse_from(&arguments).unwrap_or_else(|mistake| panic!("{arguments:?}: {mistake}"));
                assert_eq!(cli.log_level.as_deref(), Some("debug"), "{arguments:?}");
                assert_eq!(cli.command.is_some(), !command.starts_with('-'), "{arguments:?}");
            }
        }
        // torchrun's spelling is read after it.
        assert_eq!(normalized(words("trainer --log-level info launch -np 2 -- true")).unwrap()[4], "--np");
    }

    #[test]
    fn a_path_after_tta_is_not_taken_for_the_name_of_views() {
        let read = |line: &str| {
            let Ok(cli) = Cli::try_parse_from(normalized(words(line)).unwrap()) else { return None };
            let Some(crate::cli::Command::Predict(arguments)) = cli.command else { panic!("{line}") };
            Some((arguments.tta.unwrap_or_default(), arguments.paths.len()))
        };
        let views = |name: &str, paths| Some((name.to_owned(), paths));
        assert_eq!(read("trainer predict --run x --tta a.png b.png"), views("flip", 2));
        assert_eq!(read("trainer predict --run x --tta new/"), views("flip", 1));
        assert_eq!(read("trainer predict --run x --tta ten-crop a.png"), views("ten-crop", 1));
        assert_eq!(read("trainer predict --run x a.png --tta"), views("flip", 1));
        assert_eq!(read("trainer predict --run x a.png --tta --force --to y"), views("flip", 1));
        assert_eq!(read("trainer predict --run x --tta tencrop a.png"), None, "a misspelt name");
    }
}
