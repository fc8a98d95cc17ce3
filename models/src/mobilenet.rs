//! MobileNet: "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications", Howard et al., 2017,
//! <https://arxiv.org/abs/1704.04861>, and MobileNetV2: "Inverted Residuals and Linear Bottlenecks", Sandler, Howard,
//! Zhu, Zhmoginov & Chen, 2018, <https://arxiv.org/abs/1801.04381>.
//!
//! pytorch-cifar's variants: stems of stride 1, and ReLU instead of ReLU6. In V2 the second stage keeps the image size, and
//! a block that changes the channels but not the size has a 1x1 convolution as its shortcut.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{Shortcut, apply_shortcut, classify, conv, conv_norm, depthwise, sequence};
use crate::layers::{BatchNorm2d, Conv2d, Linear};
use crate::{BuildError, Context, Init, Spec};
use ops::Activation;

/// Smallest image sides in pixels: the last stage has more than one pixel. MobileNet halves the image four times, V2 three
/// times.
const MIN_SIDE: [usize; 2] = [17, 9];

/// A depthwise separable convolution: a depthwise and a 1x1 convolution.
#[derive(Module, Debug)]
struct Separable {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
}

impl Separable {
    fn new([input, output]: [usize; 2], stride: usize, init: &Init) -> Self {
        Self {
            conv1: depthwise(input, 3, stride, &init.child("conv1")),
            bn1: BatchNorm2d::new(input, &init.child("bn1")),
            conv2: conv([input, output], 1, 1, &init.child("conv2")),
            bn2: BatchNorm2d::new(output, &init.child("bn2")),
        }
    }

    /// `[B, input, H, W]` → `[B, output, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = self.bn1.after(&self.conv1, input, Activation::Relu, cx);
        self.bn2.after(&self.conv2, x, Activation::Relu, cx).into_images()
    }
}

/// MobileNet: a stem, thirteen separable convolutions and a linear layer.
#[derive(Module, Debug)]
pub struct MobileNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layers: Vec<Separable>,
    linear: Linear,
}

impl MobileNet {
    /// Channels and stride of each block.
    const BLOCKS: [(usize, usize); 13] = [
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        (512, 1),
        (512, 1),
        (512, 1),
        (512, 1),
        (512, 1),
        (1024, 2),
        (1024, 1),
    ];

    /// Builds MobileNet for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 17 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("mobilenet", MIN_SIDE[0], 32)?;
        let mut channels = 32;
        Ok(Self {
            conv1: conv([spec.in_channels, 32], 3, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(32, &init.child("bn1")),
            layers: sequence(&init.child("layers"), Self::BLOCKS.len(), |block, init| {
                let (width, stride) = Self::BLOCKS[block];
                Separable::new([std::mem::replace(&mut channels, width), width], stride, init)
            }),
            linear: Linear::new([1024, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.bn1.after(&self.conv1, images, Activation::Relu, cx).into_images(); // [B, 32, 32, 32]
        let x = self.layers.iter().fold(x, |x, block| block.forward(x, cx)); // [B, 1024, 2, 2]
        classify(x, &self.linear, cx) // [B, classes]
    }
}

/// A 1x1 convolution that expands the channels, a depthwise convolution, and a 1x1 convolution that projects them, without
/// a final activation.
#[derive(Module, Debug)]
struct InvertedResidual {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    conv3: Conv2d,
    bn3: BatchNorm2d,
    shortcut: Shortcut,
    /// True where the block keeps the image size: the shortcut is added.
    has_skip: bool,
}

impl InvertedResidual {
    fn new([input, output]: [usize; 2], expansion: usize, stride: usize, init: &Init) -> Self {
        let width = expansion * input;
        Self {
            conv1: conv([input, width], 1, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(width, &init.child("bn1")),
            conv2: depthwise(width, 3, stride, &init.child("conv2")),
            bn2: BatchNorm2d::new(width, &init.child("bn2")),
            conv3: conv([width, output], 1, 1, &init.child("conv3")),
            bn3: BatchNorm2d::new(output, &init.child("bn3")),
            shortcut: (stride == 1 && input != output)
                .then(|| conv_norm([input, output], 1, 1, &init.child("shortcut"))),
            has_skip: stride == 1,
        }
    }

    /// `[B, input, H, W]` → `[B, output, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = self.bn1.after(&self.conv1, input.clone(), Activation::Relu, cx);
        let x = self.bn2.after(&self.conv2, x, Activation::Relu, cx);
        if self.has_skip {
            let skip = || apply_shortcut(self.shortcut.as_ref(), input, cx);
            self.bn3.after_add(&self.conv3, x, skip, Activation::Identity, cx).into_images()
        } else {
            self.bn3.after(&self.conv3, x, Activation::Identity, cx).into_images()
        }
    }
}

/// MobileNetV2: a stem, seventeen inverted residuals, a 1x1 convolution and a linear layer.
#[derive(Module, Debug)]
pub struct MobileNetV2 {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layers: Vec<InvertedResidual>,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    linear: Linear,
}

impl MobileNetV2 {
    /// Expansion, channels, blocks and stride of each stage.
    const STAGES: [(usize, usize, usize, usize); 7] =
        [(1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)];

    /// Builds MobileNetV2 for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 9 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("mobilenetv2", MIN_SIDE[1], 32)?;
        let blocks: Vec<_> = Self::STAGES
            .into_iter()
            .flat_map(|(expansion, width, blocks, stride)| {
                (0..blocks).map(move |block| (expansion, width, if block == 0 { stride } else { 1 }))
            })
            .collect();
        let mut channels = 32;
        Ok(Self {
            conv1: conv([spec.in_channels, 32], 3, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(32, &init.child("bn1")),
            layers: sequence(&init.child("layers"), blocks.len(), |block, init| {
                let (expansion, width, stride) = blocks[block];
                let input = std::mem::replace(&mut channels, width);
                InvertedResidual::new([input, width], expansion, stride, init)
            }),
            conv2: conv([320, 1280], 1, 1, &init.child("conv2")),
            bn2: BatchNorm2d::new(1280, &init.child("bn2")),
            linear: Linear::new([1280, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.bn1.after(&self.conv1, images, Activation::Relu, cx).into_images(); // [B, 32, 32, 32]
        let x = self.layers.iter().fold(x, |x, block| block.forward(x, cx)); // [B, 320, 4, 4]
        let x = self.bn2.after(&self.conv2, x, Activation::Relu, cx); // [B, 1280, 4, 4]
        classify(x, &self.linear, cx) // [B, classes]
    }
}
