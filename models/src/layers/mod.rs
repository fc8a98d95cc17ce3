//! Layers with PyTorch's names and layouts.
//!
//! All networks are built from these layers and from operations of the crate `ops`, which selects the kernels by device and element
//! type. The layers take precision, synchronised batch norm and the sink of gradients from the [`Context`](crate::Context), so the
//! networks need no code for them.

mod batch_norm;
mod buffer;
mod conv;
mod dropout;
mod linear;
mod pool;
mod sequential;
mod weight;

pub use batch_norm::{BatchNorm2d, FixedScaleNorm2d};
pub use buffer::Buffer;
pub(crate) use buffer::{BUFFER, FROZEN};
pub use conv::{Conv2d, Conv2dConfig, FrozenConv2d};
pub use dropout::{Dropout, StochasticDepth};
pub use linear::Linear;
pub use pool::{MaxPool2d, Relu, global_avg_pool, relu};
pub use sequential::{Layer, forward_sequential};
pub use weight::Weight;
