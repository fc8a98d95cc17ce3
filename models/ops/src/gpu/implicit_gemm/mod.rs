//! Convolutions as matrix products on tensor cores ("implicit GEMM", Chetlur et al., "cuDNN: Efficient Primitives for Deep
//! Learning", 2014): no matrix of windows is written to memory.
//!
//! The kernel is CUDA C++, not CubeCL. CubeCL has the same instructions, but waits for asynchronous copies by barriers in shared
//! memory, not by groups of copies. And tests can compile this text for any compute capability without a GPU. Images are rows of
//! channels, one row per pixel; weights are `[out, height, width, in]` in memory. Each block computes a tile of one group's
//! product:
//!
//! | pass | rows | columns | depth (what is summed) |
//! |---|---|---|---|
//! | forward | output pixels | output channels | taps × input channels |
//! | data gradient | input pixels of a class | input channels | taps of the class × output channels |
//! | weight gradient | output channels | taps × input channels | output pixels of a piece |
//!
//! With a stride, only some taps meet an input pixel. Which ones depends on its coordinates modulo the stride: its class. Each class
//! is a product of its own, so nothing is multiplied by inserted zeros. Weight gradients have few rows and columns and a long sum:
//! it is split into pieces, which a second kernel adds in order.
//!
//! Sums are f32, in an order that depends on the shapes alone. f32 operands are rounded to TF32. There is nothing to tune, so all
//! GPUs run the same kernels.

mod kernel;
mod source;

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::{numeric::empty_device_contiguous_dtype, permute_nchw_to_nhwc, permute_nhwc_to_nchw};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::server::KernelArguments;

use self::source::{ConvKernel, Division, Pass, Sizes, Tile};
use super::conv::sum_pieces;
use super::moments::Moments;
use super::rows::{Rows, aligned};
use crate::extension::ConvOptions;

/// Returns true if the GPU and the options fit the kernel: compute capability 8.0, f32 or bf16.
pub(super) fn supports(input: &CubeTensor, options: &ConvOptions) -> bool {
    let strided = options.stride != [1, 1];
    // CubeCL says so for 8.0 and newer.
    input.client.properties().features.copy_async
        && matches!(input.dtype, DType::F32 | DType::BF16)
        && !(strided && options.dilation != [1, 1])
}

/// Returns `[out, in / groups, height, width]` in the memory order of the kernel.
pub(super) fn ordered(weight: CubeTensor) -> CubeTensor {
    permute_nhwc_to_nchw(into_contiguous(permute_nchw_to_nhwc(weight)))
}

/// Returns the largest number of elements, at most 16 bytes, that divides all these numbers.
fn vector(dtype: DType, numbers: &[usize], is_aligned: bool) -> usize {
    let largest = 16 / dtype.size();
    let fits = |vector: &usize| numbers.iter().all(|number| number.is_multiple_of(*vector));
    [8, 4, 2].into_iter().filter(|&vector| is_aligned && vector <= largest).find(fits).unwrap_or(1)
}

/// Number of windows along an axis.
fn windows(extent: usize, kernel: usize, axis: usize, options: &ConvOptions) -> usize {
    (extent + 2 * options.padding[axis] - options.dilation[axis] * (kernel - 1) - 1) / options.stride[axis] + 1
}

/// A product, apart from its tile.
struct Product<'a> {
    pass: Pass,
    /// The images that windows are taken from.
    images: &'a Rows,
    /// Channels of a group of these images.
    channels: usize,
    window: [usize; 2],
    options: &'a ConvOptions,
    /// Products beside each other: groups times classes or pieces.
    products: usize,
    bias: Option<CubeTensor>,
    relu: bool,
    /// `[tiles of rows][2][columns of all groups]`, f32: see [`Moments`].
    moments: Option<&'a CubeTensor>,
    sizes: Sizes,
}

