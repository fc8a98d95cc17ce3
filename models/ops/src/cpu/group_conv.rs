//! Convolutions of groups that are at most a vector wide, as in RegNet and ResNeXt.
//!
//! A band of an image's rows is copied group by group into planes, padding included. A plane's pixel has as many elements as a
//! vector has lanes (oneDNN's `nChw16c`). The copy takes little time compared with the products, and stays in L1. The
//! micro-kernels ([`super::group_kernel`]) then read at constant distances.
//!
//! Groups of half a vector's channels are copied two at a time, and their channels alternate in a pixel ([`GroupKernels::groups`]).
//!
//! Tasks are bands of images.
//!
//! Checked by `conv_tests`.

use std::ops::Range;

use bytemuck::Pod;

use super::allocator::Buffer;
use super::group_kernel::{GroupKernels, GroupTileArgs, GroupTileKernel};
use super::igemm::Igemm;
use super::kernel::{MicroKernels, Operand};
use super::packing::{Packed, Weights};
use super::parallel::{SharedSlice, chunk, chunk_count, for_each};

/// Limit in bytes of a group's plane. A few of them stay in L1 beside the weights.
pub(super) const PLANE: usize = 12 << 10;
/// Elements of the result per task.
const PIECE: usize = 1 << 14;

/// Returns the instruction set with the narrowest vector that holds a group of `depth` and `columns` channels; `None` if no
/// vector does, or if more than half of it would be padding.
pub(crate) fn isa_for_group<E: Operand>(
    isa: &'static MicroKernels<E>,
    depth: usize,
    columns: usize,
) -> Option<&'static MicroKernels<E>> {
    let widths = [&[isa], isa.narrower].concat().into_iter().rev();
    let isa = widths.filter(|isa| isa.cols == isa.groups.lanes).find(|isa| depth.max(columns) <= isa.cols)?;
    (2 * columns > isa.cols).then_some(isa)
}

/// Returns the kernels of an instruction set from [`isa_for_group`], for two groups at a time where possible.
pub(super) fn kernels<E>(
    isa: &'static MicroKernels<E>,
    depth: usize,
    columns: usize,
    groups: usize,
) -> &'static GroupKernels<E> {
    match &isa.two_groups {
        Some(kernels) if groups > 1 && depth == isa.cols && columns == isa.cols => kernels,
        _ => &isa.groups,
    }
}

/// Layout of the planes that hold the source pixels of a band of an [`Igemm`]'s image: `[row][phase][column][lanes]`.
struct PlaneLayout {
    /// The smallest offset of a tap. A plane's first pixel is at this offset.
    least: [isize; 2],
    /// Number of phases: a plane's row is ordered by the pixels' column modulo the stride. So adjacent results read adjacent
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

impl PlaneLayout {
    fn new(
        taps: &[[isize; 2]],
        stride: [usize; 2],
        grid: [usize; 2],
        tile: [usize; 2],
        lanes: usize,
        limit: usize,
    ) -> Self {
        let least = [0, 1].map(|i| taps.iter().map(|tap| tap[i]).min().unwrap_or(0));
        let at = |tap: &[isize; 2], i: usize| (tap[i] - least[i]) as usize;
        let span = [0, 1].map(|i| taps.iter().map(|tap| at(tap, i) + 1).max().unwrap_or(1));
        let phases = stride[1];
        let columns = ((grid[1].next_multiple_of(tile[1]) - 1) * stride[1] + span[1]).div_ceil(phases);
        let row = phases * columns * lanes;
        let most = (limit / row).saturating_sub(span[0]) / stride[0] + 1;
        let band = (most / tile[0] * tile[0]).clamp(tile[0], grid[0].next_multiple_of(tile[0]));
        let offset =
            |tap: &[isize; 2]| at(tap, 0) * row + (at(tap, 1) % phases * columns + at(tap, 1) / phases) * lanes;
        let offsets = taps.iter().map(offset).collect();
        Self { least, phases, columns, row, band, rows: (band - 1) * stride[0] + span[0], offsets }
    }
}

impl<E: Operand> Igemm<'_, E> {
    /// Computes the result's pixels of the grid for groups that fit into a vector of `isa`.
    pub(super) fn run_groups(&self, isa: &'static MicroKernels<E>, target: &mut [E]) {
        let Weights { depth, columns, groups, .. } = *self.weights;
        // The kernels add a bias in the order of the channels, but a padded bias is not in that order for two groups.
        let kernels = if self.bias.is_some() { &isa.groups } else { kernels(isa, depth, columns, groups) };
        let wasted = |tile: &&GroupTileKernel<E>| {
            self.grid[0].next_multiple_of(tile.size[0]) * self.grid[1].next_multiple_of(tile.size[1])
        };
        let tile = kernels.tiles.iter().min_by_key(wasted).expect("three tiles");
        // Vectors whose channels share a cache line.
        let together = if depth == isa.cols { (64 / (kernels.lanes * size_of::<E>())).max(1) } else { 1 };
        let limit = kernels.groups * PLANE / size_of::<E>();
        let planes = PlaneLayout::new(self.taps, self.source_stride, self.grid, tile.size, kernels.lanes, limit);
        let Packed { mut values, width } = self.weights.pack(isa, 1);
        if kernels.groups > 1 {
            values = alternate_groups(&values, isa.cols * width);
        }
        let vectors = groups.div_ceil(kernels.groups);
        let groups = GroupedConv { conv: self, kernels, tile, packed: &values, width, planes };
        let bands = self.grid[0].div_ceil(groups.planes.band);
        let target = SharedSlice::new(target);
        let results = self.batch * self.grid[0] * self.grid[1] * self.weights.groups * columns;
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
                for first_vector in (0..vectors).step_by(together) {
                    let together = together.min(vectors - first_vector);
                    groups.copy(index / bands, first, first_vector, &mut planes[..together * plane_len]);
                    for (vector, plane) in planes.chunks_exact(plane_len).take(together).enumerate() {
                        groups.multiply(index / bands, rows.clone(), first_vector + vector, plane, target);
                    }
                }
            }
        });
    }
}

