//! Times the training step of any model, PyTorch's step, and the loader:
//! `cargo bench -p benches --bench step -- [--python PYTHON] [--batch N] [--steps N] [--rounds N] [--json FILE]
//! [--device cpu|cuda] [--precision f32|bf16|both] [--launches] [--kernels] all|MODEL…`.
//!
//! With `--device cuda` (feature `cuda`) the images are on the GPU and augmented there, as in training. The N steps of a round
//! are queued and waited for once, as in `peers/step.py`'s `best`; forward and backward are times of the host. The step is a CUDA
//! graph, as in training; `--launches` measures it launched kernel by kernel too, in the same rounds. The first step, which
//! compiles kernels, is reported separately. `--kernels` shows the GPU's time by kernel, and the bytes
//! that kernels read and write.
//! `benches/first_light.sh` runs this and PyTorch and prints one table.
//!
//! Random images of the size that each model expects. A round of a model is N steps of ours (forward, backward, SGD with
//! Nesterov momentum), the beginning of an epoch of the loader, and with `--python` (a Python that has torch) N steps of
//! `peers/step.py` in each variant. All rounds of a model are finished before the next model begins, so that only one
//! network is in memory. The table shows medians over the rounds, and how many times as fast as PyTorch's fastest variant ours
//! is: in f32 its fastest f32 variant, in bf16 its fastest of all. `--precision both` measures both in the same rounds.

#[path = "../shared/mod.rs"]
mod shared;

#[cfg(feature = "cuda")]
mod kernels;

use std::collections::BTreeMap;
use std::error::Error;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use data::augment::{Augment, Fill};
use data::loader::{Batch, Loader, LoaderConfig};
use data::{Dataset, ImageShape};
use serde::{Deserialize, Serialize};
use shared::median;
use trainer::device::{self, DeviceRequest, DeviceSet, LocalRank, SelectedDevice};
use trainer::strategy::{DeviceDataset, DeviceDatasets, StepOutcome, Strategy, single::Single};

struct Options {
    python: Option<String>,
    json: Option<String>,
    batch: usize,
    steps: usize,
    rounds: usize,
    gpu: bool,
    /// `f32`, `bf16` or both.
    precisions: Vec<String>,
    launches: bool,
    kernels: bool,
    models: Vec<String>,
}

/// Milliseconds.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
struct Times {
    forward: f64,
    backward: f64,
    /// Forward, backward and the optimizer.
    step: f64,
}

/// A line of the table.
#[derive(Debug, Serialize)]
struct Row {
    model: String,
    device: String,
    precision: String,
    batch: usize,
    ours: Times,
    /// Seconds of the first step.
    first_step_s: f64,
    /// Peak memory in bytes: what burn's allocator holds on a GPU, or the process's peak on the CPU.
    peak_bytes: Option<u64>,
    /// Variants of PyTorch by name.
    pytorch: BTreeMap<String, Times>,
    /// PyTorch's shortest step divided by ours.
    ratio: Option<f64>,
    /// Whether the step was launched kernel by kernel.
    launches: bool,
    /// Results of `--kernels`.
    #[cfg(feature = "cuda")]
    kernels: Option<kernels::Kernels>,
    /// Images per second of the loader divided by those of the step. On a GPU there are no pixels to load.
    loader: Option<f64>,
}

impl Row {
    fn show(&self) {
        let ratio = self.ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"));
        let peers: Vec<_> = self.pytorch.iter().map(|(name, times)| format!("{name} {:.1}", times.step)).collect();
        let Times { forward, backward, step } = self.ours;
        println!(
            "{:<17} {:<9} {forward:>9.1} {backward:>9.1} {step:>9.1} {:>9.1} {ratio:>7}  {}{}",
            self.model,
            self.precision,
            1000.0 * self.batch as f64 / step,
            peers.join(", "),
            if self.launches { "launched kernel by kernel" } else { "" }
        );
        #[cfg(feature = "cuda")]
        if let Some(kernels) = &self.kernels {
            kernels.show();
        }
    }
}