/// Returns true if images, `channels` of each group, are read by less than 8 bytes.
fn narrow(images: &Rows, channels: usize) -> bool {
    vector(images.dtype(), &[channels, images.pitch(1)], images.is_aligned()) * images.dtype().size() < 8
}

impl Product<'_> {
    /// Launches with the tensors `[other operand, result]`, accessed with these numbers of elements.
    fn launch(self, tile: Tile, [other, result]: [&CubeTensor; 2], vectors: [usize; 2]) {
        let Self { pass, images, channels, window, options, products, bias, relu, moments, mut sizes } = self;
        let [_, height, width, _] = images.dims();
        let ConvOptions { stride, padding, dilation, groups, .. } = *options;
        sizes.channels = channels as u32;
        sizes.groups = groups as u32;
        sizes.height = height as u32;
        sizes.width = width as u32;
        sizes.pitch = images.pitch(1) as u32;
        sizes.padding = padding.map(|pixels| pixels as u32);
        let kernel = ConvKernel {
            pass,
            tile,
            bf16: images.dtype() == DType::BF16,
            window,
            stride,
            dilation,
            vectors: [
                vector(images.dtype(), &[channels, images.pitch(1)], images.is_aligned()),
                vectors[0],
                vectors[1],
            ],
            bias: bias.is_some(),
            relu,
            moments: moments.is_some(),
        };
        let (rows, columns) = (sizes.rows as usize, sizes.columns as usize);
        let count =
            CubeCount::Static(rows.div_ceil(tile.rows) as u32, columns.div_ceil(tile.columns) as u32, products as u32);
        let client = images.client();
        let buffers = [Some(images.tensor()), Some(other), bias.as_ref(), Some(result), moments];
        let arguments = buffers
            .into_iter()
            .flatten()
            .fold(KernelArguments::new(), |all, tensor| all.with_buffer(tensor.handle.clone().binding()));
        client.launch(Box::new(kernel), count, sizes.after(arguments));
    }
}

/// Convolves `[B, in, H, W]` with `[out, in / groups, kh, kw]`, [`ordered`]. The result's moments are kept for the batch norm that
/// follows, if the options say that one does.
pub(super) fn forward(
    input: CubeTensor,
    weight: &CubeTensor,
    bias: Option<CubeTensor>,
    options: &ConvOptions,
    relu: bool,
) -> CubeTensor {
    let [outputs, channels, height, width]: [usize; 4] = weight.shape().dims();
    let images = Rows::new(input);
    let [batch, in_height, in_width, _] = images.dims();
    let (down, across) = (windows(in_height, height, 0, options), windows(in_width, width, 1, options));
    let result = images.images(batch, down, across, outputs);
    let (rows, columns) = (batch * down * across, outputs / options.groups);
    let sizes = Sizes {
        rows: rows as u32,
        columns: columns as u32,
        other_pitch: result.pitch(1) as u32,
        across: Division::by(across),
        down: Division::by(down),
        ..Sizes::default()
    };
    let tile = Tile::choose(rows, columns, options.groups, narrow(&images, channels));
    let moments =
        (options.norm_follows && bias.is_none() && !relu).then(|| result.of_columns(2 * rows.div_ceil(tile.rows)));
    let product = Product {
        pass: Pass::Forward,
        images: &images,
        channels,
        window: [height, width],
        options,
        products: options.groups,
        bias: bias.map(into_contiguous),
        relu,
        moments: moments.as_ref(),
        sizes,
    };
    let vectors = [
        vector(images.dtype(), &[channels], aligned(weight)),
        vector(images.dtype(), &[columns, result.pitch(1)], result.is_aligned()),
    ];
    product.launch(tile, [weight, result.tensor()], vectors);
    if let Some(pieces) = moments {
        Moments::keep(&result, pieces, tile.rows);
    }
    result.into_tensor()
}

