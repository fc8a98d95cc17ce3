//! Times each layer of ResNet-18, forward and backward, with our kernels and PyTorch:
//! `cargo bench -p benches --bench layers -- [--python PYTHON] [--batch N] [--steps N] [--rounds N] [--markdown]`.
//!
//! Images of 3x32x32, in f32 and bf16, on the CPU. Each distinct layer is timed alone, with inputs as in the middle of a network
//! (channels-last for ours and PyTorch's channels_last). Convolutions and the linear layer are timed in three parts:
//! forward, gradient of the data, gradient of the weight. Batch norm (with the following sum and ReLU) and pooling are timed
//! in two parts. Ours are the kernels of the crate `ops`, without autodiff; PyTorch (`peers/layers.py`) includes its autograd.
//! A round runs each side once; the table has medians of the rounds' medians. The last lines are sums over the network, each
//! layer as often as it occurs.
//!
//! `peak` is the rate of a convolution, counted as direct convolution with two operations per multiply-add, as a share of
//! the cores' peak rate. The peak rate is that of a loop of multiply-adds in registers of the widest vector unit, on all
//! threads; it is measured in every round, and the best counts. With AVX512-BF16, twice this rate counts in bf16. A
//! Winograd convolution needs fewer operations and may exceed 100 %.
//!
//! In bf16, activations and their gradients are bf16 and weights are f32, as in training. PyTorch's is autocast with
//! channels_last, whose weights are cast in the forward pass.

#[path = "../shared/mod.rs"]
mod shared;

mod peak;
mod resnet18;
mod sides;

use std::collections::BTreeMap;
use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use burn::tensor::{Device, FloatDType};
use resnet18::Layer;
use shared::median;

/// All implementations, in the order of the table.
const IMPLEMENTATIONS: [&str; 5] = ["ours", "ours_bf16", "nchw", "channels_last", "channels_last_bf16"];
/// PyTorch's implementations; the last one is bf16.
const PYTORCH: [&str; 3] = ["nchw", "channels_last", "channels_last_bf16"];

struct Options {
    python: Option<String>,
    batch: usize,
    steps: usize,
    rounds: usize,
    markdown: bool,
}

/// The peak rates of all threads in FLOP/s.
struct Peak {
    f32: f64,
    /// With AVX512-BF16.
    bf16: Option<f64>,
}

/// Milliseconds of each round by layer, part and side.
type Times = BTreeMap<(usize, &'static str, &'static str), Vec<f64>>;

fn main() -> ExitCode {
    shared::exit_code(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let layers = resnet18::layers();
    let macs: usize = layers.iter().map(|layer| layer.count * layer.kind.macs()).sum();
    let spec = models::find("resnet18")?.spec;
    let network = models::build("resnet18", &spec, 0, &Device::flex())?;
    let expected = models::cost(&network, &spec).macs;
    if macs as u64 != expected {
        return Err(format!("these layers take {macs} multiply-adds, ResNet-18 {expected}").into());
    }

    let (mut times, mut peak) = (Times::new(), 0.0f64);
    for round in 0..options.rounds {
        peak = peak.max(peak::flop_rate());
        for (index, layer) in layers.iter().enumerate() {
            for (side, dtype) in [("ours", FloatDType::F32), ("ours_bf16", FloatDType::BF16)] {
                for (part, time) in turn(sides::ours(layer.kind, options.batch, dtype), options.steps) {
                    times.entry((index, part, side)).or_default().push(time);
                }
            }
        }
        if let Some(python) = &options.python {
            for variant in PYTORCH {
                pytorch(python, variant, &layers, &options, &mut times)?;
            }
        }
        eprintln!("round {} of {}", round + 1, options.rounds);
    }
    let peak = Peak { f32: peak, bf16: peak::bf16_factor().map(|factor| factor * peak) };
    print(&layers, &times, &peak, &options);
    Ok(())
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options { python: None, batch: 128, steps: 3, rounds: 3, markdown: false };
    // `cargo bench` adds `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--python" => options.python = Some(value()?),
            "--batch" => options.batch = value()?.parse()?,
            "--steps" => options.steps = value()?.parse()?,
            "--rounds" => options.rounds = value()?.parse()?,
            "--markdown" => options.markdown = true,
            other => return Err(format!("unknown option {other}").into()),
        }
    }
    Ok(options)
}

/// Returns the milliseconds of each part: the median of `steps` steps after one that is not counted.
fn turn(mut parts: Vec<sides::Part>, steps: usize) -> Vec<(&'static str, f64)> {
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); parts.len()];
    for step in 0..=steps {
        for ((_, work), times) in parts.iter_mut().zip(&mut times) {
            let start = Instant::now();
            let results = work();
            let time = 1000.0 * start.elapsed().as_secs_f64();
            drop(results);
            if step > 0 {
                times.push(time);
            }
        }
    }
    parts.iter().zip(times).map(|((part, _), times)| (*part, median(times))).collect()
}

