//! The table of all models.

use std::sync::OnceLock;

use burn::tensor::Device;
use parking_lot::Mutex;

use crate::airbench::Airbench;
use crate::custom::{CustomModule, CustomNetwork};
use crate::densenet::DenseNet;
use crate::dla::{Dla, SimpleDla};
use crate::dpn::{Dpn, DpnDepth};
use crate::efficientnet::EfficientNet;
use crate::googlenet::GoogLeNet;
use crate::lenet::LeNet;
use crate::mnist_net::MnistNet;
use crate::mobilenet::{MobileNet, MobileNetV2};
use crate::preact_resnet::PreActResNet;
use crate::regnet::{RegNet, RegNetSize};
use crate::resnet::{ResNet, ResNetDepth};
use crate::resnext::{ResNeXt, ResNeXtShape};
use crate::senet::SeNet;
use crate::shufflenet::{ShuffleNetSize, ShuffleNetV2};
use crate::torchvision;
use crate::vgg::{Vgg, VggDepth};
use crate::{BuildError, Init, Network, Spec};

/// A model that [`build`] can build.
#[derive(Debug, Clone, Copy)]
pub struct ModelEntry {
    /// Name in the configuration and on the command line.
    pub name: &'static str,
    /// The paper's name for the family.
    pub family: &'static str,
    /// CIFAR-10 test accuracy that pytorch-cifar's README states, in percent.
    pub published_top1: Option<f64>,
    /// The images that the model was designed for. Parameters and multiply-adds are reported for this specification.
    pub spec: Spec,
    build: fn(&Spec, &Init) -> Result<Network, BuildError>,
}

/// CIFAR-10.
const CIFAR10: Spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };
/// ImageNet.
const IMAGENET: Spec = Spec { num_classes: 1000, in_channels: 3, image_size: [224, 224] };
/// MNIST.
const MNIST: Spec = Spec { num_classes: 10, in_channels: 1, image_size: [28, 28] };

/// Makes an entry from a name, or from the depth or size of a family that has several.
macro_rules! entry {
    ($family:literal, $variant:ident, $network:ident, depth $depth:path, $published_top1:expr) => {
        ModelEntry {
            name: $depth.name(),
            family: $family,
            published_top1: $published_top1,
            spec: CIFAR10,
            build: |spec, init| $network::new($depth, spec, init).map(Network::$variant),
        }
    };
    ($family:literal, $variant:ident, $network:ident, $name:literal, $published_top1:expr) => {
        ModelEntry {
            name: $name,
            family: $family,
            published_top1: $published_top1,
            spec: CIFAR10,
            build: |spec, init| $network::new(spec, init).map(Network::$variant),
        }
    };
}

/// Makes the entry of a torchvision ResNet.
macro_rules! imagenet_resnet {
    ($depth:path) => {
        ModelEntry {
            name: torchvision::imagenet_name($depth),
            family: "ResNet",
            published_top1: None,
            spec: IMAGENET,
            build: |spec, init| torchvision::ResNet::new($depth, spec, init).map(Network::TorchvisionResNet),
        }
    };
}

