//! Two-dimensional convolution, `torch.nn.Conv2d`.

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};

use super::{Buffer, Weight};
use crate::{Context, Init};
use ops::{
    Activation, ConvNormOutput, ConvOptions, Features, FollowingNorm, conv_batch_norm, conv2d, fuses_batch_norm,
};

/// Options of a [`Conv2d`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy)]
pub struct Conv2dConfig {
    channels: [usize; 2],
    kernel: usize,
    stride: usize,
    padding: usize,
    groups: usize,
    bias: bool,
    identity: bool,
}

impl Conv2dConfig {
    /// Options for `[input, output]` channels and a square kernel: stride 1, no padding, one group, with a bias.
    pub fn new(channels: [usize; 2], kernel: usize) -> Self {
        Self { channels, kernel, stride: 1, padding: 0, groups: 1, bias: true, identity: false }
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

    /// Makes the first filters pass on the input channels, each filter one channel, `torch.nn.init.dirac_(weight[:input])`. The
    /// other filters keep their default weights. Only for one group.
    pub fn with_identity(mut self) -> Self {
        self.identity = true;
        self
    }

    /// Builds the layer with PyTorch's default weights.
    pub fn init(self, init: &Init) -> Conv2d {
        let [input, output] = self.channels;
        let group_input = input / self.groups;
        let fan_in = group_input * self.kernel * self.kernel;
        let shape = [output, group_input, self.kernel, self.kernel];
        Conv2d {
            weight: match self.identity {
                true => init.identity("weight", shape, fan_in),
                false => init.fan_in_uniform("weight", shape, fan_in),
            },
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
    pub weight: Weight<4>,
    /// `[out]`.
    pub bias: Option<Weight<1>>,
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
    pub fn forward(&self, input: impl Into<Features>, cx: &Context) -> Tensor<4> {
        self.run(input.into(), false, cx)
    }

    /// Applies [`Self::forward`] and ReLU in one pass over the output.
    pub fn forward_relu(&self, input: impl Into<Features>, cx: &Context) -> Tensor<4> {
        self.run(input.into(), true, cx)
    }

    fn run(&self, input: Features, relu: bool, cx: &Context) -> Tensor<4> {
        // A network omits the bias only if a batch norm follows. If a pooling, sum or concatenation is in between, the batch norm
        // does not use the moments that the convolution's kernel computes.
        let norm_follows = cx.training() && self.bias.is_none() && !relu;
        let weight = cx.parameter(&self.weight, input.source());
        let bias = self.bias.as_ref().map(|bias| cx.parameter(bias, input.source()));
        convolve(input, weight, bias, self.options(norm_follows), relu, cx)
    }

    fn options(&self, norm_follows: bool) -> ConvOptions {
        ConvOptions {
            stride: [self.stride; 2],
            padding: [self.padding; 2],
            dilation: [1, 1],
            groups: self.groups,
            norm_follows,
        }
    }

    /// Applies [`Self::forward`] and a batch norm in training mode as one operation, where the GPU's kernels support this;
    /// otherwise returns the input. `norm` returns the batch norm for an input.
    #[expect(clippy::result_large_err, reason = "not an error: the input goes back to the caller")]
    pub(super) fn forward_norm(
        &self,
        input: Features,
        activation: Activation,
        norm: impl FnOnce(&Tensor<4>) -> FollowingNorm,
        cx: &Context,
    ) -> Result<ConvNormOutput, Features> {
        let input = input.map_images(|images| cx.autocast(images));
        let (options, weight) = (self.options(true), self.weight.value().dims());
        if self.bias.is_some() || !fuses_batch_norm(&input, weight, &options, activation) {
            return Err(input);
        }
        let (weight, norm) = (cx.parameter(&self.weight, input.source()), norm(input.source()));
        Ok(conv_batch_norm(input, weight, options, norm))
    }
}

/// Applies a convolution in the context's precision and counts its cost.
fn convolve(
    input: Features,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    options: ConvOptions,
    relu: bool,
    cx: &Context,
) -> Tensor<4> {
    // Each output element takes one multiply-add per weight of its filter.
    let filter: usize = weight.dims()[1..].iter().product();
    let input = input.map_images(|images| cx.autocast(images));
    let output = conv2d(input, weight, bias, options, relu);
    cx.add_macs(output.dims().iter().product::<usize>() * filter);
    cx.count_activations(output)
}

/// A convolution of stride 1 without padding whose weight is not trained: `torch.nn.Conv2d` with `weight.requires_grad =
/// False`. Its bias is trained.
#[derive(Module, Debug)]
pub struct FrozenConv2d {
    /// `[out, in, kernel, kernel]`, frozen.
    pub weight: Buffer<4>,
    /// `[out]`.
    pub bias: Weight<1>,
}

impl FrozenConv2d {
    /// Builds the layer with PyTorch's default weight and a bias of 0. `channels` are `[input, output]`.
    pub fn new([input, output]: [usize; 2], kernel: usize, init: &Init) -> Self {
        let weight = init.fan_in_uniform("weight", [output, input, kernel, kernel], input * kernel * kernel);
        Self { weight: Buffer::frozen(weight.value()), bias: init.constant("bias", output, 0.0) }
    }

    /// Replaces the weight by `values`, in row-major order.
    ///
    /// # Panics
    ///
    /// When there are more or fewer values than the weight has.
    pub fn with_weight(self, values: Vec<f32>) -> Self {
        let old = self.weight.value();
        self.weight.set(Tensor::from_data(TensorData::new(values, old.dims()), &old.device()));
        self
    }

    /// Applies the layer. `[B, in, H, W]` → `[B, out, H − kernel + 1, W − kernel + 1]`.
    pub fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let options = ConvOptions::stride_one(1);
        let bias = cx.parameter(&self.bias, &input);
        convolve(input.into(), self.weight.value(), Some(bias), options, false, cx)
    }
}
