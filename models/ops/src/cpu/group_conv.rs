//! Convolutions of groups that are at most a vector wide, as in RegNet and ResNeXt.
//!
//! A band of an image's rows is copied group by group into planes, padding included. A plane's pixel has as many elements as a
//! vector has lanes (oneDNN's `nChw16c`). The copy takes little time compared with the products, and stays in L1. The
//! micro-kernels ([`super::group_kernel`]) then read at constant distances.
//!
//! Tasks are bands of images. The weight gradient has one sum for each of 16 parts of the batch and adds the sums in order, so
//! it does not depend on the number of threads.

use std::ops::Range;

use bytemuck::Pod;

use super::allocator::Buffer;
use super::group_kernel::{GroupOuter, GroupTile, TileOf};
use super::igemm::Igemm;
use super::kernel::{Isa, Operand};
use super::parallel::{SharedSlice, chunk, chunk_count, for_each};
use super::shape::ConvShape;

/// Limit in bytes of a plane. A few of them stay in L1 beside the weights.
const PLANE: usize = 12 << 10;
/// Elements of the result per task.
const PIECE: usize = 1 << 14;

/// Returns the instruction set with the narrowest vector that holds a group of `depth` and `columns` channels; `None` if no
/// vector does, or if more than half of it would be padding.
pub(crate) fn fits<E: Operand>(isa: &'static Isa<E>, depth: usize, columns: usize) -> Option<&'static Isa<E>> {
    let widths = [&[isa], isa.narrower].concat().into_iter().rev();
    let isa = widths.filter(|isa| isa.cols == isa.groups.lanes).find(|isa| depth.max(columns) <= isa.cols)?;
    (2 * columns > isa.cols).then_some(isa)
}

/// Source planes of an [`Igemm`].
struct Planes {
    /// The smallest offset of a tap. A plane's first pixel is at this offset.
    least: [isize; 2],
    /// Number of phases: a plane's row is ordered by the pixels' column modulo the step. So adjacent results read adjacent
    /// pixels.
    phases: usize,
    /// Pixels of a phase.
    columns: usize,
    /// Elements of a row.
    row: usize,
    /// Rows of the grid whose source is in one plane.
    band: usize,
    /// Rows of a plane.
    rows: usize,
    /// Offset in elements of each tap.
    offsets: Vec<usize>,
}

impl Planes {
    fn new(
        taps: &[[isize; 2]],
        step: [usize; 2],
        grid: [usize; 2],
        tile: [usize; 2],
        lanes: usize,
        size: usize,
    ) -> Self {
        let least = [0, 1].map(|i| taps.iter().map(|tap| tap[i]).min().unwrap_or(0));
        let at = |tap: &[isize; 2], i: usize| (tap[i] - least[i]) as usize;
        let span = [0, 1].map(|i| taps.iter().map(|tap| at(tap, i) + 1).max().unwrap_or(1));
        let phases = step[1];
        let columns = ((grid[1].next_multiple_of(tile[1]) - 1) * step[1] + span[1]).div_ceil(phases);
        let row = phases * columns * lanes;
        let most = (PLANE / (row * size)).saturating_sub(span[0]) / step[0] + 1;
        let band = (most / tile[0] * tile[0]).clamp(tile[0], grid[0].next_multiple_of(tile[0]));
        let offset =
            |tap: &[isize; 2]| at(tap, 0) * row + (at(tap, 1) % phases * columns + at(tap, 1) / phases) * lanes;
        let offsets = taps.iter().map(offset).collect();
        Self { least, phases, columns, row, band, rows: (band - 1) * step[0] + span[0], offsets }
    }
}

impl<E: Operand> Igemm<'_, E> {
    /// Computes the result's pixels of the grid for groups that fit into a vector of `isa`.
    pub(super) fn run_groups(&self, isa: &'static Isa<E>, target: &mut [E]) {
        let kernels = &isa.groups;
        let wasted = |tile: &&TileOf<E>| {
            self.grid[0].next_multiple_of(tile.size[0]) * self.grid[1].next_multiple_of(tile.size[1])
        };
        let tile = kernels.tiles.iter().min_by_key(wasted).expect("three tiles");
        // Groups whose channels share a cache line.
        let together = if self.weights.depth == isa.cols { (64 / (isa.cols * size_of::<E>())).max(1) } else { 1 };
        let planes = Planes::new(self.taps, self.source_step, self.grid, tile.size, kernels.lanes, size_of::<E>());
        let packed = self.weights.pack(isa, 1);
        let groups = Groups { conv: self, isa, tile, packed: &packed.values, width: packed.width, planes };
        let bands = self.grid[0].div_ceil(groups.planes.band);
        let target = SharedSlice::new(target);
        let results = self.batch * self.grid[0] * self.grid[1] * self.weights.groups * self.weights.columns;
        let tasks = chunk_count(results, PIECE);
        for_each(tasks, |task| {
            let plane_len = groups.planes.rows * groups.planes.row;
            let mut planes = Buffer::zeroed(together * plane_len);
            for index in chunk(self.batch * bands, 1, tasks, task) {
                if bands > 1 {
                    planes.fill(E::zeroed());
                }
                let first = index % bands * groups.planes.band;
                let rows = first..self.grid[0].min(first + groups.planes.band);
                for first_group in (0..self.weights.groups).step_by(together) {
                    let together = together.min(self.weights.groups - first_group);
                    groups.copy(index / bands, first, first_group, &mut planes[..together * plane_len]);
                    for (group, plane) in planes.chunks_exact(plane_len).take(together).enumerate() {
                        groups.multiply(index / bands, rows.clone(), first_group + group, plane, target);
                    }
                }
            }
        });
    }
}