static ENTRIES: &[ModelEntry] = &[
    entry!("LeNet", LeNet, LeNet, "lenet", None),
    ModelEntry { spec: MNIST, ..entry!("MNIST network", MnistNet, MnistNet, "mnist_net", None) },
    entry!("VGG", Vgg, Vgg, depth VggDepth::Vgg11, None),
    entry!("VGG", Vgg, Vgg, depth VggDepth::Vgg13, None),
    entry!("VGG", Vgg, Vgg, depth VggDepth::Vgg16, Some(92.64)),
    entry!("VGG", Vgg, Vgg, depth VggDepth::Vgg19, None),
    entry!("ResNet", ResNet, ResNet, depth ResNetDepth::ResNet18, Some(93.02)),
    entry!("ResNet", ResNet, ResNet, depth ResNetDepth::ResNet34, None),
    entry!("ResNet", ResNet, ResNet, depth ResNetDepth::ResNet50, Some(93.62)),
    entry!("ResNet", ResNet, ResNet, depth ResNetDepth::ResNet101, Some(93.75)),
    entry!("ResNet", ResNet, ResNet, depth ResNetDepth::ResNet152, None),
    entry!("RegNet", RegNet, RegNet, depth RegNetSize::X200Mf, Some(94.24)),
    entry!("RegNet", RegNet, RegNet, depth RegNetSize::Y400Mf, Some(94.29)),
    entry!("MobileNetV2", MobileNetV2, MobileNetV2, "mobilenetv2", Some(94.43)),
    entry!("ResNeXt", ResNeXt, ResNeXt, depth ResNeXtShape::X32x4, Some(94.73)),
    entry!("ResNeXt", ResNeXt, ResNeXt, depth ResNeXtShape::X2x64, Some(94.82)),
    entry!("DLA", SimpleDla, SimpleDla, "simple_dla", Some(94.89)),
    entry!("DenseNet", DenseNet, DenseNet, "densenet121", Some(95.04)),
    entry!("PreActResNet", PreActResNet, PreActResNet, "preact_resnet18", Some(95.11)),
    entry!("DPN", Dpn, Dpn, depth DpnDepth::Dpn26, None),
    entry!("DPN", Dpn, Dpn, depth DpnDepth::Dpn92, Some(95.16)),
    entry!("DLA", Dla, Dla, "dla", Some(95.47)),
    entry!("MobileNet", MobileNet, MobileNet, "mobilenet", None),
    entry!("SENet", SeNet, SeNet, "senet18", None),
    entry!("ShuffleNetV2", ShuffleNetV2, ShuffleNetV2, depth ShuffleNetSize::X0_5, None),
    entry!("ShuffleNetV2", ShuffleNetV2, ShuffleNetV2, depth ShuffleNetSize::X1, None),
    entry!("ShuffleNetV2", ShuffleNetV2, ShuffleNetV2, depth ShuffleNetSize::X1_5, None),
    entry!("ShuffleNetV2", ShuffleNetV2, ShuffleNetV2, depth ShuffleNetSize::X2, None),
    entry!("EfficientNet", EfficientNet, EfficientNet, "efficientnet_b0", None),
    entry!("GoogLeNet", GoogLeNet, GoogLeNet, "googlenet", None),
    entry!("airbench", Airbench, Airbench, "airbench94", None),
    imagenet_resnet!(ResNetDepth::ResNet18),
    imagenet_resnet!(ResNetDepth::ResNet34),
    imagenet_resnet!(ResNetDepth::ResNet50),
    imagenet_resnet!(ResNetDepth::ResNet101),
    imagenet_resnet!(ResNetDepth::ResNet152),
    ModelEntry {
        name: "mobilenet_v2_imagenet",
        family: "MobileNetV2",
        published_top1: None,
        spec: IMAGENET,
        build: |spec, init| torchvision::MobileNetV2::new(spec, init).map(Network::TorchvisionMobileNetV2),
    },
    ModelEntry {
        name: "efficientnet_b0_imagenet",
        family: "EfficientNet",
        published_top1: None,
        spec: IMAGENET,
        build: |spec, init| torchvision::EfficientNet::new(spec, init).map(Network::TorchvisionEfficientNet),
    },
];

/// The models of other crates.
static REGISTERED: Mutex<Vec<ModelEntry>> = Mutex::new(Vec::new());
/// All models. The first use of the registry sets the list.
static ALL: OnceLock<Vec<ModelEntry>> = OnceLock::new();

