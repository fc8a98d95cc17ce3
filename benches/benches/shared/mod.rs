//! Parts of several benches: a training step of one process, PyTorch's programs, medians.

#![allow(dead_code, reason = "each bench uses a part")]

use std::error::Error;
use std::process::{Command, ExitCode};

use burn::tensor::Device;
use data::{ImageShape, loader::Batch};
use models::Spec;
use serde::de::DeserializeOwned;
use trainer::config::{self, ConfigSource, DatasetFacts, Overrides, Registry};
use trainer::strategy::single::Single;

/// Converts the result of `main` to an exit code; prints an error.
pub fn exit_code(result: Result<(), Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A network with SGD, Nesterov momentum and weight decay, on an autodiff device.
pub fn strategy(
    model: &str,
    spec: &Spec,
    precision: &str,
    graph: bool,
    device: &Device,
) -> Result<Single, Box<dyn Error>> {
    let facts = DatasetFacts {
        channels: spec.in_channels,
        height: spec.image_size[0],
        width: spec.image_size[1],
        classes: spec.num_classes,
        mean: vec![0.5; spec.in_channels],
        std: vec![0.25; spec.in_channels],
    };
    let datasets = |_: &str| Some(facts.clone());
    let registry = Registry { models: &[model], dataset_names: &["cifar10"], dataset_facts: &datasets };
    let text = format!(
        "[model]\nname = \"{model}\"\n[data]\nname = \"cifar10\"\n[train]\nprecision = \"{precision}\"\ngraph = {graph}\n\
         [optimizer]\nnesterov = true\n"
    );
    let plan = config::resolve(&ConfigSource::new("bench.toml", text), &Overrides::default(), &registry)?;
    let network = models::build(model, spec, 0, device)?;
    Ok(Single::new(network, device.clone(), spec.num_classes, &plan))
}

/// Returns a batch of pseudo-random numbers.
pub fn batch(spec: &Spec, len: usize) -> Batch {
    let [height, width] = spec.image_size;
    let shape = ImageShape { channels: spec.in_channels, height, width };
    Batch {
        images: (0..len * shape.len()).map(|i| (i as f32 * 0.37).sin()).collect(),
        labels: (0..len).map(|i| (i % spec.num_classes) as i32).collect(),
        views: 1,
        multi_hot: Vec::new(),
        mix: None,
        ids: (0..len as u32).collect(),
        epoch: 0,
        index: 0,
        repetitions: Vec::new(),
        replaced: Vec::new(),
        global_len: len,
        global_weight: len as f64,
        params: Vec::new(),
        shape,
    }
}

/// Returns the JSON that a program of `peers/` prints.
pub fn peer<T: DeserializeOwned>(python: &str, script: &str, arguments: &[String]) -> Result<T, Box<dyn Error>> {
    let path = format!("{}/peers/{script}", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(python).arg("-B").arg(path).args(arguments).output()?;
    let text = String::from_utf8(output.stdout)?;
    Ok(serde_json::from_str(&text).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?)
}

/// Returns the median; NaN for no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