/// Computes the gradient of an input of `shape`.
pub(super) fn data_gradient(
    shape: [usize; 4],
    weight: &CubeTensor,
    grad: CubeTensor,
    options: &ConvOptions,
) -> CubeTensor {
    let [outputs, columns, height, width]: [usize; 4] = weight.shape().dims();
    let [batch, channels, in_height, in_width] = shape;
    let images = Rows::new(grad);
    let result = images.images(batch, in_height, in_width, channels);
    let [down, across] = [in_height.div_ceil(options.stride[0]), in_width.div_ceil(options.stride[1])];
    let rows = batch * down * across;
    let products = options.groups * options.stride[0] * options.stride[1];
    let sizes = Sizes {
        rows: rows as u32,
        columns: columns as u32,
        other_height: in_height as u32,
        other_width: in_width as u32,
        other_pitch: result.pitch(1) as u32,
        across: Division::by(across),
        down: Division::by(down),
        ..Sizes::default()
    };
    let product = Product {
        pass: Pass::DataGradient,
        images: &images,
        channels: outputs / options.groups,
        window: [height, width],
        options,
        products,
        bias: None,
        relu: false,
        moments: None,
        sizes,
    };
    let tile = Tile::choose(rows, columns, products, narrow(&images, product.channels));
    let vectors = [
        vector(images.dtype(), &[columns], aligned(weight)),
        vector(images.dtype(), &[columns, result.pitch(1)], result.is_aligned()),
    ];
    product.launch(tile, [weight, result.tensor()], vectors);
    result.into_tensor()
}

/// Computes the gradient of `weight`, [`ordered`], in the element type `dtype`.
pub(super) fn weight_gradient(
    input: CubeTensor,
    weight: &CubeTensor,
    grad: CubeTensor,
    options: &ConvOptions,
    dtype: DType,
) -> CubeTensor {
    /// Number of blocks that occupies a large GPU.
    const BLOCKS: usize = 256;
    /// Pixels of the shortest piece.
    const SHORTEST: usize = 256;
    let [outputs, channels, height, width]: [usize; 4] = weight.shape().dims();
    let (images, grad) = (Rows::new(input), Rows::new(grad));
    let [batch, down, across, _] = grad.dims();
    let (rows, columns, pixels) = (outputs / options.groups, height * width * channels, batch * down * across);
    let sizes = Sizes {
        rows: rows as u32,
        columns: columns as u32,
        other_pitch: grad.pitch(1) as u32,
        pixels: pixels as u32,
        across: Division::by(across),
        down: Division::by(down),
        ..Sizes::default()
    };
    let mut product = Product {
        pass: Pass::WeightGradient,
        images: &images,
        channels,
        window: [height, width],
        options,
        products: 1,
        bias: None,
        relu: false,
        moments: None,
        sizes,
    };
    let narrow = narrow(&images, channels);
    let tile = Tile::of_weight_gradient(rows, columns, narrow);
    let blocks = tile.blocks(rows, columns) * options.groups;
    let pieces = (BLOCKS / blocks).clamp(1, pixels.div_ceil(SHORTEST));
    let piece = pixels.div_ceil(pieces).next_multiple_of(32);
    let pieces = pixels.div_ceil(piece);
    product.products = options.groups * pieces;
    product.sizes.piece = piece as u32;
    let length = outputs * columns;
    let new = |shape: [usize; 4], dtype| {
        empty_device_contiguous_dtype(images.client().clone(), weight.device.clone(), Shape::from(shape), dtype)
    };
    let shape = [outputs, height, width, channels];
    let sums = new(if pieces == 1 { shape } else { [pieces, 1, 1, length] }, DType::F32);
    let vectors = [
        vector(grad.dtype(), &[rows, grad.pitch(1)], grad.is_aligned()),
        if columns.is_multiple_of(2) { 2 } else { 1 },
    ];
    product.launch(tile, [grad.tensor(), &sums], vectors);
    if pieces == 1 && dtype == DType::F32 {
        return permute_nhwc_to_nchw(sums);
    }
    let result = new(shape, dtype);
    sum_pieces(&sums, &result, pieces);
    permute_nhwc_to_nchw(result)
}
