//! Convolutions as matrix products on tensor cores ("implicit GEMM", Chetlur et al., "cuDNN: Efficient Primitives for Deep
//! Learning", 2014): no matrix of windows is written to memory.
//!
//! The kernel is CUDA C++, not CubeCL, for two reasons. CubeCL waits for asynchronous copies with barriers in shared memory, not
//! with groups of copies (`cp.async.commit_group`). And tests can compile the source for any compute capability without a GPU.
//!
//! Images are rows of channels, one row per pixel. Weights are `[out, height, width, in]` in memory. Each block computes a tile
//! of one group's product:
//!
//! | pass | rows | columns | depth (what is summed) |
//! |---|---|---|---|
//! | forward | output pixels | output channels | taps × input channels |
//! | data gradient | input pixels of a class | input channels | taps of the class × output channels |
//! | weight gradient | output channels | taps × input channels | output pixels of a piece |
//!
//! With a stride, only some taps connect an input pixel with output pixels. These taps depend on the pixel's coordinates modulo
//! the stride, which are the pixel's *class*. Each class is a separate product, so nothing is multiplied by inserted zeros.
//! Weight gradients have few rows and columns and a long sum. The sum is split into *pieces*, which the last block of each tile
//! adds in order (`merge_parts.cu`). The gradients of input and weight share one launch.
//!
//! Groups of few channels would leave most of a tile empty. So several neighbouring groups are one product ([`Groups`]): the weight
//! is block-diagonal, and the copies to shared memory fill the rest with zeros.
//!
//! A forward product also computes the moments of its result, which the next batch norm needs. A data gradient adds the gradients
//! that the input has from other operations, and computes the sums for the batch norm before the convolution (`moments.cu`).
//! Deferred batch norms ([`Deferred`]) are applied to operands in shared memory (`prologue.cu`): the images of a forward product
//! and of a weight gradient are normalised, and the output's gradient is computed from the gradient of the normalised values.
//!
//! Sums are f32, in an order that depends on the shapes alone. f32 operands are rounded to TF32. Nothing is tuned at run time, so
//! all GPUs run the same kernels.
//!
//! A tile is 64 to 128 rows by 32 to 128 columns ([`Tile`]), and a warp multiplies 32 or 64 rows by 32 columns of it. Files:
//! `source.rs` joins the `.cu` files to a kernel, of which `conv.cu` is the entry; `forward.rs` and `gradients.rs` prepare the
//! launches; `kernel.rs` and `ahead.rs` compile. Checked by `models/ops/tests/conv_lowering.rs` (compiles all variants without a
//! GPU) and by `gpu_check --ops` (`benches/gpu_check/convolutions.rs`, `deferred.rs`).

mod ahead;
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

pub use self::ahead::compile_ahead;
pub(super) use self::forward::{Fused, StatisticsOfBatch, forward};
pub(super) use self::gradients::{NormFactors, OutputGradient, Required, gradients};
use self::kernel::with_sizes;
use self::source::{ConvKernel, ConvProduct, Pass, Sizes, Tile};
use super::counters::COUNTERS;
use super::deferred::Deferred;
use super::rows::Rows;
use super::traffic;
use crate::extension::{Activation, ConvOptions};

/// Returns true if the kernel supports the GPU and the options: compute capability 8.0 or higher, f32 or bf16, and not both a
/// stride and a dilation.
pub(super) fn supports(input: &CubeTensor, options: &ConvOptions) -> bool {
    let strided = options.stride != [1, 1];
    // CubeCL sets this flag for compute capability 8.0 and higher.
    input.client.properties().features.copy_async
        && matches!(input.dtype, DType::F32 | DType::BF16)
        && !(strided && options.dilation != [1, 1])
}

/// Returns `[out, in / groups, height, width]` in the memory order of the kernel.
pub(super) fn to_kernel_order(weight: CubeTensor) -> CubeTensor {
    permute_nhwc_to_nchw(into_contiguous(permute_nchw_to_nhwc(weight)))
}

