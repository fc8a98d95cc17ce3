//! burn-flex tensors as channels-last slices.
//!
//! The kernels keep images channels-last in memory, `[batch, height, width, channels]`, as PyTorch's `channels_last`:
//! every loop runs over contiguous channels for all image sizes. For burn, the shape is `[batch, channels, height,
//! width]` with permuted strides, so all other operations accept the tensors.

use burn::tensor::{DType, Shape};
use burn_flex::{FlexTensor, Layout};

use super::allocator::Buffer;
use super::element::{Element, with_element};
use super::parallel::{SharedSlice, for_each};

/// A tensor that is dense in memory, channels-last or row-major.
#[derive(Debug, Clone)]
pub(crate) struct Dense {
    tensor: FlexTensor,
}

impl Dense {
    /// Makes a channels-last view of `[B, C, H, W]`; copies memory of another order.
    pub(crate) fn channels_last(tensor: FlexTensor) -> Self {
        let [b, c, h, w] = dims4(&tensor);
        if has_strides(&tensor, &channels_last_strides([b, c, h, w])) {
            return Self { tensor };
        }
        let contiguous = tensor.to_contiguous();
        let tensor = with_element!(contiguous.dtype(), E => {
            let from = &storage::<E>(&contiguous)[contiguous.layout().start_offset()..];
            let mut to = Buffer::<E>::new(b * c * h * w);
            transpose(from, &mut to, b, c, h * w);
            image(to, [b, c, h, w])
        });
        Self { tensor }
    }

    /// Makes a row-major view; copies memory of another order.
    pub(crate) fn row_major(tensor: FlexTensor) -> Self {
        Self { tensor: if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() } }
    }

    /// Makes a row-major view of images; copies memory of another order.
    pub(crate) fn row_major_images(tensor: FlexTensor) -> Self {
        let [b, c, h, w] = dims4(&tensor);
        if tensor.is_contiguous() || !has_strides(&tensor, &channels_last_strides([b, c, h, w])) {
            return Self::row_major(tensor);
        }
        let images = Self { tensor };
        let tensor = with_element!(images.dtype(), E => {
            let mut to = Buffer::<E>::new(b * c * h * w);
            transpose(images.values(), &mut to, b, h * w, c);
            row_major(to, [b, c, h, w])
        });
        Self { tensor }
    }

    /// Makes a channels-last view of images and a row-major view of other tensors.
    pub(crate) fn natural(tensor: FlexTensor) -> Self {
        if tensor.layout().shape().num_dims() == 4 { Self::channels_last(tensor) } else { Self::row_major(tensor) }
    }

    pub(crate) fn shape(&self) -> Shape {
        self.tensor.layout().shape().clone()
    }

    /// Returns `[B, C, H, W]`.
    pub(crate) fn dims4(&self) -> [usize; 4] {
        dims4(&self.tensor)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Returns all elements, in memory order.
    ///
    /// # Panics
    ///
    /// When `E` is not the tensor's element type.
    pub(crate) fn values<E: Element>(&self) -> &[E] {
        let start = self.tensor.layout().start_offset();
        &storage(&self.tensor)[start..start + self.tensor.layout().num_elements()]
    }

    pub(crate) fn into_tensor(self) -> FlexTensor {
        self.tensor
    }

    /// Makes a tensor of this tensor's shape and memory order.
    pub(crate) fn like<E: Element>(&self, values: Buffer<E>) -> FlexTensor {
        if self.tensor.layout().shape().num_dims() == 4 {
            image(values, self.dims4())
        } else {
            FlexTensor::new(values.into_bytes(), Layout::contiguous(self.shape()), E::DTYPE)
        }
    }
}

/// Makes a tensor `[B, C, H, W]` from a channels-last buffer.
pub(crate) fn image<E: Element>(values: Buffer<E>, dims: [usize; 4]) -> FlexTensor {
    let layout = Layout::new(Shape::from(dims), channels_last_strides(dims).to_vec(), 0);
    FlexTensor::new(values.into_bytes(), layout, E::DTYPE)
}

/// Makes a tensor from a row-major buffer.
pub(crate) fn row_major<E: Element, const D: usize>(values: Buffer<E>, dims: [usize; D]) -> FlexTensor {
    FlexTensor::new(values.into_bytes(), Layout::contiguous(Shape::from(dims)), E::DTYPE)
}

fn storage<E: Element>(tensor: &FlexTensor) -> &[E] {
    assert_eq!(tensor.dtype(), E::DTYPE, "element type of a kernel's input");
    bytemuck::cast_slice(tensor.bytes())
}

fn dims4(tensor: &FlexTensor) -> [usize; 4] {
    let shape = tensor.layout().shape();
    [shape[0], shape[1], shape[2], shape[3]]
}

fn channels_last_strides([_, c, h, w]: [usize; 4]) -> [isize; 4] {
    [h * w * c, 1, w * c, c].map(|stride| stride as isize)
}

/// Compares strides, except those of axes of length one, which have no effect.
fn has_strides(tensor: &FlexTensor, strides: &[isize]) -> bool {
    let layout = tensor.layout();
    layout.strides().iter().zip(strides).enumerate().all(|(axis, (a, b))| a == b || layout.shape()[axis] == 1)
}

/// Transposes `[batch][rows][columns]` to `[batch][columns][rows]`.
pub(super) fn transpose<E: Element>(from: &[E], to: &mut [E], batch: usize, rows: usize, columns: usize) {
    const TILE: usize = 16;
    let len = rows * columns;
    let target = SharedSlice::new(to);
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
