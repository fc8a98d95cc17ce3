//! Pooling and activation: layers without parameters.

use burn::module::Module;
use burn::tensor::Tensor;

use ops::{PoolOptions, max_pool2d};

/// `torch.nn.MaxPool2d`: the last row or column is dropped where it does not fill a window.
#[derive(Module, Debug)]
pub struct MaxPool2d {
    kernel: usize,
    stride: usize,
    padding: usize,
}

impl MaxPool2d {
    /// Square windows of `kernel` pixels side by side, no padding.
    pub fn new(kernel: usize) -> Self {
        Self { kernel, stride: kernel, padding: 0 }
    }

    /// Windows of three pixels, one of them beyond each border, `stride` pixels apart.
    pub fn overlapping(stride: usize) -> Self {
        Self { kernel: 3, stride, padding: 1 }
    }

    /// `[B, C, H, W]` → `[B, C, (H + 2·padding − kernel) / stride + 1, …]`.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let [kernel, stride, padding] = [self.kernel, self.stride, self.padding].map(|pixels| [pixels; 2]);
        max_pool2d(input, PoolOptions { kernel, stride, padding })
    }
}

/// `torch.nn.ReLU` as a module, for networks that are a list of layers.
#[derive(Module, Debug)]
pub struct Relu;

impl Relu {
    /// Negative values become zero.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        relu(input)
    }
}

/// Equals pytorch-cifar's `avg_pool2d(out, 4)` and flattening where the features are 4x4, and goes on working where
/// they are not.
pub use ops::global_avg_pool;
pub use ops::relu;
