//! Kernels of grouped convolutions and their data gradient, which sum in f32. Images are rows of channels.
//!
//! A thread computes one vector of `N` output channels for a few pixels, so a weight that it reads is used for all of
//! them. The data gradient is the transposed sum, over the windows that contain a pixel.
//!
//! Checked by `gpu_check --ops` (`benches/gpu_check/convolutions.rs`, `deferred.rs`).

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::weight_kernels::{NormOnLoad, Taps, load_factors, load_normalised};

/// Pixels per thread.
pub(super) const PIXELS: usize = 4;

/// Size arguments of a launch. The target is written: the output, or the input's gradient. The source is read.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Images {
    /// Pixels of all target images, and the target's height and width.
    pub(super) pixels: usize,
    pub(super) target_height: FastDivmod<usize>,
    pub(super) target_width: FastDivmod<usize>,
    /// Height and width of the source.
    pub(super) height: usize,
    pub(super) width: usize,
    /// Vectors of the target's channels, and vectors from one target pixel to the next.
    pub(super) columns: usize,
    pub(super) pitch: usize,
    /// Vectors from one source pixel to the next.
    pub(super) source_pitch: usize,
}

/// Returns whether a target row (or column) reads the source by a tap, and at which index.
#[cube]
#[allow(clippy::manual_is_multiple_of, reason = "kernels do not support that function")]
fn source_index(
    target: usize,
    extent: usize,
    #[comptime] tap: usize,
    #[comptime] stride: usize,
    #[comptime] padding: usize,
    #[comptime] dilation: usize,
    #[comptime] transposed: bool,
) -> (bool, usize) {
    let offset = comptime!(tap * dilation);
    if comptime!(transposed) {
        let at = target + padding;
        let apart = at - min(offset, at);
        (at >= offset && apart % stride == 0 && apart / stride < extent, apart / stride)
    } else {
        let at = target * stride + offset;
        (at >= padding && at < extent + padding, at - min(padding, at))
    }
}

/// Computes the source pixels of the thread's pixels for a tap, and which of them are inside the image.
#[cube]
fn source_pixels(
    pixels: &mut Array<usize>,
    inside: &mut Array<bool>,
    first: usize,
    images: &Images,
    #[comptime] tap: usize,
    #[comptime] taps: Taps,
    #[comptime] transposed: bool,
) {
    let (down, along) = comptime!((tap / taps.kernel[1], tap % taps.kernel[1]));
    #[unroll]
    for k in 0..PIXELS {
        let (line, x) = images.target_width.div_mod(first + k);
        let (image, y) = images.target_height.div_mod(line);
        let (in_height, row) = source_index(
            y,
            images.height,
            down,
            comptime!(taps.stride[0]),
            comptime!(taps.padding[0]),
            comptime!(taps.dilation[0]),
            transposed,
        );
        let (in_width, at) = source_index(
            x,
            images.width,
            along,
            comptime!(taps.stride[1]),
            comptime!(taps.padding[1]),
            comptime!(taps.dilation[1]),
            transposed,
        );
        pixels[k] = (image * images.height + row) * images.width + at;
        inside[k] = in_height && in_width && first + k < images.pixels;
    }
}

/// Writes the thread's sums.
#[cube]
fn write<F: Float, N: Size>(
    sums: &Array<Vector<f32, N>>,
    out: &mut [Vector<F, N>],
    first: usize,
    column: usize,
    images: &Images,
) {
    #[unroll]
    for k in 0..PIXELS {
        if first + k < images.pixels {
            out[(first + k) * images.pitch + column] = Vector::cast_from(sums[k]);
        }
    }
}

/// Initialises the thread's sums with the bias or zero.
#[cube]
pub(super) fn init_sums<F: Float, N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    bias: &[Vector<F, N>],
    column: usize,
    #[comptime] has_bias: bool,
) {
    let start =
        if comptime!(has_bias) { Vector::<f32, N>::cast_from(bias[column]) } else { Vector::<f32, N>::new(0.0) };
    #[unroll]
    for k in 0..PIXELS {
        sums[k] = start;
    }
}

/// Returns the thread's column and its first pixel. Pixels are on the grid's first axis, because the second is shorter.
#[cube]
fn column_and_first_pixel() -> (usize, usize) {
    let column = CUBE_POS_Y as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    (column, (CUBE_POS_X as usize * CUBE_DIM_Y as usize + UNIT_POS_Y as usize) * PIXELS)
}

