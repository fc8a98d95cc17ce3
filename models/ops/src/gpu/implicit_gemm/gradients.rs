//! The gradients of a convolution's input and weight, in one launch where both are required.

use std::sync::Arc;

use burn::backend::{Cube, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::{numeric::empty_device_contiguous_dtype, permute_nhwc_to_nchw};
use burn_cubecl::tensor::CubeTensor;

use super::source::{ConvProduct, Division, NormSums, Pass, Sizes, Tile};
use super::{Groups, Launch, activation_of, kernel_activation, launch, parts_per_merge, vector_size};
use crate::extension::ConvOptions;
use crate::gpu::counters::counters;
use crate::gpu::deferred::{Deferred, Statistic};
use crate::gpu::rows::{Rows, aligned};
use crate::gpu::side_results::{NormGradientResult, NormOutput, ResidualNorm, SideResults};

/// Which gradients are required.
pub(in crate::gpu) struct Required {
    pub(in crate::gpu) input: bool,
    pub(in crate::gpu) weight: bool,
    /// A gradient that is added to the input's.
    pub(in crate::gpu) addend: Option<CubeTensor>,
    /// The batch norm whose backward pass comes next.
    pub(in crate::gpu) norm: Option<Arc<NormOutput>>,
    /// The batch norm that is applied to the input.
    pub(in crate::gpu) input_norm: Option<Deferred>,
}

/// The gradient of a convolution's output.
pub(in crate::gpu) struct OutputGradient {
    /// The gradient or, with `norm`, the gradient of the normalised values of the batch norm that follows.
    pub(in crate::gpu) grad: Rows,
    pub(in crate::gpu) norm: Option<NormFactors>,
}

/// Inputs from which the kernel computes the gradient of a batch norm's input.
pub(in crate::gpu) struct NormFactors {
    /// The batch norm's input, with rows like the gradient.
    pub(in crate::gpu) input: Rows,
    /// See [`NormGradientResult`].
    pub(in crate::gpu) factors: CubeTensor,
}

impl OutputGradient {
    /// Returns the buffers that a product needs to compute the gradient.
    fn buffers(&self) -> impl Iterator<Item = CubeTensor> {
        self.norm.iter().flat_map(|norm| [norm.input.tensor().clone(), norm.factors.clone()])
    }
}

/// Computes the gradients of `images` and of `weight`, [`to_kernel_order`](super::to_kernel_order). The weight's gradient is f32.
pub(in crate::gpu) fn gradients(
    images: &Rows,
    weight: &CubeTensor,
    grad: OutputGradient,
    options: &ConvOptions,
    required: Required,
) -> [Option<CubeTensor>; 2] {
    let input_norm = required.input_norm.as_ref();
    let of_weight = required.weight.then(|| WeightGradient::new(images, input_norm, weight, &grad, options));
    let data = required.input.then(|| DataGradient::new(images, weight, &grad, options, &required));
    match (data, of_weight) {
        (None, None) => [None, None],
        (Some(data), None) => {
            let (of_data, result) = data.prepare(None);
            launch(of_data, None);
            [Some(result.finish()), None]
        }
        (None, Some(weight)) => {
            let (of_weight, result) = weight.prepare(None);
            launch(of_weight, None);
            [None, Some(permute_nhwc_to_nchw(result))]
        }
        (Some(data), Some(weight)) => {
            // Blocks have as many threads as the smaller tile.
            let tiles = [data.tile, weight.tile];
            let (of_weight, of_weight_result) = weight.prepare(Some(tiles[0]));
            let (of_data, result) = data.prepare(Some(tiles[1]));
            // A block of the weight gradient takes longer, so its blocks start first.
            launch(of_weight, Some(of_data));
            [Some(result.finish()), Some(permute_nhwc_to_nchw(of_weight_result))]
        }
    }
}

struct DataGradient<'a> {
    tile: Tile,
    images: &'a Rows,
    weight: &'a CubeTensor,
    grad: &'a OutputGradient,
    options: &'a ConvOptions,
    groups: Groups,
    rows: usize,
    across: usize,
    down: usize,
    result: Rows,
    addend: Option<Rows>,
    later: Option<Rows>,
    norm: Option<Arc<NormOutput>>,
}

/// A data gradient that has been launched, and the sums over it.
struct DataResult {
    result: Rows,
    totals: Option<CubeTensor>,
    /// With a masked [`NormOutput`]: the inputs of the batch norms, and what the kernel has computed for each.
    masked: Vec<(Rows, NormGradientResult)>,
    /// A gradient that a separate launch adds.
    later: Option<Rows>,
}

