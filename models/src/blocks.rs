//! Blocks that several model families share. Fields have PyTorch's names and its registration order.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::layers::{BatchNorm2d, Conv2d, Conv2dConfig, Linear, global_avg_pool};
use crate::{Context, Init};
use ops::{Activation, Features};

/// Builds a convolution without bias and with a padding of `kernel / 2`. `channels` are `[input, output]`.
pub(crate) fn conv(channels: [usize; 2], kernel: usize, stride: usize, init: &Init) -> Conv2d {
    grouped(channels, kernel, stride, 1, init)
}

/// Builds a [`conv`] with `groups` groups.
pub(crate) fn grouped(channels: [usize; 2], kernel: usize, stride: usize, groups: usize, init: &Init) -> Conv2d {
    Conv2dConfig::new(channels, kernel)
        .with_stride(stride)
        .with_padding(kernel / 2)
        .with_groups(groups)
        .without_bias()
        .init(init)
}

/// Builds a depthwise [`conv`]: one filter per channel.
pub(crate) fn depthwise(channels: usize, kernel: usize, stride: usize, init: &Init) -> Conv2d {
    grouped([channels; 2], kernel, stride, channels, init)
}

/// Builds the `blocks` entries of an `nn.Sequential`. Each is named by its index.
pub(crate) fn sequence<B>(init: &Init, blocks: usize, mut make: impl FnMut(usize, &Init) -> B) -> Vec<B> {
    (0..blocks).map(|index| make(index, &init.child(&index.to_string()))).collect()
}

/// Applies global average pooling and the linear layer, the classifier of most networks: features `[B, C, H, W]` → logits
/// `[B, classes]`.
///
/// pytorch-cifar pools with a fixed window (4x4 in most networks). The result is equal for its 32x32 images.
pub(crate) fn classify(features: impl Into<Features>, linear: &Linear, cx: &Context) -> Tensor<2> {
    linear.forward(global_avg_pool(features), cx)
}

/// A convolution and a batch norm, entries `0` and `1` of an `nn.Sequential`.
pub(crate) type ConvNorm = (Conv2d, BatchNorm2d);

/// Builds a [`conv`] and a batch norm.
pub(crate) fn conv_norm(channels: [usize; 2], kernel: usize, stride: usize, init: &Init) -> ConvNorm {
    (conv(channels, kernel, stride, &init.child("0")), BatchNorm2d::new(channels[1], &init.child("1")))
}

/// Applies convolution, batch norm and ReLU.
pub(crate) fn conv_norm_relu((conv, norm): &ConvNorm, input: impl Into<Features>, cx: &Context) -> Features {
    norm.after(conv, input, Activation::Relu, cx)
}

/// The shortcut branch of a residual block: a strided 1x1 convolution and a batch norm, for example `shortcut.0` and
/// `shortcut.1`. `None` is the identity.
pub(crate) type Shortcut = Option<ConvNorm>;

/// Name of a block's shortcut branch in the state dict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShortcutName {
    /// `shortcut`, pytorch-cifar's.
    Shortcut,
    /// `downsample`, torchvision's.
    Downsample,
}

/// Builds the values of a block's fields `shortcut` and `downsample`. `name` selects the field that is used; the other one is
/// `None`. The used field has a convolution where the block changes the number of channels or the image size.
fn shortcuts(name: ShortcutName, channels: [usize; 2], stride: usize, init: &Init) -> [Shortcut; 2] {
    let projects = stride != 1 || channels[0] != channels[1];
    let made = |name| projects.then(|| conv_norm(channels, 1, stride, &init.child(name)));
    match name {
        ShortcutName::Shortcut => [made("shortcut"), None],
        ShortcutName::Downsample => [None, made("downsample")],
    }
}

/// Applies the shortcut branch. The block adds the result to the output of its last batch norm.
pub(crate) fn apply_shortcut(shortcut: Option<&ConvNorm>, input: Tensor<4>, cx: &Context) -> Features {
    match shortcut {
        Some((conv, norm)) => norm.after(conv, input, Activation::Identity, cx),
        None => input.into(),
    }
}

