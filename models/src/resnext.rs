//! ResNeXt: "Aggregated Residual Transformations for Deep Neural Networks", Xie, Girshick, Dollár, Tu & He, 2016,
//! <https://arxiv.org/abs/1611.05431>.
//!
//! pytorch-cifar's variant: a 1x1 stem, and bottlenecks with an expansion of two instead of four.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{Bottleneck, BottleneckShape, classify, conv, sequence};
use crate::layers::{BatchNorm2d, Conv2d, Linear};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, Features};

/// Smallest image side in pixels: the last stage has more than one pixel.
const MIN_SIDE: usize = 5;

/// Cardinality and group width of the 29-layer network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResNeXtShape {
    /// 32 groups of 4 channels.
    X32x4,
    /// 2 groups of 64 channels.
    X2x64,
}

impl ResNeXtShape {
    /// Returns the name in the registry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::X32x4 => "resnext29_32x4d",
            Self::X2x64 => "resnext29_2x64d",
        }
    }

    /// Returns the number of groups and the channels of one group in the first stage.
    fn groups(self) -> [usize; 2] {
        match self {
            Self::X32x4 => [32, 4],
            Self::X2x64 => [2, 64],
        }
    }
}

/// A stem, three stages of three grouped bottlenecks and a linear layer.
#[derive(Module, Debug)]
pub struct ResNeXt {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layer1: Vec<Bottleneck>,
    layer2: Vec<Bottleneck>,
    layer3: Vec<Bottleneck>,
    linear: Linear,
}

impl ResNeXt {
    /// Builds the ResNeXt of this shape for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 5 pixels.
    pub fn new(shape: ResNeXtShape, spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side(shape.name(), MIN_SIDE, 32)?;
        let [groups, group_width] = shape.groups();
        let mut channels = 64;
        let mut stage = |index: usize, stride: usize| {
            let width = (groups * group_width) << index;
            sequence(&init.child(&format!("layer{}", index + 1)), 3, |block, init| {
                let input = std::mem::replace(&mut channels, 2 * width);
                let stride = if block == 0 { stride } else { 1 };
                let channels = [input, width, 2 * width];
                Bottleneck::new(BottleneckShape { channels, stride, groups, squeeze: None }, init)
            })
        };
        Ok(Self {
            conv1: conv([spec.in_channels, 64], 1, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(64, &init.child("bn1")),
            layer1: stage(0, 1),
            layer2: stage(1, 2),
            layer3: stage(2, 2),
            linear: Linear::new([groups * group_width * 8, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32, both variants.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let stage = |x: Features, blocks: &[Bottleneck]| blocks.iter().fold(x, |x, block| block.forward(x, cx));
        let x = self.bn1.after(&self.conv1, images, Activation::Relu, cx); // [B, 64, 32, 32]
        let x = stage(x, &self.layer1); // [B, 256, 32, 32]
        let x = stage(x, &self.layer2); // [B, 512, 16, 16]
        let x = stage(x, &self.layer3); // [B, 1024, 8, 8]
        classify(x, &self.linear, cx) // [B, classes]
    }
}
