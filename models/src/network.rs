//! The type of all models, and the cost and memory of a forward pass.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::airbench::Airbench;
use crate::custom::CustomModule;
use crate::densenet::DenseNet;
use crate::dla::{Dla, SimpleDla};
use crate::dpn::Dpn;
use crate::efficientnet::EfficientNet;
use crate::googlenet::GoogLeNet;
use crate::lenet::LeNet;
use crate::mnist_net::MnistNet;
use crate::mobilenet::{MobileNet, MobileNetV2};
use crate::preact_resnet::PreActResNet;
use crate::regnet::RegNet;
use crate::resnet::ResNet;
use crate::resnext::ResNeXt;
use crate::senet::SeNet;
use crate::shufflenet::ShuffleNetV2;
use crate::vgg::Vgg;
use crate::{BuildError, Context, Spec, torchvision, whitening};
use ops::upcast;

/// A network of any family. `Network::valid` returns an independent copy for inference, without autodiff.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "a program holds a handful of networks, each once")]
pub enum Network {
    /// LeNet-5.
    LeNet(LeNet),
    /// MNIST network of PyTorch's distributed tutorial.
    MnistNet(MnistNet),
    /// VGG with batch norm.
    Vgg(Vgg),
    /// ResNet.
    ResNet(ResNet),
    /// RegNet.
    RegNet(RegNet),
    /// MobileNet.
    MobileNet(MobileNet),
    /// MobileNetV2.
    MobileNetV2(MobileNetV2),
    /// ResNeXt.
    ResNeXt(ResNeXt),
    /// DLA.
    Dla(Dla),
    /// SimpleDLA.
    SimpleDla(SimpleDla),
    /// DenseNet.
    DenseNet(DenseNet),
    /// Pre-activation ResNet.
    PreActResNet(PreActResNet),
    /// Dual path network.
    Dpn(Dpn),
    /// SENet.
    SeNet(SeNet),
    /// ShuffleNetV2.
    ShuffleNetV2(ShuffleNetV2),
    /// EfficientNet.
    EfficientNet(EfficientNet),
    /// GoogLeNet.
    GoogLeNet(GoogLeNet),
    /// airbench94.
    Airbench(Airbench),
    /// torchvision's ResNet.
    TorchvisionResNet(torchvision::ResNet),
    /// torchvision's MobileNetV2.
    TorchvisionMobileNetV2(torchvision::MobileNetV2),
    /// torchvision's EfficientNet.
    TorchvisionEfficientNet(torchvision::EfficientNet),
    /// A network of another crate.
    Custom(CustomModule),
}

impl Network {
    /// Returns how many training images [`Network::initialised_from`] needs; 0 for a network whose initial weights depend on the
    /// seed alone.
    pub fn init_image_count(&self) -> usize {
        match self {
            Self::Airbench(_) => whitening::IMAGES,
            _ => 0,
        }
    }

    /// Sets those initial weights that depend on the training images, `[N, C, H, W]` in row-major order, normalised as for
    /// training. The same images yield the same bits on every machine. Most networks have no such weights and stay as they are.
    ///
    /// # Panics
    ///
    /// When `images` is not of this shape, or the network was built for other channels.
    pub fn initialised_from(self, images: &[f32], shape: [usize; 4]) -> Self {
        match self {
            Self::Airbench(network) => Self::Airbench(network.whitened(images, shape)),
            other => other,
        }
    }

    /// Returns the smallest batch of images of `image_size`, `[height, width]`, on which the network can be trained: batch norm
    /// needs more than one value per channel.
    pub fn smallest_batch(&self, image_size: [usize; 2]) -> usize {
        match self {
            Self::TorchvisionResNet(_) | Self::TorchvisionMobileNetV2(_) | Self::TorchvisionEfficientNet(_) => {
                torchvision::smallest_batch(image_size)
            }
            Self::Custom(network) => network.smallest_batch(image_size),
            _ => 1,
        }
    }

