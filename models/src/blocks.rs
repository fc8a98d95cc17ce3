//! Parts that several families share. Fields are in PyTorch's order of registration and have its names.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::layers::{BatchNorm2d, Conv2d, Conv2dConfig, Linear, global_avg_pool};
use crate::{Context, Init};

/// A convolution without bias, "same" padding.
pub(crate) fn conv(channels: [usize; 2], kernel: usize, stride: usize, init: &Init) -> Conv2d {
    grouped(channels, kernel, stride, 1, init)
}

/// [`conv`] in groups of channels that do not see each other.
pub(crate) fn grouped(channels: [usize; 2], kernel: usize, stride: usize, groups: usize, init: &Init) -> Conv2d {
    Conv2dConfig::new(channels, kernel)
        .with_stride(stride)
        .with_padding(kernel / 2)
        .with_groups(groups)
        .without_bias()
        .init(init)
}

/// [`conv`] with a filter of its own for each channel.
pub(crate) fn depthwise(channels: usize, kernel: usize, stride: usize, init: &Init) -> Conv2d {
    grouped([channels; 2], kernel, stride, channels, init)
}

/// `blocks` parts of an `nn.Sequential`, named by their position.
pub(crate) fn sequence<B>(init: &Init, blocks: usize, mut make: impl FnMut(usize, &Init) -> B) -> Vec<B> {
    (0..blocks).map(|index| make(index, &init.child(&index.to_string()))).collect()
}

/// Mean over the pixels, then the linear layer: the end of most networks.
///
/// pytorch-cifar pools by a fixed window (4x4 as a rule), which is the same for the 32x32 images it is made for.
pub(crate) fn classify(features: Tensor<4>, linear: &Linear, cx: &Context) -> Tensor<2> {
    linear.forward(global_avg_pool(features), cx)
}

/// Convolution and batch norm as entries `0` and `1` of an `nn.Sequential`.
pub(crate) type ConvNorm = (Conv2d, BatchNorm2d);

/// [`conv`] and a batch norm.
pub(crate) fn conv_norm(channels: [usize; 2], kernel: usize, stride: usize, init: &Init) -> ConvNorm {
    (conv(channels, kernel, stride, &init.child("0")), BatchNorm2d::new(channels[1], &init.child("1")))
}

/// Convolution, batch norm, ReLU.
pub(crate) fn conv_norm_relu((conv, norm): &ConvNorm, input: Tensor<4>, cx: &Context) -> Tensor<4> {
    norm.forward_relu(conv.forward(input, cx), cx)
}

/// The identity where shapes agree, else a strided 1x1 convolution and batch norm: PyTorch's `shortcut.0`, `shortcut.1`.
pub(crate) type Shortcut = Option<ConvNorm>;

/// The [`Shortcut`] of a block that changes channels or size.
pub(crate) fn shortcut(channels: [usize; 2], stride: usize, init: &Init) -> Shortcut {
    (stride != 1 || channels[0] != channels[1]).then(|| conv_norm(channels, 1, stride, &init.child("shortcut")))
}

/// The way around a block.
pub(crate) fn residual(shortcut: &Shortcut, input: Tensor<4>, cx: &Context) -> Tensor<4> {
    match shortcut {
        Some((conv, norm)) => norm.forward(conv.forward(input, cx), cx),
        None => input,
    }
}

/// Two 3x3 convolutions and a way around them.
#[derive(Module, Debug)]
pub(crate) struct BasicBlock {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    shortcut: Shortcut,
}

impl BasicBlock {
    pub(crate) fn new([input, width]: [usize; 2], stride: usize, init: &Init) -> Self {
        Self {
            conv1: conv([input, width], 3, stride, &init.child("conv1")),
            bn1: BatchNorm2d::new(width, &init.child("bn1")),
            conv2: conv([width, width], 3, 1, &init.child("conv2")),
            bn2: BatchNorm2d::new(width, &init.child("bn2")),
            shortcut: shortcut([input, width], stride, init),
        }
    }

    /// `[B, input, H, W]` → `[B, width, H / stride, W / stride]`.
    pub(crate) fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = self.bn1.forward_relu(self.conv1.forward(input.clone(), cx), cx);
        let x = self.conv2.forward(x, cx);
        self.bn2.forward_add_relu(x, residual(&self.shortcut, input, cx), cx)
    }
}

/// The shape of a [`Bottleneck`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct BottleneckShape {
    /// Channels of input, inside and output.
    pub(crate) channels: [usize; 3],
    /// Of the 3x3 convolution.
    pub(crate) stride: usize,
    /// Of the 3x3 convolution.
    pub(crate) groups: usize,
    /// Channels to which squeeze and excitation, where there is one, narrows.
    pub(crate) squeeze: Option<usize>,
}

/// 1x1, 3x3 and 1x1 convolutions and a way around them: ResNet's, ResNeXt's (grouped) and RegNet's (grouped, with
/// squeeze and excitation in the Y variant).
#[derive(Module, Debug)]
pub(crate) struct Bottleneck {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    se: Option<SqueezeExcite>,
    conv3: Conv2d,
    bn3: BatchNorm2d,
    shortcut: Shortcut,
}

