//! The forward product.

use burn::backend::TensorMetadata;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::source::{ConvProduct, Division, Pass, Sizes, Tile};
use super::{Groups, Launch, activation_of, launch, parts_per_merge, vector_size};
use crate::extension::ConvOptions;
use crate::gpu::counters::counters;
use crate::gpu::deferred::{Deferred, Statistic};
use crate::gpu::rows::{Rows, aligned};
use crate::gpu::side_results::SideResults;

/// Number of windows along an axis.
fn windows(extent: usize, kernel: usize, axis: usize, options: &ConvOptions) -> usize {
    (extent + 2 * options.padding[axis] - options.dilation[axis] * (kernel - 1) - 1) / options.stride[axis] + 1
}

/// A batch norm whose statistics a convolution computes.
pub(in crate::gpu) struct StatisticsOfBatch {
    /// Weight and bias.
    pub(in crate::gpu) affine: [CubeTensor; 2],
    /// Running mean and variance, which are updated in place.
    pub(in crate::gpu) running: [CubeTensor; 2],
    pub(in crate::gpu) epsilon: f32,
    pub(in crate::gpu) momentum: f32,
}

/// The deferred batch norms before and after a convolution.
#[derive(Default)]
pub(in crate::gpu) struct Fused<'a> {
    /// Is applied to the input.
    pub(in crate::gpu) input: Option<Deferred>,
    pub(in crate::gpu) statistics: Option<&'a StatisticsOfBatch>,
}

/// Convolves `[B, in, H, W]` with `[out, in / groups, kh, kw]`, [`to_kernel_order`](super::to_kernel_order). If a batch norm
/// follows, also computes the moments of the result. They are kept for this batch norm ([`SideResults`]) or, if the batch norm is
/// fused, become its statistics, which are returned.
pub(in crate::gpu) fn forward(
    images: &Rows,
    weight: &CubeTensor,
    bias: Option<CubeTensor>,
    options: &ConvOptions,
    relu: bool,
    fused: Fused,
) -> (CubeTensor, Option<CubeTensor>) {
    let [outputs, channels, height, width]: [usize; 4] = weight.shape().dims();
    let [batch, in_height, in_width, _] = images.dims();
    let (down, across) = (windows(in_height, height, 0, options), windows(in_width, width, 1, options));
    let result = images.empty_images(batch, down, across, outputs);
    // Rows may be padded, so the images may be larger than `dispatch::check_gpu_convolution` knows.
    [images, &result].into_iter().for_each(Rows::check_offsets);
    let groups = Groups::of([outputs, channels, height, width], options);
    let (rows, [_, columns]) = (batch * down * across, groups.of_product());
    let tile = Tile::choose(rows, columns, groups.products(), groups.narrow(images, 0));
    let [parts, tiles] = [rows.div_ceil(tile.rows), columns.div_ceil(tile.columns) * groups.products()];
    let Fused { input, statistics } = fused;
    let moments = statistics.is_some() || options.norm_follows && bias.is_none() && !relu;
    let parts_per_merge = if moments { parts_per_merge(parts, tiles) } else { parts };
    let sizes = Sizes {
        rows: rows as u32,
        columns: columns as u32,
        other_pitch: result.pitch(1) as u32,
        across: Division::by(across),
        down: Division::by(down),
        parts_per_merge: parts_per_merge as u32,
        epsilon: statistics.map_or(0.0, |statistics| statistics.epsilon),
        momentum: statistics.map_or(0.0, |statistics| statistics.momentum),
        ..Sizes::default()
    };
    let vectors = [vector_size(images.dtype(), &[channels], aligned(weight)), groups.vector_size(&result, 1)];
    let mut buffers = vec![images.tensor().clone(), weight.clone()];
    let product = ConvProduct {
        bias: bias.is_some(),
        relu,
        moments,
        statistics: statistics.is_some(),
        input: input.as_ref().map(activation_of),
        ..ConvProduct::new(Pass::Forward, tile, images, groups, options, [[height, width], vectors])
    };
    buffers.extend(bias.map(into_contiguous));
    buffers.push(result.tensor().clone());
    let totals = moments.then(|| result.empty_columns(2));
    if let Some(totals) = &totals {
        let [zeros, _] = counters(totals);
        buffers.extend([result.empty_columns(2 * (parts + parts.div_ceil(parts_per_merge))), totals.clone(), zeros]);
    }
    let of_batch = statistics.map(|statistics| {
        let of_batch = result.empty_columns(4);
        buffers.push(of_batch.clone());
        buffers.extend(statistics.affine.iter().chain(&statistics.running).cloned());
        of_batch
    });
    buffers.extend(input.iter().flat_map(|norm| [norm.statistic(Statistic::Scale), norm.statistic(Statistic::Shift)]));
    let sizes = sizes.of(images, 0, groups, options, tile, 1);
    launch(Launch { product, sizes, buffers }, None);
    if let Some(totals) = totals.filter(|_| of_batch.is_none()) {
        SideResults::keep_moments(&result, totals);
    }
    (result.into_tensor(), of_batch)
}
