//! Tensors as matrices of rows, and the launch geometry of kernels over them.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, empty_device_dtype};
use burn_cubecl::ops::{permute_nchw_to_nhwc, permute_nhwc_to_nchw};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::traffic;
use crate::dispatch::SMALLER_BATCH;

/// Threads per block.
pub(super) const THREADS_PER_BLOCK: usize = 256;
/// Rows per thread of an elementwise pass. Per-channel values that a thread reads are used for all its rows.
const ROWS_PER_THREAD: usize = 8;

/// A tensor whose last axis is dense: `[B, H, W, C]` for images, `[B, C]` for features.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    tensor: CubeTensor,
    /// Whether the tensor's original shape is `[B, C, H, W]`.
    image: bool,
    /// Elements from one row to the next.
    pitch: usize,
}

impl Rows {
    /// Makes rows of `[B, C, H, W]` or `[B, C]` in any memory order. Copies the tensor if its memory does not consist
    /// of rows.
    pub(super) fn new(tensor: CubeTensor) -> Self {
        let image = tensor.rank() == 4;
        let tensor = if image { permute_nchw_to_nhwc(tensor) } else { tensor };
        match pitch(&tensor) {
            Some(pitch) => Self { tensor, image, pitch },
            None => Self::dense(into_contiguous(tensor), image),
        }
    }

    /// Makes rows without a copy; `None` if the memory does not consist of rows.
    pub(super) fn view(tensor: &CubeTensor) -> Option<Self> {
        let image = tensor.rank() == 4;
        let tensor = if image { permute_nchw_to_nhwc(tensor.clone()) } else { tensor.clone() };
        pitch(&tensor).map(|pitch| Self { tensor, image, pitch })
    }

    fn dense(tensor: CubeTensor, image: bool) -> Self {
        let pitch = pitch(&tensor).expect("a new tensor consists of rows");
        Self { tensor, image, pitch }
    }

    /// Allocates a matrix of this shape and type.
    pub(super) fn empty_like(&self) -> Self {
        Self::dense(self.allocate(self.tensor.meta.shape().clone(), self.dtype()), self.image)
    }

    /// Copies the rows to aligned memory without gaps. burn's own copies may pad rows.
    pub(super) fn dense_copy(&self) -> Self {
        let CubeTensor { client, device, dtype, .. } = self.tensor.clone();
        let copy =
            cubecl::std::tensor::into_contiguous(&client, self.tensor.clone().binding(), dtype_to_storage_type(dtype));
        Self::dense(CubeTensor::new(client, copy.handle, *copy.metadata, device, dtype), self.image)
    }

    /// Allocates images of this element type.
    pub(super) fn empty_images(&self, batch: usize, height: usize, width: usize, channels: usize) -> Self {
        self.empty_images_of(batch, height, width, channels, self.dtype())
    }

    /// Allocates images of an element type.
    pub(super) fn empty_images_of(
        &self,
        batch: usize,
        height: usize,
        width: usize,
        channels: usize,
        dtype: DType,
    ) -> Self {
        Self::dense(self.allocate(Shape::from([batch, height, width, channels]), dtype), true)
    }