fn main() -> ExitCode {
    shared::exit_code(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let wish = if options.gpu { DeviceRequest::Gpus(1) } else { DeviceRequest::Cpu };
    let selected = DeviceSet::of(wish)?.select(&LocalRank::ALONE)?;
    let threads = selected.threads;
    println!(
        "batch {}, {}, medians of {} rounds of {} steps",
        options.batch, selected.description, options.rounds, options.steps
    );
    println!(
        "{:<17} {:<9} {:>9} {:>9} {:>9} {:>9} {:>7}  PyTorch's steps",
        "model", "precision", "forward", "backward", "step ms", "images/s", "ratio"
    );
    let mut rows = Vec::new();
    for name in &options.models {
        for row in measure(name, &options, &selected, threads)? {
            row.show();
            rows.push(row);
        }
    }
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}

/// Runs all rounds of one model. Returns a row for each precision.
fn measure(
    name: &str,
    options: &Options,
    selected: &SelectedDevice,
    threads: usize,
) -> Result<Vec<Row>, Box<dyn Error>> {
    let spec = models::find(name)?.spec;
    let [height, width] = spec.image_size;
    let shape = ImageShape { channels: spec.in_channels, height, width };
    let dataset = Arc::new(random(shape));
    let loader = loader(&dataset, options)?;
    let batches: Vec<Batch> = loader.epoch(1, 0).take(4).collect::<Result<_, _>>()?;
    let resident = || DeviceDataset::new(&dataset, loader.pipeline().clone(), &selected.device().inner());
    let mut sides = Vec::new();
    let graphs = [true, false].into_iter().take(1 + usize::from(options.launches));
    for (precision, graph) in
        options.precisions.iter().flat_map(|precision| graphs.clone().map(move |g| (precision, g)))
    {
        let mut strategy = shared::strategy(name, &spec, precision, graph, &selected.device())?;
        if options.gpu {
            strategy.set_device_datasets(DeviceDatasets { train: resident(), eval: resident() })?;
        }
        let first_step_s = steps(&mut strategy, &batches, 1, selected)?.step / 1000.0;
        // The next two steps allocate memory, and the fourth one is captured as a CUDA graph (in bf16 the fifth).
        steps(&mut strategy, &batches, if options.gpu { 4 } else { 0 }, selected)?;
        sides.push(Side { precision, graph, strategy, first_step_s, times: Vec::new() });
    }
    let mut loaded_rates = Vec::new();
    let mut peers: BTreeMap<String, Vec<Times>> = BTreeMap::new();
    for _ in 0..options.rounds {
        for side in &mut sides {
            side.times.push(steps(&mut side.strategy, &batches, options.steps, selected)?);
        }
        if !options.gpu {
            loaded_rates.push(loaded(&loader, options.batch));
        }
        if let Some(python) = &options.python {
            for (variant, times) in peer(python, name, options, if options.gpu { 0 } else { threads })? {
                peers.entry(variant).or_default().push(times);
            }
        }
    }
    let loaded_rate = median(loaded_rates);
    let pytorch: BTreeMap<String, Times> = peers.iter().map(|(name, times)| (name.clone(), medians(times))).collect();
    let mut rows = Vec::new();
    for side in sides {
        let bf16 = side.precision == "bf16";
        let held = device::reserved_bytes(&selected.device().inner()).or_else(device::peak_bytes);
        drop(side.strategy);
        #[cfg(feature = "cuda")]
        let kernels = match options.kernels && side.graph {
            true => {
                let mut strategy = shared::strategy(name, &spec, side.precision, false, &selected.device())?;
                strategy.set_device_datasets(DeviceDatasets { train: resident(), eval: resident() })?;
                Some(kernels::measure(&mut strategy, &resident(), &batches, options.steps, selected)?)
            }
            false => None,
        };
        let ours = medians(&side.times);
        let comparable = pytorch.iter().filter(|(variant, _)| bf16 || !variant.contains("bf16"));
        rows.push(Row {
            model: name.to_owned(),
            ratio: comparable.map(|(_, times)| times.step).reduce(f64::min).map(|best| best / ours.step),
            loader: (!options.gpu).then(|| loaded_rate * ours.step / (1000.0 * options.batch as f64)),
            device: selected.description.clone(),
            precision: side.precision.to_owned(),
            batch: options.batch,
            first_step_s: side.first_step_s,
            peak_bytes: held,
            launches: !side.graph,
            #[cfg(feature = "cuda")]
            kernels,
            ours,
            pytorch: pytorch.clone(),
        });
    }
    Ok(rows)
}

/// Training in one precision.
struct Side<'a> {
    precision: &'a str,
    graph: bool,
    strategy: Single,
    first_step_s: f64,
    times: Vec<Times>,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options {
        python: None,
        json: None,
        batch: 128,
        steps: 3,
        rounds: 5,
        gpu: false,
        precisions: vec!["f32".to_owned()],
        launches: false,
        kernels: false,
        models: Vec::new(),
    };
    // `cargo bench` adds `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--python" => options.python = Some(value()?),
            "--json" => options.json = Some(value()?),
            "--batch" => options.batch = value()?.parse()?,
            "--steps" => options.steps = value()?.parse()?,
            "--rounds" => options.rounds = value()?.parse()?,
            "--device" => {
                options.gpu = match value()?.as_str() {
                    "cpu" => false,
                    "cuda" => true,
                    other => return Err(format!("--device {other}: cpu or cuda").into()),
                }
            }
            "--precision" => {
                options.precisions = match value()?.as_str() {
                    "both" => vec!["f32".to_owned(), "bf16".to_owned()],
                    one => vec![one.to_owned()],
                }
            }
            "--launches" => options.launches = true,
            "--kernels" => options.kernels = true,
            "all" => options.models.extend(models::entries().iter().map(|entry| entry.name.to_owned())),
            _ => options.models.push(argument),
        }
    }
    if options.kernels && !options.gpu {
        return Err("--kernels needs a GPU; add --device cuda (feature `cuda`)".into());
    }
    if options.models.is_empty() {
        options.models = vec!["lenet".into(), "resnet18".into()];
    }
    Ok(options)
}

