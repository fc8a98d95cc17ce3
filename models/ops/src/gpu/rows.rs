//! Tensors as matrices of rows, and how a launch goes over them.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::{numeric::empty_device_dtype, permute_nchw_to_nhwc, permute_nhwc_to_nchw};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Threads of a block.
pub(super) const UNITS: usize = 256;
/// Rows that a thread of an elementwise pass goes over, so that what it reads of the channels is read once for many.
const ROWS_A_UNIT: usize = 8;

/// A tensor whose last axis is dense: `[B, H, W, C]` for images, `[B, C]` else.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    tensor: CubeTensor,
    /// Whether the tensor came as `[B, C, H, W]`.
    image: bool,
    /// Elements from one row to the next.
    pitch: usize,
}

impl Rows {
    /// Of `[B, C, H, W]` or `[B, C]` in any order of memory. What is not in rows is copied.
    pub(super) fn of(tensor: CubeTensor) -> Self {
        let image = tensor.rank() == 4;
        let tensor = if image { permute_nchw_to_nhwc(tensor) } else { tensor };
        match pitch(&tensor) {
            Some(pitch) => Self { tensor, image, pitch },
            None => Self::dense(into_contiguous(tensor), image),
        }
    }

    fn dense(tensor: CubeTensor, image: bool) -> Self {
        let pitch = pitch(&tensor).expect("a tensor that was just made lies in rows");
        Self { tensor, image, pitch }
    }

    /// New memory of this shape and type.
    pub(super) fn output(&self) -> Self {
        let like = &self.tensor;
        let shape = like.meta.shape().clone();
        Self::dense(empty_device_dtype(like.client.clone(), like.device.clone(), shape, like.dtype), self.image)
    }

    /// New memory for images of this type.
    pub(super) fn images(&self, batch: usize, height: usize, width: usize, channels: usize) -> Self {
        let like = &self.tensor;
        let shape = Shape::from([batch, height, width, channels]);
        Self::dense(empty_device_dtype(like.client.clone(), like.device.clone(), shape, like.dtype), true)
    }

    /// In the shape that it came in.
    pub(super) fn into_tensor(self) -> CubeTensor {
        if self.image { permute_nhwc_to_nchw(self.tensor) } else { self.tensor }
    }

    pub(super) fn client(&self) -> &Client {
        &self.tensor.client
    }

    pub(super) fn dtype(&self) -> DType {
        self.tensor.dtype
    }

    pub(super) fn columns(&self) -> usize {
        self.tensor.meta.shape().last().copied().unwrap_or(1)
    }

    pub(super) fn rows(&self) -> usize {
        self.tensor.meta.num_elements() / self.columns().max(1)
    }

    /// Elements from one row to the next, in vectors.
    pub(super) fn pitch(&self, vector: usize) -> usize {
        self.pitch / vector
    }

    pub(super) fn arg(&self) -> BufferArg {
        arg(&self.tensor, self.rows() * self.pitch)
    }

    /// New memory for `parts` values of each column, in f32.
    pub(super) fn of_columns(&self, parts: usize) -> CubeTensor {
        let like = &self.tensor;
        let shape = Shape::from([parts * self.columns()]);
        empty_device_dtype(like.client.clone(), like.device.clone(), shape, DType::F32)
    }

    /// Batch, height, width and channels of an image.
    pub(super) fn dims(&self) -> [usize; 4] {
        self.tensor.meta.shape().dims()
    }

