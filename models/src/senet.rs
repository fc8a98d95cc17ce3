//! SENet: "Squeeze-and-Excitation Networks", Hu, Shen, Albanie, Sun & Wu, 2017, <https://arxiv.org/abs/1709.01507>.
//!
//! pytorch-cifar's variant: the blocks of a pre-activation ResNet-18, each with squeeze-and-excitation.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{PreActBlock, PreActShape, classify, conv};
use crate::layers::{BatchNorm2d, Conv2d, Linear};
use crate::{BuildError, Context, Init, Spec};
use ops::Activation;

/// Smallest image side in pixels: the last stage has more than one pixel.
const MIN_SIDE: usize = 9;
/// The paper's reduction ratio: a block's channels divided by its squeezed channels.
const REDUCTION: usize = 16;

/// SENet-18: a stem, four stages of two blocks and a linear layer.
#[derive(Module, Debug)]
pub struct SeNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layer1: Vec<PreActBlock>,
    layer2: Vec<PreActBlock>,
    layer3: Vec<PreActBlock>,
    layer4: Vec<PreActBlock>,
    linear: Linear,
}

impl SeNet {
    /// Builds SENet-18 for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 9 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("senet18", MIN_SIDE, 32)?;
        let stage = |name: &str, channels: [usize; 2], stride: usize| {
            let squeeze = Some(channels[1] / REDUCTION);
            PreActBlock::stage(PreActShape { channels, stride, squeeze }, &init.child(name))
        };
        Ok(Self {
            conv1: conv([spec.in_channels, 64], 3, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(64, &init.child("bn1")),
            layer1: stage("layer1", [64, 64], 1),
            layer2: stage("layer2", [64, 128], 2),
            layer3: stage("layer3", [128, 256], 2),
            layer4: stage("layer4", [256, 512], 2),
            linear: Linear::new([512, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let stage = |x, blocks: &[PreActBlock]| blocks.iter().fold(x, |x, block| block.forward(x, cx));
        let x = self.bn1.after(&self.conv1, images, Activation::Relu, cx).into_images(); // [B, 64, 32, 32]
        let x = stage(x, &self.layer1); // [B, 64, 32, 32]
        let x = stage(x, &self.layer2); // [B, 128, 16, 16]
        let x = stage(x, &self.layer3); // [B, 256, 8, 8]
        let x = stage(x, &self.layer4); // [B, 512, 4, 4]
        classify(x, &self.linear, cx) // [B, classes]
    }
}
