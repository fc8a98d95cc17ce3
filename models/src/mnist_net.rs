//! MNIST network of the distributed tutorial: "Writing Distributed Applications with PyTorch", Séb Arnold, 2017,
//! <https://pytorch.org/tutorials/intermediate/dist_tuto.html>.
//!
//! PyTorch's first MNIST example has the same network. The final `log_softmax` is left to the loss.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::layers::{Conv2d, Conv2dConfig, Dropout, Linear, MaxPool2d};
use crate::{BuildError, Context, Init, Spec};
use ops::flatten;

/// Smallest image side in pixels: two 5x5 convolutions and two poolings leave one pixel.
const MIN_SIDE: usize = 16;

/// Two convolutions (10 and 20 channels), dropout, and two linear layers (320-50-10 for 28x28 images).
#[derive(Module, Debug)]
pub struct MnistNet {
    conv1: Conv2d,
    conv2: Conv2d,
    fc1: Linear,
    fc2: Linear,
    pool: MaxPool2d,
    dropout: Dropout,
}

impl MnistNet {
    /// Builds the network for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 16 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("mnist_net", MIN_SIDE, 28)?;
        let [height, width] = spec.image_size.map(|side| ((side - 4) / 2 - 4) / 2);
        Ok(Self {
            conv1: Conv2dConfig::new([spec.in_channels, 10], 5).init(&init.child("conv1")),
            conv2: Conv2dConfig::new([10, 20], 5).init(&init.child("conv2")),
            fc1: Linear::new([20 * height * width, 50], &init.child("fc1")),
            fc2: Linear::new([50, spec.num_classes], &init.child("fc2")),
            pool: MaxPool2d::new(2),
            dropout: Dropout::new(0.5),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 1x28x28.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.conv1.forward_relu(images, cx); // [B, 10, 24, 24]
        let x = cx.count_activations(self.pool.forward(x)); // [B, 10, 12, 12]
        let x = self.conv2.forward_relu(x, cx); // [B, 20, 8, 8]
        let x = cx.count_activations(self.pool.forward(x)); // [B, 20, 4, 4]
        // The tutorial applies dropout before pooling and ReLU. The result is equal: both commute with a factor per
        // channel that is not negative.
        let x = self.dropout.forward_channels(x, cx);
        let x = flatten(x); // [B, 320]
        let x = self.fc1.forward_relu(x, cx); // [B, 50]
        let x = self.dropout.forward(x, cx);
        self.fc2.forward(x, cx) // [B, classes]
    }
}