/// Returns the largest number of elements, at most 16 bytes, that divides all these numbers.
fn vector_size(dtype: DType, numbers: &[usize], is_aligned: bool) -> usize {
    let largest = 16 / dtype.size();
    let fits = |vector: &usize| numbers.iter().all(|number| number.is_multiple_of(*vector));
    [8, 4, 2].into_iter().filter(|&vector| is_aligned && vector <= largest).find(fits).unwrap_or(1)
}

/// Returns how many of `parts` parts one block merges (`merge_parts` in `merge_parts.cu`), for `tiles` results. The number is about
/// the square root of `parts`, so both levels of merging are about equally long.
fn parts_per_merge(parts: usize, tiles: usize) -> usize {
    /// Parts that one block may merge alone.
    const FEW: usize = 8;
    let mut parts_per_merge = FEW.max(parts.isqrt());
    while (parts.div_ceil(parts_per_merge) + 1) * tiles > COUNTERS {
        assert!(parts_per_merge < parts, "{tiles} tiles have more counters than there are");
        parts_per_merge *= 2;
    }
    parts_per_merge
}

/// Returns true if the kernel can compute an activation and its derivative.
pub(in crate::gpu) fn supports_activation(activation: Activation) -> bool {
    kernel_activation(activation).is_some()
}

fn kernel_activation(activation: Activation) -> Option<source::Activation> {
    match activation {
        Activation::Identity => Some(source::Activation::Identity),
        Activation::Relu => Some(source::Activation::Relu),
        Activation::Relu6 => Some(source::Activation::Relu6),
        Activation::Silu => Some(source::Activation::Silu),
        Activation::Sigmoid | Activation::Gelu => None,
    }
}

/// Returns the activation of a deferred batch norm.
fn activation_of(norm: &Deferred) -> source::Activation {
    kernel_activation(norm.activation).expect("only batch norms with such activations are deferred")
}

/// A product that is ready to be launched.
struct Launch {
    product: ConvProduct,
    sizes: Sizes,
    /// In the order of [`ConvProduct::buffers`].
    buffers: Vec<CubeTensor>,
}

/// The groups of a convolution, and which of them are one product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Groups {
    /// Input and output channels of a group.
    channels: [usize; 2],
    count: usize,
    /// Neighbouring groups of a product. The last product may have fewer.
    merged: usize,
}

impl Groups {
    /// Returns the groups of a convolution with a weight `[out, in / groups, height, width]`.
    pub(super) fn of([outputs, inputs, ..]: [usize; 4], options: &ConvOptions) -> Self {
        /// Channels of a product with several groups: the columns of a tile.
        const CHANNELS: usize = 64;
        let channels = [inputs, outputs / options.groups];
        // A power of two, so that the channels of a product are a multiple of 16 bytes for more networks.
        let most = (CHANNELS / channels[0].max(channels[1]).max(1)).max(1);
        let merged = (1 << most.ilog2()).min(options.groups);
        Self { channels, count: options.groups, merged }
    }

    /// Number of products.
    fn products(self) -> usize {
        self.count.div_ceil(self.merged)
    }

    /// Input and output channels of a product; the last one may have fewer.
    fn of_product(self) -> [usize; 2] {
        self.channels.map(|channels| channels * self.merged)
    }

    /// Input and output channels of all groups.
    fn all(self) -> [usize; 2] {
        self.channels.map(|channels| channels * self.count)
    }

    /// Returns true if the input channels (`side` 0) or output channels (1) of each product are whole chunks of 16 bytes. The
    /// kernels apply batch norms to whole chunks.
    pub(super) fn has_whole_chunks(self, side: usize, dtype: DType) -> bool {
        let chunk = 16 / dtype.size();
        self.of_product()[side].is_multiple_of(chunk) && self.all()[side].is_multiple_of(chunk)
    }

