//! One type for every model.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::lenet::LeNet;
use crate::resnet::ResNet;
use crate::vgg::Vgg;
use crate::{Context, Spec};

/// A network of any family. `Network::valid` gives a copy for inference, without autodiff and independent of this one.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "a program holds a handful of networks, each once")]
pub enum Network {
    /// LeNet-5.
    LeNet(LeNet),
    /// VGG with batch norm.
    Vgg(Vgg),
    /// ResNet.
    ResNet(ResNet),
}

impl Network {
    /// Normalised images `[B, C, H, W]` → logits `[B, classes]`.
    ///
    /// The images must be of the size that the network was built for; a training [`Context`] updates the running
    /// statistics of batch norm.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        match self {
            Self::LeNet(network) => network.forward(images, cx),
            Self::Vgg(network) => network.forward(images, cx),
            Self::ResNet(network) => network.forward(images, cx),
        }
    }
}

/// Multiply-adds of convolutions and linear layers for one image, counted in one forward pass of a black image on the
/// network's device.
pub fn macs(network: &Network, spec: &Spec) -> u64 {
    let network = network.valid();
    let device = network.devices().pop().expect("every network has parameters");
    let [height, width] = spec.image_size;
    let cx = Context::counting();
    network.forward(Tensor::zeros([1, spec.in_channels, height, width], &device), &cx);
    cx.macs().expect("the context counts")
}