fn pytorch(
    python: &str,
    variant: &'static str,
    layers: &[Layer],
    options: &Options,
    times: &mut Times,
) -> Result<(), Box<dyn Error>> {
    let kinds: Vec<_> = layers.iter().map(|layer| layer.kind).collect();
    let numbers = [options.batch, options.steps, rayon::current_num_threads()].map(|number| number.to_string());
    let arguments = [&[variant.to_owned()], numbers.as_slice(), &[serde_json::to_string(&kinds)?]].concat();
    let found: Vec<BTreeMap<String, f64>> = shared::peer(python, "layers.py", &arguments)?;
    for (index, parts) in found.iter().enumerate() {
        for part in ["forward", "data", "weight"] {
            if let Some(&time) = parts.get(part) {
                times.entry((index, part, variant)).or_default().push(time);
            }
        }
    }
    Ok(())
}

fn print(layers: &[Layer], times: &Times, peak: &Peak, options: &Options) {
    let threads = rayon::current_num_threads();
    println!(
        "ResNet-18, batch {}, {threads} threads, medians of {} rounds of {} steps, milliseconds; peak {:.0} GFLOP/s, in bf16 {}",
        options.batch,
        options.rounds,
        options.steps,
        peak.f32 / 1e9,
        peak.bf16.map_or("not measured".into(), |peak| format!("{:.0}", peak / 1e9))
    );
    let header = [
        "layer",
        "times",
        "part",
        "ours",
        "bf16",
        "PyTorch NCHW",
        "channels_last",
        "PyTorch bf16",
        "PyTorch/ours",
        "best/bf16",
        "peak",
        "bf16 peak",
    ];
    row(header.map(String::from), options.markdown);
    if options.markdown {
        println!("| --- | ---: | --- |{}", " ---: |".repeat(9));
    }
    let mut sums: BTreeMap<&str, BTreeMap<&str, f64>> = BTreeMap::new();
    let mut flop: BTreeMap<&str, f64> = BTreeMap::new();
    for (index, layer) in layers.iter().enumerate() {
        for part in ["forward", "data", "weight"] {
            let found: BTreeMap<&str, f64> = IMPLEMENTATIONS
                .into_iter()
                .filter_map(|side| Some((side, median(times.get(&(index, part, side))?.clone()))))
                .collect();
            if found.is_empty() || (part == "data" && !layer.data) {
                continue;
            }
            let work = (2 * layer.kind.macs() * options.batch) as f64;
            let total = if part == "forward" { "forward" } else { "backward" };
            for (side, time) in &found {
                *sums.entry(total).or_default().entry(side).or_default() += layer.count as f64 * time;
            }
            *flop.entry(total).or_default() += layer.count as f64 * work;
            let part = if part == "data" && layer.kind.macs() == 0 { "backward" } else { part };
            line([&layer.kind.name(), &layer.count.to_string(), part], &found, work, peak, options.markdown);
        }
    }
    for total in ["forward", "backward"] {
        line(["all layers", "", total], &sums[total], flop[total], peak, options.markdown);
    }
}

/// Prints a line of the table; `work` counts floating-point operations.
fn line(names: [&str; 3], times: &BTreeMap<&str, f64>, work: f64, peak: &Peak, markdown: bool) {
    let number = |side: &str| times.get(side).map_or("-".into(), |time| format!("{time:.2}"));
    let [ours, bf16] = ["ours", "ours_bf16"].map(|side| times.get(side).copied().unwrap_or(f64::NAN));
    let best = |sides: &[&str]| sides.iter().filter_map(|side| times.get(side)).copied().reduce(f64::min);
    let ratio = |time: Option<f64>, ours: f64| time.map_or("-".into(), |time| format!("{:.2}", time / ours));
    let share = |ours: f64, peak: Option<f64>| match peak {
        Some(peak) if work > 0.0 => format!("{:.0} %", 100.0 * work / (ours / 1000.0) / peak),
        _ => "-".into(),
    };
    let [name, count, part] = names.map(String::from);
    let [own, own_bf16, nchw, last, last_bf16] = IMPLEMENTATIONS.map(number);
    let (to_f32, to_best) = (ratio(best(&PYTORCH[..2]), ours), ratio(best(&PYTORCH), bf16));
    let (of_f32, of_bf16) = (share(ours, Some(peak.f32)), share(bf16, peak.bf16));
    let cells = [name, count, part, own, own_bf16, nchw, last, last_bf16, to_f32, to_best, of_f32, of_bf16];
    row(cells, markdown);
}

fn row(cells: [String; 12], markdown: bool) {
    if markdown {
        println!("| {} |", cells.join(" | "));
    } else {
        let [name, count, part, rest @ ..] = cells;
        let rest: String = rest.iter().map(|cell| format!(" {cell:>13}")).collect();
        println!("{name:<30} {count:>5} {part:<8}{rest}");
    }
}