/// A convolution whose weights are packed.
struct Groups<'a, E: 'static> {
    conv: &'a Igemm<'a, E>,
    isa: &'static Isa<E>,
    tile: &'a TileOf<E>,
    packed: &'a [E],
    /// Packed elements per column.
    width: usize,
    planes: Planes,
}

impl<E: Operand> Groups<'_, E> {
    /// Copies the pixels that the band from grid row `first` reads, for the groups from `group` on: one group per plane. Padding
    /// is not written, so it stays zero.
    fn copy(&self, n: usize, first: usize, group: usize, to: &mut [E]) {
        let (conv, planes) = (self.conv, &self.planes);
        let [height, width] = conv.source_image.size;
        let (channels, step, depth) = (conv.source_image.channels, conv.source_step, conv.weights.depth);
        let top = (first * step[0]) as isize + planes.least[0];
        let plane = planes.rows * planes.row;
        for row in 0..planes.rows {
            let y = top + row as isize;
            // A negative row wraps around to a large number.
            if y as usize >= height {
                continue;
            }
            let line = &conv.source[(n * height + y as usize) * width * channels..][..width * channels];
            for phase in 0..planes.phases {
                // Column `i` of the phase is the source's column `i · phases + left`.
                let left = planes.least[1] + phase as isize;
                let from = (-left).max(0).unsigned_abs().div_ceil(planes.phases);
                let end = (width as isize - left).max(0).unsigned_abs().div_ceil(planes.phases).min(planes.columns);
                if from < end {
                    let at = ((from * planes.phases) as isize + left) as usize * channels + group * depth;
                    let to = &mut to[row * planes.row + (phase * planes.columns + from) * self.isa.cols..];
                    copy_pixels(&line[at..], planes.phases * channels, depth, end - from, to, self.isa.cols, plane);
                }
            }
        }
    }

    /// Computes one group's results of grid rows `rows` from their plane.
    fn multiply(&self, n: usize, rows: Range<usize>, group: usize, plane: &[E], target: SharedSlice<E>) {
        let (conv, planes, lanes) = (self.conv, &self.planes, self.isa.cols);
        let (image, columns) = (&conv.target_image, conv.weights.columns);
        let out_step = [conv.target_step[0] * image.size[1], conv.target_step[1]].map(|pixels| pixels * image.channels);
        let first = (n * image.size[0] + conv.target_first[0]) * image.size[1] + conv.target_first[1];
        let first = first * image.channels + group * columns;
        let x_row = conv.source_step[0] * planes.row;
        for y in rows.clone().step_by(self.tile.size[0]) {
            for x in (0..conv.grid[1]).step_by(self.tile.size[1]) {
                let call = GroupTile {
                    x: plane[(y - rows.start) * x_row + x * lanes..].as_ptr(),
                    x_row,
                    offsets: planes.offsets.as_ptr(),
                    taps: planes.offsets.len(),
                    steps: conv.weights.depth.div_ceil(E::STEP),
                    w: self.packed[group * lanes * self.width..].as_ptr(),
                    out: target.ptr().wrapping_add(first + y * out_step[0] + x * out_step[1]),
                    out_step,
                    size: [rows.end - y, conv.grid[1] - x],
                    channels: columns,
                    bias: conv.bias.map_or(std::ptr::null(), |bias| bias[group * lanes..][..lanes].as_ptr()),
                    relu: conv.relu,
                };
                // SAFETY: `Planes::new` made room for whole tiles and all taps. The weights have as many panels of `lanes`
                // columns as groups. The pixels to store are those of the grid, and only this task writes this image's
                // band.
                unsafe { self.tile.run(&call) };
            }
        }
    }
}

