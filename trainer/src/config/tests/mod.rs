//! Every mistake a configuration can hold, as its author reads it; round trips; arbitrary input.

mod data;
mod files;
mod flags;
mod kinds;
mod plan;
mod random;
mod shipped;
mod syntax;
mod types;
mod values;

use super::{DatasetFacts, Overrides, Registry, RunPlan, Source, resolve};

/// Sections without which no configuration is complete.
const BASE: &str = "[model]\nname = \"resnet18\"\n[data]\nname = \"cifar10\"\n";

const MODELS: &[&str] = &["lenet", "vgg11", "vgg16", "resnet18", "resnet50", "resnet101"];
const DATASETS: &[&str] = &["cifar10", "cifar100", "mnist", "fashion-mnist", "fashion-mini", "image-folder"];

/// Facts as the data crate's registry has them.
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
    Registry { models: MODELS, dataset_names: DATASETS, datasets: &facts, gpu: false }
}

/// Resolves text as if it were the file `configs/x.toml`.
fn read(text: &str, overrides: &Overrides) -> Result<RunPlan, String> {
    resolve(&Source::new("configs/x.toml", text), overrides, &registry()).map_err(|errors| errors.to_string())
}

/// What the user reads about a text.
fn mistake(text: &str) -> String {
    read(text, &Overrides::default()).expect_err("the configuration is wrong")
}

/// What the user reads about lines that follow a complete configuration.
fn mistake_after_base(lines: &str) -> String {
    mistake(&format!("{BASE}{lines}"))
}

/// The plan of lines that follow a complete configuration.
fn plan_after_base(lines: &str) -> RunPlan {
    read(&format!("{BASE}{lines}"), &Overrides::default()).expect("the configuration is right")
}

/// `--set` for each of the texts.
fn set(values: &[&str]) -> Overrides {
    Overrides { set: values.iter().map(|value| (*value).to_owned()).collect(), ..Overrides::default() }
}
