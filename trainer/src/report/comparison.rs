//! `trainer compare`: the same training in several modes, on one page, as JSON and as a picture.

mod chart;
mod table;

use serde::Serialize;

use crate::report::StepRecord;

pub use chart::chart;

/// Where a step's time goes, in milliseconds; they add up to the step, but for what is hidden.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Parts {
    /// Waiting for the batch.
    pub data: f64,
    /// Host to device, forward, loss.
    pub forward: f64,
    /// Backward.
    pub backward: f64,
    /// Waiting for other devices, reducing, copying: what nothing else covers.
    pub communication: f64,
    /// Reducing while backward ran: inside `backward`.
    pub communication_hidden: f64,
    /// Clipping, optimizer, weight average.
    pub optimizer: f64,
    /// The rest: what the loop does between.
    pub other: f64,
}

impl Parts {
    /// Means over steps.
    pub fn mean(steps: &[StepRecord]) -> Self {
        let mean = |value: fn(&StepRecord) -> f64| steps.iter().map(value).sum::<f64>() / steps.len().max(1) as f64;
        let mut parts = Self {
            data: mean(|step| step.data_ms),
            forward: mean(|step| step.forward_ms),
            backward: mean(|step| step.backward_ms),
            communication: mean(|step| step.communication_ms),
            communication_hidden: mean(|step| step.communication_hidden_ms),
            optimizer: mean(|step| step.optimizer_ms),
            other: 0.0,
        };
        parts.other = (mean(|step| step.step_ms) - parts.named()).max(0.0);
        parts
    }

    fn named(&self) -> f64 {
        self.data + self.forward + self.backward + self.communication + self.optimizer
    }
}

/// What one run of a mode measured, its first steps left out.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// Images a second over all devices: all images by all seconds.
    pub images_per_s: f64,
    /// Milliseconds a step, mean.
    pub step_ms: f64,
    /// What they were spent on.
    pub parts: Parts,
    /// Loss of every step, those left out as well.
    pub losses: Vec<f64>,
    /// Bytes that devices gave to other devices in a step, mean.
    pub bytes_moved: u64,
    /// Most memory that each process has held.
    pub peak_bytes: Vec<u64>,
    /// Bytes that each device of one process is known to have held, where they are several.
    pub device_bytes: Vec<u64>,
}

impl Round {
    /// From a run's steps; `None` where fewer than two are left after the `warmup`.
    pub fn new(steps: &[StepRecord], warmup: usize, peak_bytes: Vec<u64>, device_bytes: Vec<u64>) -> Option<Self> {
        let measured = steps.get(warmup..).filter(|measured| measured.len() >= 2)?;
        let seconds = measured.iter().map(|step| step.step_ms * 1e-3).sum::<f64>();
        let images = measured.iter().map(|step| step.images_per_s * step.step_ms * 1e-3).sum::<f64>();
        Some(Self {
            images_per_s: images / seconds,
            step_ms: seconds * 1e3 / measured.len() as f64,
            parts: Parts::mean(measured),
            losses: steps.iter().map(|step| step.loss).collect(),
            bytes_moved: measured.iter().map(|step| step.bytes_moved).sum::<u64>() / measured.len() as u64,
            peak_bytes,
            device_bytes,
        })
    }
}

/// One mode's row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModeResult {
    /// `single`, `dp` or `ddp`.
    pub mode: String,
    /// Processes, or devices of one process.
    pub workers: usize,
    /// The figures; absent where the mode failed.
    #[serde(flatten)]
    pub figures: Option<Figures>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A mode's figures: those of its median round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figures {
    /// Images a second over all devices.
    pub images_per_s: f64,
    /// The same of each round, in their order.
    pub images_per_s_rounds: Vec<f64>,
    /// Milliseconds a step.
    pub step_ms: f64,
    /// What they are spent on, on rank 0.
    pub parts_ms: Parts,
    /// Loss of the last step.
    pub loss: f64,
    /// Largest relative difference of a step's loss to that of `single`; absent without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_difference: Option<f64>,
    /// Steps over which it is the largest: all of a run.
    pub steps: usize,
    /// Most memory that each process has held.
    pub peak_bytes: Vec<u64>,
    /// Parameters, gradients, inputs and outputs that each device of one process has held, where they are several: the
    /// system does not tell what a thread's peak is.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_bytes: Vec<u64>,
    /// The largest of them (of the processes, where each device has one) over their mean.
    pub imbalance: f64,
    /// Bytes that devices give to other devices in a step, all devices together.
    pub bytes_moved: u64,
}

impl Figures {
    /// The median round by images a second; `None` without rounds. `reference` are the losses of `single`.
    pub fn of(rounds: &[Round], reference: Option<&[f64]>) -> Option<Self> {
        let mut order: Vec<&Round> = rounds.iter().collect();
        order.sort_by(|a, b| a.images_per_s.total_cmp(&b.images_per_s));
        // of an even number the slower one
        let median = *order.get(order.len().checked_sub(1)? / 2)?;
        let devices = if median.device_bytes.is_empty() { &median.peak_bytes } else { &median.device_bytes };
        Some(Self {
            images_per_s: median.images_per_s,
            images_per_s_rounds: rounds.iter().map(|round| round.images_per_s).collect(),
            step_ms: median.step_ms,
            parts_ms: median.parts,
            loss: median.losses.last().copied().unwrap_or(f64::NAN),
            loss_difference: reference.map(|reference| largest_difference(reference, &median.losses)),
            steps: median.losses.len(),
            peak_bytes: median.peak_bytes.clone(),
            device_bytes: median.device_bytes.clone(),
            imbalance: imbalance(devices),
            bytes_moved: median.bytes_moved,
        })
    }
}

/// The largest of `|a - b| / |a|`; not a number where one of them is none.
fn largest_difference(reference: &[f64], losses: &[f64]) -> f64 {
    let differences = reference.iter().zip(losses).map(|(a, b)| (a - b).abs() / a.abs());
    differences.fold(0.0, |most, difference| if difference > most || difference.is_nan() { difference } else { most })
}

/// Largest over mean; 1 of nothing.
fn imbalance(bytes: &[u64]) -> f64 {
    let mean = bytes.iter().sum::<u64>() as f64 / bytes.len().max(1) as f64;
    let most = bytes.iter().copied().max().unwrap_or(0) as f64;
    if mean > 0.0 { most / mean } else { 1.0 }
}

/// The whole comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The network's name.
    pub model: String,
    /// The data set's.
    pub data: String,
    /// `train.batch_size`.
    pub batch_size: usize,
    /// Steps of each run.
    pub steps: usize,
    /// Of these, left out of all times.
    pub warmup: usize,
    /// Runs of each mode, taken in turn.
    pub rounds: usize,
    /// Processor, in words.
    pub machine: String,
    /// A row a mode.
    pub modes: Vec<ModeResult>,
}

#[cfg(test)]
mod tests;