impl Bottleneck {
    pub(crate) fn new(shape: BottleneckShape, init: &Init) -> Self {
        let BottleneckShape { channels: [input, width, output], stride, groups, squeeze } = shape;
        Self {
            conv1: conv([input, width], 1, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(width, &init.child("bn1")),
            conv2: grouped([width, width], 3, stride, groups, &init.child("conv2")),
            bn2: BatchNorm2d::new(width, &init.child("bn2")),
            se: squeeze.map(|squeeze| SqueezeExcite::new([width, squeeze], &init.child("se"))),
            conv3: conv([width, output], 1, 1, &init.child("conv3")),
            bn3: BatchNorm2d::new(output, &init.child("bn3")),
            shortcut: shortcut([input, output], stride, init),
        }
    }

    /// `[B, input, H, W]` → `[B, output, H / stride, W / stride]`.
    pub(crate) fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = self.bn1.forward_relu(self.conv1.forward(input.clone(), cx), cx);
        let x = self.bn2.forward_relu(self.conv2.forward(x, cx), cx);
        let x = match &self.se {
            Some(se) => se.forward(x, ops::relu, cx),
            None => x,
        };
        let x = self.conv3.forward(x, cx);
        self.bn3.forward_add_relu(x, residual(&self.shortcut, input, cx), cx)
    }
}

/// Squeeze and excitation with PyTorch's names `se1` and `se2`; see [`squeeze_excite`].
#[derive(Module, Debug)]
pub(crate) struct SqueezeExcite {
    se1: Conv2d,
    se2: Conv2d,
}

impl SqueezeExcite {
    /// `[wide, narrow]` channels.
    pub(crate) fn new([wide, narrow]: [usize; 2], init: &Init) -> Self {
        Self {
            se1: Conv2dConfig::new([wide, narrow], 1).init(&init.child("se1")),
            se2: Conv2dConfig::new([narrow, wide], 1).init(&init.child("se2")),
        }
    }

    /// `activation` stands between the two layers; the shape stays.
    pub(crate) fn forward(&self, input: Tensor<4>, activation: fn(Tensor<4>) -> Tensor<4>, cx: &Context) -> Tensor<4> {
        squeeze_excite(input, [&self.se1, &self.se2], activation, cx)
    }
}

/// Squeeze and excitation, Hu, Shen & Sun, 2017, <https://arxiv.org/abs/1709.01507>: each channel of `[B, C, H, W]` is
/// multiplied by a number between 0 and 1 that two layers compute from the means of all channels.
pub(crate) fn squeeze_excite(
    input: Tensor<4>,
    [narrow, wide]: [&Conv2d; 2],
    activation: fn(Tensor<4>) -> Tensor<4>,
    cx: &Context,
) -> Tensor<4> {
    let [batch, channels, _, _] = input.dims();
    let means = global_avg_pool(input.clone()).reshape([batch, channels, 1, 1]);
    let x = activation(narrow.forward(means, cx)); // [B, narrow, 1, 1]
    let x = wide.forward(x, cx).reshape([batch, channels]);
    cx.wrote(ops::scale_channels(input, ops::sigmoid(x)))
}

/// The shape of a [`PreActBlock`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreActShape {
    /// Channels of input and output.
    pub(crate) channels: [usize; 2],
    /// Of the first convolution.
    pub(crate) stride: usize,
    /// Squeeze and excitation to that many channels.
    pub(crate) squeeze: Option<usize>,
}

/// Two 3x3 convolutions, each behind its batch norm and ReLU: PreActResNet's block and, with squeeze and excitation
/// (`fc1`, `fc2`), SENet's.
#[derive(Module, Debug)]
pub(crate) struct PreActBlock {
    bn1: BatchNorm2d,
    conv1: Conv2d,
    bn2: BatchNorm2d,
    conv2: Conv2d,
    /// None or one convolution: PyTorch's `shortcut.0`.
    shortcut: Vec<Conv2d>,
    fc1: Option<Conv2d>,
    fc2: Option<Conv2d>,
}

impl PreActBlock {
    /// Two blocks, the first of which may stride and change the channels: a stage of the networks with eighteen layers.
    pub(crate) fn stage(shape: PreActShape, init: &Init) -> Vec<Self> {
        let rest = PreActShape { channels: [shape.channels[1]; 2], stride: 1, ..shape };
        sequence(init, 2, |block, init| Self::new(if block == 0 { shape } else { rest }, init))
    }

    pub(crate) fn new(shape: PreActShape, init: &Init) -> Self {
        let PreActShape { channels: [input, width], stride, squeeze } = shape;
        let projects = usize::from(stride != 1 || input != width);
        let excite = |name: &str, channels: [usize; 2]| Conv2dConfig::new(channels, 1).init(&init.child(name));
        Self {
            bn1: BatchNorm2d::new(input, &init.child("bn1")),
            conv1: conv([input, width], 3, stride, &init.child("conv1")),
            bn2: BatchNorm2d::new(width, &init.child("bn2")),
            conv2: conv([width, width], 3, 1, &init.child("conv2")),
            shortcut: sequence(&init.child("shortcut"), projects, |_, init| conv([input, width], 1, stride, init)),
            fc1: squeeze.map(|narrow| excite("fc1", [width, narrow])),
            fc2: squeeze.map(|narrow| excite("fc2", [narrow, width])),
        }
    }

    /// `[B, input, H, W]` → `[B, width, H / stride, W / stride]`.
    pub(crate) fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = self.bn1.forward_relu(input.clone(), cx);
        let around = match self.shortcut.first() {
            Some(conv) => conv.forward(x.clone(), cx),
            None => input,
        };
        let x = self.conv1.forward(x, cx);
        let x = self.conv2.forward(self.bn2.forward_relu(x, cx), cx);
        let x = match (&self.fc1, &self.fc2) {
            (Some(fc1), Some(fc2)) => squeeze_excite(x, [fc1, fc2], ops::relu, cx),
            _ => x,
        };
        cx.wrote(ops::add(x, around))
    }
}
