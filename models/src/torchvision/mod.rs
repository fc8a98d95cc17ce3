//! torchvision's classification networks, with its names and shapes: their pretrained state dicts load strictly.
//!
//! They are made for ImageNet's images of 224x224 pixels and halve the image five times, so they also accept 32x32. The mean over
//! all pixels in front of the classifier is torchvision's `AdaptiveAvgPool2d(1)`. Initial weights have PyTorch's default
//! distributions, not torchvision's, because these networks usually start from trained weights.

mod efficientnet;
mod mobilenet_v2;
mod resnet;

pub use efficientnet::EfficientNet;
pub use mobilenet_v2::MobileNetV2;
pub use resnet::{ResNet, imagenet_name};

use crate::blocks::{ConvNorm, depthwise};
use crate::layers::BatchNorm2d;
use crate::{BuildError, Init, Spec};

/// Smallest image side in pixels: the last stage has one pixel.
const MIN_SIDE: usize = 32;

/// Factor by which the networks reduce the image's sides, rounded up.
const REDUCTION: usize = 32;

/// Checks the images' size.
fn require_side(model: &str, spec: &Spec) -> Result<(), BuildError> {
    spec.require_side(model, MIN_SIDE, MIN_SIDE)
}

/// Returns the smallest batch that batch norm can be trained with: a channel needs two values, and the last stage of small images
/// has one per image.
pub(crate) fn smallest_batch(image_size: [usize; 2]) -> usize {
    if image_size.iter().all(|&side| side <= REDUCTION) { 2 } else { 1 }
}

/// Builds a depthwise convolution and a batch norm, entries `0` and `1` of an `nn.Sequential`.
fn depthwise_norm(channels: usize, kernel: usize, stride: usize, init: &Init) -> ConvNorm {
    (depthwise(channels, kernel, stride, &init.child("0")), BatchNorm2d::new(channels, &init.child("1")))
}
