//! Dropout, `torch.nn.Dropout` and its relatives (<https://jmlr.org/papers/v15/srivastava14a.html>).

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};

use crate::Context;
use ops::scale_channels;

/// Sets values to zero at random and scales the others so that the mean stays; see [`Context::with_dropout`].
#[derive(Module, Debug)]
pub struct Dropout {
    rate: f64,
}

impl Dropout {
    /// Each value is dropped with probability `rate`, below 1.
    pub fn new(rate: f64) -> Self {
        Self { rate }
    }

    /// Single values, `torch.nn.Dropout`: `[B, C]`.
    pub fn forward(&self, input: Tensor<2>, cx: &Context) -> Tensor<2> {
        match self.factors(input.dims(), &input.device(), cx) {
            Some(factors) => input.clone() * factors.cast(input.dtype()),
            None => input,
        }
    }

    /// Whole channels, `torch.nn.Dropout2d`: `[B, C, H, W]`.
    pub fn forward_channels(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let [batch, channels, _, _] = input.dims();
        match self.factors([batch, channels], &input.device(), cx) {
            Some(factors) => scale_channels(input, factors),
            None => input,
        }
    }

    /// Whole images, the drop-connect of EfficientNet and stochastic depth: `[B, C, H, W]`.
    pub fn forward_images(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let [batch, channels, _, _] = input.dims();
        match self.factors([batch, 1], &input.device(), cx) {
            Some(factors) => scale_channels(input, factors.expand([batch, channels])),
            None => input,
        }
    }

    fn factors(&self, [batch, each]: [usize; 2], device: &burn::tensor::Device, cx: &Context) -> Option<Tensor<2>> {
        let factors = cx.dropout(self.rate, batch, each)?;
        Some(Tensor::from_data(TensorData::new(factors, [batch, each]), device))
    }
}