    /// Returns the largest number of elements that one access to images may have. `side`: as in [`Self::has_whole_chunks`].
    fn vector_size(self, images: &Rows, side: usize) -> usize {
        let numbers = [self.of_product()[side], self.all()[side], images.pitch(1)];
        vector_size(images.dtype(), &numbers, images.is_aligned())
    }

    /// Returns true if images or filters are read in accesses of less than 8 bytes.
    fn narrow(self, images: &Rows, side: usize) -> bool {
        let filters = if self.merged > 1 { self.channels } else { [self.channels[side]; 2] };
        vector_size(images.dtype(), &filters, true).min(self.vector_size(images, side)) * images.dtype().size() < 8
    }

    /// See [`ConvProduct::diagonal`].
    fn diagonal(self) -> Option<[usize; 2]> {
        (self.merged > 1).then_some(self.channels)
    }
}

impl Sizes {
    /// Adds the sizes that all passes have: of the images of the windows, with the channels of a side of the groups, and of the
    /// blocks. `parts` is the number of classes or pieces.
    fn of(self, images: &Rows, side: usize, groups: Groups, options: &ConvOptions, tile: Tile, parts: usize) -> Self {
        let [_, height, width, _] = images.dims();
        let tiles = [(self.rows as usize).div_ceil(tile.rows), (self.columns as usize).div_ceil(tile.columns)];
        Self {
            channels: groups.of_product()[side] as u32,
            groups: groups.products() as u32,
            all_channels: groups.all()[side] as u32,
            other_channels: groups.all()[1 - side] as u32,
            height: height as u32,
            width: width as u32,
            pitch: images.pitch(1) as u32,
            padding: options.padding.map(|pixels| pixels as u32),
            tiles: tiles.map(|tiles| tiles as u32),
            blocks: (tiles[0] * tiles[1] * groups.products() * parts) as u32,
            ..self
        }
    }
}

impl ConvProduct {
    /// Makes a product without epilogue. `more`: the window, and the vectors of the other operand and of the result.
    fn new(
        pass: Pass,
        tile: Tile,
        images: &Rows,
        groups: Groups,
        options: &ConvOptions,
        more: [[usize; 2]; 2],
    ) -> Self {
        let [window, vectors] = more;
        let of_images = groups.vector_size(images, usize::from(pass == Pass::DataGradient));
        Self {
            pass,
            tile,
            bf16: images.dtype() == DType::BF16,
            window,
            stride: options.stride,
            dilation: options.dilation,
            diagonal: groups.diagonal(),
            vectors: [of_images, vectors[0], vectors[1]],
            bias: false,
            relu: false,
            moments: false,
            statistics: false,
            input: None,
            norm_gradient: false,
            split: false,
            add: false,
            norm: None,
        }
    }
}

/// Launches one product, or two independent ones.
fn launch(first: Launch, second: Option<Launch>) {
    let kernel = ConvKernel { first: first.product, second: second.as_ref().map(|second| second.product) };
    let (client, device) = (first.buffers[0].client.clone(), first.buffers[0].device.clone());
    if let cubecl::Device::Cuda(gpu) = &device {
        ahead::compile(kernel, gpu);
    }
    let all = [Some(first), second].into_iter().flatten();
    let (mut arguments, mut sizes) = (KernelArguments::new(), Vec::new());
    for Launch { product, sizes: of_product, buffers } in all {
        assert_eq!(buffers.len(), product.buffers().len(), "the buffers that {product:?} names");
        for tensor in buffers {
            traffic::note(&tensor, tensor.meta.num_elements() * tensor.dtype.size());
            arguments = arguments.with_buffer(tensor.handle.binding());
        }
        sizes.push(of_product);
    }
    let blocks = sizes.iter().map(|sizes| sizes.blocks).sum();
    client.launch(Box::new(kernel), CubeCount::Static(blocks, 1, 1), with_sizes(arguments, &sizes));
}
