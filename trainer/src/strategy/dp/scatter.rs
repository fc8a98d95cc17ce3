//! Splits a batch into chunks, one per device, and concatenates the outputs: `torch.nn.parallel.{scatter, gather}`.

use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};
use data::loader::Batch;

use super::copy;

/// Returns the chunks of `torch.chunk`: `ceil(len / devices)` samples each. The last chunk may be smaller, and there may be fewer
/// chunks than devices.
pub(crate) fn chunks(len: usize, devices: usize) -> Vec<Range<usize>> {
    let each = len.div_ceil(devices).max(1);
    (0..len).step_by(each).map(|start| start..(start + each).min(len)).collect()
}

/// Copies the pixels of images `range` of a batch to `device`, `[range, C, H, W]`.
pub(super) fn images(batch: &Batch, range: Range<usize>, device: &Device) -> Tensor<4> {
    let (one, shape) = (batch.shape.len(), batch.shape);
    let pixels = batch.images[range.start * one..range.end * one].to_vec();
    Tensor::from_data(TensorData::new(pixels, [range.len(), shape.channels, shape.height, shape.width]), device)
}

/// Concatenates the outputs of all chunks, `[B, classes]`, on `device`. `outputs` are without autodiff.
pub(super) fn gather(outputs: impl Iterator<Item = Tensor<2>>, device: &Device) -> Tensor<2> {
    Tensor::cat(outputs.map(|output| copy::to_device(output, device)).collect(), 0)
}

/// The sizes in bytes of the data that devices send each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferSizes {
    /// Parameters. Gradients have the same size.
    pub(super) parameters: u64,
    /// Running statistics.
    pub(super) buffers: u64,
    /// The outputs of one image.
    pub(super) outputs: u64,
}

impl TransferSizes {
    /// Returns the bytes that devices send each other for one batch. Each device but the first receives parameters, statistics
    /// and its images of `image` bytes, sends its outputs and gradients, and receives the gradients of its outputs.
    pub(super) fn bytes_sent(&self, chunks: &[Range<usize>], image: u64) -> u64 {
        let others = chunks.len().saturating_sub(1) as u64;
        let samples: u64 = chunks.iter().skip(1).map(|chunk| chunk.len() as u64).sum();
        others * (2 * self.parameters + self.buffers) + samples * (image + 2 * self.outputs)
    }

    /// Returns the bytes that a device holds at once, without activations and the optimizer's state: parameters, statistics,
    /// gradients, its images of `image` bytes, and outputs. The first device also holds all outputs and their gradients.
    pub(super) fn peak_bytes(&self, device: usize, chunk: usize, batch: usize, image: u64) -> u64 {
        let gathered = if device == 0 { 2 * batch as u64 * self.outputs } else { 0 };
        2 * self.parameters + self.buffers + chunk as u64 * (image + 2 * self.outputs) + gathered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_once_per_device() {
        let sizes = TransferSizes { parameters: 1000, buffers: 100, outputs: 1 };
        assert_eq!(sizes.bytes_sent(&chunks(8, 1), 10), 0);
        assert_eq!(sizes.bytes_sent(&chunks(5, 4), 10), 2 * 2100 + 3 * 12);
        assert_eq!(sizes.peak_bytes(0, 2, 5, 10), 2100 + 2 * 12 + 10);
        assert_eq!(sizes.peak_bytes(2, 1, 5, 10), 2100 + 12);
    }

    /// `[len(c) for c in torch.arange(n).chunk(devices)]`, PyTorch 2.15.
    #[test]
    fn chunks_equal_pytorch() {
        for (len, devices, expected) in [
            (128, 3, &[43, 43, 42][..]),
            (5, 4, &[2, 2, 1]),
            (6, 4, &[2, 2, 2]),
            (1, 2, &[1]),
            (3, 8, &[1, 1, 1]),
            (10, 4, &[3, 3, 3, 1]),
            (128, 1, &[128]),
            (16, 5, &[4, 4, 4, 4]),
        ] {
            let found = chunks(len, devices);
            assert_eq!(found.iter().map(Range::len).collect::<Vec<_>>(), expected, "{len} over {devices}");
            assert_eq!(found.into_iter().flatten().collect::<Vec<_>>(), (0..len).collect::<Vec<_>>());
        }
        assert!(chunks(0, 2).is_empty());
    }
}