/// Adds to the sums of a thread's pixels their windows times `weight[tap][channels]`. The factors are those of [`load_factors`].
#[cube]
pub(super) fn add_windows<F: Float, N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    source: &[Vector<F, N>],
    norm_input: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    first: usize,
    column: usize,
    images: &Images,
    scale: Vector<f32, N>,
    second: Vector<f32, N>,
    third: Vector<f32, N>,
    #[comptime] transposed: bool,
    #[comptime] norm_on_load: NormOnLoad,
    #[comptime] taps: Taps,
) {
    let mut pixels = Array::<usize>::new(PIXELS);
    let mut inside = Array::<bool>::new(PIXELS);
    #[unroll]
    for tap in 0..comptime!(taps.kernel[0] * taps.kernel[1]) {
        source_pixels(&mut pixels, &mut inside, first, images, tap, taps, transposed);
        let weights = Vector::<f32, N>::cast_from(weight[tap * images.columns + column]);
        #[unroll]
        for k in 0..PIXELS {
            if inside[k] {
                let at = pixels[k] * images.source_pitch + column;
                sums[k] +=
                    weights * load_normalised::<F, N>(source, norm_input, at, scale, second, third, norm_on_load);
            }
        }
    }
}

/// Depthwise convolution with `weight[tap][channels]`. The source is normalised when it is loaded; `norm_input` has
/// the source's layout.
#[cube(launch_unchecked)]
pub(super) fn depthwise<F: Float, N: Size>(
    source: &[Vector<F, N>],
    norm_input: &[Vector<F, N>],
    factors: &[Vector<f32, N>],
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    images: &Images,
    #[comptime] has_bias: bool,
    #[comptime] transposed: bool,
    #[comptime] norm_on_load: NormOnLoad,
    #[comptime] taps: Taps,
    #[define(F)] _dtype: ElemType,
) {
    let (column, first) = column_and_first_pixel();
    if column >= images.columns || first >= images.pixels {
        terminate!();
    }
    let (scale, second, third) = load_factors::<N>(factors, column, images.columns, norm_on_load);
    let mut sums = Array::<Vector<f32, N>>::new(PIXELS);
    init_sums::<F, N>(&mut sums, bias, column, has_bias);
    add_windows::<F, N>(
        &mut sums,
        source,
        norm_input,
        weight,
        first,
        column,
        images,
        scale,
        second,
        third,
        transposed,
        norm_on_load,
        taps,
    );
    write::<F, N>(&sums, out, first, column, images);
}

/// Grouped convolution with `weight[tap][source channel of the group][target channels]`. A group has `group_columns`
/// vectors of target channels and `inputs` vectors of `M` source channels.
#[cube(launch_unchecked)]
pub(super) fn grouped<F: Float, N: Size, M: Size>(
    source: &[Vector<F, M>],
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    group_columns: usize,
    inputs: usize,
    images: &Images,
    #[comptime] has_bias: bool,
    #[comptime] transposed: bool,
    #[comptime] taps: Taps,
    #[comptime] lanes: usize,
    #[define(F)] _dtype: ElemType,
) {
    let (column, first) = column_and_first_pixel();
    if column >= images.columns || first >= images.pixels {
        terminate!();
    }
    let group = column / group_columns * inputs;
    let mut sums = Array::<Vector<f32, N>>::new(PIXELS);
    init_sums::<F, N>(&mut sums, bias, column, has_bias);
    let mut pixels = Array::<usize>::new(PIXELS);
    let mut inside = Array::<bool>::new(PIXELS);
    let mut values = Array::<Vector<f32, M>>::new(PIXELS);
    #[unroll]
    for tap in 0..comptime!(taps.kernel[0] * taps.kernel[1]) {
        source_pixels(&mut pixels, &mut inside, first, images, tap, taps, transposed);
        let mut input = 0usize;
        while input < inputs {
            #[unroll]
            for k in 0..PIXELS {
                values[k] = Vector::new(0.0);
                if inside[k] {
                    values[k] = Vector::<f32, M>::cast_from(source[pixels[k] * images.source_pitch + group + input]);
                }
            }
            #[unroll]
            for lane in 0..lanes {
                let row = (tap * inputs + input) * lanes + lane;
                let weights = Vector::<f32, N>::cast_from(weight[row * images.columns + column]);
                #[unroll]
                for k in 0..PIXELS {
                    sums[k] += weights * Vector::new(values[k].extract(lane));
                }
            }
            input += 1;
        }
    }
    write::<F, N>(&sums, out, first, column, images);
}
