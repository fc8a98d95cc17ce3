//! DenseNet: "Densely Connected Convolutional Networks", Huang, Liu, van der Maaten & Weinberger, 2016,
//! <https://arxiv.org/abs/1608.06993>.
//!
//! pytorch-cifar's variant: a 3x3 stem of stride 1 without pooling. New channels come before the existing ones.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{classify, conv, sequence};
use crate::layers::{BatchNorm2d, Conv2d, Linear};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, avg_pool2d, concat};

/// Smallest image side in pixels: three poolings, which drop incomplete windows, leave 2x2 pixels.
const MIN_SIDE: usize = 16;
/// Channels that each dense layer adds, the paper's growth rate.
const GROWTH: usize = 32;

/// A 1x1 and a 3x3 convolution, each preceded by batch norm and ReLU. The result is concatenated with the input.
#[derive(Module, Debug)]
struct DenseLayer {
    bn1: BatchNorm2d,
    conv1: Conv2d,
    bn2: BatchNorm2d,
    conv2: Conv2d,
}

impl DenseLayer {
    fn new(input: usize, init: &Init) -> Self {
        Self {
            bn1: BatchNorm2d::new(input, &init.child("bn1")),
            conv1: conv([input, 4 * GROWTH], 1, 1, &init.child("conv1")),
            bn2: BatchNorm2d::new(4 * GROWTH, &init.child("bn2")),
            conv2: conv([4 * GROWTH, GROWTH], 3, 1, &init.child("conv2")),
        }
    }

    /// `[B, input, H, W]` → `[B, 32 + input, H, W]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = self.bn1.forward_relu(input.clone(), cx);
        let x = self.bn2.after(&self.conv1, x, Activation::Relu, cx);
        let x = self.conv2.forward(x, cx);
        cx.count_activations(concat(vec![x, input]))
    }
}

/// A 1x1 convolution that halves the channels and an average pooling that halves the image.
#[derive(Module, Debug)]
struct Transition {
    bn: BatchNorm2d,
    conv: Conv2d,
}

impl Transition {
    fn new(input: usize, init: &Init) -> Self {
        Self {
            bn: BatchNorm2d::new(input, &init.child("bn")),
            conv: conv([input, input / 2], 1, 1, &init.child("conv")),
        }
    }

    /// `[B, input, H, W]` → `[B, input / 2, H / 2, W / 2]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = self.conv.forward(self.bn.forward_relu(input, cx), cx);
        cx.count_activations(avg_pool2d(x, 2))
    }
}

/// DenseNet-121: a stem, four dense blocks with transitions between them, a batch norm and a linear layer.
#[derive(Module, Debug)]
pub struct DenseNet {
    conv1: Conv2d,
    dense1: Vec<DenseLayer>,
    trans1: Transition,
    dense2: Vec<DenseLayer>,
    trans2: Transition,
    dense3: Vec<DenseLayer>,
    trans3: Transition,
    dense4: Vec<DenseLayer>,
    bn: BatchNorm2d,
    linear: Linear,
}

impl DenseNet {
    /// Builds DenseNet-121 for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 16 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("densenet121", MIN_SIDE, 32)?;
        let block = |name: &str, input: usize, layers: usize| {
            sequence(&init.child(name), layers, |layer, init| DenseLayer::new(input + layer * GROWTH, init))
        };
        let transition = |name: &str, input: usize| Transition::new(input, &init.child(name));
        Ok(Self {
            conv1: conv([spec.in_channels, 64], 3, 1, &init.child("conv1")),
            dense1: block("dense1", 64, 6),
            trans1: transition("trans1", 256),
            dense2: block("dense2", 128, 12),
            trans2: transition("trans2", 512),
            dense3: block("dense3", 256, 24),
            trans3: transition("trans3", 1024),
            dense4: block("dense4", 512, 16),
            bn: BatchNorm2d::new(1024, &init.child("bn")),
            linear: Linear::new([1024, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let dense = |x, layers: &[DenseLayer]| layers.iter().fold(x, |x, layer| layer.forward(x, cx));
        let x = self.conv1.forward(images, cx); // [B, 64, 32, 32]
        let x = self.trans1.forward(dense(x, &self.dense1), cx); // [B, 128, 16, 16]
        let x = self.trans2.forward(dense(x, &self.dense2), cx); // [B, 256, 8, 8]
        let x = self.trans3.forward(dense(x, &self.dense3), cx); // [B, 512, 4, 4]
        let x = self.bn.forward_relu(dense(x, &self.dense4), cx); // [B, 1024, 4, 4]
        classify(x, &self.linear, cx) // [B, classes]
    }
}
