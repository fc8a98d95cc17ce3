//! Depthwise convolution: one filter per channel. Each multiply-add processes a vector of channels, and there is no
//! matrix product. Sums and weights are f32. Tasks are rows of pixels. The weight gradient has one sum for each of 16 parts
//! of the batch and adds them in order, so it does not depend on the number of threads.

use std::ops::Range;

use super::allocator::Buffer;
use super::channels::sum_rows;
use super::element::{Element, load, store};
use super::parallel::{SharedSlice, chunk, for_each};
use super::shape::ConvShape;
use super::simd::multiversion;

/// Channels whose sums are in registers at the same time.
const WIDE: usize = 32;
/// Channels of a vector, for the rest.
const NARROW: usize = 8;

/// Returns true if each group has one input and one output channel.
pub(crate) fn fits(shape: &ConvShape) -> bool {
    shape.groups > 1 && shape.group_channels() == [1, 1]
}

/// Transposes `[channel][tap]` to `[tap][channel]`.
fn by_tap(weight: &[f32], taps: usize) -> Buffer {
    let channels = weight.len() / taps;
    let mut to = Buffer::new(weight.len());
    for tap in 0..taps {
        for c in 0..channels {
            to[tap * channels + c] = weight[c * taps + tap];
        }
    }
    to
}

/// The taps of each target coordinate along one axis, with the source coordinate that each tap reads. Taps on padding are
/// left out.
pub(crate) struct Taps {
    starts: Vec<usize>,
    /// `[tap, source coordinate]`
    all: Vec<[usize; 2]>,
}

impl Taps {
    /// `source(target, tap)` returns the source coordinate; `None` for padding.
    fn new(targets: usize, taps: usize, source: impl Fn(usize, usize) -> Option<usize>) -> Self {
        let (mut starts, mut all) = (vec![0], Vec::with_capacity(targets * taps));
        for target in 0..targets {
            all.extend((0..taps).filter_map(|tap| Some([tap, source(target, tap)?])));
            starts.push(all.len());
        }
        Self { starts, all }
    }

    /// Along `axis` of the output: the input coordinates that an output pixel reads.
    fn of_output(shape: &ConvShape, axis: usize) -> Self {
        Self::new(shape.output[axis], shape.kernel[axis], |o, k| {
            let at = (o * shape.stride[axis] + k * shape.dilation[axis]).checked_sub(shape.padding[axis])?;
            (at < shape.input[axis]).then_some(at)
        })
    }

    /// Along `axis` of the input: the output coordinates to which an input pixel contributes.
    fn of_input(shape: &ConvShape, axis: usize) -> Self {
        Self::new(shape.input[axis], shape.kernel[axis], |i, k| {
            let at = (i + shape.padding[axis]).checked_sub(k * shape.dilation[axis])?;
            let o = at / shape.stride[axis];
            (at.is_multiple_of(shape.stride[axis]) && o < shape.output[axis]).then_some(o)
        })
    }

    #[inline(always)]
    fn of(&self, target: usize) -> &[[usize; 2]] {
        &self.all[self.starts[target]..self.starts[target + 1]]
    }
}

/// A pass that computes each target pixel from source pixels: the forward pass or the data gradient.
pub(crate) struct Gather<'a, E> {
    channels: usize,
    /// `[tap][channel]`
    weight: &'a [f32],
    kernel_width: usize,
    bias: Option<&'a [f32]>,
    relu: bool,
    rows: Taps,
    columns: Taps,
    /// `[height, width]`
    source_size: [usize; 2],
    source: &'a [E],
}