    /// Allocates `[batch, columns]` of an element type, without padding, because burn's operations copy padded tensors.
    pub(super) fn empty_features(&self, batch: usize, columns: usize, dtype: DType) -> Self {
        let (like, shape) = (&self.tensor, Shape::from([batch, columns]));
        let tensor = empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype);
        Self::dense(tensor, false)
    }

    /// Allocates rows. CubeCL pads a row to a power of two of bytes. The padding is useful only for rows that are not a multiple
    /// of 16 bytes, the longest access. Images of one pixel are never padded: they are features, and burn's operations copy
    /// padded tensors.
    fn allocate(&self, shape: Shape, dtype: DType) -> CubeTensor {
        let like = &self.tensor;
        let (client, device) = (like.client.clone(), like.device.clone());
        let row = shape.last().map_or(0, |&channels| channels * dtype.size());
        let features = shape.len() == 4 && shape[1] * shape[2] == 1;
        match row.is_multiple_of(16) || features {
            true => empty_device_contiguous_dtype(client, device, shape, dtype),
            false => empty_device_dtype(client, device, shape, dtype),
        }
    }

    /// Returns the tensor in its original shape.
    pub(super) fn into_tensor(self) -> CubeTensor {
        if self.image { permute_nhwc_to_nchw(self.tensor) } else { self.tensor }
    }

    /// Returns the tensor, channels last in its shape.
    pub(super) fn tensor(&self) -> &CubeTensor {
        &self.tensor
    }

    pub(super) fn client(&self) -> &Client {
        &self.tensor.client
    }

    pub(super) fn dtype(&self) -> DType {
        self.tensor.dtype
    }

    pub(super) fn is_image(&self) -> bool {
        self.image
    }

    pub(super) fn columns(&self) -> usize {
        self.tensor.meta.shape().last().copied().unwrap_or(1)
    }

    pub(super) fn rows(&self) -> usize {
        self.tensor.meta.num_elements() / self.columns().max(1)
    }

    /// Returns the distance of rows, in vectors.
    pub(super) fn pitch(&self, vector: usize) -> usize {
        self.pitch / vector
    }

    /// Checks that offsets with 32 bits reach all rows, for the kernels of convolutions.
    ///
    /// # Panics
    ///
    /// When the rows, with their padding, have 2^31 elements or more.
    pub(super) fn check_offsets(&self) {
        let (rows, pitch) = (self.rows(), self.pitch);
        assert!(
            rows * pitch < 1 << 31,
            "a convolution of {rows} pixels with {pitch} elements each: the kernels count up to 2^31: {SMALLER_BATCH}"
        );
    }

    /// Returns true if the memory is aligned for vectors.
    pub(super) fn is_aligned(&self) -> bool {
        aligned(&self.tensor)
    }

    pub(super) fn arg(&self) -> BufferArg {
        arg(&self.tensor, self.rows() * self.pitch)
    }

    /// Allocates `parts` f32 values per column.
    pub(super) fn empty_columns(&self, parts: usize) -> CubeTensor {
        self.empty_values(parts * self.columns())
    }

    /// Allocates `count` f32 values.
    pub(super) fn empty_values(&self, count: usize) -> CubeTensor {
        let (like, shape) = (&self.tensor, Shape::from([count]));
        empty_device_dtype(like.client.clone(), like.device.clone(), shape, DType::F32)
    }

    /// Returns batch, height, width and channels of an image.
    pub(super) fn dims(&self) -> [usize; 4] {
        self.tensor.meta.shape().dims()
    }

    /// Returns the largest vector (4, 2 or 1 elements) that divides groups of `group` columns and the rows.
    pub(super) fn vector_of(&self, group: usize) -> usize {
        let fits = |vector: &usize| {
            group.is_multiple_of(*vector) && self.pitch.is_multiple_of(*vector) && aligned(&self.tensor)
        };
        [4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// Returns 4 if all matrices and vectors can be accessed in vectors of four elements, else 1.
    pub(super) fn vector_size(&self, others: &[&Rows], columns: &[&CubeTensor]) -> usize {
        let rows = others.iter().copied().chain([self]);
        let whole = self.columns().is_multiple_of(4)
            && rows.clone().all(|rows| rows.pitch.is_multiple_of(4))
            && rows.map(|rows| &rows.tensor).chain(columns.iter().copied()).all(aligned);
        if whole { 4 } else { 1 }
    }
}

/// Returns the elements from one row to the next; `None` if the distances differ.
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

/// Returns true if the tensor's memory is aligned for vectors.
pub(super) fn aligned(tensor: &CubeTensor) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

/// Makes a kernel argument of the first `length` elements of a tensor's memory.
pub(super) fn arg(tensor: &CubeTensor, length: usize) -> BufferArg {
    traffic::note(tensor, length * tensor.dtype.size());
    untracked_arg(tensor, length)
}

/// As [`arg`], but not counted as traffic, because the kernel uses a small part only.
pub(super) fn untracked_arg(tensor: &CubeTensor, length: usize) -> BufferArg {
    // SAFETY: the kernels do not use the length, only the rows and columns of their arguments.
    unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), length) }
}

/// Makes a kernel argument of a contiguous tensor.
pub(super) fn all(tensor: &CubeTensor) -> BufferArg {
    arg(tensor, tensor.meta.num_elements())
}

