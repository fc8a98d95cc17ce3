//! Grouped convolutions and their data gradient, added up in f32. Images are rows of channels.
//!
//! A thread computes one vector of `N` output channels for a few pixels, so that a weight that it reads serves them all. The
//! data gradient is the same sum the other way: over the windows that see a pixel.

use cubecl::prelude::*;
use cubecl::std::FastDivmod;

use super::weight_kernels::Taps;

/// Pixels of a thread.
pub(super) const PIXELS: usize = 4;

/// Sizes that a launch brings along. The target is what is written: the output, or the input's gradient.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Images {
    /// Pixels of all images, height and width of the target.
    pub(super) pixels: usize,
    pub(super) target_height: FastDivmod<usize>,
    pub(super) target_width: FastDivmod<usize>,
    /// Of what is read.
    pub(super) height: usize,
    pub(super) width: usize,
    /// Vectors of the target's channels, and from one pixel to the next.
    pub(super) columns: usize,
    pub(super) pitch: usize,
    /// Vectors from one pixel of what is read to the next.
    pub(super) source_pitch: usize,
}

/// Whether a target's row (or column) sees the source by a tap, and where.
#[cube]
#[allow(clippy::manual_is_multiple_of, reason = "a kernel has no such function")]
fn seen(
    target: usize,
    extent: usize,
    #[comptime] tap: usize,
    #[comptime] stride: usize,
    #[comptime] padding: usize,
    #[comptime] dilation: usize,
    #[comptime] transposed: bool,
) -> (bool, usize) {
    let far = comptime!(tap * dilation);
    if comptime!(transposed) {
        let at = target + padding;
        let apart = at - min(far, at);
        (at >= far && apart % stride == 0 && apart / stride < extent, apart / stride)
    } else {
        let at = target * stride + far;
        (at >= padding && at < extent + padding, at - min(padding, at))
    }
}

/// Pixels of the source that the thread's pixels see by a tap, and which of these there are.
#[cube]
fn look(
    places: &mut Array<usize>,
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
        let (in_height, row) = seen(
            y,
            images.height,
            down,
            comptime!(taps.stride[0]),
            comptime!(taps.padding[0]),
            comptime!(taps.dilation[0]),
            transposed,
        );
        let (in_width, at) = seen(
            x,
            images.width,
            along,
            comptime!(taps.stride[1]),
            comptime!(taps.padding[1]),
            comptime!(taps.dilation[1]),
            transposed,
        );
        places[k] = (image * images.height + row) * images.width + at;
        inside[k] = in_height && in_width && first + k < images.pixels;
    }
}

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

/// The bias, or zero, as the beginning of the thread's sums.
#[cube]
fn begin<F: Float, N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    bias: &[Vector<F, N>],
    column: usize,
    #[comptime] biased: bool,
) {
    let start = if comptime!(biased) { Vector::<f32, N>::cast_from(bias[column]) } else { Vector::<f32, N>::new(0.0) };
    #[unroll]
    for k in 0..PIXELS {
        sums[k] = start;
    }
}

/// The thread's column and the first of its pixels, of which a grid may have more than its second axis is long.
#[cube]
fn place() -> (usize, usize) {
    let column = CUBE_POS_Y as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    (column, (CUBE_POS_X as usize * CUBE_DIM_Y as usize + UNIT_POS_Y as usize) * PIXELS)
}

/// Depthwise: `weight[tap][channels]`.
#[cube(launch_unchecked)]
pub(super) fn depthwise<F: Float, N: Size>(
    source: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    images: &Images,
    #[comptime] biased: bool,
    #[comptime] transposed: bool,
    #[comptime] taps: Taps,
    #[define(F)] _dtype: ElemType,
) {
    let (column, first) = place();
    if column >= images.columns || first >= images.pixels {
        terminate!();
    }
    let mut sums = Array::<Vector<f32, N>>::new(PIXELS);
    begin::<F, N>(&mut sums, bias, column, biased);
    let mut places = Array::<usize>::new(PIXELS);
    let mut inside = Array::<bool>::new(PIXELS);
    #[unroll]
    for tap in 0..comptime!(taps.kernel[0] * taps.kernel[1]) {
        look(&mut places, &mut inside, first, images, tap, taps, transposed);
        let weights = Vector::<f32, N>::cast_from(weight[tap * images.columns + column]);
        #[unroll]
        for k in 0..PIXELS {
            if inside[k] {
                sums[k] += weights * Vector::<f32, N>::cast_from(source[places[k] * images.source_pitch + column]);
            }
        }
    }
    write::<F, N>(&sums, out, first, column, images);
}

/// In groups: `weight[tap][source channel of the group][target channels]`; `each` vectors of target channels and `inputs`
/// vectors of `M` source channels a group.
#[cube(launch_unchecked)]
pub(super) fn grouped<F: Float, N: Size, M: Size>(
    source: &[Vector<F, M>],
    weight: &[Vector<F, N>],
    bias: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    each: usize,
    inputs: usize,
    images: &Images,
    #[comptime] biased: bool,
    #[comptime] transposed: bool,
    #[comptime] taps: Taps,
    #[comptime] lanes: usize,
    #[define(F)] _dtype: ElemType,
) {
    let (column, first) = place();
    if column >= images.columns || first >= images.pixels {
        terminate!();
    }
    let group = column / each * inputs;
    let mut sums = Array::<Vector<f32, N>>::new(PIXELS);
    begin::<F, N>(&mut sums, bias, column, biased);
    let mut places = Array::<usize>::new(PIXELS);
    let mut inside = Array::<bool>::new(PIXELS);
    let mut values = Array::<Vector<f32, M>>::new(PIXELS);
    #[unroll]
    for tap in 0..comptime!(taps.kernel[0] * taps.kernel[1]) {
        look(&mut places, &mut inside, first, images, tap, taps, transposed);
        let mut input = 0usize;
        while input < inputs {
            #[unroll]
            for k in 0..PIXELS {
                values[k] = Vector::new(0.0);
                if inside[k] {
                    values[k] = Vector::<f32, M>::cast_from(source[places[k] * images.source_pitch + group + input]);
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