    /// Of groups of so many columns: four elements, two, or one.
    pub(super) fn vector_of(&self, group: usize) -> usize {
        let fits = |vector: &usize| {
            group.is_multiple_of(*vector) && self.pitch.is_multiple_of(*vector) && aligned(&self.tensor)
        };
        [4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// Four elements where all of these can be read and written so, else one.
    pub(super) fn vector(&self, others: &[&Rows], columns: &[&CubeTensor]) -> usize {
        let rows = others.iter().copied().chain([self]);
        let whole = self.columns().is_multiple_of(4)
            && rows.clone().all(|rows| rows.pitch.is_multiple_of(4))
            && rows.map(|rows| &rows.tensor).chain(columns.iter().copied()).all(aligned);
        if whole { 4 } else { 1 }
    }
}

/// From one row to the next, where all rows are as far apart.
fn pitch(tensor: &CubeTensor) -> Option<usize> {
    if tensor.meta.is_tiled() {
        return None;
    }
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let last = shape.len() - 1;
    if shape[last] > 1 && strides[last] != 1 {
        return None;
    }
    let mut outer = (0..last).rev().filter(|&axis| shape[axis] > 1);
    let Some(first) = outer.next() else { return Some(shape[last]) };
    let mut expected = strides[first] * shape[first];
    for axis in outer {
        if strides[axis] != expected {
            return None;
        }
        expected *= shape[axis];
    }
    (strides[first] >= shape[last]).then_some(strides[first])
}

/// Whether vectors can be read from its beginning on.
pub(super) fn aligned(tensor: &CubeTensor) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

/// As many elements of a tensor's memory as a kernel's argument.
pub(super) fn arg(tensor: &CubeTensor, length: usize) -> BufferArg {
    // SAFETY: the kernels here look at no length, but at the rows and columns that they are given.
    unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), length) }
}

/// All of a tensor whose elements lie one behind the other.
pub(super) fn all(tensor: &CubeTensor) -> BufferArg {
    arg(tensor, tensor.meta.num_elements())
}

/// Blocks over a matrix: threads side by side take neighbouring vectors of a row, what is left of a block takes rows.
pub(super) struct Blocks {
    /// Vectors a row.
    pub(super) columns: usize,
    /// Of columns.
    tiles: usize,
    /// Threads side by side.
    lanes: usize,
    rows: usize,
}

impl Blocks {
    pub(super) fn over(rows: &Rows, vector: usize) -> Self {
        let columns = rows.columns() / vector;
        let lanes = columns.next_power_of_two().min(32);
        Self { columns, tiles: columns.div_ceil(lanes), lanes, rows: rows.rows() }
    }

    pub(super) fn dim(&self) -> CubeDim {
        CubeDim::new_2d(self.lanes as u32, (UNITS / self.lanes) as u32)
    }

    /// For a pass in which every row is looked at by one thread a vector.
    pub(super) fn elementwise(&self) -> CubeCount {
        let blocks = self.rows.div_ceil(UNITS / self.lanes * ROWS_A_UNIT).clamp(1, 1 << 15);
        CubeCount::Static(self.tiles as u32, blocks as u32, 1)
    }

    /// Rows of a piece, and pieces, of a reduction over all rows. They depend on the shape alone, and so do the bits.
    pub(super) fn pieces(&self) -> [usize; 2] {
        /// Blocks that keep a large GPU busy.
        const BLOCKS: usize = 1024;
        let deep = UNITS / self.lanes;
        let piece = self.rows.div_ceil((BLOCKS / self.tiles).clamp(1, 512)).next_multiple_of(deep).max(deep * 4);
        [piece, self.rows.div_ceil(piece)]
    }

    pub(super) fn reduction(&self) -> CubeCount {
        CubeCount::Static(self.tiles as u32, self.pieces()[1] as u32, 1)
    }

    /// For the second launch of a reduction, over the pieces: few columns a block, so that many threads share the pieces of
    /// each, which are read one behind the other.
    pub(super) fn whole(&self) -> (CubeCount, CubeDim) {
        whole(self.columns)
    }
}

/// See [`Blocks::whole`].
pub(super) fn whole(columns: usize) -> (CubeCount, CubeDim) {
    let lanes = columns.next_power_of_two().min(4);
    let dim = CubeDim::new_2d(lanes as u32, (UNITS / lanes) as u32);
    (CubeCount::Static(columns.div_ceil(lanes) as u32, 1, 1), dim)
}
