//! Depthwise convolutions that also compute what the deferred batch norms around them need: the statistics of their output, and in
//! the backward pass the sums over their data gradient.
//!
//! Images are rows of channels, weights `[tap][channels]`, both in vectors of `N`. A thread computes one vector of channels, for
//! runs of [`PIXELS`] adjacent pixels of its block's piece. The last block of each tile of channels merges the pieces in a fixed
//! order. Checked by `gpu_check --ops --cases deferred` (`benches/gpu_check/deferred.rs`).

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::activation::activation_grad;
use super::block_sums::{sum_of_pieces, sum_pair_over_block, thread_position};
use super::counters::{counters, is_last_block};
use super::deferred::Deferred;
use super::deferred_gradient::write_gradient;
use super::direct::{ConvSource, taps_first};
use super::direct_kernels::{Images, ImagesLaunch, PIXELS, add_windows, init_sums};
use super::implicit_gemm::StatisticsOfBatch;
use super::norm_moments::{merge_blocks, write_deferred_statistics};
use super::rows::{Blocks, Rows, all};
use super::side_results::NormGradientResult;
use super::weight_kernels::{NormOnLoad, Taps, load_factors};
use crate::extension::{Activation, ConvOptions};

/// Convolves the runs of a thread in a piece of the pixels, and returns the mean of its results, the sum of squares around the
/// mean, and the number of results.
#[cube]
fn convolve_runs<F: Float, N: Size>(
    source: &[Vector<F, N>],
    factors: &[Vector<f32, N>],
    weight: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    images: &Images,
    piece: usize,
    #[comptime] norm_on_load: NormOnLoad,
    #[comptime] taps: Taps,
) -> (Vector<f32, N>, Vector<f32, N>, f32) {
    let (column, y, _, depth) = thread_position();
    let start = CUBE_POS_Y as usize * piece;
    let end = min(start + piece, images.pixels);
    // Sum differences from the thread's first pixel: the variance stays accurate if the mean is far from zero.
    let mut pivot = Vector::<f32, N>::new(0.0);
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut squares = Vector::<f32, N>::new(0.0);
    let mut count = 0.0f32;
    if column < images.columns {
        let (scale, second, third) = load_factors::<N>(factors, column, images.columns, norm_on_load);
        let mut sums = Array::<Vector<f32, N>>::new(PIXELS);
        let mut first = start + y * PIXELS;
        while first < end {
            init_sums::<F, N>(&mut sums, weight, column, false);
            add_windows::<F, N>(
                &mut sums,
                source,
                source,
                weight,
                first,
                column,
                images,
                scale,
                second,
                third,
                false,
                norm_on_load,
                taps,
            );
            #[unroll]
            for k in 0..PIXELS {
                if first + k < end {
                    let rounded = Vector::<F, N>::cast_from(sums[k]);
                    out[(first + k) * images.pitch + column] = rounded;
                    let value = Vector::<f32, N>::cast_from(rounded);
                    if count == 0.0 {
                        pivot = value;
                    }
                    let difference = value - pivot;
                    sum += difference;
                    squares += difference * difference;
                    count += 1.0;
                }
            }
            first += depth * PIXELS;
        }
    }
    let shift = sum / Vector::new(max(count, 1.0));
    (pivot + shift, max(squares - shift * sum, Vector::new(0.0)), count)
}

/// Convolves as [`depthwise`](super::direct_kernels::depthwise), and computes the statistics of the result as
/// [`write_deferred_statistics`] writes them. `pieces[piece][2][columns]` is a workspace.
#[cube(launch_unchecked)]
fn convolve_with_statistics<F: Float, N: Size>(
    source: &[Vector<F, N>],
    factors: &[Vector<f32, N>],
    weight: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    pieces: &mut [Vector<f32, N>],
    of_batch: &mut [Vector<f32, N>],
    norm_weight: &[Vector<f32, N>],
    norm_bias: &[Vector<f32, N>],
    running_mean: &mut [Vector<f32, N>],
    running_variance: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    images: &Images,
    piece: usize,
    count_of_pieces: usize,
    rows: f32,
    epsilon: f32,
    momentum: f32,
    #[comptime] norm_on_load: NormOnLoad,
    #[comptime] taps: Taps,
    #[define(F)] _dtype: ElemType,
) {
    let (mean, squares, count) = convolve_runs::<F, N>(source, factors, weight, out, images, piece, norm_on_load, taps);
    let (mean, squares, has_result) = merge_blocks::<N>(
        mean,
        squares,
        count,
        pieces,
        counters,
        images.pixels,
        images.columns,
        piece,
        count_of_pieces,
    );
    if has_result {
        let (column, _, _, _) = thread_position();
        write_deferred_statistics::<N>(
            mean,
            squares,
            rows,
            column,
            images.columns,
            of_batch,
            norm_weight,
            norm_bias,
            running_mean,
            running_variance,
            epsilon,
            momentum,
        );
    }
}