/// Copies `count` pixels that are `step` elements apart to pixels of `lanes` elements. Each group has `depth` elements and goes
/// to its own plane of `plane` elements; the length of `to` determines the number of groups.
fn copy_pixels<E: Pod>(from: &[E], step: usize, depth: usize, count: usize, to: &mut [E], lanes: usize, plane: usize) {
    /// Copies whole vectors of `GROUPS` groups.
    fn whole<E: Pod, const LANES: usize, const GROUPS: usize>(
        from: &[E],
        step: usize,
        count: usize,
        to: &mut [E],
        plane: usize,
    ) {
        assert!((count - 1) * step + GROUPS * LANES <= from.len());
        assert!((GROUPS - 1) * plane + count * LANES <= to.len());
        for pixel in 0..count {
            for group in 0..GROUPS {
                // SAFETY: both assertions; the pixels of a plane do not overlap.
                unsafe {
                    let from = from.as_ptr().add(pixel * step + group * LANES).cast::<[E; LANES]>();
                    let to = to.as_mut_ptr().add(group * plane + pixel * LANES).cast::<[E; LANES]>();
                    to.write_unaligned(from.read_unaligned());
                }
            }
        }
    }
    match (lanes, depth, to.len().div_ceil(plane)) {
        (8, 8, 1) => whole::<E, 8, 1>(from, step, count, to, plane),
        (8, 8, 2) => whole::<E, 8, 2>(from, step, count, to, plane),
        (8, 8, 4) => whole::<E, 8, 4>(from, step, count, to, plane),
        (_, _, groups) => {
            for group in 0..groups {
                for pixel in 0..count {
                    let to = &mut to[group * plane + pixel * lanes..][..depth];
                    to.copy_from_slice(&from[pixel * step + group * depth..][..depth]);
                }
            }
        }
    }
}

/// Computes the weight gradient in PyTorch's layout, for groups that fit into a vector of `isa`; `None` for a dilation along
/// rows, with which the taps of a row are not adjacent.
pub(crate) fn weight_grad<E: Operand>(isa: &'static Isa<E>, shape: &ConvShape, x: &[E], dy: &[E]) -> Option<Buffer> {
    /// Does not depend on the number of threads.
    const PARTS: usize = 16;
    if shape.dilation[1] > 1 {
        return None;
    }
    let len = shape.groups * shape.taps() * isa.cols * isa.cols;
    let parts = PARTS.min(shape.batch).max(1);
    let mut sums = Buffer::new(parts * len);
    let shared = SharedSlice::new(&mut sums);
    let zeros = Buffer::zeroed(shape.channels[0].max(shape.channels[1]));
    for_each(parts, |index| {
        // SAFETY: each task has its own sums.
        let sums = unsafe { shared.slice(index * len..(index + 1) * len) };
        sums.fill(0.0);
        let mut part = Part::new(isa, shape, x, dy, &zeros);
        for n in chunk(shape.batch, 1, parts, index) {
            part.add_image(n, sums);
        }
    });
    Some(add_parts(isa.cols, shape, &sums, parts))
}

/// Inputs and copies of a part of the batch.
struct Part<'a, E: 'static> {
    isa: &'static Isa<E>,
    shape: &'a ConvShape,
    x: &'a [E],
    dy: &'a [E],
    zeros: &'a [E],
    /// Output rows that share planes, a multiple of [`Operand::STEP`].
    band: usize,
    /// Rows and columns of `x`'s plane.
    plane: [usize; 2],
    /// `[row][column][STEP]`: each step has the pixels that adjacent output rows read.
    x_pixels: Vec<*const E>,
    dy_pixels: Vec<*const E>,
    x_plane: Buffer<E>,
    dy_plane: Buffer<E>,
}

impl<'a, E: Operand> Part<'a, E> {
    fn new(isa: &'static Isa<E>, shape: &'a ConvShape, x: &'a [E], dy: &'a [E], zeros: &'a [E]) -> Self {
        let columns = (shape.output[1] - 1) * shape.stride[1] + shape.kernel[1];
        let span = shape.dilation[0] * (shape.kernel[0] - 1) + 1;
        let row = columns * isa.cols * E::STEP * size_of::<E>();
        let most = (PLANE / row).saturating_sub(span) / shape.stride[0] + E::STEP;
        let band = (most / E::STEP * E::STEP).min(shape.output[0].next_multiple_of(E::STEP));
        let plane = [(band - E::STEP) * shape.stride[0] + span, columns];
        let step = isa.cols * E::STEP;
        Self {
            isa,
            shape,
            x,
            dy,
            zeros,
            band,
            plane,
            x_pixels: Vec::with_capacity(plane[0] * plane[1] * E::STEP),
            dy_pixels: Vec::with_capacity(band * shape.output[1]),
            x_plane: Buffer::new(plane[0] * plane[1] * step),
            dy_plane: Buffer::new(band / E::STEP * shape.output[1] * step),
        }
    }