/// ResNet's basic block: two 3x3 convolutions and a shortcut.
#[derive(Module, Debug)]
pub(crate) struct BasicBlock {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    shortcut: Shortcut,
    downsample: Shortcut,
}

impl BasicBlock {
    pub(crate) fn new(channels: [usize; 2], stride: usize, init: &Init) -> Self {
        Self::with_shortcut(ShortcutName::Shortcut, channels, stride, init)
    }

    /// Builds the block. `name` is the name of its shortcut branch in the state dict.
    pub(crate) fn with_shortcut(name: ShortcutName, [input, width]: [usize; 2], stride: usize, init: &Init) -> Self {
        let [shortcut, downsample] = shortcuts(name, [input, width], stride, init);
        Self {
            conv1: conv([input, width], 3, stride, &init.child("conv1")),
            bn1: BatchNorm2d::new(width, &init.child("bn1")),
            conv2: conv([width, width], 3, 1, &init.child("conv2")),
            bn2: BatchNorm2d::new(width, &init.child("bn2")),
            shortcut,
            downsample,
        }
    }

    /// `[B, input, H, W]` → `[B, width, H / stride, W / stride]`.
    pub(crate) fn forward(&self, input: impl Into<Features>, cx: &Context) -> Features {
        let input = input.into().into_images();
        let x = self.bn1.after(&self.conv1, input.clone(), Activation::Relu, cx);
        let shortcut = self.shortcut.as_ref().or(self.downsample.as_ref());
        self.bn2.after_add(&self.conv2, x, || apply_shortcut(shortcut, input, cx), Activation::Relu, cx)
    }
}

/// The shape of a [`Bottleneck`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct BottleneckShape {
    /// Channels of the input, of the inner features and of the output.
    pub(crate) channels: [usize; 3],
    /// Stride of the 3x3 convolution.
    pub(crate) stride: usize,
    /// Groups of the 3x3 convolution.
    pub(crate) groups: usize,
    /// Squeezed channels of squeeze-and-excitation; `None` without it.
    pub(crate) squeeze: Option<usize>,
}

/// Bottleneck block: 1x1, 3x3 and 1x1 convolutions and a shortcut. ResNeXt's and RegNet's 3x3 convolution is grouped;
/// RegNetY's block has squeeze-and-excitation.
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
    downsample: Shortcut,
}

impl Bottleneck {
    pub(crate) fn new(shape: BottleneckShape, init: &Init) -> Self {
        Self::with_shortcut(ShortcutName::Shortcut, shape, init)
    }

    /// Builds the block. `name` is the name of its shortcut branch in the state dict.
    pub(crate) fn with_shortcut(name: ShortcutName, shape: BottleneckShape, init: &Init) -> Self {
        let BottleneckShape { channels: [input, width, output], stride, groups, squeeze } = shape;
        let [shortcut, downsample] = shortcuts(name, [input, output], stride, init);
        Self {
            conv1: conv([input, width], 1, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(width, &init.child("bn1")),
            conv2: grouped([width, width], 3, stride, groups, &init.child("conv2")),
            bn2: BatchNorm2d::new(width, &init.child("bn2")),
            se: squeeze.map(|squeeze| SqueezeExcite::new([width, squeeze], &init.child("se"))),
            conv3: conv([width, output], 1, 1, &init.child("conv3")),
            bn3: BatchNorm2d::new(output, &init.child("bn3")),
            shortcut,
            downsample,
        }
    }

    /// `[B, input, H, W]` → `[B, output, H / stride, W / stride]`.
    pub(crate) fn forward(&self, input: impl Into<Features>, cx: &Context) -> Features {
        let input = input.into().into_images();
        let x = self.bn1.after(&self.conv1, input.clone(), Activation::Relu, cx);
        let x = self.bn2.after(&self.conv2, x, Activation::Relu, cx);
        let x = match &self.se {
            Some(se) => se.forward(x.into_images(), ops::relu, cx).into(),
            None => x,
        };
        let shortcut = self.shortcut.as_ref().or(self.downsample.as_ref());
        self.bn3.after_add(&self.conv3, x, || apply_shortcut(shortcut, input, cx), Activation::Relu, cx)
    }
}

/// Squeeze-and-excitation with the names `se1` and `se2`; see [`squeeze_excite`].
#[derive(Module, Debug)]
pub(crate) struct SqueezeExcite {
    se1: Conv2d,
    se2: Conv2d,
}

impl SqueezeExcite {
    /// `[wide, narrow]` are the channels of the block and the squeezed channels.
    pub(crate) fn new([wide, narrow]: [usize; 2], init: &Init) -> Self {
        Self {
            se1: Conv2dConfig::new([wide, narrow], 1).init(&init.child("se1")),
            se2: Conv2dConfig::new([narrow, wide], 1).init(&init.child("se2")),
        }
    }

