//! Tests of the configuration: the messages for every mistake, plans that read back as the same plan, and random input.

mod facts;
mod flags;
mod mistakes;
mod plan;
mod random;
mod readme;
mod screens;
mod shipped;

use super::{ConfigError, ConfigErrors, ConfigSource, DatasetFacts, Location, Overrides, Registry, RunPlan, resolve};

/// Reads the file at `path` and resolves it.
fn load(path: &std::path::Path, overrides: &Overrides, registry: &Registry) -> Result<RunPlan, ConfigErrors> {
    resolve(&ConfigSource::read(path)?, overrides, registry)
}

/// The sections that every configuration must have.
const BASE: &str = "[model]\nname = \"resnet18\"\n[data]\nname = \"cifar10\"\n";

const MODELS: &[&str] = &["lenet", "vgg11", "vgg16", "resnet18", "resnet50", "resnet101"];
const DATASETS: &[&str] = &["cifar10", "cifar100", "mnist", "fashion-mnist", "fashion-mini", "image-folder"];

/// Returns the facts of a data set, as the registry of the crate `data` has them.
fn facts(name: &str) -> Option<DatasetFacts> {
    let (channels, side, classes, mean, std) = match name {
        "cifar10" | "cifar100" => {
            (3, 32, if name == "cifar10" { 10 } else { 100 }, vec![0.4914, 0.4822, 0.4465], vec![0.2023, 0.1994, 0.201])
        }
        "mnist" => (1, 28, 10, vec![0.1307], vec![0.3081]),
        "fashion-mnist" | "fashion-mini" => (1, 28, 10, vec![0.286], vec![0.353]),
        _ => return None,
    };
    Some(DatasetFacts { channels, height: side, width: side, classes, mean, std })
}

fn registry() -> Registry<'static> {
    Registry { models: MODELS, dataset_names: DATASETS, dataset_facts: &facts }
}

/// Resolves text as if it were the file `configs/x.toml`.
fn read(text: &str, overrides: &Overrides) -> Result<RunPlan, ConfigErrors> {
    resolve(&ConfigSource::new("configs/x.toml", text), overrides, &registry())
}

/// Returns the plan of [`BASE`] followed by `lines`.
fn plan_after_base(lines: &str) -> RunPlan {
    read(&format!("{BASE}{lines}"), &Overrides::default()).expect("the configuration is right")
}

/// Returns the overrides of a command line with `--set` for each of `values`.
fn set(values: &[&str]) -> Overrides {
    Overrides { set: values.iter().map(|value| (*value).to_owned()).collect(), ..Overrides::default() }
}

/// Formats each mistake in three lines: the line or the flag; the caret with the line, column and cause; the hint.
fn brief(errors: &ConfigErrors) -> String {
    let one = |error: &ConfigError| {
        let (text, caret) = match &error.location {
            Location::Line(line) => {
                let caret = format!("{:indent$}{}", "", "^".repeat(line.width), indent = line.indent);
                (line.text.clone(), format!("{caret} {}:{} ", line.line, line.column))
            }
            Location::File(file) => (file.display().to_string(), String::new()),
            Location::Flag(flag) => (flag.clone(), String::new()),
        };
        format!("{text}\n{caret}{}\n  hint: {}\n", error.cause, error.hint)
    };
    errors.0.iter().map(one).collect()
}
