//! EfficientNet: "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", Tan & Le, 2019,
//! <https://arxiv.org/abs/1905.11946>.
//!
//! pytorch-cifar's variant: a stem of stride 1, and no 1x1 convolution before the pooling. Two defects of its definition are
//! kept: the first block has an expansion (`conv1`, `bn1`) that it never uses, and the drop-connect rate is 0 in every block,
//! because the counter that determines the rate is never incremented.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{SqueezeExcite, conv, depthwise, sequence};
use crate::layers::{BatchNorm2d, Conv2d, Dropout, Linear, global_avg_pool};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, silu};

/// Smallest image side in pixels: the last stage has more than one pixel.
const MIN_SIDE: usize = 17;
/// Dropout rate before the linear layer.
const DROPOUT: f64 = 0.2;

/// Blocks of one stage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stage {
    /// Inner channels of a block divided by its input channels.
    pub(crate) expansion: usize,
    /// Output channels.
    pub(crate) width: usize,
    pub(crate) blocks: usize,
    pub(crate) kernel: usize,
    /// Stride of the first block.
    pub(crate) stride: usize,
}

const fn stage(expansion: usize, width: usize, blocks: usize, kernel: usize, stride: usize) -> Stage {
    Stage { expansion, width, blocks, kernel, stride }
}

/// Stages of B0.
pub(crate) const STAGES: [Stage; 7] = [
    stage(1, 16, 1, 3, 1),
    stage(6, 24, 2, 3, 2),
    stage(6, 40, 2, 5, 2),
    stage(6, 80, 3, 3, 2),
    stage(6, 112, 3, 5, 1),
    stage(6, 192, 4, 5, 2),
    stage(6, 320, 1, 3, 1),
];

/// The paper's MBConv: an inverted residual with squeeze-and-excitation.
#[derive(Module, Debug)]
struct MbConv {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    se: SqueezeExcite,
    conv3: Conv2d,
    bn3: BatchNorm2d,
    /// True where `conv1` and `bn1` are used.
    has_expansion: bool,
    /// True where the input is added to the output.
    has_skip: bool,
}

impl MbConv {
    fn new(input: usize, stage: Stage, stride: usize, init: &Init) -> Self {
        let width = stage.expansion * input;
        Self {
            conv1: conv([input, width], 1, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(width, &init.child("bn1")),
            conv2: depthwise(width, stage.kernel, stride, &init.child("conv2")),
            bn2: BatchNorm2d::new(width, &init.child("bn2")),
            se: SqueezeExcite::new([width, input / 4], &init.child("se")),
            conv3: conv([width, stage.width], 1, 1, &init.child("conv3")),
            bn3: BatchNorm2d::new(stage.width, &init.child("bn3")),
            has_expansion: stage.expansion > 1,
            has_skip: stride == 1 && input == stage.width,
        }
    }

    /// `[B, input, H, W]` → `[B, output, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = if self.has_expansion {
            self.bn1.after(&self.conv1, input.clone(), Activation::Silu, cx)
        } else {
            input.clone().into()
        };
        let x = self.bn2.after(&self.conv2, x, Activation::Silu, cx).into_images();
        let x = self.se.forward(x, silu, cx);
        if self.has_skip {
            self.bn3.after_add(&self.conv3, x, || input.into(), Activation::Identity, cx).into_images()
        } else {
            self.bn3.after(&self.conv3, x, Activation::Identity, cx).into_images()
        }
    }
}

/// EfficientNet-B0: a stem, sixteen MBConv blocks, dropout and a linear layer.
#[derive(Module, Debug)]
pub struct EfficientNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layers: Vec<MbConv>,
    linear: Linear,
    dropout: Dropout,
}

impl EfficientNet {
    /// Builds EfficientNet-B0 for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 17 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("efficientnet_b0", MIN_SIDE, 32)?;
        let blocks: Vec<(Stage, usize)> = STAGES
            .into_iter()
            .flat_map(|stage| (0..stage.blocks).map(move |block| (stage, if block == 0 { stage.stride } else { 1 })))
            .collect();
        let mut channels = 32;
        Ok(Self {
            conv1: conv([spec.in_channels, 32], 3, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(32, &init.child("bn1")),
            layers: sequence(&init.child("layers"), blocks.len(), |block, init| {
                let (stage, stride) = blocks[block];
                MbConv::new(std::mem::replace(&mut channels, stage.width), stage, stride, init)
            }),
            linear: Linear::new([channels, spec.num_classes], &init.child("linear")),
            dropout: Dropout::new(DROPOUT),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.bn1.after(&self.conv1, images, Activation::Silu, cx).into_images(); // [B, 32, 32, 32]
        let x = self.layers.iter().fold(x, |x, block| block.forward(x, cx)); // [B, 320, 2, 2]
        let x = self.dropout.forward(global_avg_pool(x), cx); // [B, 320]
        self.linear.forward(x, cx) // [B, classes]
    }
}