impl DataResult {
    fn finish(self) -> CubeTensor {
        if let (true, Some(totals)) = (self.masked.is_empty(), self.totals) {
            SideResults::keep_sums(&self.result, totals);
        }
        for (input, values) in self.masked {
            NormGradientResult::keep(&self.result, &input, values);
        }
        match self.later {
            Some(later) => Cube::float_add(later.into_tensor(), self.result.into_tensor()),
            None => self.result.into_tensor(),
        }
    }
}

impl<'a> DataGradient<'a> {
    fn new(
        images: &'a Rows,
        weight: &'a CubeTensor,
        grad: &'a OutputGradient,
        options: &'a ConvOptions,
        required: &Required,
    ) -> Self {
        let of_output = &grad.grad;
        let [batch, height, width, channels] = images.dims();
        let result = of_output.empty_images(batch, height, width, channels);
        [of_output, &result].into_iter().for_each(Rows::check_offsets);
        let [down, across] = [height.div_ceil(options.stride[0]), width.div_ceil(options.stride[1])];
        let groups = Groups::of(weight.shape().dims(), options);
        let (rows, [columns, _]) = (batch * down * across, groups.of_product());
        let products = groups.products() * options.stride[0] * options.stride[1];
        let tile = Tile::choose(rows, columns, products, groups.narrow(of_output, 1));
        let addend = required.addend.clone().map(Rows::new);
        // A gradient from one of burn's operations may have another pitch. A separate launch adds it.
        let (addend, later) = match addend {
            Some(addend) if addend.pitch(1) == result.pitch(1) => (Some(addend), None),
            other => (None, other),
        };
        let norm = required.norm.clone().filter(|norm| later.is_none() && norm.fits(&result));
        assert!(
            norm.is_some() || required.input_norm.is_none(),
            "a deferred batch norm gets the gradient that it expects"
        );
        Self { tile, images, weight, grad, options, groups, rows, across, down, result, addend, later, norm }
    }

    /// Prepares the launch. `other` is the tile of the product that shares the launch.
    fn prepare(self, other: Option<Tile>) -> (Launch, DataResult) {
        let Self { tile, images, weight, grad: gradient, options, groups, .. } = self;
        let Self { rows, across, down, result, addend, later, norm, .. } = self;
        let grad = &gradient.grad;
        let tile = other.map_or(tile, |other| tile.beside(other));
        let [_, channels, height, width]: [usize; 4] = weight.shape().dims();
        let ([batch, in_height, in_width, _], [columns, _]) = (images.dims(), groups.of_product());
        let classes = options.stride[0] * options.stride[1];
        let parts = rows.div_ceil(tile.rows) * classes;
        let parts_per_merge = if norm.is_some() {
            parts_per_merge(parts, columns.div_ceil(tile.columns) * groups.products())
        } else {
            parts
        };
        let sizes = Sizes {
            rows: rows as u32,
            columns: columns as u32,
            other_height: in_height as u32,
            other_width: in_width as u32,
            other_pitch: result.pitch(1) as u32,
            pixels: (batch * in_height * in_width) as u32,
            across: Division::by(across),
            down: Division::by(down),
            parts_per_merge: parts_per_merge as u32,
            ..Sizes::default()
        };
        let is_aligned = result.is_aligned()
            && addend.as_ref().is_none_or(Rows::is_aligned)
            && norm.as_ref().is_none_or(|norm| norm.is_aligned());
        let vectors = [
            vector_size(grad.dtype(), &[channels], aligned(weight)),
            if is_aligned { groups.vector_size(&result, 0) } else { 1 },
        ];
        let product = ConvProduct {
            add: addend.is_some(),
            norm: norm.as_ref().map(|norm| NormSums {
                activation: kernel_activation(norm.activation).expect("`fits` has accepted the activation"),
                from_output: norm.from_output,
                masked: norm.masked,
                residual: norm.residual.is_some(),
            }),
            norm_gradient: gradient.norm.is_some(),
            ..ConvProduct::new(Pass::DataGradient, tile, grad, groups, options, [[height, width], vectors])
        };
        let mut buffers = vec![grad.tensor().clone(), weight.clone(), result.tensor().clone()];
        let sums = if norm.as_ref().is_some_and(|norm| norm.residual.is_some()) { 3 } else { 2 };
        let totals = norm.is_some().then(|| result.empty_columns(sums));
        if let Some(totals) = &totals {
            let [_, zeros] = counters(totals);
            buffers.extend([
                result.empty_columns(sums * (parts + parts.div_ceil(parts_per_merge))),
                totals.clone(),
                zeros,
            ]);
        }
        buffers.extend(addend.map(|addend| addend.tensor().clone()));
        let mut masked = Vec::new();
        if let Some(norm) = norm {
            buffers.push(norm.x.tensor().clone());
            buffers.extend(norm.from_output.then(|| norm.out.tensor().clone()));
            buffers.extend([&norm.mean, &norm.inv_std].into_iter().chain(&norm.affine).cloned());
            if norm.masked {
                let gradient = NormGradientResult::empty(&result);
                buffers.extend(gradient.tensors());
                masked.push((norm.x.clone(), gradient));
            }
            if let Some(ResidualNorm { x, mean, inv_std, weight }) = &norm.residual {
                let gradient = NormGradientResult::empty(&result);
                buffers.extend([x.tensor(), mean, inv_std, weight].map(CubeTensor::clone));
                buffers.extend(gradient.tensors());
                masked.push((x.clone(), gradient));
            }
        }
        buffers.extend(gradient.buffers());
        let sizes = sizes.of(grad, 1, groups, options, tile, classes);
        (Launch { product, sizes, buffers }, DataResult { result, totals, masked, later })
    }
}