/// A grouped convolution with packed weights.
struct GroupedConv<'a, E: 'static> {
    conv: &'a Igemm<'a, E>,
    kernels: &'static GroupKernels<E>,
    tile: &'a GroupTileKernel<E>,
    packed: &'a [E],
    /// Packed elements per column.
    width: usize,
    planes: PlaneLayout,
}

impl<E: Operand> GroupedConv<'_, E> {
    /// Copies the pixels that the band from grid row `first` reads, for the groups from `vector` on: one vector's groups per plane.
    /// Padding is not written, so it stays zero.
    fn copy(&self, n: usize, first: usize, vector: usize, to: &mut [E]) {
        let (conv, planes) = (self.conv, &self.planes);
        let [height, width] = conv.source_image.size;
        let (channels, stride) = (conv.source_image.channels, conv.source_stride);
        let GroupKernels { lanes, groups, .. } = *self.kernels;
        let depth = conv.weights.depth * groups;
        let top = (first * stride[0]) as isize + planes.least[0];
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
                    let at = ((from * planes.phases) as isize + left) as usize * channels + vector * depth;
                    let to = &mut to[row * planes.row + (phase * planes.columns + from) * lanes..];
                    let copy = PixelCopy { stride: planes.phases * channels, depth, count: end - from, lanes, plane };
                    match groups {
                        1 => copy.pixels(&line[at..], to),
                        _ => copy.alternating(self.kernels, &line[at..], to),
                    }
                }
            }
        }
    }

    /// Computes the results of a vector's groups for grid rows `rows` from their plane.
    fn multiply(&self, n: usize, rows: Range<usize>, vector: usize, plane: &[E], target: SharedSlice<E>) {
        let (conv, planes, lanes) = (self.conv, &self.planes, self.kernels.lanes);
        let group = vector * self.kernels.groups;
        let groups = self.kernels.groups.min(conv.weights.groups - group);
        let (image, columns) = (&conv.target_image, conv.weights.columns);
        let out_stride =
            [conv.target_stride[0] * image.size[1], conv.target_stride[1]].map(|pixels| pixels * image.channels);
        let first = (n * image.size[0] + conv.target_first[0]) * image.size[1] + conv.target_first[1];
        let first = first * image.channels + group * columns;
        let x_row = conv.source_stride[0] * planes.row;
        for y in rows.clone().step_by(self.tile.size[0]) {
            for x in (0..conv.grid[1]).step_by(self.tile.size[1]) {
                let call = GroupTileArgs {
                    x: plane[(y - rows.start) * x_row + x * lanes..].as_ptr(),
                    x_row,
                    offsets: planes.offsets.as_ptr(),
                    taps: planes.offsets.len(),
                    steps: conv.weights.depth.div_ceil(E::STEP),
                    w: self.packed[vector * lanes * self.width..].as_ptr(),
                    out: target.ptr().wrapping_add(first + y * out_stride[0] + x * out_stride[1]),
                    out_stride,
                    size: [rows.end - y, conv.grid[1] - x],
                    channels: groups * columns,
                    bias: conv.bias.map_or(std::ptr::null(), |bias| bias[group * lanes..][..lanes].as_ptr()),
                    relu: conv.relu,
                };
                // SAFETY: `PlaneLayout::new` made room for whole tiles and all taps. The weights have as many panels of `lanes`
                // columns as vectors. The pixels to store are those of the grid, and only this task writes this image's
                // band.
                unsafe { self.tile.run(&call) };
            }
        }
    }
}

