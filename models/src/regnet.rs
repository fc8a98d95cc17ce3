//! RegNet: "Designing Network Design Spaces", Radosavovic, Kosaraju, Girshick, He & Dollár, 2020,
//! <https://arxiv.org/abs/2003.13678>.
//!
//! pytorch-cifar's variant: a stem of 64 channels and stride 1. Only the last two stages halve the image.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{Bottleneck, BottleneckShape, classify, conv, sequence};
use crate::layers::{BatchNorm2d, Conv2d, Linear};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, Features};

/// Smallest image side in pixels: the last stage has more than one pixel.
const MIN_SIDE: usize = 5;

/// Network of the paper. The number is its multiply-adds for an ImageNet image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegNetSize {
    /// Groups of 8 channels.
    X200Mf,
    /// Groups of 16 channels, squeeze-and-excitation.
    Y400Mf,
}

impl RegNetSize {
    /// Returns the name in the registry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::X200Mf => "regnetx_200mf",
            Self::Y400Mf => "regnety_400mf",
        }
    }

    /// Returns the number of blocks and the channels of each stage.
    fn stages(self) -> [(usize, usize); 4] {
        match self {
            Self::X200Mf => [(1, 24), (1, 56), (4, 152), (7, 368)],
            Self::Y400Mf => [(1, 32), (2, 64), (7, 160), (12, 384)],
        }
    }

    /// Returns the channels of one group.
    fn group_width(self) -> usize {
        match self {
            Self::X200Mf => 8,
            Self::Y400Mf => 16,
        }
    }

    /// Returns a block's squeezed channels, a quarter of its input channels.
    fn squeeze(self, input: usize) -> Option<usize> {
        (self == Self::Y400Mf).then_some(input / 4)
    }
}

/// A stem, four stages of grouped bottlenecks with an expansion of one, and a linear layer.
#[derive(Module, Debug)]
pub struct RegNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layer1: Vec<Bottleneck>,
    layer2: Vec<Bottleneck>,
    layer3: Vec<Bottleneck>,
    layer4: Vec<Bottleneck>,
    linear: Linear,
}

impl RegNet {
    /// Builds the RegNet of this size for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 5 pixels.
    pub fn new(size: RegNetSize, spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side(size.name(), MIN_SIDE, 32)?;
        let mut channels = 64;
        let mut stage = |index: usize, stride: usize| {
            let (blocks, width) = size.stages()[index];
            sequence(&init.child(&format!("layer{}", index + 1)), blocks, |block, init| {
                let input = std::mem::replace(&mut channels, width);
                let shape = BottleneckShape {
                    channels: [input, width, width],
                    stride: if block == 0 { stride } else { 1 },
                    groups: width / size.group_width(),
                    squeeze: size.squeeze(input),
                };
                Bottleneck::new(shape, init)
            })
        };
        Ok(Self {
            conv1: conv([spec.in_channels, 64], 3, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(64, &init.child("bn1")),
            layer1: stage(0, 1),
            layer2: stage(1, 1),
            layer3: stage(2, 2),
            layer4: stage(3, 2),
            linear: Linear::new([size.stages()[3].1, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32 and RegNetX-200MF.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let stage = |x: Features, blocks: &[Bottleneck]| blocks.iter().fold(x, |x, block| block.forward(x, cx));
        let x = self.bn1.after(&self.conv1, images, Activation::Relu, cx); // [B, 64, 32, 32]
        let x = stage(x, &self.layer1); // [B, 24, 32, 32]
        let x = stage(x, &self.layer2); // [B, 56, 32, 32]
        let x = stage(x, &self.layer3); // [B, 152, 16, 16]
        let x = stage(x, &self.layer4); // [B, 368, 8, 8]
        classify(x, &self.linear, cx) // [B, classes]
    }
}