/// Computes `g` for the runs of a thread in a piece of the pixels, and returns its sums of `g` and of `g · x̂`. Arguments are those
/// of [`gradient_with_sums`].
#[cube]
fn gradient_of_runs<F: Float, N: Size>(
    grad: &[Vector<F, N>],
    norm_input: &[Vector<F, N>],
    factors: &[Vector<f32, N>],
    weight: &[Vector<F, N>],
    x: &[Vector<F, N>],
    statistics: &[Vector<f32, N>],
    g_out: &mut [Vector<F, N>],
    images: &Images,
    x_pitch: usize,
    piece: usize,
    #[comptime] activation: Activation,
    #[comptime] norm_on_load: NormOnLoad,
    #[comptime] taps: Taps,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let (column, y, _, depth) = thread_position();
    let columns = images.columns;
    let start = CUBE_POS_Y as usize * piece;
    let end = min(start + piece, images.pixels);
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut product = Vector::<f32, N>::new(0.0);
    if column < columns {
        let (mean, inv_std) = (statistics[column], statistics[columns + column]);
        let (scale, shift) = (statistics[2 * columns + column], statistics[3 * columns + column]);
        let (first_factor, second, third) = load_factors::<N>(factors, column, columns, norm_on_load);
        let mut sums = Array::<Vector<f32, N>>::new(PIXELS);
        let mut first = start + y * PIXELS;
        while first < end {
            init_sums::<F, N>(&mut sums, weight, column, false);
            add_windows::<F, N>(
                &mut sums,
                grad,
                norm_input,
                weight,
                first,
                column,
                images,
                first_factor,
                second,
                third,
                true,
                norm_on_load,
                taps,
            );
            #[unroll]
            for k in 0..PIXELS {
                if first + k < end {
                    let x = Vector::<f32, N>::cast_from(x[(first + k) * x_pitch + column]);
                    // Sum the rounded values, which later kernels read.
                    let rounded =
                        Vector::<F, N>::cast_from(activation_grad::<N>(x * scale + shift, sums[k], activation));
                    g_out[(first + k) * images.pitch + column] = rounded;
                    let g = Vector::<f32, N>::cast_from(rounded);
                    sum += g;
                    product += g * ((x - mean) * inv_std);
                }
            }
            first += depth * PIXELS;
        }
    }
    (sum, product)
}

/// Computes the gradient of the images of a depthwise convolution and, from it, `g`, the gradient of the values before the
/// activation. The images are the output of the deferred batch norm of `x`. Also sums `g` and `g · x̂` over all pixels, and
/// computes everything that [`write_gradient`] writes. `pieces[piece][2][columns]` is a workspace; `inv_rows` is the reciprocal of
/// the number of rows.
#[cube(launch_unchecked)]
fn gradient_with_sums<F: Float, N: Size>(
    grad: &[Vector<F, N>],
    norm_input: &[Vector<F, N>],
    factors: &[Vector<f32, N>],
    weight: &[Vector<F, N>],
    x: &[Vector<F, N>],
    statistics: &[Vector<f32, N>],
    g_out: &mut [Vector<F, N>],
    pieces: &mut [Vector<f32, N>],
    weight_out: &mut [Vector<f32, N>],
    bias_out: &mut [Vector<f32, N>],
    factors_out: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    images: &Images,
    x_pitch: usize,
    piece: usize,
    count_of_pieces: usize,
    inv_rows: f32,
    #[comptime] activation: Activation,
    #[comptime] norm_on_load: NormOnLoad,
    #[comptime] taps: Taps,
    #[define(F)] _dtype: ElemType,
) {
    let (sum, product) = gradient_of_runs::<F, N>(
        grad,
        norm_input,
        factors,
        weight,
        x,
        statistics,
        g_out,
        images,
        x_pitch,
        piece,
        activation,
        norm_on_load,
        taps,
    );
    let (column, y, _, _) = thread_position();
    let columns = images.columns;
    let (sum, product) = sum_pair_over_block::<N>(sum, product);
    if y == 0 && column < columns {
        let at = CUBE_POS_Y as usize * 2 * columns + column;
        pieces[at] = sum;
        pieces[at + columns] = product;
    }
    if is_last_block(counters, CUBE_POS_X as usize, count_of_pieces) {
        let (sum, product) = sum_of_pieces::<N>(pieces, 0usize, 2 * columns, count_of_pieces, columns);
        if y == 0 && column < columns {
            write_gradient::<N>(sum, product, statistics, weight_out, bias_out, factors_out, column, columns, inv_rows);
        }
    }
}

