//! The networks of pytorch-cifar, some of torchvision's, airbench94 and a network for MNIST, on burn. Parameter names, layouts and
//! batch-norm semantics are PyTorch's.
//!
//! The crate knows no ranks, files or data sets. Each file has one model family, and [`registry`] lists all models.
//! [`state`] accesses a [`Network`] by PyTorch's names, for optimizers, checkpoints and weight files.

pub mod airbench;
mod blocks;
pub mod context;
mod custom;
pub mod densenet;
pub mod dla;
pub mod dpn;
pub mod efficientnet;
pub mod error;
pub mod googlenet;
pub mod graph;
pub mod hook;
pub mod init;
pub mod layers;
pub mod lenet;
pub mod mnist_net;
pub mod mobilenet;
pub mod network;
pub mod preact_resnet;
pub mod registry;
pub mod regnet;
pub mod resnet;
pub mod resnext;
pub mod senet;
pub mod shufflenet;
pub mod spec;
pub mod state;
pub mod torchvision;
pub mod vgg;
pub mod whitening;

pub use context::Context;
pub use custom::{CustomModule, CustomNetwork};
pub use error::BuildError;
pub use graph::Graph;
pub use hook::GradientSink;
pub use init::Init;
pub use network::{Cost, Network, cost, estimate_size};
pub use registry::{ModelEntry, build, build_frozen, entries, find, register, skip_init};
pub use spec::Spec;
pub use state::{
    LoadError, ParameterInfo, StateKind, StateTensor, load_state_dict, map_parameters, map_state, parameters,
    state_dict, take_gradients, update_parameters,
};
