//! Kernels of grouped convolutions' weight gradient. Images are rows of channels in vectors of `N`.
//!
//! Each thread keeps in registers the sums of all taps of one output channel and one vector of input channels
//! (depthwise: of one vector of channels), over its share of the output's pixels. A block sums its threads' values, and
//! a second kernel sums the blocks' values, in an order that depends on the shape alone.
//!
//! Checked by `gpu_check --ops` (`benches/gpu_check/convolutions.rs`, `deferred.rs`).

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::activation::activation_value;
use super::block_sums::sum_over_block;
use super::rows::THREADS_PER_BLOCK;
use crate::extension::Activation;

/// Geometry of a convolution's taps. Pairs are `[vertical, horizontal]`, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Taps {
    pub(super) kernel: [usize; 2],
    pub(super) stride: [usize; 2],
    pub(super) padding: [usize; 2],
    pub(super) dilation: [usize; 2],
}

/// The batch norm that a depthwise convolution applies to the values that it loads, see `deferred.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum NormOnLoad {
    Nothing,
    /// The output of a batch norm and its activation. Factors are the statistics `[4][channels]`.
    Normalise(Activation),
    /// The gradient of a batch norm's input, from the gradient of the normalised values and the input. Factors are `[3][channels]`.
    NormGradient,
}

impl NormOnLoad {
    fn is_gradient(self) -> bool {
        self == Self::NormGradient
    }

    fn normalises(self) -> bool {
        matches!(self, Self::Normalise(_))
    }

    fn activation(self) -> Activation {
        if let Self::Normalise(activation) = self { activation } else { Activation::Identity }
    }
}

/// Loads the factors of a column.
#[cube]
pub(super) fn load_factors<N: Size>(
    factors: &[Vector<f32, N>],
    column: usize,
    columns: usize,
    #[comptime] norm_on_load: NormOnLoad,
) -> (Vector<f32, N>, Vector<f32, N>, Vector<f32, N>) {
    let mut first = Vector::<f32, N>::new(1.0);
    let mut second = Vector::<f32, N>::new(0.0);
    let mut third = Vector::<f32, N>::new(0.0);
    if comptime!(norm_on_load.normalises()) {
        first = factors[2 * columns + column];
        second = factors[3 * columns + column];
    }
    if comptime!(norm_on_load.is_gradient()) {
        first = factors[column];
        second = factors[columns + column];
        third = factors[2 * columns + column];
    }
    (first, second, third)
}

/// Loads a vector of an image and applies a batch norm with the factors of [`load_factors`]. `other` is the batch norm's input. The
/// result is rounded to the image's type, as if it had been in memory.
#[cube]
pub(super) fn load_normalised<F: Float, N: Size>(
    image: &[Vector<F, N>],
    other: &[Vector<F, N>],
    at: usize,
    first: Vector<f32, N>,
    second: Vector<f32, N>,
    third: Vector<f32, N>,
    #[comptime] norm_on_load: NormOnLoad,
) -> Vector<f32, N> {
    let mut value = Vector::<f32, N>::cast_from(image[at]);
    if comptime!(norm_on_load.normalises()) {
        let z = activation_value::<N>(value * first + second, comptime!(norm_on_load.activation()));
        value = Vector::<f32, N>::cast_from(Vector::<F, N>::cast_from(z));
    }
    if comptime!(norm_on_load.is_gradient()) {
        let gradient = value * first + (Vector::<f32, N>::cast_from(other[at]) * second + third);
        value = Vector::<f32, N>::cast_from(Vector::<F, N>::cast_from(gradient));
    }
    value
}

/// Size arguments of a launch.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Sizes {
    /// Pixels of all output images, and the output's height and width.
    pub(super) pixels: usize,
    pub(super) out_height: FastDivmod<usize>,
    pub(super) out_width: FastDivmod<usize>,
    /// Height and width of the input.
    pub(super) height: usize,
    pub(super) width: usize,
    /// Vectors from one pixel of the input to the next; elements or vectors from one pixel of the output's gradient to
    /// the next.
    pub(super) x_pitch: usize,
    pub(super) dy_pitch: usize,
    /// Pixels per piece.
    pub(super) piece: usize,
}

/// Sums the values of a column's threads for each tap. The column's first thread writes the results.
#[cube]
fn write_sums<N: Size>(
    sums: &Array<Vector<f32, N>>,
    pieces: &mut [Vector<f32, N>],
    first: usize,
    step: usize,
    writes: bool,
    #[comptime] taps: usize,
) {
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
    #[unroll]
    for tap in 0..taps {
        let sum = sum_over_block::<N>(sums[tap], &mut shared);
        if writes && UNIT_POS_Y == 0 {
            pieces[first + tap * step] = sum;
        }
        // Wait before the next tap overwrites the shared memory.
        sync_cube();
    }
}

