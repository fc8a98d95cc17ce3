//! Times forward and backward launch by launch, and replayed as one recorded graph (`burn::tensor::capture`, CUDA graphs).
//! The difference is the time that the GPU waits for the host.

#![allow(unsafe_code, reason = "a replay writes to memory that nothing tracks")]

use std::error::Error;
use std::time::Instant;

use burn::tensor::activation::log_softmax;
use burn::tensor::{Tensor, TensorData, capture};
use models::{Context, Spec};
use serde::Serialize;
use trainer::device::Selected;
use trainer::optim::FlatGradients;

use crate::shared::{self, median};

/// Milliseconds of one forward and backward pass of a fixed batch, without the optimizer.
#[derive(Debug, Serialize)]
pub struct Captured {
    /// Launch by launch, as in training.
    pub launched: f64,
    /// Replayed as a graph.
    pub replayed: f64,
    /// Whether the device recorded a graph. Without a graph a replay repeats the launches.
    pub graph: bool,
}

/// Measures `steps` passes of each in turns.
pub fn measure(
    model: &str,
    spec: &Spec,
    batch: usize,
    bf16: bool,
    steps: usize,
    selected: &Selected,
) -> Result<Captured, Box<dyn Error>> {
    let device = &selected.device();
    let network = models::build(model, spec, 0, device)?;
    let batch = shared::batch(spec, batch);
    let samples = batch.labels.len();
    let mut targets = vec![0f32; samples * spec.num_classes];
    batch.labels.iter().enumerate().for_each(|(row, label)| targets[row * spec.num_classes + *label as usize] = 1.0);
    let shape = [samples, spec.in_channels, spec.image_size[0], spec.image_size[1]];
    // The memory that a graph reads must stay valid: a pass may read nothing from the host.
    let images = Tensor::<4>::from_data(TensorData::new(batch.images, shape), device);
    let targets = Tensor::<2>::from_data(TensorData::new(targets, [samples, spec.num_classes]), device);
    let context = Context::train().autocast_bf16(bf16);
    let pass = || {
        let logits = network.forward(images.clone(), &context);
        let loss = (log_softmax(logits, 1) * targets.clone()).sum().mul_scalar(-1.0 / samples as f64);
        FlatGradients::from_backward(loss.backward(), &network)
    };
    let wait = || device.sync().map_err(|error| format!("the device failed: {error:?}"));
    let mut graph = capture(&device.clone().inner(), pass);
    let (mut launched, mut replayed) = (Vec::new(), Vec::new());
    for _ in 0..steps {
        let start = Instant::now();
        // SAFETY: the network, the images and the targets outlive the graph, and only this thread uses the device. The running
        // statistics from before the recording are freed; a replay reads whatever their memory contains, which only
        // affects gradients that nobody reads. Each replay is waited for.
        unsafe { graph.replay() };
        wait()?;
        replayed.push(1000.0 * start.elapsed().as_secs_f64());
    }
    // Only now, because memory that these passes allocate may be written by the graph.
    let is_graph = graph.is_hardware();
    drop(graph);
    for _ in 0..=steps {
        let start = Instant::now();
        let gradients = pass();
        wait()?;
        drop(gradients);
        launched.push(1000.0 * start.elapsed().as_secs_f64());
    }
    // The first pass compiles nothing any more, but allocates.
    Ok(Captured { launched: median(launched.split_off(1)), replayed: median(replayed), graph: is_graph })
}
