//! The forward product.

use burn::backend::TensorMetadata;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::source::{ConvProduct, Division, Pass, Sizes, Tile};
use super::{Launch, fan, launch, narrow, vector};
use crate::extension::ConvOptions;
use crate::gpu::counters::counters;
use crate::gpu::rows::{Rows, aligned};
use crate::gpu::side_results::SideResults;

/// Number of windows along an axis.
fn windows(extent: usize, kernel: usize, axis: usize, options: &ConvOptions) -> usize {
    (extent + 2 * options.padding[axis] - options.dilation[axis] * (kernel - 1) - 1) / options.stride[axis] + 1
}

/// Convolves `[B, in, H, W]` with `[out, in / groups, kh, kw]`, [`ordered`](super::ordered). If a batch norm follows, also
/// computes the moments of the result and keeps them for this batch norm ([`SideResults`]).
pub(in crate::gpu) fn forward(
    images: &Rows,
    weight: &CubeTensor,
    bias: Option<CubeTensor>,
    options: &ConvOptions,
    relu: bool,
) -> CubeTensor {
    let [outputs, channels, height, width]: [usize; 4] = weight.shape().dims();
    let [batch, in_height, in_width, _] = images.dims();
    let (down, across) = (windows(in_height, height, 0, options), windows(in_width, width, 1, options));
    let result = images.images(batch, down, across, outputs);
    let (rows, columns) = (batch * down * across, outputs / options.groups);
    let tile = Tile::choose(rows, columns, options.groups, narrow(images, channels));
    let [parts, tiles] = [rows.div_ceil(tile.rows), columns.div_ceil(tile.columns) * options.groups];
    let moments = options.norm_follows && bias.is_none() && !relu;
    let fan = if moments { fan(parts, tiles) } else { parts };
    let sizes = Sizes {
        rows: rows as u32,
        columns: columns as u32,
        other_pitch: result.pitch(1) as u32,
        across: Division::by(across),
        down: Division::by(down),
        fan: fan as u32,
        ..Sizes::default()
    };
    let vectors = [
        vector(images.dtype(), &[channels], aligned(weight)),
        vector(images.dtype(), &[columns, result.pitch(1)], result.is_aligned()),
    ];
    let mut buffers = vec![images.tensor().clone(), weight.clone()];
    let product = ConvProduct {
        bias: bias.is_some(),
        relu,
        moments,
        ..ConvProduct::new(Pass::Forward, tile, images, channels, options, [[height, width], vectors])
    };
    buffers.extend(bias.map(into_contiguous));
    buffers.push(result.tensor().clone());
    let totals = moments.then(|| result.of_columns(2));
    if let Some(totals) = &totals {
        let [zeros, _] = counters(totals);
        buffers.extend([result.of_columns(2 * (parts + parts.div_ceil(fan))), totals.clone(), zeros]);
    }
    let sizes = sizes.of(images, channels, options, tile, options.groups);
    launch(Launch { product, sizes, buffers }, None);
    if let Some(totals) = totals {
        SideResults::moments(&result, totals);
    }
    result.into_tensor()
}
