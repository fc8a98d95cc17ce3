//! `trainer compare`: the same training in several modes, as a page of text, as JSON and as a chart.

mod chart;
mod table;

use serde::Serialize;

use crate::report::StepRecord;

pub use chart::chart;

/// The parts of a step's time, in milliseconds. The sum of all parts except `communication_hidden` is the time of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Parts {
    /// Waiting for the batch.
    pub data: f64,
    /// Host to device, forward, loss.
    pub forward: f64,
    /// Backward.
    pub backward: f64,
    /// Communication that no other part covers: waiting for other devices, reducing, copying.
    pub communication: f64,
    /// Reductions while backward runs. This time is already in `backward`.
    pub communication_hidden: f64,
    /// Clipping, optimizer, weight average.
    pub optimizer: f64,
    /// The rest: the work of the loop between the other parts.
    pub other: f64,
}

impl Parts {
    /// Returns the mean of each part over `steps`.
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
        parts.other = (mean(|step| step.step_ms) - parts.measured()).max(0.0);
        parts
    }

    fn measured(&self) -> f64 {
        self.data + self.forward + self.backward + self.communication + self.optimizer
    }
}

/// Measurements of one run of a mode, without its warm-up steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// Images per second over all devices: all images over all seconds.
    pub images_per_s: f64,
    /// Mean milliseconds per step.
    pub step_ms: f64,
    /// The parts of `step_ms`.
    pub parts: Parts,
    /// Loss of every step, including the warm-up steps.
    pub losses: Vec<f64>,
    /// Mean bytes per step that devices send to other devices.
    pub bytes_moved: u64,
    /// Peak memory of each process in bytes.
    pub peak_bytes: Vec<u64>,
    /// Memory of each device in bytes, rank after rank ([`Strategy::device_bytes`](crate::strategy::Strategy::device_bytes)).
    /// Empty for `single` and `ddp` on the CPU.
    pub device_bytes: Vec<u64>,
}

impl Round {
    /// Computes the measurements from a run's steps. `None` if fewer than two steps are left after the `warmup`.
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
    /// Number of processes, or of devices in one process.
    pub workers: usize,
    /// The figures; absent if the mode failed.
    #[serde(flatten)]
    pub figures: Option<ModeStats>,
    /// Why the mode failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The figures of a mode, taken from its median round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModeStats {
    /// Images per second over all devices.
    pub images_per_s: f64,
    /// Images per second of each round, in the order of the rounds.
    pub images_per_s_rounds: Vec<f64>,
    /// Milliseconds per step.
    pub step_ms: f64,
    /// The parts of `step_ms` on rank 0.
    pub parts_ms: Parts,
    /// Loss of the last step.
    pub loss: f64,
    /// Largest relative difference between a step's loss and the loss of `single`; absent without `single`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_difference: Option<f64>,
    /// Number of steps that `loss_difference` covers: all steps of a run.
    pub steps: usize,
    /// Peak memory of each process in bytes.
    pub peak_bytes: Vec<u64>,
    /// Memory of each device in bytes, rank after rank ([`Strategy::device_bytes`](crate::strategy::Strategy::device_bytes)).
    /// Empty for `single` and `ddp` on the CPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_bytes: Vec<u64>,
    /// Largest device memory over the mean. Uses the processes' memory if each device has its own process.
    pub imbalance: f64,
    /// Bytes per step that devices send to other devices, summed over all devices.
    pub bytes_moved: u64,
}

impl ModeStats {
    /// Returns the figures of the median round by images per second. `None` without rounds. `reference` contains the
    /// losses of `single`.
    pub fn of(rounds: &[Round], reference: Option<&[f64]>) -> Option<Self> {
        let mut order: Vec<&Round> = rounds.iter().collect();
        order.sort_by(|a, b| a.images_per_s.total_cmp(&b.images_per_s));
        // With an even number of rounds, take the slower of the two in the middle.
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

/// Returns the largest of `|a - b| / |a|`, or NaN if a difference is NaN.
fn largest_difference(reference: &[f64], losses: &[f64]) -> f64 {
    let differences = reference.iter().zip(losses).map(|(a, b)| (a - b).abs() / a.abs());
    differences.fold(0.0, |most, difference| if difference > most || difference.is_nan() { difference } else { most })
}

/// Returns the largest value over the mean; 1 for an empty slice.
fn imbalance(bytes: &[u64]) -> f64 {
    let mean = bytes.iter().sum::<u64>() as f64 / bytes.len().max(1) as f64;
    let most = bytes.iter().copied().max().unwrap_or(0) as f64;
    if mean > 0.0 { most / mean } else { 1.0 }
}

/// The whole comparison.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Name of the network.
    pub model: String,
    /// Name of the data set.
    pub data: String,
    /// `train.batch_size`.
    pub batch_size: usize,
    /// Steps of each run.
    pub steps: usize,
    /// Steps of each run that are left out of all times.
    pub warmup: usize,
    /// Runs of each mode. The modes take turns.
    pub rounds: usize,
    /// Processor, or the GPU with `--gpus`, as readable text.
    pub machine: String,
    /// One row per mode.
    pub modes: Vec<ModeResult>,
}

#[cfg(test)]
mod tests;