/// Adds to the sum of each tap the input that the tap reads for an output pixel, times the output's gradient `dy`.
#[cube]
fn add_window<F: Float, N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    x: &[Vector<F, N>],
    dy: Vector<f32, N>,
    pixel: usize,
    column: usize,
    sizes: &Sizes,
    scale: Vector<f32, N>,
    shift: Vector<f32, N>,
    #[comptime] norm_on_load: NormOnLoad,
    #[comptime] taps: Taps,
) {
    let (line, left) = sizes.out_width.div_mod(pixel);
    let (image, top) = sizes.out_height.div_mod(line);
    let (above, beside) = comptime!((taps.padding[0], taps.padding[1]));
    #[unroll]
    for tap in 0..comptime!(taps.kernel[0] * taps.kernel[1]) {
        // Coordinates in the padded image.
        let row = top * comptime!(taps.stride[0]) + comptime!(tap / taps.kernel[1] * taps.dilation[0]);
        let at = left * comptime!(taps.stride[1]) + comptime!(tap % taps.kernel[1] * taps.dilation[1]);
        if row >= above && row < sizes.height + above && at >= beside && at < sizes.width + beside {
            let place = (image * sizes.height + row - above) * sizes.width + at - beside;
            let at = place * sizes.x_pitch + column;
            sums[tap] += dy * load_normalised::<F, N>(x, x, at, scale, shift, Vector::new(0.0), norm_on_load);
        }
    }
}

/// Computes `pieces[piece][tap][channels]` of a depthwise convolution. `x` and `dy` are normalised when they are loaded;
/// `norm_input` has the layout of `dy`.
#[cube(launch_unchecked)]
pub(super) fn depthwise_pieces<F: Float, N: Size>(
    x: &[Vector<F, N>],
    x_factors: &[Vector<f32, N>],
    dy: &[Vector<F, N>],
    norm_input: &[Vector<F, N>],
    dy_factors: &[Vector<f32, N>],
    pieces: &mut [Vector<f32, N>],
    columns: usize,
    sizes: &Sizes,
    #[comptime] norm_of_x: NormOnLoad,
    #[comptime] norm_of_dy: NormOnLoad,
    #[comptime] taps: Taps,
    #[define(F)] _dtype: ElemType,
) {
    let count = comptime!(taps.kernel[0] * taps.kernel[1]);
    let mut sums = Array::<Vector<f32, N>>::new(count);
    #[unroll]
    for tap in 0..count {
        sums[tap] = Vector::new(0.0);
    }
    let column = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    let start = CUBE_POS_Y as usize * sizes.piece;
    let end = min(start + sizes.piece, sizes.pixels);
    if column < columns {
        let (scale, shift, _) = load_factors::<N>(x_factors, column, columns, norm_of_x);
        let (first, second, third) = load_factors::<N>(dy_factors, column, columns, norm_of_dy);
        let mut pixel = start + UNIT_POS_Y as usize;
        while pixel < end {
            let at = pixel * sizes.dy_pitch + column;
            let grad = load_normalised::<F, N>(dy, norm_input, at, first, second, third, norm_of_dy);
            add_window::<F, N>(&mut sums, x, grad, pixel, column, sizes, scale, shift, norm_of_x, taps);
            pixel += CUBE_DIM_Y as usize;
        }
    }
    let first = CUBE_POS_Y as usize * count * columns + column;
    write_sums::<N>(&sums, pieces, first, columns, column < columns, count);
}

/// Computes `pieces[piece][output channel][tap][input channels of the group]`. The grid's third axis is the vector of
/// input channels.
#[cube(launch_unchecked)]
pub(super) fn grouped_pieces<F: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[F],
    pieces: &mut [Vector<f32, N>],
    channels: usize,
    group_columns: usize,
    sizes: &Sizes,
    #[comptime] inputs: usize,
    #[comptime] taps: Taps,
    #[define(F)] _dtype: ElemType,
) {
    let count = comptime!(taps.kernel[0] * taps.kernel[1]);
    let mut sums = Array::<Vector<f32, N>>::new(count);
    #[unroll]
    for tap in 0..count {
        sums[tap] = Vector::new(0.0);
    }
    let channel = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    let vector = CUBE_POS_Z as usize;
    let start = CUBE_POS_Y as usize * sizes.piece;
    let end = min(start + sizes.piece, sizes.pixels);
    if channel < channels {
        let column = channel / group_columns * inputs + vector;
        let mut pixel = start + UNIT_POS_Y as usize;
        while pixel < end {
            let grad = Vector::<f32, N>::new(f32::cast_from(dy[pixel * sizes.dy_pitch + channel]));
            let (one, zero) = (Vector::<f32, N>::new(1.0), Vector::<f32, N>::new(0.0));
            add_window::<F, N>(
                &mut sums,
                x,
                grad,
                pixel,
                column,
                sizes,
                one,
                zero,
                comptime!(NormOnLoad::Nothing),
                taps,
            );
            pixel += CUBE_DIM_Y as usize;
        }
    }
    let first = (CUBE_POS_Y as usize * channels + channel) * count * inputs + vector;
    write_sums::<N>(&sums, pieces, first, inputs, channel < channels, count);
}

/// Sums each of `length` vectors over the pieces.
#[cube(launch_unchecked)]
pub(super) fn add_pieces<F: Float, N: Size>(
    pieces: &[Vector<f32, N>],
    out: &mut [Vector<F, N>],
    length: usize,
    count_of_pieces: usize,
    #[define(F)] _dtype: ElemType,
) {
    let at = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    let mut sum = Vector::<f32, N>::new(0.0);
    if at < length {
        let mut index = UNIT_POS_Y as usize;
        while index < count_of_pieces {
            sum += pieces[index * length + at];
            index += CUBE_DIM_Y as usize;
        }
    }
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(THREADS_PER_BLOCK);
    let sum = sum_over_block::<N>(sum, &mut shared);
    if at < length && UNIT_POS_Y == 0 {
        out[at] = Vector::cast_from(sum);
    }
}
