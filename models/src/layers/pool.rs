//! Layers without parameters: pooling and activation.

use burn::module::Module;
use burn::tensor::Tensor;

use ops::{PoolOptions, max_pool2d};

/// Max pooling, `torch.nn.MaxPool2d`. Incomplete windows at the end of a row or column are dropped.
#[derive(Module, Debug)]
pub struct MaxPool2d {
    kernel: usize,
    stride: usize,
    padding: usize,
}

impl MaxPool2d {
    /// Pools over adjacent windows of `kernel` x `kernel` pixels, without padding.
    pub fn new(kernel: usize) -> Self {
        Self { kernel, stride: kernel, padding: 0 }
    }

    /// Pools over windows of 3x3 pixels with the given stride and a padding of one pixel.
    pub fn overlapping(stride: usize) -> Self {
        Self { kernel: 3, stride, padding: 1 }
    }

    /// Maps `[B, C, H, W]` to `[B, C, (H + 2·padding − kernel) / stride + 1, …]`.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let [kernel, stride, padding] = [self.kernel, self.stride, self.padding].map(|pixels| [pixels; 2]);
        max_pool2d(input, PoolOptions { kernel, stride, padding })
    }
}

/// `torch.nn.ReLU` as a module, for lists of layers.
#[derive(Module, Debug)]
pub struct Relu;

impl Relu {
    /// Replaces negative values by zero; the shape is kept.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        relu(input)
    }
}

/// The mean over all pixels, `[B, C, H, W]` → `[B, C]`. For 4x4 features it equals pytorch-cifar's `avg_pool2d(out, 4)` and
/// flattening.
pub use ops::global_avg_pool;
pub use ops::relu;