/// A copy of adjacent pixels from a row of a channels-last image to planes.
struct PixelCopy {
    /// Elements between adjacent source pixels.
    stride: usize,
    /// Elements per pixel and plane.
    depth: usize,
    /// Number of pixels.
    count: usize,
    /// Elements of a pixel in a plane.
    lanes: usize,
    /// Elements of a plane. The length of the target determines the number of planes.
    plane: usize,
}

impl PixelCopy {
    /// Copies pixels to planes of one group each.
    fn pixels<E: Pod>(&self, from: &[E], to: &mut [E]) {
        let Self { stride, depth, count, lanes, plane } = *self;
        match (lanes, depth, to.len().div_ceil(plane)) {
            (8, 8, 1) => self.whole::<E, 8, 1>(from, to),
            (8, 8, 2) => self.whole::<E, 8, 2>(from, to),
            (8, 8, 4) => self.whole::<E, 8, 4>(from, to),
            (_, _, groups) => {
                for group in 0..groups {
                    for pixel in 0..count {
                        let to = &mut to[group * plane + pixel * lanes..][..depth];
                        to.copy_from_slice(&from[pixel * stride + group * depth..][..depth]);
                    }
                }
            }
        }
    }

    /// Copies whole vectors of `GROUPS` groups.
    fn whole<E: Pod, const LANES: usize, const GROUPS: usize>(&self, from: &[E], to: &mut [E]) {
        let Self { stride, count, plane, .. } = *self;
        assert!((count - 1) * stride + GROUPS * LANES <= from.len());
        assert!((GROUPS - 1) * plane + count * LANES <= to.len());
        for pixel in 0..count {
            for group in 0..GROUPS {
                // SAFETY: both assertions; the pixels of a plane do not overlap.
                unsafe {
                    let from = from.as_ptr().add(pixel * stride + group * LANES).cast::<[E; LANES]>();
                    let to = to.as_mut_ptr().add(group * plane + pixel * LANES).cast::<[E; LANES]>();
                    to.write_unaligned(from.read_unaligned());
                }
            }
        }
    }

    /// Copies pixels to planes of several groups each, whose elements alternate. If the last pixel ends before the last plane has
    /// all of its groups, the others get arbitrary values, which no stored result depends on.
    fn alternating<E: Operand>(&self, kernels: &GroupKernels<E>, from: &[E], to: &mut [E]) {
        let Self { stride, depth, count, lanes, plane } = *self;
        assert_eq!(lanes, depth);
        for (index, to) in to.chunks_mut(plane).enumerate() {
            let from = &from[index * depth..];
            let last = (count - 1) * stride;
            let whole = if last + lanes <= from.len() { count } else { count - 1 };
            let mut rest = [E::zeroed(); 16];
            let available = &from[last..from.len().min(last + lanes)];
            rest[..available.len()].copy_from_slice(available);
            // SAFETY: the source has whole pixels, and `rest` has one; the slice of the target has all pixels.
            unsafe {
                kernels.copy(from.as_ptr(), stride, &mut to[..whole * lanes]);
                kernels.copy(rest.as_ptr(), stride, &mut to[whole * lanes..count * lanes]);
            }
        }
    }
}

/// Packs the weights of each two groups as those of one. A group has `len` elements: vectors of 8 lanes, each with a step of 32
/// bits.
fn alternate_groups<E: Operand>(packed: &[E], len: usize) -> Buffer<E> {
    let mut to = Buffer::zeroed(packed.len().next_multiple_of(2 * len));
    let vector = 8 * E::STEP;
    for (pair, to) in packed.chunks(2 * len).zip(to.chunks_exact_mut(2 * len)) {
        for (group, from) in pair.chunks_exact(len).enumerate() {
            for (from, to) in from.chunks_exact(vector).zip(to.chunks_exact_mut(2 * vector)) {
                for (lane, step) in from.chunks_exact(E::STEP).enumerate() {
                    to[(2 * lane + group) * E::STEP..][..E::STEP].copy_from_slice(step);
                }
            }
        }
    }
    to
}