fn random(shape: ImageShape) -> Dataset {
    let images = 50_000;
    let pixels = (0..images * shape.len()).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    Dataset {
        name: "random".into(),
        images: pixels,
        encoded: None,
        label_sets: None,
        shared: None,
        labels: (0..images).map(|i| (i % 10) as u16).collect(),
        shape,
        classes: (0..10).map(|class| class.to_string()).collect(),
    }
}

fn loader(dataset: &Arc<Dataset>, options: &Options) -> Result<Loader, Box<dyn Error>> {
    let shape = dataset.shape;
    let config = LoaderConfig {
        global_batch: options.batch,
        pixels: !options.gpu,
        augment: vec![Augment::Crop { padding: 4, fill: Fill::Reflect }, Augment::Flip, Augment::Cutout { size: 12 }],
        mean: vec![0.5; shape.channels],
        std: vec![0.25; shape.channels],
        workers: 2,
        prefetch: 4,
        ..LoaderConfig::default()
    };
    Ok(Loader::new(Arc::clone(dataset), config)?)
}

/// Returns the times of a step that was begun at `start`, in milliseconds.
fn times_of(outcome: &StepOutcome, start: Instant) -> Times {
    let milliseconds = |seconds: f64| 1000.0 * seconds;
    Times {
        forward: milliseconds(outcome.seconds.forward),
        backward: milliseconds(outcome.seconds.backward),
        step: milliseconds(start.elapsed().as_secs_f64()),
    }
}

/// Takes `count` steps. Returns the medians, in milliseconds. On a GPU a step's time is the mean.
fn steps(
    strategy: &mut Single,
    batches: &[Batch],
    count: usize,
    selected: &SelectedDevice,
) -> Result<Times, Box<dyn Error>> {
    let mut times = Vec::new();
    let (begun, mut queued) = (Instant::now(), 0);
    for step in 0..count {
        let batch = batches[step % batches.len()].clone();
        let start = Instant::now();
        let outcome = match strategy.queue_step(vec![batch], 1e-3, None)? {
            Some(outcome) => Some(outcome),
            // As in training, the host waits for a step when the next ones are queued.
            None if queued >= strategy.max_queued() => strategy.finish_step()?,
            None => {
                queued += 1;
                None
            }
        };
        times.extend(outcome.map(|outcome| times_of(&outcome, start)));
    }
    let start = Instant::now();
    while let Some(outcome) = strategy.finish_step()? {
        times.push(times_of(&outcome, start));
    }
    let mut times = medians(&times);
    if selected.gpu.is_some() {
        // Steps are only queued. If the host waited for each of them, the GPU would be idle at the start of the next one.
        selected.device().sync().map_err(|error| format!("the GPU failed: {error:?}"))?;
        times.step = 1000.0 * begun.elapsed().as_secs_f64() / count as f64;
    }
    Ok(times)
}

/// Returns the images per second.
fn loaded(loader: &Loader, batch: usize) -> f64 {
    let start = Instant::now();
    let batches = (12_800 / batch).max(1);
    let images: usize =
        loader.epoch(1, 0).take(batches).map(|batch| black_box(batch).map_or(0, |batch| batch.len())).sum();
    images as f64 / start.elapsed().as_secs_f64()
}

fn peer(
    python: &str,
    model: &str,
    options: &Options,
    threads: usize,
) -> Result<BTreeMap<String, Times>, Box<dyn Error>> {
    let numbers = [options.batch, options.steps, threads].map(|number| number.to_string());
    shared::peer(python, "step.py", &[&[model.to_owned()], numbers.as_slice()].concat())
}

fn medians(times: &[Times]) -> Times {
    let of = |part: fn(&Times) -> f64| median(times.iter().map(part).collect());
    Times { forward: of(|t| t.forward), backward: of(|t| t.backward), step: of(|t| t.step) }
}
