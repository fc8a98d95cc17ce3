//! ShuffleNetV2: "ShuffleNet V2: Practical Guidelines for Efficient CNN Architecture Design", Ma, Zhang, Zheng & Sun,
//! 2018, <https://arxiv.org/abs/1807.11164>.
//!
//! pytorch-cifar's variant: a stem of stride 1 without pooling.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{classify, conv, depthwise, sequence};
use crate::layers::{BatchNorm2d, Conv2d, Linear};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, interleave, slice_channels};

/// Smallest image side in pixels: the last stage has more than one pixel.
const MIN_SIDE: usize = 9;
/// Basic blocks of each stage. They follow the stage's first block, which halves the image.
const BLOCKS: [usize; 3] = [3, 7, 3];

/// Width multiplier of the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShuffleNetSize {
    /// 0.5
    X0_5,
    /// 1
    X1,
    /// 1.5
    X1_5,
    /// 2
    X2,
}

impl ShuffleNetSize {
    /// Returns the name in the registry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::X0_5 => "shufflenetv2_x0_5",
            Self::X1 => "shufflenetv2_x1",
            Self::X1_5 => "shufflenetv2_x1_5",
            Self::X2 => "shufflenetv2_x2",
        }
    }

    /// Returns the channels of the three stages and of the last convolution.
    fn widths(self) -> [usize; 4] {
        match self {
            Self::X0_5 => [48, 96, 192, 1024],
            Self::X1 => [116, 232, 464, 1024],
            Self::X1_5 => [176, 352, 704, 1024],
            Self::X2 => [224, 488, 976, 2048],
        }
    }
}

/// Three convolutions over half of the channels. The other half is passed on unchanged.
#[derive(Module, Debug)]
struct Basic {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    conv3: Conv2d,
    bn3: BatchNorm2d,
}

impl Basic {
    fn new(width: usize, init: &Init) -> Self {
        let half = width / 2;
        Self {
            conv1: conv([half; 2], 1, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(half, &init.child("bn1")),
            conv2: depthwise(half, 3, 1, &init.child("conv2")),
            bn2: BatchNorm2d::new(half, &init.child("bn2")),
            conv3: conv([half; 2], 1, 1, &init.child("conv3")),
            bn3: BatchNorm2d::new(half, &init.child("bn3")),
        }
    }

    /// `[B, width, H, W]` → `[B, width, H, W]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let width = input.dims()[1];
        let (identity, x) = (slice_channels(input.clone(), 0..width / 2), slice_channels(input, width / 2..width));
        let x = self.bn1.after(&self.conv1, x, Activation::Relu, cx);
        let x = self.bn2.after(&self.conv2, x, Activation::Identity, cx);
        let x = self.bn3.after(&self.conv3, x, Activation::Relu, cx);
        cx.count_activations(interleave(identity, x.into_images()))
    }
}

/// Two parallel branches that halve the image.
#[derive(Module, Debug)]
struct Down {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    conv3: Conv2d,
    bn3: BatchNorm2d,
    conv4: Conv2d,
    bn4: BatchNorm2d,
    conv5: Conv2d,
    bn5: BatchNorm2d,
}

impl Down {
    fn new([input, width]: [usize; 2], init: &Init) -> Self {
        let half = width / 2;
        Self {
            conv1: depthwise(input, 3, 2, &init.child("conv1")),
            bn1: BatchNorm2d::new(input, &init.child("bn1")),
            conv2: conv([input, half], 1, 1, &init.child("conv2")),
            bn2: BatchNorm2d::new(half, &init.child("bn2")),
            conv3: conv([input, half], 1, 1, &init.child("conv3")),
            bn3: BatchNorm2d::new(half, &init.child("bn3")),
            conv4: depthwise(half, 3, 2, &init.child("conv4")),
            bn4: BatchNorm2d::new(half, &init.child("bn4")),
            conv5: conv([half; 2], 1, 1, &init.child("conv5")),
            bn5: BatchNorm2d::new(half, &init.child("bn5")),
        }
    }

    /// `[B, input, H, W]` → `[B, width, H / 2, W / 2]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let left = self.bn1.after(&self.conv1, input.clone(), Activation::Identity, cx);
        let left = self.bn2.after(&self.conv2, left, Activation::Relu, cx);
        let right = self.bn3.after(&self.conv3, input, Activation::Relu, cx);
        let right = self.bn4.after(&self.conv4, right, Activation::Identity, cx);
        let right = self.bn5.after(&self.conv5, right, Activation::Relu, cx);
        cx.count_activations(interleave(left.into_images(), right.into_images()))
    }
}

#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "sixteen of them, beside megabytes of weights")]
enum Block {
    Down(Down),
    Basic(Basic),
}

impl Block {
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        match self {
            Self::Down(block) => block.forward(input, cx),
            Self::Basic(block) => block.forward(input, cx),
        }
    }
}

/// A stem, three stages, a 1x1 convolution and a linear layer.
#[derive(Module, Debug)]
pub struct ShuffleNetV2 {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layer1: Vec<Block>,
    layer2: Vec<Block>,
    layer3: Vec<Block>,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    linear: Linear,
}

impl ShuffleNetV2 {
    /// Builds the ShuffleNetV2 of this size for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 9 pixels.
    pub fn new(size: ShuffleNetSize, spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side(size.name(), MIN_SIDE, 32)?;
        let [first, second, third, last] = size.widths();
        let stage = |index: usize, [input, width]: [usize; 2]| {
            sequence(&init.child(&format!("layer{}", index + 1)), 1 + BLOCKS[index], |block, init| match block {
                0 => Block::Down(Down::new([input, width], init)),
                _ => Block::Basic(Basic::new(width, init)),
            })
        };
        Ok(Self {
            conv1: conv([spec.in_channels, 24], 3, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(24, &init.child("bn1")),
            layer1: stage(0, [24, first]),
            layer2: stage(1, [first, second]),
            layer3: stage(2, [second, third]),
            conv2: conv([third, last], 1, 1, &init.child("conv2")),
            bn2: BatchNorm2d::new(last, &init.child("bn2")),
            linear: Linear::new([last, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32 and size 1.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let stage = |x, blocks: &[Block]| blocks.iter().fold(x, |x, block| block.forward(x, cx));
        let x = self.bn1.after(&self.conv1, images, Activation::Relu, cx).into_images(); // [B, 24, 32, 32]
        let x = stage(x, &self.layer1); // [B, 116, 16, 16]
        let x = stage(x, &self.layer2); // [B, 232, 8, 8]
        let x = stage(x, &self.layer3); // [B, 464, 4, 4]
        let x = self.bn2.after(&self.conv2, x, Activation::Relu, cx).into_images(); // [B, 1024, 4, 4]
        classify(x, &self.linear, cx) // [B, classes]
    }
}