impl<E: Element> Gather<'_, E> {
    /// Computes all rows of `batch` images.
    fn run(&self, batch: usize, target: &mut [E]) {
        let (height, width) = (self.rows.starts.len() - 1, self.columns.starts.len() - 1);
        let row_len = width * self.channels;
        let target = SharedSlice::new(target);
        for_each(batch * height, |row| {
            let image = self.source_size[0] * self.source_size[1] * self.channels;
            let source = &self.source[row / height * image..][..image];
            // SAFETY: each task has its own row.
            let to = unsafe { target.slice(row * row_len..(row + 1) * row_len) };
            gather_row(self, source, self.rows.of(row % height), to);
        });
    }
}

multiversion!(fn gather_row<E: Element>(pass: &Gather<'_, E>, source: &[E], rows: &[[usize; 2]], to: &mut [E]) = gather_row_body);

#[inline(always)]
fn gather_row_body<E: Element>(pass: &Gather<'_, E>, source: &[E], rows: &[[usize; 2]], to: &mut [E]) {
    let mut first = 0;
    while first + WIDE <= pass.channels {
        gather_channels::<E, WIDE>(pass, source, rows, to, first, WIDE);
        first += WIDE;
    }
    while first < pass.channels {
        gather_channels::<E, NARROW>(pass, source, rows, to, first, NARROW.min(pass.channels - first));
        first += NARROW;
    }
}

/// Computes `lanes` channels from `first` of a row.
#[inline(always)]
fn gather_channels<E: Element, const LANES: usize>(
    pass: &Gather<'_, E>,
    source: &[E],
    rows: &[[usize; 2]],
    to: &mut [E],
    first: usize,
    lanes: usize,
) {
    let (channels, width) = (pass.channels, pass.source_size[1]);
    let start = pass.bias.map_or([0.0; LANES], |bias| load(&bias[first..first + lanes]));
    for (x, to) in to.chunks_exact_mut(channels).enumerate() {
        let mut sums = start;
        for [ky, y] in rows {
            for [kx, x] in pass.columns.of(x) {
                let from = (y * width + x) * channels + first;
                let values = load::<E, LANES>(&source[from..from + lanes]);
                let from = (ky * pass.kernel_width + kx) * channels + first;
                let weight = load::<f32, LANES>(&pass.weight[from..from + lanes]);
                for lane in 0..LANES {
                    sums[lane] += values[lane] * weight[lane];
                }
            }
        }
        if pass.relu {
            sums = sums.map(|sum| if sum < 0.0 { 0.0 } else { sum });
        }
        store(&sums, &mut to[first..first + lanes]);
    }
}

/// Computes `y` `[batch, oh, ow, channels]`.
pub(crate) fn forward<E: Element>(
    shape: &ConvShape,
    x: &[E],
    weight: &[f32],
    bias: Option<&[f32]>,
    relu: bool,
    y: &mut [E],
) {
    let pass = Gather {
        channels: shape.channels[0],
        weight: &by_tap(weight, shape.taps()),
        kernel_width: shape.kernel[1],
        bias,
        relu,
        rows: Taps::of_output(shape, 0),
        columns: Taps::of_output(shape, 1),
        source_size: shape.input,
        source: x,
    };
    pass.run(shape.batch, y);
}

/// Computes `dx` `[batch, h, w, channels]`.
pub(crate) fn data_grad<E: Element>(shape: &ConvShape, weight: &[f32], dy: &[E], dx: &mut [E]) {
    let pass = Gather {
        channels: shape.channels[0],
        weight: &by_tap(weight, shape.taps()),
        kernel_width: shape.kernel[1],
        bias: None,
        relu: false,
        rows: Taps::of_input(shape, 0),
        columns: Taps::of_input(shape, 1),
        source_size: shape.output,
        source: dy,
    };
    pass.run(shape.batch, dx);
}

/// Computes the weight gradient in PyTorch's layout.
pub(crate) fn weight_grad<E: Element>(shape: &ConvShape, x: &[E], dy: &[E]) -> Buffer {
    /// Does not depend on the number of threads.
    const PARTS: usize = 16;
    let (channels, taps) = (shape.channels[0], shape.taps());
    let len = channels * taps;
    let parts = PARTS.min(shape.batch).max(1);
    let rows = Taps::of_output(shape, 0);
    let columns: Vec<Range<usize>> = (0..shape.kernel[1]).map(|kx| columns(shape, kx)).collect();
    let mut sums = Buffer::new(parts * len);
    let target = SharedSlice::new(&mut sums);
    for_each(parts, |index| {
        // SAFETY: each task has its own sums.
        let sums = unsafe { target.slice(index * len..(index + 1) * len) };
        sums.fill(0.0);
        for n in chunk(shape.batch, 1, parts, index) {
            weight_grad_image(shape, &rows, &columns, x, dy, n, sums);
        }
    });
    let mut total = Buffer::new(len);
    sum_rows::<f32>(&sums, &mut total);
    let mut grad = Buffer::new(len);
    for (c, grad) in grad.chunks_exact_mut(taps).enumerate() {
        for (tap, grad) in grad.iter_mut().enumerate() {
            *grad = total[tap * channels + c];
        }
    }
    grad
}

/// Returns the output columns for which a tap reads inside the image.
fn columns(shape: &ConvShape, kx: usize) -> Range<usize> {
    let (stride, offset, padding) = (shape.stride[1], kx * shape.dilation[1], shape.padding[1]);
    let first = padding.saturating_sub(offset).div_ceil(stride);
    let end = (shape.input[1] + padding).saturating_sub(offset).div_ceil(stride).min(shape.output[1]);
    first.min(end)..end
}

multiversion!(fn weight_grad_image<E: Element>(shape: &ConvShape, rows: &Taps, columns: &[Range<usize>], x: &[E], dy: &[E], n: usize, sums: &mut [f32]) = weight_grad_image_body);

#[inline(always)]
fn weight_grad_image_body<E: Element>(
    shape: &ConvShape,
    rows: &Taps,
    columns: &[Range<usize>],
    x: &[E],
    dy: &[E],
    n: usize,
    sums: &mut [f32],
) {
    let channels = shape.channels[0];
    let [input_row, output_row] = [shape.input[1] * channels, shape.output[1] * channels];
    for oy in 0..shape.output[0] {
        let dy = &dy[(n * shape.output[0] + oy) * output_row..][..output_row];
        let mut first = 0;
        while first < channels {
            let wide = first + WIDE <= channels;
            let lanes = if wide { WIDE } else { NARROW.min(channels - first) };
            for [ky, iy] in rows.of(oy) {
                let x = &x[(n * shape.input[0] + iy) * input_row..][..input_row];
                for (kx, columns) in columns.iter().enumerate() {
                    let at = (ky * shape.kernel[1] + kx) * channels + first;
                    let sums = &mut sums[at..at + lanes];
                    if wide {
                        add_products::<E, WIDE>(shape, kx, columns, &x[first..], &dy[first..], sums);
                    } else {
                        add_products::<E, NARROW>(shape, kx, columns, &x[first..], &dy[first..], sums);
                    }
                }
            }
            first += lanes;
        }
    }
}

/// Adds the products of a tap along a row to `sums`, for as many channels as there are sums.
#[inline(always)]
fn add_products<E: Element, const LANES: usize>(
    shape: &ConvShape,
    kx: usize,
    columns: &Range<usize>,
    x: &[E],
    dy: &[E],
    sums: &mut [f32],
) {
    let (channels, lanes) = (shape.channels[0], sums.len());
    let mut total = load::<f32, LANES>(sums);
    for ox in columns.clone() {
        let ix = ox * shape.stride[1] + kx * shape.dilation[1] - shape.padding[1];
        let dy = load::<E, LANES>(&dy[ox * channels..][..lanes]);
        let x = load::<E, LANES>(&x[ix * channels..][..lanes]);
        for lane in 0..LANES {
            total[lane] += x[lane] * dy[lane];
        }
    }
    store(&total, sums);
}