    /// Adds the products of an image's pixels to `sums` `[group][tap][channel][LANES]`.
    fn add_image(&mut self, n: usize, sums: &mut [f32]) {
        let (shape, lanes) = (self.shape, self.isa.cols);
        let [depth, columns] = shape.group_channels();
        let step = lanes * E::STEP;
        for first in (0..shape.output[0]).step_by(self.band) {
            let lines = (shape.output[0] - first).min(self.band).div_ceil(E::STEP);
            self.find_pixels(n, first, lines);
            for (group, sums) in sums.chunks_exact_mut(shape.taps() * lanes * lanes).enumerate() {
                let (x, dy) = (group * depth, group * columns);
                // SAFETY: each pixel has the channels of all groups.
                unsafe {
                    self.isa.pack(&self.x_pixels, x, shape.channels[0] - x, lanes, &mut self.x_plane);
                    self.isa.pack(&self.dy_pixels, dy, shape.channels[1] - dy, lanes, &mut self.dy_plane);
                }
                let taps = sums.chunks_exact_mut(shape.kernel[1] * lanes * lanes);
                for (ky, sums) in taps.enumerate() {
                    let call = GroupOuter {
                        x: self.x_plane[ky * shape.dilation[0] * self.plane[1] * step..].as_ptr(),
                        x_step: [E::STEP * shape.stride[0] * self.plane[1], shape.stride[1]]
                            .map(|pixels| pixels * step),
                        dy: self.dy_plane.as_ptr(),
                        lines,
                        steps: shape.output[1],
                        sums: sums.as_mut_ptr(),
                        rows: shape.kernel[1] * lanes,
                    };
                    // SAFETY: the planes have the pixels of a band, of which these are the first lines, and the sums have
                    // a row per tap and lane.
                    unsafe { self.isa.groups.outer(&call) };
                }
            }
        }
    }

    /// Finds the pixels of the band from output row `first`; zeros for padding and for rows after the last.
    fn find_pixels(&mut self, n: usize, first: usize, lines: usize) {
        let (shape, zeros) = (self.shape, self.zeros.as_ptr());
        let pixel = |values: &'a [E], size: [usize; 2], channels: usize, y: isize, x: isize| {
            // A negative coordinate wraps around to a large number.
            match (y as usize) < size[0] && (x as usize) < size[1] {
                true => values[((n * size[0] + y as usize) * size[1] + x as usize) * channels..].as_ptr(),
                false => zeros,
            }
        };
        self.x_pixels.clear();
        let rows = (lines - 1) * E::STEP * shape.stride[0] + shape.dilation[0] * (shape.kernel[0] - 1) + 1;
        for row in 0..rows {
            for column in 0..self.plane[1] {
                for step in 0..E::STEP {
                    let y = (first + step) * shape.stride[0] + row;
                    let [y, x] = [y as isize - shape.padding[0] as isize, column as isize - shape.padding[1] as isize];
                    self.x_pixels.push(pixel(self.x, shape.input, shape.channels[0], y, x));
                }
            }
        }
        self.dy_pixels.clear();
        for line in 0..lines {
            for column in 0..shape.output[1] {
                for step in 0..E::STEP {
                    let [y, x] = [first + line * E::STEP + step, column].map(|at| at as isize);
                    self.dy_pixels.push(pixel(self.dy, shape.output, shape.channels[1], y, x));
                }
            }
        }
    }
}

/// Adds the parts' sums `[group][tap][channel][lanes]` in order and converts them to PyTorch's layout.
fn add_parts(lanes: usize, shape: &ConvShape, sums: &[f32], parts: usize) -> Buffer {
    let ([depth, columns], taps) = (shape.group_channels(), shape.taps());
    let part = sums.len() / parts;
    let mut grad = Buffer::new(shape.weight_len());
    let target = SharedSlice::new(&mut grad);
    for_each(shape.groups, |group| {
        let len = columns * depth * taps;
        // SAFETY: each task has its own group.
        let grad = unsafe { target.slice(group * len..(group + 1) * len) };
        for tap in 0..taps {
            for d in 0..depth {
                let at = ((group * taps + tap) * lanes + d) * lanes;
                let mut sum = [0.0_f32; 16];
                for part in sums.chunks_exact(part) {
                    sum.iter_mut().zip(&part[at..at + columns]).for_each(|(sum, value)| *sum += value);
                }
                for (column, sum) in sum[..columns].iter().enumerate() {
                    grad[(column * depth + d) * taps + tap] = *sum;
                }
            }
        }
    });
    grad
}
