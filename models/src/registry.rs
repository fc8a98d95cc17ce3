//! Every model by name.

use burn::tensor::Device;

use crate::error::ZeroOf;
use crate::lenet::LeNet;
use crate::resnet::{ResNet, ResNetDepth};
use crate::vgg::{Vgg, VggDepth};
use crate::{BuildError, Init, Network, Spec};

/// A model that [`build`] knows.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Name in the configuration and on the command line.
    pub name: &'static str,
    /// The paper's name for the family.
    pub family: &'static str,
    /// CIFAR-10 test accuracy that pytorch-cifar's README states, in percent.
    pub published_top1: Option<f64>,
    build: fn(&Spec, &Init) -> Result<Network, BuildError>,
}

/// An entry of a family that comes in several depths.
macro_rules! entry {
    ($family:literal, $variant:ident, $network:ident, $depth:path, $published_top1:expr) => {
        Entry {
            name: $depth.name(),
            family: $family,
            published_top1: $published_top1,
            build: |spec, init| $network::new($depth, spec, init).map(Network::$variant),
        }
    };
}

static ENTRIES: [Entry; 10] = [
    Entry {
        name: "lenet",
        family: "LeNet",
        published_top1: None,
        build: |spec, init| LeNet::new(spec, init).map(Network::LeNet),
    },
    entry!("VGG", Vgg, Vgg, VggDepth::Vgg11, None),
    entry!("VGG", Vgg, Vgg, VggDepth::Vgg13, None),
    entry!("VGG", Vgg, Vgg, VggDepth::Vgg16, Some(92.64)),
    entry!("VGG", Vgg, Vgg, VggDepth::Vgg19, None),
    entry!("ResNet", ResNet, ResNet, ResNetDepth::ResNet18, Some(93.02)),
    entry!("ResNet", ResNet, ResNet, ResNetDepth::ResNet34, None),
    entry!("ResNet", ResNet, ResNet, ResNetDepth::ResNet50, Some(93.62)),
    entry!("ResNet", ResNet, ResNet, ResNetDepth::ResNet101, Some(93.75)),
    entry!("ResNet", ResNet, ResNet, ResNetDepth::ResNet152, None),
];

/// All models, in the order of the accuracy table.
pub fn entries() -> &'static [Entry] {
    &ENTRIES
}

/// The model called `name`.
///
/// # Errors
///
/// [`BuildError::UnknownModel`] with the nearest names.
pub fn find(name: &str) -> Result<&'static Entry, BuildError> {
    entries()
        .iter()
        .find(|entry| entry.name == name)
        .ok_or_else(|| BuildError::UnknownModel { name: name.to_owned(), nearest: nearest(name) })
}

/// Up to three names that look like `name`, most alike first.
fn nearest(name: &str) -> Vec<&'static str> {
    // People write `ResNet-18` and `VGG_16`: neither case nor separators count.
    let plain: String = name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    let mut scored: Vec<_> = entries()
        .iter()
        .map(|entry| (strsim::normalized_damerau_levenshtein(&plain, entry.name), entry.name))
        .filter(|(score, _)| *score >= 0.6)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0)); // stable: equals stay in table order
    if scored.first().is_some_and(|(score, _)| *score == 1.0) {
        scored.truncate(1);
    }
    scored.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Builds the model called `name` with PyTorch's default weights, drawn from `seed` alone.
///
/// The same seed gives the same weights on every device, thread and rank. On an autodiff device the parameters require
/// gradients.
///
/// # Errors
///
/// An unknown name, no class or channel, or images too small for the model.
pub fn build(name: &str, spec: &Spec, seed: u64, device: &Device) -> Result<Network, BuildError> {
    let entry = find(name)?;
    if spec.num_classes == 0 {
        return Err(BuildError::Zero(ZeroOf::Class));
    }
    if spec.in_channels == 0 {
        return Err(BuildError::Zero(ZeroOf::Channel));
    }
    (entry.build)(spec, &Init::new(seed, device))
}
