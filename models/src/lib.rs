//! The networks of pytorch-cifar's accuracy table on burn, with PyTorch's parameter names, layouts and batch-norm
//! semantics.
//!
//! The crate never learns of ranks, files or data sets. One model family a file, one [`registry`]; [`state`] is the
//! PyTorch-named view through which optimisers, checkpoints and weight files reach a [`Network`].

pub mod context;
pub mod error;
pub mod hook;
pub mod init;
pub mod layers;
pub mod lenet;
pub mod network;
#[allow(unsafe_code, reason = "kernels: vector instructions, pointer tables, buffers that tasks share")]
pub mod ops;
pub mod registry;
pub mod resnet;
pub mod spec;
pub mod state;
pub mod vgg;

pub use context::{Context, StatisticsReduce};
pub use error::BuildError;
pub use hook::GradientSink;
pub use init::Init;
pub use network::{Network, macs};
pub use registry::{Entry, build, entries, find};
pub use spec::Spec;
pub use state::{
    LoadError, ParameterInfo, StateKind, StateTensor, gradient, load_state_dict, map_parameters, map_state, parameters,
    state_dict, take_gradient,
};