/// Adds a network of another crate to the registry. Configurations, checkpoints and all commands then know the network by `name`.
/// Its parameters and multiply-adds are reported for `spec`.
///
/// Every process of a run must register the same networks: call the function at the start of `main`.
///
/// # Panics
///
/// When the name is taken, or after the first use of the registry.
pub fn register<N: CustomNetwork>(name: &'static str, spec: Spec) {
    let mut registered = REGISTERED.lock();
    assert!(ALL.get().is_none(), "register `{name}` before the first use of the registry");
    let mut taken = ENTRIES.iter().chain(registered.iter());
    assert!(taken.all(|entry| entry.name != name), "there is a model `{name}` already");
    registered.push(ModelEntry {
        name,
        family: "custom",
        published_top1: None,
        spec,
        build: |spec, init| N::build(spec, init).map(|network| Network::Custom(CustomModule::new(network))),
    });
}

/// Returns all models, in the order of the accuracy table, and after them those of [`register`].
pub fn entries() -> &'static [ModelEntry] {
    ALL.get_or_init(|| {
        let registered = REGISTERED.lock();
        ENTRIES.iter().chain(registered.iter()).copied().collect()
    })
}

/// Returns the model called `name`.
///
/// # Errors
///
/// [`BuildError::UnknownModel`] with similar names.
pub fn find(name: &str) -> Result<&'static ModelEntry, BuildError> {
    entries()
        .iter()
        .find(|entry| entry.name == name)
        .ok_or_else(|| BuildError::UnknownModel { name: name.to_owned(), nearest: nearest(name) })
}

/// Returns up to three names that are similar to `name`, most similar first.
fn nearest(name: &str) -> Vec<&'static str> {
    // Users write `ResNet-18` and `VGG_16`: ignore case and separators.
    let plain = |name: &str| -> String {
        name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
    };
    let asked = plain(name);
    let mut scored: Vec<_> = entries()
        .iter()
        .map(|entry| (strsim::normalized_damerau_levenshtein(&asked, &plain(entry.name)), entry.name))
        .filter(|(score, _)| *score >= 0.6)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0)); // Stable: equal scores stay in table order.
    if scored.first().is_some_and(|(score, _)| *score == 1.0) {
        scored.truncate(1);
    }
    scored.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Builds the model called `name` with PyTorch's default weights, which depend on `seed` alone.
///
/// The same seed yields the same weights on every device, thread and rank. On an autodiff device the parameters require
/// gradients.
///
/// # Errors
///
/// A [`BuildError`]: an unknown name, zero classes or channels, or images that are too small for the model.
pub fn build(name: &str, spec: &Spec, seed: u64, device: &Device) -> Result<Network, BuildError> {
    build_frozen(name, spec, seed, device, &[])
}

/// Builds a model as [`build`], and freezes all weights within `frozen`: modules or weights of the state dict, such as `layer1`
/// or `fc.bias`. The initial values are the same as without freezing. A name that the model does not have freezes nothing.
///
/// A batch norm whose scale and shift are both frozen normalises with its running statistics in training too.
///
/// # Errors
///
/// Those of [`build`].
pub fn build_frozen(
    name: &str,
    spec: &Spec,
    seed: u64,
    device: &Device,
    frozen: &[String],
) -> Result<Network, BuildError> {
    build_with(name, spec, &Init::new(seed, device).freezing(frozen))
}

/// Builds a model on the CPU whose weights are all 0 (PyTorch: `torch.nn.utils.skip_init`). Its names, shapes and
/// [`cost`](crate::cost) are those of [`build`], which takes most of its time for the initial weights.
///
/// # Errors
///
/// Those of [`build`].
pub fn skip_init(name: &str, spec: &Spec) -> Result<Network, BuildError> {
    build_with(name, spec, &Init::zeros(&Device::flex()))
}

fn build_with(name: &str, spec: &Spec, init: &Init) -> Result<Network, BuildError> {
    let entry = find(name)?;
    if spec.num_classes == 0 {
        return Err(BuildError::NoClasses);
    }
    if spec.in_channels == 0 {
        return Err(BuildError::NoChannels);
    }
    (entry.build)(spec, init)
}
