//! burn-flex tensors as channels-last slices.
//!
//! The operations keep images channels-last in memory, `[batch, height, width, channels]`, as PyTorch's
//! `channels_last` does: every loop then runs over contiguous channels, whatever the size of the image. To burn they
//! remain `[batch, channels, height, width]` with permuted strides, so any other operation works on them.

use burn::tensor::{DType, Shape};
use burn_flex::{FlexTensor, Layout};

use super::memory::Buffer;
use super::parallel::{Shared, for_each};

/// A tensor whose memory is known to be dense and channels-last, or row-major.
#[derive(Debug, Clone)]
pub(crate) struct Dense {
    tensor: FlexTensor,
}

impl Dense {
    /// Channels-last view of `[B, C, H, W]`; copies where the memory is in another order.
    pub(crate) fn channels_last(tensor: FlexTensor) -> Self {
        let [b, c, h, w] = dims4(&tensor);
        if has_strides(&tensor, &channels_last_strides([b, c, h, w])) {
            return Self { tensor };
        }
        let contiguous = tensor.to_contiguous();
        let from: &[f32] = &contiguous.storage::<f32>()[contiguous.layout().start_offset()..];
        let mut to = Buffer::new(b * c * h * w);
        transpose(from, &mut to, b, c, h * w);
        Self { tensor: image(to, [b, c, h, w]) }
    }

    /// Row-major view; copies where the memory is in another order.
    pub(crate) fn row_major(tensor: FlexTensor) -> Self {
        Self { tensor: if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() } }
    }

    /// Images channels-last, everything else row-major.
    pub(crate) fn natural(tensor: FlexTensor) -> Self {
        if tensor.layout().shape().num_dims() == 4 { Self::channels_last(tensor) } else { Self::row_major(tensor) }
    }

    pub(crate) fn shape(&self) -> Shape {
        self.tensor.layout().shape().clone()
    }

    /// `[B, C, H, W]`.
    pub(crate) fn dims4(&self) -> [usize; 4] {
        dims4(&self.tensor)
    }

    /// All elements, in memory order.
    pub(crate) fn values(&self) -> &[f32] {
        let start = self.tensor.layout().start_offset();
        &self.tensor.storage::<f32>()[start..start + self.tensor.layout().num_elements()]
    }

    pub(crate) fn into_tensor(self) -> FlexTensor {
        self.tensor
    }

    /// A tensor of this one's shape and memory order.
    pub(crate) fn like(&self, values: Buffer) -> FlexTensor {
        if self.tensor.layout().shape().num_dims() == 4 {
            image(values, self.dims4())
        } else {
            FlexTensor::new(values.into_bytes(), Layout::contiguous(self.shape()), DType::F32)
        }
    }
}

/// A channels-last buffer as the `[B, C, H, W]` tensor it is to burn.
pub(crate) fn image(values: Buffer, dims: [usize; 4]) -> FlexTensor {
    let layout = Layout::new(Shape::from(dims), channels_last_strides(dims).to_vec(), 0);
    FlexTensor::new(values.into_bytes(), layout, DType::F32)
}

/// A row-major tensor.
pub(crate) fn row_major<const D: usize>(values: Buffer, dims: [usize; D]) -> FlexTensor {
    FlexTensor::new(values.into_bytes(), Layout::contiguous(Shape::from(dims)), DType::F32)
}

fn dims4(tensor: &FlexTensor) -> [usize; 4] {
    let shape = tensor.layout().shape();
    [shape[0], shape[1], shape[2], shape[3]]
}

fn channels_last_strides([_, c, h, w]: [usize; 4]) -> [isize; 4] {
    [h * w * c, 1, w * c, c].map(|stride| stride as isize)
}

/// Equal strides, but for axes of length one, whose stride never counts.
fn has_strides(tensor: &FlexTensor, strides: &[isize]) -> bool {
    let layout = tensor.layout();
    layout.strides().iter().zip(strides).enumerate().all(|(axis, (a, b))| a == b || layout.shape()[axis] == 1)
}

/// `[batch][rows][columns]` to `[batch][columns][rows]`.
fn transpose(from: &[f32], to: &mut [f32], batch: usize, rows: usize, columns: usize) {
    const TILE: usize = 16;
    let len = rows * columns;
    let target = Shared::new(to);
    for_each(batch, |n| {
        let from = &from[n * len..(n + 1) * len];
        // SAFETY: each task has its own image.
        let to = unsafe { target.slice(n * len..(n + 1) * len) };
        for r0 in (0..rows).step_by(TILE) {
            for c0 in (0..columns).step_by(TILE) {
                for c in c0..columns.min(c0 + TILE) {
                    for r in r0..rows.min(r0 + TILE) {
                        to[c * rows + r] = from[r * columns + c];
                    }
                }
            }
        }
    });
}
