//! airbench94, the network of "94% on CIFAR-10 in 3.29 seconds on a single GPU", Jordan, 2024,
//! <https://arxiv.org/abs/2404.00498>.
//!
//! The network is small and made for a training of a few epochs. The first convolution whitens 2x2 patches and is not trained.
//! The other convolutions start as the identity on their first channels. The batch norms have no trained scale.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::layers::{Conv2d, Conv2dConfig, FixedScaleNorm2d, FrozenConv2d, Linear, MaxPool2d};
use crate::{BuildError, Context, Init, Spec, whitening};
use ops::{divide, flatten, gelu, upcast};

/// Smallest image side in pixels: the last pooling needs 3x3 features.
const MIN_SIDE: usize = 25;
/// Side of the whitened patches in pixels.
const PATCH: usize = 2;
/// Channels after each group of convolutions.
const WIDTHS: [usize; 3] = [64, 256, 256];
/// Batch norm's `eps` and `momentum`: the statistics follow the weights quickly, because the run is short.
const NORM: (f64, f64) = (1e-12, 0.4);
/// The logits are divided by this number, so that the first steps have small losses.
const LOGIT_DIVISOR: f32 = 9.0;

/// Two convolutions; the first is followed by max pooling.
#[derive(Module, Debug)]
struct ConvGroup {
    conv1: Conv2d,
    norm1: FixedScaleNorm2d,
    conv2: Conv2d,
    norm2: FixedScaleNorm2d,
    pool: MaxPool2d,
}

impl ConvGroup {
    fn new([input, width]: [usize; 2], init: &Init) -> Self {
        let conv = |channels, name: &str| {
            let config = Conv2dConfig::new(channels, 3).with_padding(1).without_bias().with_identity();
            config.init(&init.child(name))
        };
        let norm = |name: &str| FixedScaleNorm2d::new(width, NORM.0, NORM.1, &init.child(name));
        Self {
            conv1: conv([input, width], "conv1"),
            norm1: norm("norm1"),
            conv2: conv([width, width], "conv2"),
            norm2: norm("norm2"),
            pool: MaxPool2d::new(2),
        }
    }

    /// `[B, input, H, W]` → `[B, width, H / 2, W / 2]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = cx.count_activations(self.pool.forward(self.conv1.forward(input, cx)));
        let x = self.norm1.forward_gelu(x, cx);
        self.norm2.forward_gelu(self.conv2.forward(x, cx), cx)
    }
}

/// A whitening convolution, three groups of two convolutions, a linear layer.
#[derive(Module, Debug)]
pub struct Airbench {
    whiten: FrozenConv2d,
    layer1: ConvGroup,
    layer2: ConvGroup,
    layer3: ConvGroup,
    pool: MaxPool2d,
    linear: Linear,
}

impl Airbench {
    /// Builds the network for `spec` with weights from `init`. [`Airbench::whitened`] sets the first convolution's weight.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 25 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("airbench94", MIN_SIDE, 32)?;
        let [height, width] = spec.image_size.map(|side| (side - PATCH + 1) / 8 / 3);
        let values = spec.in_channels * PATCH * PATCH;
        let [first, second, third] = WIDTHS;
        Ok(Self {
            whiten: FrozenConv2d::new([spec.in_channels, 2 * values], PATCH, &init.child("whiten")),
            layer1: ConvGroup::new([2 * values, first], &init.child("layer1")),
            layer2: ConvGroup::new([first, second], &init.child("layer2")),
            layer3: ConvGroup::new([second, third], &init.child("layer3")),
            pool: MaxPool2d::new(3),
            linear: Linear::new([third * height * width, spec.num_classes], &init.child("linear")).without_bias(),
        })
    }

    /// Sets the first convolution from training images, `[N, C, H, W]` in row-major order, normalised: see
    /// [`whitening::filters`].
    ///
    /// # Panics
    ///
    /// When `images` is not of this shape, or the network has another number of channels.
    pub fn whitened(mut self, images: &[f32], shape: [usize; 4]) -> Self {
        let filters = whitening::filters(images, shape, PATCH);
        self.whiten = self.whiten.with_weight(filters);
        self
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = gelu(self.whiten.forward(images, cx)); // [B, 24, 31, 31]
        let x = self.layer1.forward(x, cx); // [B, 64, 15, 15]
        let x = self.layer2.forward(x, cx); // [B, 256, 7, 7]
        let x = self.layer3.forward(x, cx); // [B, 256, 3, 3]
        let x = flatten(cx.count_activations(self.pool.forward(x))); // [B, 256]
        divide(upcast(self.linear.forward(x, cx)), LOGIT_DIVISOR) // [B, classes]
    }
}
