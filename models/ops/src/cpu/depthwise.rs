//! Depthwise convolution: one filter per channel. Each multiply-add processes a vector of channels, and there is no
//! matrix product. Sums and weights are f32. Tasks are rows of pixels. The weight gradient has one sum for each of 16 parts
//! of the batch and adds them in order, so it does not depend on the number of threads.

use super::allocator::Buffer;
use super::channels::sum_rows;
use super::element::Element;
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
        let to = &mut to[first..first + lanes];
        if to.len() == LANES {
            for lane in 0..LANES {
                to[lane] = E::from_f32(sums[lane]);
            }
        } else {
            to.iter_mut().zip(&sums).for_each(|(to, sum)| *to = E::from_f32(*sum));
        }
    }
}

/// Loads a vector, or its first lanes.
#[inline(always)]
fn load<E: Element, const LANES: usize>(from: &[E]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    if from.len() == LANES {
        for lane in 0..LANES {
            lanes[lane] = from[lane].to_f32();
        }
    } else {
        lanes.iter_mut().zip(from).for_each(|(lane, value)| *lane = value.to_f32());
    }
    lanes
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
    let mut sums = Buffer::new(parts * len);
    let target = SharedSlice::new(&mut sums);
    for_each(parts, |index| {
        // SAFETY: each task has its own sums.
        let sums = unsafe { target.slice(index * len..(index + 1) * len) };
        sums.fill(0.0);
        for n in chunk(shape.batch, 1, parts, index) {
            weight_grad_image(shape, &rows, x, dy, n, sums);
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

multiversion!(fn weight_grad_image<E: Element>(shape: &ConvShape, rows: &Taps, x: &[E], dy: &[E], n: usize, sums: &mut [f32]) = weight_grad_image_body);

#[inline(always)]
fn weight_grad_image_body<E: Element>(shape: &ConvShape, rows: &Taps, x: &[E], dy: &[E], n: usize, sums: &mut [f32]) {
    let channels = shape.channels[0];
    let [input_row, output_row] = [shape.input[1] * channels, shape.output[1] * channels];
    for oy in 0..shape.output[0] {
        let dy = &dy[(n * shape.output[0] + oy) * output_row..][..output_row];
        for [ky, iy] in rows.of(oy) {
            let x = &x[(n * shape.input[0] + iy) * input_row..][..input_row];
            let row_taps = shape.kernel[1] * channels;
            let sums = &mut sums[ky * row_taps..][..row_taps];
            let mut first = 0;
            while first < channels {
                let lanes = NARROW.min(channels - first);
                let row = RowGrad { shape, x, dy, first, lanes };
                first += match (shape.kernel[1], channels - first >= WIDE) {
                    (3, true) => RowGrad { lanes: WIDE, ..row }.add::<WIDE, 3>(0, sums),
                    (3, false) => row.add::<NARROW, 3>(0, sums),
                    (5, true) => RowGrad { lanes: WIDE, ..row }.add::<WIDE, 5>(0, sums),
                    (5, false) => row.add::<NARROW, 5>(0, sums),
                    (width, _) => {
                        (0..width).for_each(|kx| {
                            row.add::<NARROW, 1>(kx, sums);
                        });
                        lanes
                    }
                };
            }
        }
    }
}

/// Products of a row of the input and a row of the output's gradient.
struct RowGrad<'a, E> {
    shape: &'a ConvShape,
    x: &'a [E],
    dy: &'a [E],
    /// Range of channels.
    first: usize,
    lanes: usize,
}

impl<E: Element> RowGrad<'_, E> {
    /// Adds the products of `TAPS` taps from `tap` to `sums`, `[kernel column][channel]`. Returns the number of channels.
    #[inline(always)]
    fn add<const LANES: usize, const TAPS: usize>(&self, tap: usize, sums: &mut [f32]) -> usize {
        let Self { shape, x, dy, first, lanes } = *self;
        let channels = shape.channels[0];
        let mut taps: [[f32; LANES]; TAPS] =
            std::array::from_fn(|kx| load(&sums[(tap + kx) * channels + first..][..lanes]));
        for (ox, dy) in dy.chunks_exact(channels).enumerate() {
            let dy = load::<E, LANES>(&dy[first..first + lanes]);
            for (kx, sums) in taps.iter_mut().enumerate() {
                let ix = (ox * shape.stride[1] + (tap + kx) * shape.dilation[1]).wrapping_sub(shape.padding[1]);
                if ix < shape.input[1] {
                    let x = load::<E, LANES>(&x[ix * channels + first..][..lanes]);
                    for lane in 0..LANES {
                        sums[lane] += x[lane] * dy[lane];
                    }
                }
            }
        }
        for (kx, tap_sums) in taps.iter().enumerate() {
            sums[(tap + kx) * channels + first..][..lanes].copy_from_slice(&tap_sums[..lanes]);
        }
        lanes
    }
}
