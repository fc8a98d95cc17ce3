//! LeNet-5: "Gradient-based learning applied to document recognition", LeCun, Bottou, Bengio & Haffner, 1998,
//! <http://yann.lecun.com/exdb/publis/pdf/lecun-98.pdf>.
//!
//! pytorch-cifar's variant: ReLU and max pooling replace the paper's squashing and sub-sampling, and no image is padded.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::layers::{Conv2d, Conv2dConfig, Linear, MaxPool2d};
use crate::{BuildError, Context, Init, Spec};
use ops::flatten;

/// Smallest image side in pixels: two 5x5 convolutions and two poolings leave one pixel.
const MIN_SIDE: usize = 16;

/// Two convolutions and three linear layers.
#[derive(Module, Debug)]
pub struct LeNet {
    conv1: Conv2d,
    conv2: Conv2d,
    fc1: Linear,
    fc2: Linear,
    fc3: Linear,
    pool: MaxPool2d,
}

impl LeNet {
    /// Builds LeNet for `spec` with weights from `init`.
    ///
    /// `fc1` has as many inputs as the image size leaves features: 400 for 32x32, 256 for 28x28.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 16 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("lenet", MIN_SIDE, MIN_SIDE)?;
        let [height, width] = spec.image_size.map(|side| ((side - 4) / 2 - 4) / 2);
        Ok(Self {
            conv1: Conv2dConfig::new([spec.in_channels, 6], 5).init(&init.child("conv1")),
            conv2: Conv2dConfig::new([6, 16], 5).init(&init.child("conv2")),
            fc1: Linear::new([16 * height * width, 120], &init.child("fc1")),
            fc2: Linear::new([120, 84], &init.child("fc2")),
            fc3: Linear::new([84, spec.num_classes], &init.child("fc3")),
            pool: MaxPool2d::new(2),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.conv1.forward_relu(images, cx); // [B, 6, 28, 28]
        let x = cx.count_activations(self.pool.forward(x)); // [B, 6, 14, 14]
        let x = self.conv2.forward_relu(x, cx); // [B, 16, 10, 10]
        let x = cx.count_activations(self.pool.forward(x)); // [B, 16, 5, 5]
        let x = flatten(x); // [B, 400]
        let x = self.fc1.forward_relu(x, cx); // [B, 120]
        let x = self.fc2.forward_relu(x, cx); // [B, 84]
        self.fc3.forward(x, cx) // [B, classes]
    }
}
