//! `trainer bench scaling`: measured and computed scaling, as a page of text, as JSON and as a picture.

mod chart;
mod model;
mod profile;

use serde::Serialize;

pub use chart::chart;
pub use model::{Algorithm, Interconnect, Link, computed};
pub use profile::{BucketProfile, Profile, median, profile};

use crate::text::{aligned, bytes, speed};

/// Weak or strong scaling: whether the global batch grows with the number of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scaling {
    /// The global batch grows: each worker has `train.batch_size` images.
    Weak,
    /// The global batch is constant: all workers together have `train.batch_size` images.
    Strong,
}

impl Scaling {
    /// Returns the name in JSON and in the page.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weak => "weak",
            Self::Strong => "strong",
        }
    }
}

/// A measured run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// Weak or strong scaling.
    pub scaling: Scaling,
    /// Number of processes.
    pub workers: usize,
    /// Number of measured steps.
    pub steps: usize,
    /// Images per second of all workers.
    pub images_per_s: f64,
    /// Images per second of one worker, divided by the images per second of one worker in the smallest run.
    pub efficiency: f64,
    /// Milliseconds per step.
    pub step_ms: f64,
    /// Milliseconds of the step in which communication does not overlap with computation.
    pub exposed_ms: f64,
    /// Milliseconds of communication that overlaps with the backward pass.
    pub hidden_ms: f64,
}

/// A computed step. Only the [`Profile`] was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Computed {
    /// Weak or strong scaling.
    pub scaling: Scaling,
    /// The all-reduce algorithm.
    pub algorithm: Algorithm,
    /// Number of workers.
    pub workers: usize,
    /// Images per second of all workers.
    pub images_per_s: f64,
    /// Images per second of one worker, divided by those of a worker without communication that has the profile's batch.
    pub efficiency: f64,
    /// Milliseconds per step.
    pub step_ms: f64,
    /// Milliseconds of the step in which communication does not overlap with computation.
    pub exposed_ms: f64,
}

/// The content of `scaling.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScalingReport {
    /// Name of the network.
    pub model: String,
    /// Name of the data set.
    pub data: String,
    /// `train.batch_size`.
    pub batch_size: usize,
    /// The machine, and the threads of each worker.
    pub machine: String,
    /// Number of measured steps of the run with the most. `train.epochs` may end the other runs earlier.
    pub steps: usize,
    /// The measured runs.
    pub measured: Vec<Measured>,
    /// One worker's step. The computed steps follow from it. Absent if no run had several workers.
    pub profile: Option<Profile>,
    /// The network that the computed steps assume.
    pub network: Interconnect,
    /// The computed steps.
    pub computed: Vec<Computed>,
}

impl ScalingReport {
    /// Formats the page. The text ends with a newline.
    pub fn render(&self) -> String {
        let Self { model, data, batch_size, machine, steps, .. } = self;
        let steps = match self.measured.iter().map(|row| row.steps).min() {
            Some(fewest) if fewest < *steps => format!("{fewest} to {steps}"),
            _ => steps.to_string(),
        };
        let mut page = format!("{model} on {data}, batch {batch_size}: median of {steps} steps\n{machine}\n\n");
        let head = ["measured", "workers", "images/s", "efficiency", "step ms", "exposed ms", "hidden ms"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for row in &self.measured {
            let times = [row.step_ms, row.exposed_ms, row.hidden_ms].map(|time| format!("{time:.2}"));
            let start =
                [row.scaling.name().into(), row.workers.to_string(), speed(row.images_per_s), share(row.efficiency)];
            rows.push([&start[..], &times].concat());
        }
        page += &aligned(&rows);
        let Some(profile) = &self.profile else {
            return page + "\nno prediction: it needs the gradient buckets of a run with 2 or more workers\n";
        };
        let buckets: Vec<_> =
            profile.buckets.iter().map(|bucket| format!("{} at {:.1}", bytes(bucket.bytes), bucket.ready_ms)).collect();
        page += &format!(
            "\na worker's step with {} images: forward {:.1} ms, backward {:.1} ms, other {:.1} ms\n\
             buckets, ready in ms after the start of backward: {}\n",
            profile.images,
            profile.forward_ms,
            profile.backward_ms,
            profile.other_ms,
            buckets.join(", ")
        );
        page += &format!("\ncomputed from that step, not measured: {}\n", self.network);
        let head = ["computed", "workers", "algorithm", "images/s", "efficiency", "step ms", "exposed ms"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for row in &self.computed {
            let times = [row.step_ms, row.exposed_ms].map(|time| format!("{time:.2}"));
            let start = [
                row.scaling.name().into(),
                row.workers.to_string(),
                row.algorithm.name().into(),
                speed(row.images_per_s),
                share(row.efficiency),
            ];
            rows.push([&start[..], &times].concat());
        }
        page + &aligned(&rows)
    }
}

fn share(value: f64) -> String {
    format!("{:.1}%", 100.0 * value)
}
