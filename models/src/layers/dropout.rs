//! Dropout, `torch.nn.Dropout` and `torch.nn.Dropout2d` (<https://jmlr.org/papers/v15/srivastava14a.html>).

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};

use crate::Context;
use ops::scale_channels;

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
