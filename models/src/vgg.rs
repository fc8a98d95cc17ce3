//! VGG: "Very Deep Convolutional Networks for Large-Scale Image Recognition", Simonyan & Zisserman, 2014,
//! <https://arxiv.org/abs/1409.1556>.
//!
//! pytorch-cifar's variant: batch norm after each convolution, and one linear layer instead of the paper's three.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::layers::{BatchNorm2d, Conv2dConfig, Layer, Linear, MaxPool2d, Relu, forward_sequential, global_avg_pool};
use crate::{BuildError, Context, Init, Spec};

/// Smallest image side in pixels: each of the five poolings halves the image.
const MIN_SIDE: usize = 32;

/// Configuration of the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VggDepth {
    /// Configuration A: 8 convolutions.
    Vgg11,
    /// Configuration B: 10 convolutions.
    Vgg13,
    /// Configuration D: 13 convolutions.
    Vgg16,
    /// Configuration E: 16 convolutions.
    Vgg19,
}

impl VggDepth {
    /// Returns the name in the registry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vgg11 => "vgg11",
            Self::Vgg13 => "vgg13",
            Self::Vgg16 => "vgg16",
            Self::Vgg19 => "vgg19",
        }
    }

    /// Returns the number of convolutions in each of the five stages. A pooling ends each stage.
    fn stages(self) -> [usize; 5] {
        match self {
            Self::Vgg11 => [1, 1, 2, 2, 2],
            Self::Vgg13 => [2, 2, 2, 2, 2],
            Self::Vgg16 => [2, 2, 3, 3, 3],
            Self::Vgg19 => [2, 2, 4, 4, 4],
        }
    }
}

/// Five stages of 3x3 convolutions and a classifier.
#[derive(Module, Debug)]
pub struct Vgg {
    /// PyTorch's `nn.Sequential` of convolutions, norms, activations and poolings.
    features: Vec<Layer>,
    classifier: Linear,
}

impl Vgg {
    /// Builds the VGG of this depth for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 32 pixels.
    pub fn new(depth: VggDepth, spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side(depth.name(), MIN_SIDE, MIN_SIDE)?;
        let mut features = Vec::new();
        let mut channels = spec.in_channels;
        let scope = init.child("features");
        for (convolutions, width) in depth.stages().into_iter().zip([64, 128, 256, 512, 512]) {
            for _ in 0..convolutions {
                let at = |offset: usize| scope.child(&(features.len() + offset).to_string());
                let conv = Conv2dConfig::new([channels, width], 3).with_padding(1).init(&at(0));
                let norm = BatchNorm2d::new(width, &at(1));
                features.extend([Layer::Conv(conv), Layer::Norm(norm), Layer::Relu(Relu)]);
                channels = width;
            }
            features.push(Layer::Pool(MaxPool2d::new(2)));
        }
        Ok(Self { features, classifier: Linear::new([512, spec.num_classes], &init.child("classifier")) })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = forward_sequential(&self.features, images, cx); // [B, 512, 1, 1]
        // pytorch-cifar's average pooling has a 1x1 window. The results are equal for images up to 63x63: larger images
        // leave more than one pixel.
        let x = global_avg_pool(x); // [B, 512]
        self.classifier.forward(x, cx) // [B, classes]
    }
}
