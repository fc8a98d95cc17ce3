//! Layers with PyTorch's names and layouts.
//!
//! All networks are built from these layers alone. Kernels and synchronised batch norm are selected here through
//! [`Context`](crate::Context), so the models need no change.

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
pub use sequential::{Layer, run};
pub use weight::Weight;
