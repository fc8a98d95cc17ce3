//! Thin layers with PyTorch's names and layouts.
//!
//! Every network is built from these and from nothing else, so a faster kernel or synchronised batch norm goes in here,
//! behind [`Context`](crate::Context), and no model changes.

mod batch_norm;
mod buffer;
mod conv;
mod dropout;
mod linear;
mod pool;
mod sequential;

pub use batch_norm::BatchNorm2d;
pub use buffer::Buffer;
pub use conv::{Conv2d, Conv2dConfig};
pub use dropout::Dropout;
pub use linear::Linear;
pub use pool::{MaxPool2d, Relu, global_avg_pool, relu};
pub use sequential::{Layer, run};
