//! Measures the peak memory of a training step and of PyTorch's, on the CPU (Linux):
//! `cargo bench -p benches --bench memory -- [--python PYTHON] [--batch N] [--steps N] [--json FILE] [--markdown] MODEL…`.
//!
//! Every measurement is a separate process. It builds the network, the optimizer and one batch, resets the recorded peak,
//! and takes N steps (forward, backward, SGD with Nesterov momentum). PyTorch's are `peers/memory.py`, one process for each
//! memory format. The table shows the process's peak (`VmHWM`) and in brackets its excess over the memory that was resident
//! before the first step. The peak includes the program, its libraries and the parameters; the excess is what steps add:
//! activations, gradients, momentum, scratch space.

mod shared;

use std::collections::BTreeMap;
use std::error::Error;
use std::process::{Command, ExitCode};

use serde::{Deserialize, Serialize};
use trainer::device::{DeviceRequest, DeviceSet, LocalRank};
use trainer::strategy::Strategy;

/// The argument that turns this program into a measured process.
const CHILD: &str = "--measured-process";
/// PyTorch's memory formats.
const VARIANTS: [&str; 2] = ["nchw", "channels_last"];

struct Options {
    python: Option<String>,
    json: Option<String>,
    markdown: bool,
    batch: usize,
    steps: usize,
    models: Vec<String>,
}

/// Resident memory in bytes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Memory {
    before: u64,
    peak: u64,
}

impl Memory {
    fn growth(self) -> u64 {
        self.peak.saturating_sub(self.before)
    }

    fn cell(self) -> String {
        format!("{:.0} (+{:.0})", self.peak as f64 / 1e6, self.growth() as f64 / 1e6)
    }
}

#[derive(Debug, Serialize)]
struct Row {
    model: String,
    batch: usize,
    ours: Memory,
    pytorch: BTreeMap<String, Memory>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let done = match arguments.as_slice() {
        [child, model, batch, steps] if child == CHILD => measure(model, batch, steps),
        _ => run(arguments),
    };
    shared::exit_code(done)
}

fn run(arguments: Vec<String>) -> Result<(), Box<dyn Error>> {
    let options = options(arguments)?;
    let threads = DeviceSet::of(DeviceRequest::Cpu)?.select(&LocalRank::ALONE)?.threads;
    println!(
        "batch {}, {threads} threads, {} steps; MB at the peak (MB more than before the first step)",
        options.batch, options.steps
    );
    let header = ["model", "ours", "PyTorch NCHW", "PyTorch channels_last", "ours/PyTorch peak", "growth"];
    print_row(&options, header.map(String::from));
    if options.markdown {
        println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    }
    let mut rows = Vec::new();
    for model in &options.models {
        let row = both(model, &options, threads)?;
        let cell = |variant: &str| row.pytorch.get(variant).map_or("-".into(), |memory| memory.cell());
        let ratio = |of: fn(Memory) -> u64| {
            let least = row.pytorch.values().map(|memory| of(*memory)).min();
            least.map_or("-".into(), |least| format!("{:.2}", of(row.ours) as f64 / least as f64))
        };
        let cells = [
            model.clone(),
            row.ours.cell(),
            cell(VARIANTS[0]),
            cell(VARIANTS[1]),
            ratio(|memory| memory.peak),
            ratio(Memory::growth),
        ];
        print_row(&options, cells);
        rows.push(row);
    }
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}

fn print_row(options: &Options, cells: [String; 6]) {
    let [model, ours, nchw, last, peak, growth] = cells;
    match options.markdown {
        true => println!("| {model} | {ours} | {nchw} | {last} | {peak} | {growth} |"),
        false => println!("{model:<17} {ours:>16} {nchw:>16} {last:>22} {peak:>18} {growth:>7}"),
    }
}

fn options(arguments: Vec<String>) -> Result<Options, Box<dyn Error>> {
    let mut options = Options { python: None, json: None, markdown: false, batch: 128, steps: 3, models: Vec::new() };
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--python" => options.python = Some(value()?),
            "--json" => options.json = Some(value()?),
            "--markdown" => options.markdown = true,
            "--batch" => options.batch = value()?.parse()?,
            "--steps" => options.steps = value()?.parse()?,
            "all" => options.models.extend(models::entries().iter().map(|entry| entry.name.to_owned())),
            _ => options.models.push(argument),
        }
    }
    if options.models.is_empty() {
        let table = ["lenet", "vgg16", "resnet18", "regnetx_200mf", "mobilenetv2", "densenet121"];
        options.models = table.map(String::from).into();
    }
    Ok(options)
}

/// Runs one process of ours and one for each variant of PyTorch.
fn both(model: &str, options: &Options, threads: usize) -> Result<Row, Box<dyn Error>> {
    let numbers = [options.batch, options.steps].map(|number| number.to_string());
    let output = Command::new(std::env::current_exe()?).arg(CHILD).arg(model).args(&numbers).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let ours = serde_json::from_str(&text).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let mut pytorch = BTreeMap::new();
    if let Some(python) = &options.python {
        for variant in VARIANTS {
            let [batch, steps] = numbers.clone();
            let arguments = [model.to_owned(), batch, steps, threads.to_string(), variant.to_owned()];
            pytorch.insert(variant.to_owned(), shared::peer(python, "memory.py", &arguments)?);
        }
    }
    Ok(Row { model: model.to_owned(), batch: options.batch, ours, pytorch })
}

/// Runs as the measured process.
fn measure(model: &str, batch: &str, steps: &str) -> Result<(), Box<dyn Error>> {
    let spec = models::find(model)?.spec;
    let selected = DeviceSet::of(DeviceRequest::Cpu)?.select(&LocalRank::ALONE)?;
    let batch = shared::batch(&spec, batch.parse()?);
    let mut strategy = shared::strategy(model, &spec, "f32", &selected.device)?;
    // The peak so far is that of building.
    std::fs::write("/proc/self/clear_refs", "5")?;
    let before = resident("VmRSS")?;
    for _ in 0..steps.parse()? {
        strategy.train_step(vec![batch.clone()], 1e-3, None)?;
    }
    println!("{}", serde_json::to_string(&Memory { before, peak: resident("VmHWM")? })?);
    Ok(())
}

fn resident(key: &str) -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()).ok_or("/proc/self/status has no such line")?;
    Ok(1024 * kilobytes.parse::<u64>()?)
}