struct WeightGradient<'a> {
    tile: Tile,
    images: &'a Rows,
    /// The batch norm that is applied to the images.
    input_norm: Option<&'a Deferred>,
    weight: &'a CubeTensor,
    grad: &'a OutputGradient,
    options: &'a ConvOptions,
    groups: Groups,
    rows: usize,
    columns: usize,
}

impl<'a> WeightGradient<'a> {
    fn new(
        images: &'a Rows,
        input_norm: Option<&'a Deferred>,
        weight: &'a CubeTensor,
        grad: &'a OutputGradient,
        options: &'a ConvOptions,
    ) -> Self {
        let groups = Groups::of(weight.shape().dims(), options);
        let ([_, _, height, width], [channels, rows]) = (weight.shape().dims(), groups.of_product());
        let columns = height * width * channels;
        let tile = Tile::of_weight_gradient(rows, columns, groups.narrow(images, 0));
        Self { tile, images, input_norm, weight, grad, options, groups, rows, columns }
    }

    /// Prepares the launch, and returns it with its result, `[out, height, width, in / groups]`. `other`: as for the data
    /// gradient.
    fn prepare(self, other: Option<Tile>) -> (Launch, CubeTensor) {
        /// Number of blocks that occupies a large GPU.
        const BLOCKS: usize = 256;
        /// Pixels of the shortest piece.
        const SHORTEST: usize = 256;
        let Self { tile, images, input_norm, weight, grad: gradient, options, groups, rows, columns } = self;
        let grad = &gradient.grad;
        let tile = other.map_or(tile, |other| tile.beside(other));
        let [outputs, channels, height, width]: [usize; 4] = weight.shape().dims();
        let [batch, down, across, _] = grad.dims();
        let pixels = batch * down * across;
        let tiles = tile.blocks(rows, columns) * groups.products();
        let pieces = (BLOCKS / tiles).clamp(1, pixels.div_ceil(SHORTEST));
        let piece = pixels.div_ceil(pieces).next_multiple_of(32);
        let pieces = pixels.div_ceil(piece);
        let split = pieces > 1;
        let parts_per_merge = if split { parts_per_merge(pieces, tiles) } else { 1 };
        let sizes = Sizes {
            rows: rows as u32,
            columns: columns as u32,
            other_pitch: grad.pitch(1) as u32,
            pixels: pixels as u32,
            across: Division::by(across),
            down: Division::by(down),
            piece: piece as u32,
            parts_per_merge: parts_per_merge as u32,
            ..Sizes::default()
        };
        let new = |shape: Shape| {
            empty_device_contiguous_dtype(images.client().clone(), weight.device.clone(), shape, DType::F32)
        };
        let result = new(Shape::from([outputs, height, width, channels]));
        let vectors = [
            groups.vector_size(grad, 1),
            // Pairs of adjacent elements are in one group.
            if (if groups.merged > 1 { channels } else { columns }).is_multiple_of(2) { 2 } else { 1 },
        ];
        let product = ConvProduct {
            split,
            input: input_norm.map(activation_of),
            norm_gradient: gradient.norm.is_some(),
            ..ConvProduct::new(Pass::WeightGradient, tile, images, groups, options, [[height, width], vectors])
        };
        let mut buffers = vec![images.tensor().clone(), grad.tensor().clone(), result.clone()];
        if split {
            let slots = if pieces > parts_per_merge { pieces + pieces.div_ceil(parts_per_merge) } else { pieces };
            let [zeros, _] = counters(&result);
            buffers.extend([new(Shape::from([slots * result.meta.num_elements()])), zeros]);
        }
        buffers.extend(
            input_norm
                .into_iter()
                .flat_map(|norm| [norm.statistic(Statistic::Scale), norm.statistic(Statistic::Shift)]),
        );
        buffers.extend(gradient.buffers());
        let sizes = sizes.of(images, 0, groups, options, tile, pieces);
        (Launch { product, sizes, buffers }, result)
    }
}
