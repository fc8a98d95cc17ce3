//! Measures the peak memory of a training step and of PyTorch's, on the CPU (Linux):
//! `cargo bench -p benches --bench memory -- [--python PYTHON] [--batch N] [--steps N] [--json FILE] [--markdown] MODEL…`.
//!
//! Every measurement is a separate process. It builds the network, the optimizer and one batch, resets the recorded peak,
//! and takes N steps (forward, backward, SGD with Nesterov momentum), in f32 and in bf16. PyTorch's are `peers/memory.py`: f32
//! in both memory formats, and autocast to bf16 with channels_last. The ratios compare f32 with PyTorch's smaller f32, and
//! bf16 with our f32 and with PyTorch's bf16. The table shows the process's peak (`VmHWM`) and in brackets its excess over
//! the memory that was resident before the first step. The peak includes the program, its libraries and the parameters; the
//! excess is what steps add: activations, gradients, momentum, scratch space.

mod shared;

use std::collections::BTreeMap;
use std::error::Error;
use std::process::{Command, ExitCode};

use serde::{Deserialize, Serialize};
use trainer::device::{DeviceRequest, DeviceSet, LocalRank};
use trainer::strategy::Strategy;

/// The argument that turns this program into a measured process.
const CHILD: &str = "--measured-process";
const PRECISIONS: [&str; 2] = ["f32", "bf16"];
/// PyTorch's variants; the last one is autocast to bf16.
const VARIANTS: [&str; 3] = ["nchw", "channels_last", "channels_last_bf16"];

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
    /// By precision.
    ours: BTreeMap<String, Memory>,
    /// By variant.
    pytorch: BTreeMap<String, Memory>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let done = match arguments.as_slice() {
        [child, model, precision, batch, steps] if child == CHILD => measure(model, precision, batch, steps),
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
    let header = [
        "model",
        "f32",
        "bf16",
        "PyTorch NCHW",
        "channels_last",
        "bf16",
        "f32/PyTorch",
        "bf16/f32",
        "bf16/PyTorch bf16",
    ];
    print_row(&options, &header.map(String::from));
    if options.markdown {
        println!("| --- |{}", " ---: |".repeat(header.len() - 1));
    }
    let mut rows = Vec::new();
    for model in &options.models {
        let row = both(model, &options, threads)?;
        let peaks = |of: &BTreeMap<String, Memory>, names: &[&str]| {
            names.iter().filter_map(|name| of.get(*name)).map(|memory| memory.peak).min()
        };
        let ratio = |part: Option<u64>, whole: Option<u64>| match (part, whole) {
            (Some(part), Some(whole)) => format!("{:.2}", part as f64 / whole as f64),
            _ => "-".to_owned(),
        };
        let [f32s, bf16s] = PRECISIONS.map(|precision| peaks(&row.ours, &[precision]));
        let mut cells = vec![model.clone()];
        cells.extend(PRECISIONS.iter().map(|precision| cell(&row.ours, precision)));
        cells.extend(VARIANTS.iter().map(|variant| cell(&row.pytorch, variant)));
        cells.push(ratio(f32s, peaks(&row.pytorch, &VARIANTS[..2])));
        cells.push(ratio(bf16s, f32s));
        cells.push(ratio(bf16s, peaks(&row.pytorch, &VARIANTS[2..])));
        print_row(&options, &cells);
        rows.push(row);
    }
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}

fn cell(of: &BTreeMap<String, Memory>, name: &str) -> String {
    of.get(name).map_or("-".into(), |memory| memory.cell())
}

fn print_row(options: &Options, cells: &[String]) {
    match options.markdown {
        true => println!("| {} |", cells.join(" | ")),
        false => println!("{}", cells.iter().map(|cell| format!("{cell:>17}")).collect::<Vec<_>>().join(" ")),
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

/// Runs one process of ours for each precision, and one for each variant of PyTorch.
fn both(model: &str, options: &Options, threads: usize) -> Result<Row, Box<dyn Error>> {
    let numbers = [options.batch, options.steps].map(|number| number.to_string());
    let mut ours = BTreeMap::new();
    for precision in PRECISIONS {
        let output = Command::new(std::env::current_exe()?).args([CHILD, model, precision]).args(&numbers).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let memory = serde_json::from_str(&text).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?;
        ours.insert(precision.to_owned(), memory);
    }
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
fn measure(model: &str, precision: &str, batch: &str, steps: &str) -> Result<(), Box<dyn Error>> {
    let spec = models::find(model)?.spec;
    let selected = DeviceSet::of(DeviceRequest::Cpu)?.select(&LocalRank::ALONE)?;
    let batch = shared::batch(&spec, batch.parse()?);
    let mut strategy = shared::strategy(model, &spec, precision, true, &selected.device())?;
    // Discards the peak of building the network and the optimizer.
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
