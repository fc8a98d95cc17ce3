//! A batch's inputs on the device, in memory that later batches of the same size reuse.

use burn::tensor::{DType, Int, Tensor, TensorData};
use data::loader::Batch;
use models::Context;
use ops::graph::GraphInput;

use super::Replica;
use crate::loss;

/// The inputs of a forward pass on the device, without autodiff.
#[derive(Debug)]
pub struct DeviceBatch {
    pixels: PixelSource,
    /// `[B, C, H, W]`.
    shape: [usize; 4],
    /// Row-major `[B, classes]`.
    targets: Tensor<1>,
    classes: usize,
}

#[derive(Debug)]
enum PixelSource {
    /// Pixels from the loader, row-major.
    Loader(Tensor<1>),
    /// The source row or column of each row and column, for images that are gathered from a data set on the device:
    /// [`ops::GatherLines::values`].
    Lines(Tensor<1, Int>),
}

impl DeviceBatch {
    /// Copies the inputs of `batch` to the device of `replica`.
    pub fn new(replica: &Replica, batch: &Batch) -> Self {
        let device = replica.inner_device();
        let floats = |values: Vec<f32>| {
            let length = values.len();
            Tensor::from_data(TensorData::new(values, [length]), &device)
        };
        let targets = replica.targets(batch);
        let classes = targets.len() / batch.len();
        let (pixels, shape) = match &replica.datasets {
            Some(sets) if batch.images.is_empty() => {
                let lines = sets.train.lines(batch);
                let values = TensorData::new(lines.values().to_vec(), [lines.values().len()]);
                (PixelSource::Lines(Tensor::from_data(values, (&device, DType::I32))), lines.shape())
            }
            _ => {
                let shape = [batch.len() * batch.views, batch.shape.channels, batch.shape.height, batch.shape.width];
                (PixelSource::Loader(floats(batch.images.clone())), shape)
            }
        };
        Self { pixels, shape, targets: floats(targets), classes }
    }

    /// Returns the tensors of the inputs.
    pub fn inputs(&self) -> [GraphInput; 2] {
        let pixels = match &self.pixels {
            PixelSource::Loader(pixels) => GraphInput::Floats(pixels.clone()),
            PixelSource::Lines(lines) => GraphInput::Integers(lines.clone()),
        };
        [pixels, GraphInput::Floats(self.targets.clone())]
    }

    /// Appends the bits of the inputs of another batch of the same size to `words`, in the order of [`DeviceBatch::inputs`].
    pub fn write(&self, replica: &Replica, batch: &Batch, words: &mut Vec<u32>) {
        match (&self.pixels, &replica.datasets) {
            (PixelSource::Lines(_), Some(sets)) => {
                words.extend(sets.train.lines(batch).values().iter().map(|value| value.cast_unsigned()));
            }
            (PixelSource::Lines(_), None) => unreachable!("a replica keeps its data sets"),
            (PixelSource::Loader(_), _) => words.extend(batch.images.iter().map(|value| value.to_bits())),
        }
        words.extend(replica.targets(batch).iter().map(|value| value.to_bits()));
    }

    /// Runs the forward pass. Returns the loss `[1]` divided by `weight`, with autodiff, and the logits `[B, classes]`, without
    /// autodiff.
    pub fn forward(&self, replica: &Replica, cx: &Context, weight: f64) -> (Tensor<1>, Tensor<2>) {
        let images = match (&self.pixels, &replica.datasets) {
            (PixelSource::Lines(lines), Some(sets)) => {
                sets.train.gather(lines, self.shape).expect("a device that captures has the kernel")
            }
            (PixelSource::Lines(_), None) => unreachable!("a replica keeps its data sets"),
            (PixelSource::Loader(pixels), _) => pixels.clone().reshape(self.shape),
        };
        let logits = replica.network().forward(images.autodiff(), cx);
        let targets = self.targets.clone().reshape([self.shape[0], self.classes]);
        (loss::cross_entropy_on_device(logits.clone(), targets, weight), logits.inner())
    }
}
