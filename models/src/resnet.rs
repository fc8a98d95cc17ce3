//! ResNet: "Deep Residual Learning for Image Recognition", He, Zhang, Ren & Sun, 2015,
//! <https://arxiv.org/abs/1512.03385>.
//!
//! pytorch-cifar's variant: a 3x3 stem of stride 1 without pooling, so the first stage has the image's resolution.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{BasicBlock, Bottleneck, BottleneckShape, ShortcutName, classify, conv, sequence};
use crate::layers::{BatchNorm2d, Conv2d, Linear};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, Features};

/// Smallest image side in pixels: the last stage has more than one pixel. With a single pixel, batch norm could not be
/// trained on a batch of one image.
const MIN_SIDE: usize = 9;

/// Depth in layers, as in the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResNetDepth {
    /// Basic blocks, 2-2-2-2.
    ResNet18,
    /// Basic blocks, 3-4-6-3.
    ResNet34,
    /// Bottlenecks, 3-4-6-3.
    ResNet50,
    /// Bottlenecks, 3-4-23-3.
    ResNet101,
    /// Bottlenecks, 3-8-36-3.
    ResNet152,
}

impl ResNetDepth {
    /// Returns the name in the registry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ResNet18 => "resnet18",
            Self::ResNet34 => "resnet34",
            Self::ResNet50 => "resnet50",
            Self::ResNet101 => "resnet101",
            Self::ResNet152 => "resnet152",
        }
    }

    /// Returns the number of blocks in each of the four stages.
    fn stages(self) -> [usize; 4] {
        match self {
            Self::ResNet18 => [2, 2, 2, 2],
            Self::ResNet34 | Self::ResNet50 => [3, 4, 6, 3],
            Self::ResNet101 => [3, 4, 23, 3],
            Self::ResNet152 => [3, 8, 36, 3],
        }
    }

    /// Returns a block's output channels divided by its width.
    pub(crate) fn expansion(self) -> usize {
        match self {
            Self::ResNet18 | Self::ResNet34 => 1,
            Self::ResNet50 | Self::ResNet101 | Self::ResNet152 => 4,
        }
    }
}

/// A residual block.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "a network's blocks are all of the same kind")]
pub(crate) enum Block {
    Basic(BasicBlock),
    Bottleneck(Bottleneck),
}

impl Block {
    fn forward(&self, input: Features, cx: &Context) -> Features {
        match self {
            Self::Basic(block) => block.forward(input, cx),
            Self::Bottleneck(block) => block.forward(input, cx),
        }
    }
}

/// Builds `layer1` to `layer4` for features of 64 channels. All stages but the first halve the image.
pub(crate) fn stages(depth: ResNetDepth, name: ShortcutName, init: &Init) -> [Vec<Block>; 4] {
    let expansion = depth.expansion();
    let mut channels = 64;
    let mut stage = |index: usize| -> Vec<Block> {
        let width = 64 << index;
        sequence(&init.child(&format!("layer{}", index + 1)), depth.stages()[index], |block, init| {
            let stride = if block == 0 && index > 0 { 2 } else { 1 };
            let output = width * expansion;
            let input = std::mem::replace(&mut channels, output);
            if expansion == 1 {
                return Block::Basic(BasicBlock::with_shortcut(name, [input, width], stride, init));
            }
            let shape = BottleneckShape { channels: [input, width, output], stride, groups: 1, squeeze: None };
            Block::Bottleneck(Bottleneck::with_shortcut(name, shape, init))
        })
    };
    [stage(0), stage(1), stage(2), stage(3)]
}

/// Applies the blocks of a stage in order.
pub(crate) fn run_stage(blocks: &[Block], x: impl Into<Features>, cx: &Context) -> Features {
    blocks.iter().fold(x.into(), |x, block| block.forward(x, cx))
}

/// A stem, four stages of residual blocks and a linear layer.
#[derive(Module, Debug)]
pub struct ResNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layer1: Vec<Block>,
    layer2: Vec<Block>,
    layer3: Vec<Block>,
    layer4: Vec<Block>,
    linear: Linear,
}

impl ResNet {
    /// Builds the ResNet of this depth for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 9 pixels.
    pub fn new(depth: ResNetDepth, spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side(depth.name(), MIN_SIDE, 32)?;
        let [layer1, layer2, layer3, layer4] = stages(depth, ShortcutName::Shortcut, init);
        Ok(Self {
            conv1: conv([spec.in_channels, 64], 3, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(64, &init.child("bn1")),
            layer1,
            layer2,
            layer3,
            layer4,
            linear: Linear::new([512 * depth.expansion(), spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32 and ResNet-18 or 34; the
    /// deeper networks have four times the channels after each stage.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.bn1.after(&self.conv1, images, Activation::Relu, cx); // [B, 64, 32, 32]
        let x = run_stage(&self.layer1, x, cx); // [B, 64, 32, 32]
        let x = run_stage(&self.layer2, x, cx); // [B, 128, 16, 16]
        let x = run_stage(&self.layer3, x, cx); // [B, 256, 8, 8]
        let x = run_stage(&self.layer4, x, cx); // [B, 512, 4, 4]
        classify(x, &self.linear, cx) // [B, classes]
    }
}