/// Launch geometry over a matrix. Adjacent threads process adjacent vectors of a row, and the other dimension of a
/// block processes rows.
pub(super) struct Blocks {
    /// Vectors per row.
    pub(super) columns: usize,
    /// Number of blocks along the columns.
    tiles: usize,
    /// Threads of a block along the columns.
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
        CubeDim::new_2d(self.lanes as u32, (THREADS_PER_BLOCK / self.lanes) as u32)
    }

    /// Returns the grid of an elementwise pass, in which one thread processes each vector of a row.
    pub(super) fn elementwise(&self) -> CubeCount {
        let blocks = self.rows.div_ceil(THREADS_PER_BLOCK / self.lanes * ROWS_PER_THREAD).clamp(1, 1 << 15);
        CubeCount::Static(self.tiles as u32, blocks as u32, 1)
    }

    /// Returns the grid of a reduction of each image.
    ///
    /// # Panics
    ///
    /// When there are more images than the second axis of a grid can have blocks.
    pub(super) fn per_image(&self, images: usize) -> CubeCount {
        assert!(
            images < 1 << 16,
            "a batch of {images} images: the kernels reduce up to 65535 at a time: {SMALLER_BATCH}"
        );
        CubeCount::Static(self.tiles as u32, images as u32, 1)
    }

    /// Returns the rows per piece and the number of pieces of a reduction over all rows. They depend on the shape
    /// alone, so the result's bits do too.
    pub(super) fn pieces(&self) -> [usize; 2] {
        self.pieces_of_runs(1)
    }

    /// [`Self::pieces`] for threads that process runs of `run` adjacent rows: every thread of a column gets the same number of
    /// runs.
    pub(super) fn pieces_of_runs(&self, run: usize) -> [usize; 2] {
        /// Number of blocks that occupies a large GPU.
        const BLOCKS: usize = 1024;
        let depth = THREADS_PER_BLOCK / self.lanes;
        let least = self.rows.div_ceil((BLOCKS / self.tiles).clamp(1, 512));
        let piece = least.next_multiple_of(depth * run).max(depth * 4);
        [piece, self.rows.div_ceil(piece)]
    }

    /// Returns the grid of a launch with one thread per vector of columns, in blocks of [`Self::per_column_dim`].
    pub(super) fn per_column(&self) -> CubeCount {
        CubeCount::Static(self.columns.div_ceil(THREADS_PER_BLOCK) as u32, 1, 1)
    }

    /// See [`Self::per_column`].
    pub(super) fn per_column_dim(&self) -> CubeDim {
        CubeDim::new_1d(THREADS_PER_BLOCK as u32)
    }

    /// Returns the grid of a reduction over all rows.
    pub(super) fn reduction(&self) -> CubeCount {
        self.grid(self.pieces()[1])
    }

    /// Returns the grid of a reduction over pieces of rows.
    pub(super) fn grid(&self, pieces: usize) -> CubeCount {
        CubeCount::Static(self.tiles as u32, pieces as u32, 1)
    }
}

/// Returns the sum, or with `largest` the maximum, of the values of all threads in this thread's row of the block. The order is
/// fixed. All threads of the block must call the function. Blocks have [`THREADS_PER_BLOCK`] threads, and their rows a power of
/// two.
#[cube]
pub(super) fn reduce_row(value: f32, #[comptime] largest: bool) -> f32 {
    let mut values = Shared::<[f32]>::new_slice(THREADS_PER_BLOCK);
    let unit = UNIT_POS as usize;
    let lane = UNIT_POS_X as usize;
    values[unit] = value;
    sync_cube();
    let mut half = CUBE_DIM_X as usize / 2;
    while half > 0 {
        if lane < half {
            let one = values[unit];
            let other = values[unit + half];
            let both = if comptime!(largest) { max(one, other) } else { one + other };
            values[unit] = both;
        }
        sync_cube();
        half /= 2;
    }
    let result = values[unit - lane];
    // Wait: a later call overwrites the shared memory.
    sync_cube();
    result
}

/// Returns the sum of the values of all threads of a block of [`THREADS_PER_BLOCK`] threads, in a fixed order. All threads must
/// call the function.
#[cube]
pub(super) fn reduce_block(value: f32) -> f32 {
    let mut values = Shared::<[f32]>::new_slice(THREADS_PER_BLOCK);
    let unit = UNIT_POS as usize;
    values[unit] = value;
    sync_cube();
    let mut half = comptime!(THREADS_PER_BLOCK / 2).runtime();
    while half > 0 {
        if unit < half {
            let sum = values[unit] + values[unit + half];
            values[unit] = sum;
        }
        sync_cube();
        half /= 2;
    }
    let result = values[0];
    // Wait: a later call overwrites the shared memory.
    sync_cube();
    result
}
