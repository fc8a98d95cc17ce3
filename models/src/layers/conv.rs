//! Two-dimensional convolution, `torch.nn.Conv2d`.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::{Context, Init};
use ops::{ConvOptions, conv2d};

/// Options of a [`Conv2d`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy)]
pub struct Conv2dConfig {
    channels: [usize; 2],
    kernel: usize,
    stride: usize,
    padding: usize,
    groups: usize,
    bias: bool,
}

impl Conv2dConfig {
    /// Options for `[input, output]` channels and a square kernel: stride 1, no padding, one group, with a bias.
    pub fn new(channels: [usize; 2], kernel: usize) -> Self {
        Self { channels, kernel, stride: 1, padding: 0, groups: 1, bias: true }
    }

    /// Sets the stride in pixels, both ways.
    pub fn with_stride(mut self, stride: usize) -> Self {
        self.stride = stride;
        self
    }

    /// Sets the zero padding in pixels, on all four sides.
    pub fn with_padding(mut self, padding: usize) -> Self {
        self.padding = padding;
        self
    }

    /// Sets the number of groups, which must divide both channel counts.
    pub fn with_groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }

    /// Removes the bias, which is redundant before a batch norm.
    pub fn without_bias(mut self) -> Self {
        self.bias = false;
        self
    }

    /// Builds the layer with PyTorch's default weights.
    pub fn init(self, init: &Init) -> Conv2d {
        let [input, output] = self.channels;
        let group_input = input / self.groups;
        let fan_in = group_input * self.kernel * self.kernel;
        Conv2d {
            weight: init.fan_in_uniform("weight", [output, group_input, self.kernel, self.kernel], fan_in),
            bias: self.bias.then(|| init.fan_in_uniform("bias", [output], fan_in)),
            stride: self.stride,
            padding: self.padding,
            groups: self.groups,
        }
    }
}

/// Cross-correlation of `[B, C, H, W]` images with a square kernel.
#[derive(Module, Debug)]
pub struct Conv2d {
    /// `[out, in / groups, kernel, kernel]`.
    pub weight: Param<Tensor<4>>,
    /// `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
    stride: usize,
    padding: usize,
    groups: usize,
}

impl Conv2d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input `[B, in, H, W]`
    /// - output `[B, out, (H + 2·padding − kernel) / stride + 1, …]`
    pub fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        self.run(input, false, cx)
    }

    /// Applies [`Self::forward`] and ReLU in one pass over the output.
    pub fn forward_relu(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        self.run(input, true, cx)
    }

    fn run(&self, input: Tensor<4>, relu: bool, cx: &Context) -> Tensor<4> {
        let options =
            ConvOptions { stride: [self.stride; 2], padding: [self.padding; 2], dilation: [1, 1], groups: self.groups };
        let weight = cx.parameter(&self.weight, &input);
        let bias = self.bias.as_ref().map(|bias| cx.parameter(bias, &input));
        let output = conv2d(cx.autocast(input), weight, bias, options, relu);
        // Each output element takes one multiply-add per weight of its filter.
        let [_, group_input, kernel, _] = self.weight.dims();
        cx.add_macs(output.dims().iter().product::<usize>() * group_input * kernel * kernel);
        cx.count_activations(output)
    }
}
