//! Divides a training step's time on a GPU, by the device's clock, into classes of kernels and the gaps between kernels.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};

use data::loader::Batch;
use ops::traffic::{Traffic, count};
use serde::Serialize;
use trainer::device::SelectedDevice;
use trainer::strategy::{DeviceDataset, Strategy, single::Single};
use trainer::timeline::launches::{KernelLaunch, KernelProfiler};

/// Time and launches of a class or of one kernel.
#[derive(Debug, Default, Clone, Serialize)]
pub struct Share {
    /// Milliseconds on the device.
    pub milliseconds: f64,
    /// Number of launches.
    pub launches: usize,
}

/// One step's time on the device.
#[derive(Debug, Serialize)]
pub struct Kernels {
    /// Milliseconds of a step without profiling.
    pub step: f64,
    /// Milliseconds of the step in which no kernel ran: the device waited for the host. Profiling does not change the time
    /// of kernels but slows the host, so this is the difference between step and kernels, not the sum of measured gaps.
    pub gaps: f64,
    /// Bytes that the custom kernels read and write, see [`Traffic`].
    pub bytes: usize,
    /// Number of kernels, and of those whose bytes are not known.
    pub counted: [usize; 2],
    /// Kernels by class.
    pub classes: BTreeMap<String, Share>,
    /// Kernels by part of the step and name, the longest first.
    pub kernels: Vec<(String, String, Share)>,
}

/// Measures `steps` steps without profiling, then profiles one. `strategy` must launch kernel by kernel, without a CUDA graph.
pub fn measure(
    strategy: &mut Single,
    resident: &DeviceDataset,
    batches: &[Batch],
    steps: usize,
    selected: &SelectedDevice,
) -> Result<Kernels, Box<dyn Error>> {
    let wait = || selected.device().sync().map_err(|error| format!("the GPU failed: {error:?}"));
    let mut times = Vec::new();
    for step in 0..steps {
        let start = Instant::now();
        strategy.train_step(vec![batches[step % batches.len()].clone()], 1e-3, None)?;
        wait()?;
        times.push(1000.0 * start.elapsed().as_secs_f64());
    }
    let step = crate::shared::median(times);

    let (counted, Traffic { bytes, kernels, others }) =
        count(|| strategy.train_step(vec![batches[0].clone()], 1e-3, None));
    counted?;

    // Profiles the preparation of a batch alone. The step below prepares its batch first, so these launches are its first ones.
    let profiler = KernelProfiler::start(usize::MAX);
    drop(resident.batch(&batches[0]));
    wait()?;
    let data = profiler.finish();

    let profiler = KernelProfiler::start(usize::MAX);
    let start = Instant::now();
    let outcome = strategy.train_step(vec![batches[0].clone()], 1e-3, None)?;
    wait()?;
    let launches = profiler.finish();
    let forward = start + Duration::from_secs_f64(outcome.seconds.forward);
    let backward = forward + Duration::from_secs_f64(outcome.seconds.backward);

    let (mut classes, mut by_name) = (BTreeMap::<String, Share>::new(), BTreeMap::<_, Share>::new());
    for (index, launch) in launches.iter().enumerate() {
        let part = match launch.issued {
            _ if index < data.len() => Part::Data,
            at if at < forward => Part::Forward,
            at if at < backward => Part::Backward,
            _ => Part::Optimizer,
        };
        let milliseconds = 1000.0 * (launch.end - launch.start).as_secs_f64();
        let add = |share: &mut Share| {
            share.milliseconds += milliseconds;
            share.launches += 1;
        };
        add(classes.entry(class(part, launch.kernel).to_owned()).or_default());
        add(by_name.entry((format!("{part:?}").to_lowercase(), launch.short_name())).or_default());
    }
    let mut by_name: Vec<_> = by_name.into_iter().map(|((part, name), share)| (part, name, share)).collect();
    by_name.sort_by(|(.., a), (.., b)| b.milliseconds.total_cmp(&a.milliseconds));
    Ok(Kernels {
        step,
        gaps: (step - 1000.0 * busy(&launches)).max(0.0),
        bytes,
        counted: [kernels, others],
        classes,
        kernels: by_name,
    })
}

impl Kernels {
    /// Prints the table.
    pub fn show(&self) {
        let line = |name: &str, ms: f64, launches: String| {
            println!("    {name:<34} {ms:>9.3} ms {:>5.1} % {launches:>6}", 100.0 * ms / self.step);
        };
        for (class, share) in &self.classes {
            line(class, share.milliseconds, share.launches.to_string());
        }
        line("gaps between kernels", self.gaps, String::new());
        let [kernels, others] = self.counted;
        let megabytes = self.bytes as f64 / 1e6;
        println!("    {megabytes:.1} MB read and written by {} of {kernels} kernels", kernels - others);
        println!("  longest kernels:");
        for (part, name, share) in self.kernels.iter().take(20) {
            line(&format!("{part}: {name}"), share.milliseconds, share.launches.to_string());
        }
    }
}

/// The part of the step in which the host launched a kernel.
#[derive(Debug, Clone, Copy)]
enum Part {
    Data,
    Forward,
    Backward,
    Optimizer,
}

/// Returns the seconds in which at least one kernel ran.
fn busy(launches: &[KernelLaunch]) -> f64 {
    let mut spans: Vec<_> = launches.iter().map(|launch| (launch.start, launch.end)).collect();
    spans.sort();
    let mut total = Duration::ZERO;
    let mut until = None::<Instant>;
    for (start, end) in spans {
        let from = until.map_or(start, |until| until.max(start));
        total += end.saturating_duration_since(from);
        until = Some(until.map_or(end, |until| until.max(end)));
    }
    total.as_secs_f64()
}

/// Returns the class of a kernel, from the part of the step and the path of the kernel's type.
fn class(part: Part, kernel: &str) -> &'static str {
    let has = |what: &str| kernel.contains(what);
    match part {
        Part::Data => return "data: augmentation",
        Part::Optimizer => return "optimizer",
        Part::Forward | Part::Backward => {}
    }
    let forward = matches!(part, Part::Forward);
    if has("norm_kernels") || has("norm_moments") {
        // Our batch norm. burn's consists of reductions and elementwise kernels.
        if forward { "batch norm, forward" } else { "batch norm, backward" }
    } else if has("direct_kernels") {
        if forward { "convolution, forward" } else { "convolution, data gradient" }
    } else if has("backward_weight") || has("weight_grad") || has("weight_kernels") || has("WeightGradient") {
        "convolution, weight gradient"
    } else if has("DataGradient") || has("backward_data") || has("conv_transpose") || has("ConvTranspose") {
        "convolution, data gradient"
    } else if has("conv") || has("Conv") {
        // Grouped weight gradients and some data gradients are forward convolutions of other operands.
        if forward { "convolution, forward" } else { "convolution, gradients by forward kernels" }
    } else if has("matmul") || has("Matmul") || has("gemm") {
        "matrix products"
    } else if has("reduce") || has("Reduce") {
        if forward { "reductions, forward" } else { "reductions, backward" }
    } else if has("pool") || has("Pool") {
        "pooling"
    } else if has("contiguous") || has("into_contiguous") || has("copy") {
        "layout copies"
    } else if forward {
        "elementwise, forward"
    } else {
        "elementwise, backward"
    }
}
