//! Fully connected layer, `torch.nn.Linear`.

use burn::module::Module;
use burn::tensor::Tensor;

use super::Weight;
use crate::{Context, Init};
use ops::linear;

/// Computes `input · weightᵀ + bias`.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[out, in]`, PyTorch's layout (burn's layer has `[in, out]`).
    pub weight: Weight<2>,
    /// `[out]`; `None` without a bias.
    pub bias: Option<Weight<1>>,
}

impl Linear {
    /// Builds a layer with `[input, output]` features and PyTorch's default weights.
    pub fn new([input, output]: [usize; 2], init: &Init) -> Self {
        Self {
            weight: init.fan_in_uniform("weight", [output, input], input),
            bias: Some(init.fan_in_uniform("bias", [output], input)),
        }
    }

    /// Removes the bias.
    pub fn without_bias(self) -> Self {
        Self { bias: None, ..self }
    }

    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input `[B, in]`
    /// - output `[B, out]`
    pub fn forward(&self, input: Tensor<2>, cx: &Context) -> Tensor<2> {
        self.run(input, false, cx)
    }

    /// Applies [`Self::forward`] and ReLU in one pass over the output.
    pub fn forward_relu(&self, input: Tensor<2>, cx: &Context) -> Tensor<2> {
        self.run(input, true, cx)
    }

    fn run(&self, input: Tensor<2>, relu: bool, cx: &Context) -> Tensor<2> {
        cx.add_macs(input.dims()[0] * self.weight.dims().iter().product::<usize>());
        let weight = cx.parameter(&self.weight, &input);
        let bias = self.bias.as_ref().map(|bias| cx.parameter(bias, &input));
        cx.count_activations(linear(cx.autocast(input), weight, bias, relu))
    }
}