    /// Maps normalised images `[B, C, H, W]` to logits `[B, classes]`. Logits are f32 in every precision.
    ///
    /// The images must have the size that the network was built for, or another size for which all weights have the same shapes.
    /// With a training [`Context`], batch norm updates its running statistics.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        upcast(match self {
            Self::LeNet(network) => network.forward(images, cx),
            Self::MnistNet(network) => network.forward(images, cx),
            Self::Vgg(network) => network.forward(images, cx),
            Self::ResNet(network) => network.forward(images, cx),
            Self::RegNet(network) => network.forward(images, cx),
            Self::MobileNet(network) => network.forward(images, cx),
            Self::MobileNetV2(network) => network.forward(images, cx),
            Self::ResNeXt(network) => network.forward(images, cx),
            Self::Dla(network) => network.forward(images, cx),
            Self::SimpleDla(network) => network.forward(images, cx),
            Self::DenseNet(network) => network.forward(images, cx),
            Self::PreActResNet(network) => network.forward(images, cx),
            Self::Dpn(network) => network.forward(images, cx),
            Self::SeNet(network) => network.forward(images, cx),
            Self::ShuffleNetV2(network) => network.forward(images, cx),
            Self::EfficientNet(network) => network.forward(images, cx),
            Self::GoogLeNet(network) => network.forward(images, cx),
            Self::Airbench(network) => network.forward(images, cx),
            Self::TorchvisionResNet(network) => network.forward(images, cx),
            Self::TorchvisionMobileNetV2(network) => network.forward(images, cx),
            Self::TorchvisionEfficientNet(network) => network.forward(images, cx),
            Self::Custom(network) => network.forward(images, cx),
        })
    }
}

/// Cost of a forward pass of one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Multiply-adds of convolutions and linear layers.
    pub macs: u64,
    /// Elements of all activations that layers write.
    pub activations: u64,
}

impl Cost {
    /// Estimates the bytes of one training step of `batch` images in f32 with SGD and momentum.
    ///
    /// The estimate is `4 · (3 · parameters + batch · (activations + pixels))`: weights, gradients and momentum, and every
    /// activation that the forward pass writes, because the backward pass needs the operations' inputs. Not counted: gradients
    /// of activations (the largest two or three at a time), the kernels' workspace, and the program itself.
    pub fn step_bytes(self, parameters: usize, spec: &Spec, batch: usize) -> u64 {
        let pixels = spec.in_channels * spec.image_size[0] * spec.image_size[1];
        4 * (3 * parameters as u64 + batch as u64 * (self.activations + pixels as u64))
    }
}

/// Counts the cost of one image by a forward pass of a black image on the network's device.
pub fn cost(network: &Network, spec: &Spec) -> Cost {
    let network = network.valid();
    let device = network.devices().pop().expect("every network has parameters");
    let [height, width] = spec.image_size;
    let cx = Context::counting();
    network.forward(Tensor::zeros([1, spec.in_channels, height, width], &device), &cx);
    let counted = "the context counts";
    Cost { macs: cx.macs().expect(counted), activations: cx.activations().expect(counted) }
}

/// Estimates the parameters of a model and its [`Cost::activations`] for images of the size `spec`, without building the network
/// for that size. Both grow linearly with the area of the images, so the function extrapolates from two networks for smaller
/// images. The activations of convolutions without padding grow faster: there the estimate is up to a quarter too low.
///
/// # Errors
///
/// [`BuildError::UnknownModel`].
pub fn estimate_size(name: &str, spec: &Spec) -> Result<[f64; 2], BuildError> {
    /// Maximum side, in pixels, of the images of the smaller network. A forward pass on small images takes less time.
    const MAX_SIDE: usize = 64;
    let native_spec = crate::find(name)?.spec;
    let at = |scale: usize| {
        let image_size = native_spec.image_size.map(|side| scale * side.min(MAX_SIDE));
        // The last layer does not depend on the image size, so limit its width to save time.
        let scaled_spec = Spec { image_size, num_classes: spec.num_classes.clamp(1, 1000), ..*spec };
        let network = crate::skip_init(name, &scaled_spec)?;
        let parameters: usize = crate::parameters(&network).iter().map(|parameter| parameter.len()).sum();
        Ok([
            image_size.iter().product::<usize>() as f64,
            parameters as f64,
            cost(&network, &scaled_spec).activations as f64,
        ])
    };
    let ([area, parameters, activations], [area_2, parameters_2, activations_2]) = (at(1)?, at(2)?);
    let growth = (spec.image_size.iter().map(|&side| side as f64).product::<f64>() - area) / (area_2 - area);
    Ok([parameters + growth * (parameters_2 - parameters), activations + growth * (activations_2 - activations)])
}
