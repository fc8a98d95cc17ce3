//! Times the optimizer's step, clipping and the weight average, with our kernels, burn's operations and PyTorch:
//! `cargo bench -p benches --bench optimizer -- [--python PYTHON] [--steps N] [--rounds N] [--markdown] MODEL…`.
//!
//! The timed part is everything between gradients and new weights, on the CPU. Ours: `trainer::optim`, whose passes are
//! `ops::{update, ema_update, square_sum}` and, for Muon, `ops::orthogonalize`. burn's: the same formulas as chains of tensor
//! operations, one parameter after the other; Muon is not among them. PyTorch's, with `--python` (a Python that has torch): its
//! loop over parameters, `foreach` and `fused` (`peers/optimizer.py`), and Muon as it is, in bf16, and in f32. The sides take
//! turns in each round; the table has medians over rounds of medians over steps. GB/s counts the f32 numbers per parameter that
//! one pass must read and write: five for SGD, seven for AdamW and Muon, three for the average, one for the norm.

mod shared;

use std::collections::BTreeMap;
use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use burn::tensor::{Device, Tensor};
use models::{Network, state};
use shared::{median, peer};
use trainer::config::{OptimizerConfig, OptimizerKind};
use trainer::optim::{Ema, FlatGradients, Optimizer, clip_grad_norm};

const LR: f64 = 1e-3;
const DECAY: f64 = 5e-4;
const EMA: f64 = 0.999;

struct Options {
    python: Option<String>,
    steps: usize,
    rounds: usize,
    markdown: bool,
    models: Vec<String>,
}

/// Part, side, and the step to time.
type Side = (&'static str, &'static str, Box<dyn FnMut()>);

/// Milliseconds by part ("sgd", "adamw", "muon", "clip", "ema") and side.
type PeerTimes = BTreeMap<String, BTreeMap<String, f64>>;

/// The milliseconds of each round.
type Times = BTreeMap<String, BTreeMap<String, Vec<f64>>>;

fn main() -> ExitCode {
    shared::exit_code(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let mark = if options.markdown { "| " } else { "" };
    println!(
        "{mark}model, part: milliseconds, GB/s of ours, how many times as fast as burn's chain and PyTorch's best"
    );
    for model in &options.models {
        measure(model, &options)?;
    }
    Ok(())
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options = Options { python: None, steps: 20, rounds: 5, markdown: false, models: Vec::new() };
    // `cargo bench` adds `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--python" => options.python = Some(value()?),
            "--steps" => options.steps = value()?.parse()?,
            "--rounds" => options.rounds = value()?.parse()?,
            "--markdown" => options.markdown = true,
            _ => options.models.push(argument),
        }
    }
    if options.models.is_empty() {
        options.models = ["lenet", "densenet121", "resnet18"].map(String::from).into();
    }
    Ok(options)
}

fn measure(model: &str, options: &Options) -> Result<(), Box<dyn Error>> {
    let spec = models::find(model)?.spec;
    let network = || models::build(model, &spec, 0, &Device::flex().autodiff());
    let gradients: Vec<Tensor<1>> = state::parameters(&network()?).iter().map(|info| gradient(info.len())).collect();
    let elements: usize = gradients.iter().map(|g| g.dims()[0]).sum();
    let mut sides: Vec<Side> = Vec::new();
    for (part, kind) in [("sgd", OptimizerKind::Sgd), ("adamw", OptimizerKind::AdamW), ("muon", OptimizerKind::Muon)] {
        let config =
            OptimizerConfig { kind, nesterov: true, lr: LR, weight_decay: DECAY, ..OptimizerConfig::default() };
        let (mut held, mut optimizer, own) = (Some(network()?), Optimizer::new(&config), gradients.clone());
        let ours = move || held = held.take().map(|network| optimizer.step(network, flat(&own), LR));
        sides.push((part, "ours", Box::new(ours)));
        if kind == OptimizerKind::Muon {
            continue;
        }
        let (mut held, mut slots, own, mut count) =
            (Some(network()?), vec![[None, None]; gradients.len()], gradients.clone(), 0);
        let burn = move || {
            count += 1;
            held = held.take().map(|network| chain(network, &own, &mut slots, &config, count));
        };
        sides.push((part, "burn", Box::new(burn)));
    }
    let own = gradients.clone();
    sides.push(("clip", "ours", Box::new(move || _ = clip_grad_norm(&mut flat(&own), 1e9))));
    let own = gradients.clone();
    sides.push(("clip", "burn", Box::new(move || clip_chain(&own))));
    let (network, mut burn_average) = (network()?, Vec::new());
    state::visit(&network, |_, _, value| burn_average.push(value));
    let mut average = Ema::new(&network, EMA);
    let followed = network.clone();
    sides.push(("ema", "ours", Box::new(move || average.update(&followed))));
    sides.push(("ema", "burn", Box::new(move || ema_chain(&network, &mut burn_average))));

    let mut times = Times::new();
    for _ in 0..options.rounds {
        for (part, side, step) in &mut sides {
            times
                .entry((*part).into())
                .or_default()
                .entry((*side).into())
                .or_default()
                .push(median_ms(options.steps, step));
        }
        if let Some(python) = &options.python {
            let numbers = [options.steps, rayon::current_num_threads()].map(|number| number.to_string());
            let arguments = [&[model.to_owned()], numbers.as_slice()].concat();
            for (part, variants) in peer::<PeerTimes>(python, "optimizer.py", &arguments)? {
                for (variant, time) in variants {
                    times.entry(part.clone()).or_default().entry(format!("PyTorch {variant}")).or_default().push(time);
                }
            }
        }
    }
    for (part, sides) in times {
        report(model, &part, elements, sides, options.markdown);
    }
    Ok(())
}

