//! The training step beside the loader that feeds it and beside PyTorch's step:
//! `cargo bench -p benches --bench step -- [--python PYTHON] [--steps N] [--rounds N] [MODEL…]`.
//!
//! CIFAR-shaped random images, batch 128. One round times, for each model in turn, N steps of ours (forward, backward,
//! SGD with Nesterov momentum), an epoch's beginning of the loader, and with `--python` (a Python that has torch) N steps
//! of `peers/step.py`; the rounds are interleaved and the table shows medians and ratios.

use std::error::Error;
use std::hint::black_box;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use data::augment::{Augment, Fill};
use data::loader::{Batch, Loader, LoaderConfig};
use data::{Dataset, ImageShape};
use models::Spec;
use trainer::config::{self, DatasetFacts, Overrides, Registry, Source};
use trainer::device;
use trainer::strategy::{Strategy, single::Single};

const BATCH: usize = 128;
const SHAPE: ImageShape = ImageShape { channels: 3, height: 32, width: 32 };

struct Options {
    python: Option<String>,
    steps: usize,
    rounds: usize,
    models: Vec<String>,
}

/// Images a second of every round.
#[derive(Default)]
struct Rates {
    ours: Vec<f64>,
    loader: Vec<f64>,
    nchw: Vec<f64>,
    channels_last: Vec<f64>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let loader = loader()?;
    let batches: Vec<Batch> = loader.epoch(1, 0).take(4).collect();
    let threads = device::select().threads;
    let mut subjects = Vec::new();
    for name in &options.models {
        let mut strategy = strategy(name)?;
        steps(&mut strategy, &batches, 1)?;
        subjects.push((name, strategy, Rates::default()));
    }
    for _ in 0..options.rounds {
        for (name, strategy, rates) in &mut subjects {
            rates.ours.push(steps(strategy, &batches, options.steps)?);
            rates.loader.push(loaded(&loader));
            if let Some(python) = &options.python {
                let (nchw, channels_last) = peer(python, name, options.steps, threads)?;
                rates.nchw.push(nchw);
                rates.channels_last.push(channels_last);
            }
        }
    }
    println!("images/s, batch {BATCH}, {threads} threads, medians of {} rounds", options.rounds);
    println!(
        "{:<10} {:>10} {:>12} {:>11} {:>13} {:>14} {:>13}",
        "model", "step", "loader", "loader/step", "PyTorch NCHW", "channels_last", "ours/PyTorch"
    );
    for (name, _, rates) in subjects {
        let (ours, loader) = (median(rates.ours), median(rates.loader));
        let (nchw, channels_last) = (median(rates.nchw), median(rates.channels_last));
        println!(
            "{name:<10} {ours:>10.1} {loader:>12.0} {:>11.1} {nchw:>13.1} {channels_last:>14.1} {:>13.2}",
            loader / ours,
            ours / nchw.max(channels_last)
        );
    }
    Ok(())
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options { python: None, steps: 3, rounds: 5, models: Vec::new() };
    // `cargo bench` itself adds `--bench`
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--python" => options.python = Some(value()?),
            "--steps" => options.steps = value()?.parse()?,
            "--rounds" => options.rounds = value()?.parse()?,
            _ => options.models.push(argument),
        }
    }
    if options.models.is_empty() {
        options.models = vec!["lenet".into(), "resnet18".into()];
    }
    Ok(options)
}

fn strategy(model: &str) -> Result<Single, Box<dyn Error>> {
    let facts = DatasetFacts {
        channels: SHAPE.channels,
        height: SHAPE.height,
        width: SHAPE.width,
        classes: 10,
        mean: vec![0.5; 3],
        std: vec![0.25; 3],
    };
    let datasets = |_: &str| Some(facts.clone());
    let registry = Registry { models: &[model], dataset_names: &["cifar10"], datasets: &datasets, gpu: false };
    let text = format!("[model]\nname = \"{model}\"\n[data]\nname = \"cifar10\"\n[optimizer]\nnesterov = true\n");
    let plan = config::resolve(&Source::new("step.toml", text), &Overrides::default(), &registry)?;
    let device = device::select().device;
    let spec = Spec { num_classes: 10, in_channels: SHAPE.channels, image_size: [SHAPE.height, SHAPE.width] };
    let network = models::build(model, &spec, 0, &device)?;
    Ok(Single::new(network, device, 10, &plan))
}

fn loader() -> Result<Loader, Box<dyn Error>> {
    let images = 50_000;
    let pixels = (0..images * SHAPE.len()).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let dataset = Dataset {
        name: "random".into(),
        images: pixels,
        labels: (0..images).map(|i| (i % 10) as u16).collect(),
        shape: SHAPE,
        classes: (0..10).map(|class| class.to_string()).collect(),
    };
    let config = LoaderConfig {
        global_batch: BATCH,
        augment: vec![Augment::Crop { padding: 4, fill: Fill::Reflect }, Augment::Flip, Augment::Cutout { size: 12 }],
        mean: vec![0.5; 3],
        std: vec![0.25; 3],
        workers: 2,
        prefetch: 4,
        ..LoaderConfig::default()
    };
    Ok(Loader::new(Arc::new(dataset), config)?)
}

fn steps(strategy: &mut Single, batches: &[Batch], count: usize) -> Result<f64, Box<dyn Error>> {
    let mut times = Vec::new();
    for step in 0..count {
        let batch = batches[step % batches.len()].clone();
        let start = Instant::now();
        black_box(strategy.train_step(vec![batch], 1e-3, None)?);
        times.push(BATCH as f64 / start.elapsed().as_secs_f64());
    }
    Ok(median(times))
}

fn loaded(loader: &Loader) -> f64 {
    let start = Instant::now();
    let images: usize = loader.epoch(1, 0).take(100).map(|batch| black_box(batch).len()).sum();
    images as f64 / start.elapsed().as_secs_f64()
}

fn peer(python: &str, model: &str, steps: usize, threads: usize) -> Result<(f64, f64), Box<dyn Error>> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/step.py");
    let numbers = [BATCH, steps, threads].map(|number| number.to_string());
    let output = Command::new(python).arg(script).arg(model).args(numbers).output()?;
    let text = String::from_utf8(output.stdout)?;
    let result: serde_json::Value =
        serde_json::from_str(&text).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let rate = |layout: &str| result[layout].as_f64().ok_or_else(|| format!("no {layout} in {text}"));
    Ok((rate("nchw")?, rate("channels_last")?))
}

/// NaN of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
