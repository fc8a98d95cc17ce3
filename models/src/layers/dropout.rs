//! Dropout, `torch.nn.Dropout` and `torch.nn.Dropout2d` (<https://jmlr.org/papers/v15/srivastava14a.html>), and stochastic
//! depth, `torchvision.ops.StochasticDepth` (<https://arxiv.org/abs/1603.09382>).

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};

use crate::Context;
use ops::{add, scale_channels};

/// Sets values to zero at random and scales the others to keep the mean; see [`Context::with_dropout`].
#[derive(Module, Debug)]
pub struct Dropout {
    rate: f64,
}

impl Dropout {
    /// Drops each value or channel with probability `rate`, `0 <= rate < 1`.
    pub fn new(rate: f64) -> Self {
        Self { rate }
    }

    /// Drops single values of `[B, C]`, `torch.nn.Dropout`.
    pub fn forward(&self, input: Tensor<2>, cx: &Context) -> Tensor<2> {
        match self.factors(input.dims(), &input.device(), cx) {
            Some(factors) => input.clone() * factors.cast(input.dtype()),
            None => input,
        }
    }

    /// Drops whole channels of `[B, C, H, W]`, `torch.nn.Dropout2d`.
    pub fn forward_channels(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let [batch, channels, _, _] = input.dims();
        match self.factors([batch, channels], &input.device(), cx) {
            Some(factors) => scale_channels(input, factors),
            None => input,
        }
    }

    /// Draws the factors `[batch, each]`; `None` where nothing is dropped.
    fn factors(&self, [batch, each]: [usize; 2], device: &Device, cx: &Context) -> Option<Tensor<2>> {
        let factors = cx.dropout(self.rate, batch, each)?;
        Some(Tensor::from_data(TensorData::new(factors, [batch, each]), device))
    }
}

/// Drops a residual block's branch for random samples, and scales it for the other samples to keep the mean (torchvision's mode
/// `row`). See [`Context::with_dropout`].
#[derive(Module, Debug)]
pub struct StochasticDepth {
    rate: f64,
}

impl StochasticDepth {
    /// Drops the branch of a sample with probability `rate`, `0 <= rate < 1`.
    pub fn new(rate: f64) -> Self {
        Self { rate }
    }

    /// Adds the branch to the block's input, except for the dropped samples. Both are `[B, C, H, W]`.
    pub fn add(&self, branch: Tensor<4>, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let [batch, channels, _, _] = branch.dims();
        let branch = match cx.dropout(self.rate, batch, 1) {
            Some(factors) => {
                let all: Vec<f32> = factors.into_iter().flat_map(|f| std::iter::repeat_n(f, channels)).collect();
                let device = branch.device();
                scale_channels(branch, Tensor::from_data(TensorData::new(all, [batch, channels]), &device))
            }
            None => branch,
        };
        cx.count_activations(add(branch, input))
    }
}