fn report(model: &str, part: &str, elements: usize, sides: BTreeMap<String, Vec<f64>>, markdown: bool) {
    let touched = match part {
        "sgd" => 5,
        // Muon's products read more than this.
        "adamw" | "muon" => 7,
        "ema" => 3,
        // PyTorch reads and writes gradients once more to scale them. Ours are scaled in the optimizer's pass.
        _ => 1,
    };
    let medians: BTreeMap<String, f64> = sides.into_iter().map(|(side, times)| (side, median(times))).collect();
    let ours = medians["ours"];
    let best = medians.iter().filter(|(side, _)| side.starts_with("PyTorch")).map(|(_, &time)| time).reduce(f64::min);
    let rate = (elements * touched * size_of::<f32>()) as f64 / ours / 1e6;
    let all: Vec<String> = medians.iter().map(|(side, time)| format!("{side} {time:.3}")).collect();
    let ratio = |other: Option<f64>| other.map_or("-".into(), |other| format!("{:.2}", other / ours));
    let burn = ratio(medians.get("burn").copied());
    let cells = [model.to_owned(), part.into(), all.join(", "), format!("{rate:.1}"), burn, ratio(best)];
    match markdown {
        true => println!("| {} |", cells.join(" | ")),
        false => println!(
            "{:<14} {:<6} {}; {} GB/s, burn {}x, PyTorch {}x",
            cells[0], cells[1], cells[2], cells[3], cells[4], cells[5]
        ),
    }
}

fn gradient(len: usize) -> Tensor<1> {
    let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin() * 1e-3).collect();
    Tensor::from_floats(values.as_slice(), &Device::flex())
}

fn flat(gradients: &[Tensor<1>]) -> FlatGradients {
    FlatGradients::from_tensors(gradients.iter().cloned().map(Some).collect())
}

/// The optimizer's step with burn's operations.
fn chain(
    network: Network,
    gradients: &[Tensor<1>],
    slots: &mut [[Option<Tensor<1>>; 2]],
    config: &OptimizerConfig,
    step: i32,
) -> Network {
    let mut index = 0;
    let OptimizerConfig { kind, momentum, betas: [beta1, beta2], eps, .. } = *config;
    state::map_parameters(network, |_, value| {
        let (gradient, slots) = (gradients[index].clone(), &mut slots[index]);
        index += 1;
        match kind {
            OptimizerKind::Sgd => {
                let direction = gradient + value.clone().mul_scalar(DECAY);
                let buffer = match slots[0].take() {
                    Some(buffer) => buffer.mul_scalar(momentum) + direction.clone(),
                    None => direction.clone(),
                };
                slots[0] = Some(buffer.clone());
                value - (direction + buffer.mul_scalar(momentum)).mul_scalar(LR)
            }
            OptimizerKind::AdamW | OptimizerKind::Muon => {
                let square = (gradient.clone() * gradient.clone()).mul_scalar(1.0 - beta2);
                let gradient = gradient.mul_scalar(1.0 - beta1);
                let [first, second] = slots;
                let mean = match first.take() {
                    Some(mean) => mean.mul_scalar(beta1) + gradient,
                    None => gradient,
                };
                let variance = match second.take() {
                    Some(variance) => variance.mul_scalar(beta2) + square,
                    None => square,
                };
                (*first, *second) = (Some(mean.clone()), Some(variance.clone()));
                let (correction1, correction2) = (1.0 - beta1.powi(step), 1.0 - beta2.powi(step));
                let denominator = variance.sqrt().div_scalar(correction2.sqrt()).add_scalar(eps);
                value.mul_scalar(1.0 - LR * DECAY) - (mean / denominator).mul_scalar(LR / correction1)
            }
        }
    })
}

fn clip_chain(gradients: &[Tensor<1>]) {
    let sums = gradients.iter().map(|g| (g.clone() * g.clone()).sum()).collect();
    let norm = Tensor::cat(sums, 0).sum().sqrt();
    let factor = norm.add_scalar(1e-6).recip().mul_scalar(1e9).clamp_max(1.0);
    let scaled: Vec<Tensor<1>> = gradients.iter().map(|g| g.clone() * factor.clone()).collect();
    std::hint::black_box(scaled);
}

fn ema_chain(network: &Network, average: &mut [Tensor<1>]) {
    let mut index = 0;
    state::visit(network, |_, _, value| {
        average[index] = average[index].clone().mul_scalar(EMA) + value.mul_scalar(1.0 - EMA);
        index += 1;
    });
}

/// Returns the median of `steps` steps after one that is not counted.
fn median_ms(steps: usize, step: &mut dyn FnMut()) -> f64 {
    step();
    let time = |_| {
        let start = Instant::now();
        step();
        1000.0 * start.elapsed().as_secs_f64()
    };
    median((0..steps).map(time).collect())
}