    /// `[B, wide, H, W]` → `[B, wide, H, W]`. `activation` is applied between the two layers.
    pub(crate) fn forward(&self, input: Tensor<4>, activation: fn(Tensor<4>) -> Tensor<4>, cx: &Context) -> Tensor<4> {
        squeeze_excite(input, [&self.se1, &self.se2], activation, cx)
    }
}

/// Applies squeeze-and-excitation, Hu, Shen, Albanie, Sun & Wu, 2017, <https://arxiv.org/abs/1709.01507>.
///
/// Two layers compute a factor between 0 and 1 for each channel from the means of all channels. The result is the input
/// `[B, C, H, W]` scaled by these factors.
pub(crate) fn squeeze_excite(
    input: Tensor<4>,
    [narrow, wide]: [&Conv2d; 2],
    activation: fn(Tensor<4>) -> Tensor<4>,
    cx: &Context,
) -> Tensor<4> {
    let means = ops::unflatten(global_avg_pool(input.clone())); // [B, C, 1, 1]
    let x = activation(narrow.forward(means, cx)); // [B, narrow, 1, 1]
    let x = ops::flatten(wide.forward(x, cx)); // [B, C]
    cx.count_activations(ops::scale_channels(input, ops::sigmoid(x)))
}

/// The shape of a [`PreActBlock`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreActShape {
    /// Channels of the input and of the output.
    pub(crate) channels: [usize; 2],
    /// Stride of the first convolution.
    pub(crate) stride: usize,
    /// Squeezed channels of squeeze-and-excitation; `None` without it.
    pub(crate) squeeze: Option<usize>,
}

/// Pre-activation block: two 3x3 convolutions, each preceded by batch norm and ReLU. PreActResNet's block and, with
/// squeeze-and-excitation (`fc1`, `fc2`), SENet's.
#[derive(Module, Debug)]
pub(crate) struct PreActBlock {
    bn1: BatchNorm2d,
    conv1: Conv2d,
    bn2: BatchNorm2d,
    conv2: Conv2d,
    /// Empty, or one convolution: PyTorch's `shortcut.0`.
    shortcut: Vec<Conv2d>,
    fc1: Option<Conv2d>,
    fc2: Option<Conv2d>,
}

impl PreActBlock {
    /// Builds a stage of the 18-layer networks: two blocks, of which the first may change the channels and the image size.
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
        let skip = match self.shortcut.first() {
            Some(conv) => conv.forward(x.clone(), cx),
            None => input,
        };
        let x = self.conv2.forward(self.bn2.after(&self.conv1, x, Activation::Relu, cx), cx);
        let x = match (&self.fc1, &self.fc2) {
            (Some(fc1), Some(fc2)) => squeeze_excite(x, [fc1, fc2], ops::relu, cx),
            _ => x,
        };
        cx.count_activations(ops::add(x, skip))
    }
}
