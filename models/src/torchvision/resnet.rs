//! ResNet: "Deep Residual Learning for Image Recognition", He, Zhang, Ren & Sun, 2015,
//! <https://arxiv.org/abs/1512.03385>.
//!
//! torchvision's variant (`torchvision.models.resnet18`, …): a 7x7 stem of stride 2 and max pooling of stride 2. A bottleneck's
//! stride is in its 3x3 convolution, as in torchvision; the paper has it in the first 1x1 convolution.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{ShortcutName, classify, conv};
use crate::layers::{BatchNorm2d, Conv2d, Linear, MaxPool2d};
use crate::resnet::{Block, ResNetDepth, run_stage, stages};
use crate::{BuildError, Context, Init, Spec};
use ops::Activation;

/// Returns the name in the registry.
pub const fn imagenet_name(depth: ResNetDepth) -> &'static str {
    match depth {
        ResNetDepth::ResNet18 => "resnet18_imagenet",
        ResNetDepth::ResNet34 => "resnet34_imagenet",
        ResNetDepth::ResNet50 => "resnet50_imagenet",
        ResNetDepth::ResNet101 => "resnet101_imagenet",
        ResNetDepth::ResNet152 => "resnet152_imagenet",
    }
}

/// A stem, four stages of residual blocks and a linear layer.
#[derive(Module, Debug)]
pub struct ResNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    maxpool: MaxPool2d,
    layer1: Vec<Block>,
    layer2: Vec<Block>,
    layer3: Vec<Block>,
    layer4: Vec<Block>,
    fc: Linear,
}

impl ResNet {
    /// Builds the ResNet of this depth for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 32 pixels.
    pub fn new(depth: ResNetDepth, spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        super::require_side(imagenet_name(depth), spec)?;
        let [layer1, layer2, layer3, layer4] = stages(depth, ShortcutName::Downsample, init);
        Ok(Self {
            conv1: conv([spec.in_channels, 64], 7, 2, &init.child("conv1")),
            bn1: BatchNorm2d::new(64, &init.child("bn1")),
            maxpool: MaxPool2d::overlapping(2),
            layer1,
            layer2,
            layer3,
            layer4,
            fc: Linear::new([512 * depth.expansion(), spec.num_classes], &init.child("fc")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x224x224 and ResNet-18 or 34; the
    /// deeper networks have four times the channels after each stage.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.bn1.after(&self.conv1, images, Activation::Relu, cx).into_images(); // [B, 64, 112, 112]
        let x = cx.count_activations(self.maxpool.forward(x)); // [B, 64, 56, 56]
        let x = run_stage(&self.layer1, x, cx); // [B, 64, 56, 56]
        let x = run_stage(&self.layer2, x, cx); // [B, 128, 28, 28]
        let x = run_stage(&self.layer3, x, cx); // [B, 256, 14, 14]
        let x = run_stage(&self.layer4, x, cx); // [B, 512, 7, 7]
        classify(x, &self.fc, cx) // [B, classes]
    }
}
