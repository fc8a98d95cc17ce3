//! The files in `configs/`, as they are shipped.

use std::path::{Path, PathBuf};

use super::load;
use super::{registry, set};
use crate::config::{Overrides, Registry, RunPlan, ScheduleKind};

fn folder() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs")).to_path_buf()
}

fn files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
    files.sort();
    files
}

/// Loads a file with the models of the registry. The other tests have a fixed list of models, so that their messages do not change.
fn plan(path: &Path, overrides: &Overrides) -> RunPlan {
    let models: Vec<&str> = models::entries().iter().map(|entry| entry.name).collect();
    let registry = Registry { models: &models, ..registry() };
    load(path, overrides, &registry).unwrap_or_else(|errors| panic!("{errors}"))
}

#[test]
fn every_file_loads_and_starts_with_its_launch_command() {
    let files = files();
    assert!(files.len() >= 7, "{files:?}");
    for path in files {
        let plan = plan(&path, &Overrides::default());
        assert_eq!(plan.notes(), [] as [String; 0], "{}", path.display());
        let name = path.file_name().unwrap().to_str().unwrap();
        let first = std::fs::read_to_string(&path).unwrap().lines().next().unwrap().to_owned();
        assert_eq!(first, format!("# cargo run --release -- --config configs/{name}"));
    }
}

/// Checks the values that `configs/README.md` lists for the recipe of the published table.
#[test]
fn the_recipe_of_the_table_applies_to_every_cifar_network() {
    let readme = std::fs::read_to_string(folder().join("README.md")).unwrap();
    let values: Vec<&str> = readme
        .lines()
        .filter_map(|line| line.trim().strip_prefix("--set "))
        .map(|value| value.trim_end_matches('\\').trim().trim_matches('\''))
        .collect();
    assert!(values.len() >= 8, "{values:?}");
    for path in files().into_iter().filter(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("cifar_") && name != "cifar_lenet.toml"
    }) {
        let plan = plan(&path, &set(&values));
        assert_eq!((plan.train.epochs, plan.train.batch_size), (200, 128));
        assert_eq!((plan.train.label_smoothing, plan.train.cutout, plan.train.ema), (0.0, 0, 0.0));
        assert_eq!((plan.optimizer.lr, plan.optimizer.weight_decay), (0.1, 5e-4));
        assert_eq!(plan.schedule.kind, ScheduleKind::Cosine);
        let augment: Vec<String> = plan.data.augment.iter().map(ToString::to_string).collect();
        assert_eq!(augment, ["crop:4", "flip"]);
    }
}
