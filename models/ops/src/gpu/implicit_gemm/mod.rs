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
//! it is split into pieces, which the last block of each tile adds in order (`finish.cu`). Both gradients are one launch.
//!
//! A forward product also computes the moments of its result for the batch norm behind it. A data gradient adds the gradients that
//! the input has from other operations, and computes the sums that the batch norm in front of it needs (`moments.cu`).
//!
//! Sums are f32, in an order that depends on the shapes alone. f32 operands are rounded to TF32. There is nothing to tune, so all
//! GPUs run the same kernels.

mod forward;
mod gradients;
mod kernel;
mod source;

use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::{permute_nchw_to_nhwc, permute_nhwc_to_nchw};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::server::KernelArguments;

pub(super) use self::forward::forward;
pub(super) use self::gradients::{Required, gradients, knows};
use self::kernel::with_sizes;
use self::source::{ConvKernel, ConvProduct, Pass, Sizes, Tile};
use super::counters::COUNTERS;
use super::rows::Rows;
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

/// Returns true if images, `channels` of each group, are read by less than 8 bytes.
fn narrow(images: &Rows, channels: usize) -> bool {
    vector(images.dtype(), &[channels, images.pitch(1)], images.is_aligned()) * images.dtype().size() < 8
}

/// Returns how many of `parts` parts a block merges at a time, for `tiles` results: about as many as it then merges results.
fn fan(parts: usize, tiles: usize) -> usize {
    /// Parts that one block may merge alone.
    const FEW: usize = 8;
    let mut fan = FEW.max(parts.isqrt());
    while (parts.div_ceil(fan) + 1) * tiles > COUNTERS {
        assert!(fan < parts, "{tiles} tiles have more counters than there are");
        fan *= 2;
    }
    fan
}

/// A product that is ready to be launched.
struct Launch {
    product: ConvProduct,
    sizes: Sizes,
    /// As [`ConvProduct::buffers`] names them.
    buffers: Vec<CubeTensor>,
}

impl Sizes {
    /// Adds what all passes have alike: the images of the windows, with `channels` in each group, and the blocks. `products` are
    /// groups times classes or pieces.
    fn of(self, images: &Rows, channels: usize, options: &ConvOptions, tile: Tile, products: usize) -> Self {
        let [_, height, width, _] = images.dims();
        let tiles = [(self.rows as usize).div_ceil(tile.rows), (self.columns as usize).div_ceil(tile.columns)];
        Self {
            channels: channels as u32,
            groups: options.groups as u32,
            height: height as u32,
            width: width as u32,
            pitch: images.pitch(1) as u32,
            padding: options.padding.map(|pixels| pixels as u32),
            tiles: tiles.map(|tiles| tiles as u32),
            blocks: (tiles[0] * tiles[1] * products) as u32,
            ..self
        }
    }
}

impl ConvProduct {
    /// Makes a product without anything around it. `vectors` are those of the other operand and of the result.
    fn new(
        pass: Pass,
        tile: Tile,
        images: &Rows,
        channels: usize,
        options: &ConvOptions,
        more: [[usize; 2]; 2],
    ) -> Self {
        let [window, vectors] = more;
        let of_images = vector(images.dtype(), &[channels, images.pitch(1)], images.is_aligned());
        Self {
            pass,
            tile,
            bf16: images.dtype() == DType::BF16,
            window,
            stride: options.stride,
            dilation: options.dilation,
            vectors: [of_images, vectors[0], vectors[1]],
            bias: false,
            relu: false,
            moments: false,
            split: false,
            add: false,
            norm: None,
        }
    }
}

/// Launches one product, or two that have nothing to do with each other.
fn launch(first: Launch, second: Option<Launch>) {
    let kernel = ConvKernel { first: first.product, second: second.as_ref().map(|second| second.product) };
    let client = first.buffers[0].client.clone();
    let all = [Some(first), second].into_iter().flatten();
    let (mut arguments, mut sizes) = (KernelArguments::new(), Vec::new());
    for Launch { product, sizes: of_product, buffers } in all {
        assert_eq!(buffers.len(), product.buffers().len(), "the buffers that {product:?} names");
        arguments = buffers.into_iter().fold(arguments, |all, tensor| all.with_buffer(tensor.handle.binding()));
        sizes.push(of_product);
    }
    let blocks = sizes.iter().map(|sizes| sizes.blocks).sum();
    client.launch(Box::new(kernel), CubeCount::Static(blocks, 1, 1), with_sizes(arguments, &sizes));
}