/// Makes the size arguments of a launch that reads `source` and writes `target`.
fn sizes_of(target: &Rows, source: &Rows, vector: usize) -> ImagesLaunch {
    let ([_, height, width, channels], [_, source_height, source_width, _]) = (target.dims(), source.dims());
    let (pixels, pitch, source_pitch) = (target.rows(), target.pitch(vector), source.pitch(vector));
    ImagesLaunch::new(pixels, height, width, source_height, source_width, channels / vector, pitch, source_pitch)
}

/// Convolves images, to which `input_norm` is applied, with the weight `[channels, 1, kh, kw]` of a depthwise convolution. Also
/// returns the statistics of the batch norm that follows, `[4·C]`.
pub(super) fn forward(
    images: &Rows,
    input_norm: Option<&Deferred>,
    weight: CubeTensor,
    options: &ConvOptions,
    norm: &StatisticsOfBatch,
) -> (CubeTensor, CubeTensor) {
    let taps = Taps::of(&weight, options);
    let [batch, channels, height, width] = taps.output_of(images, options.groups);
    let weight = into_contiguous(taps_first(weight));
    let (out, from) = (images.empty_images(batch, height, width, channels), ConvSource::images(input_norm));
    let StatisticsOfBatch { affine: [scale, bias], running: [mean, variance], epsilon, momentum } = norm;
    let of_batch = out.empty_columns(4);
    // The kernel reads the factors only if it applies a batch norm (`NormOnLoad`).
    let factors = from.factors().unwrap_or(&of_batch);
    let vector = images.vector_size(&[&out], &[&weight, factors, scale, bias, mean, variance]);
    let blocks = Blocks::over(&out, vector);
    let [piece, pieces] = blocks.pieces_of_runs(PIXELS);
    let workspace = out.empty_columns(2 * pieces);
    let [zeros, _] = counters(&workspace);
    // SAFETY: the sizes are those of the images, vectors have one element per column, the statistics four and the workspace two per
    // piece; a tile of columns has a counter.
    unsafe {
        convolve_with_statistics::launch_unchecked(
            images.client(),
            blocks.grid(pieces),
            blocks.dim(),
            vector,
            images.arg(),
            all(factors),
            all(&weight),
            out.arg(),
            all(&workspace),
            all(&of_batch),
            all(scale),
            all(bias),
            all(mean),
            all(variance),
            all(&zeros),
            sizes_of(&out, images, vector),
            piece,
            pieces,
            out.rows() as f32,
            *epsilon,
            *momentum,
            from.norm_on_load(),
            taps,
            dtype_to_storage_type(images.dtype()),
        );
    }
    (out.into_tensor(), of_batch)
}

/// Computes the gradient of the normalised values of `norm`, whose output a depthwise convolution reads, and keeps
/// [`NormGradientResult`] for it. `x` is the batch norm's input, `grad` the gradient of the convolution's output.
pub(super) fn data_gradient(
    x: &Rows,
    norm: &Deferred,
    grad: &Rows,
    from: ConvSource<'_>,
    weight: CubeTensor,
    options: &ConvOptions,
) -> CubeTensor {
    let taps = Taps::of(&weight, options);
    let weight = into_contiguous(taps_first(weight));
    let (out, values, statistics) = (x.empty_like(), NormGradientResult::empty(x), norm.statistics());
    let NormGradientResult { affine: [norm_weight, norm_bias], factors: factors_out } = &values;
    // The kernel reads the factors only if it applies a batch norm (`NormOnLoad`).
    let (norm_input, factors) = (from.norm_input().unwrap_or(grad), from.factors().unwrap_or(statistics));
    let columns = [&weight, factors, statistics, norm_weight, norm_bias, factors_out];
    let vector = x.vector_size(&[&out, grad, norm_input], &columns);
    let blocks = Blocks::over(&out, vector);
    let [piece, pieces] = blocks.pieces_of_runs(PIXELS);
    let workspace = out.empty_columns(2 * pieces);
    let [zeros, _] = counters(&workspace);
    // SAFETY: the sizes are those of the images; statistics have four vectors over the columns, factors three, the workspace two
    // per piece, and a tile of columns has a counter.
    unsafe {
        gradient_with_sums::launch_unchecked(
            x.client(),
            blocks.grid(pieces),
            blocks.dim(),
            vector,
            grad.arg(),
            norm_input.arg(),
            all(factors),
            all(&weight),
            x.arg(),
            all(statistics),
            out.arg(),
            all(&workspace),
            all(norm_weight),
            all(norm_bias),
            all(factors_out),
            all(&zeros),
            sizes_of(&out, grad, vector),
            x.pitch(vector),
            piece,
            pieces,
            1.0 / x.rows() as f32,
            norm.activation,
            from.norm_on_load(),
            taps,
            dtype_to_storage_type(x.dtype()),
        );
    }
    NormGradientResult::keep(&out, x, values);
    out.into_tensor()
}
