//! Packing of weights, and of rows of pixels, into the panels of the micro-kernels.

use super::allocator::Buffer;
use super::kernel::{MicroKernels, Operand};
use super::panels::{Panel, padded, panels};
use super::parallel::{SharedSlice, for_each};

/// Channels that are packed together.
const BLOCK: usize = 16;

/// A weight tensor as a matrix per group and tap: the columns are the result's channels, and the depth, the summed index, is the
/// source's channels.
pub(crate) struct Weights<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) groups: usize,
    /// Columns and depth of one group.
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    /// Elements from one group, column or depth to the next.
    pub(crate) group_stride: usize,
    pub(crate) column_stride: usize,
    pub(crate) depth_stride: usize,
    /// Offset in elements of each tap.
    pub(crate) taps: &'a [usize],
}

/// Packed weights.
pub(crate) struct Packed<E> {
    /// `[group][panel][tap][depth / STEP][columns of the panel's tile][STEP]`, padded with zeros to [`MicroKernels::depth`].
    pub(crate) values: Buffer<E>,
    /// Elements per column, including padding.
    pub(crate) width: usize,
}

impl Weights<'_> {
    /// Packs the weights. `merged` adjacent taps become one tap with `merged` times the depth.
    pub(crate) fn pack<E: Operand>(&self, isa: &'static MicroKernels<E>, merged: usize) -> Packed<E> {
        let depth = self.depth * merged;
        let padded_depth = depth.next_multiple_of(isa.depth);
        let width = self.taps.len() / merged * padded_depth;
        let panels = panels(isa, self.columns);
        let padded = padded(&panels);
        let mut values = Buffer::new(self.groups * padded * width);
        let target = SharedSlice::new(&mut values);
        for_each(self.groups * panels.len(), |task| {
            let (group, panel) = (task / panels.len(), &panels[task % panels.len()]);
            let (start, cols) = ((group * padded + panel.column) * width, panel.isa.cols);
            // SAFETY: each task has its own panel.
            let to = unsafe { target.slice(start..start + cols * width) };
            if panel.cols < cols || depth < padded_depth {
                to.fill(E::zeroed());
            }
            let from = &self.data[group * self.group_stride + panel.column * self.column_stride..];
            // The weights of a block of channels, which are not in the order of `to`, stay in L1.
            for first in (0..self.depth).step_by(BLOCK) {
                for (tap, &start) in self.taps.iter().enumerate() {
                    for d in first..self.depth.min(first + BLOCK) {
                        let k = tap / merged * padded_depth + tap % merged * self.depth + d;
                        let to = &mut to[k / E::STEP * cols * E::STEP + k % E::STEP..];
                        let from = from[d * self.depth_stride + start..].iter().step_by(self.column_stride);
                        for (to, from) in to.iter_mut().step_by(E::STEP).zip(from).take(panel.cols) {
                            *to = E::from_f32(*from);
                        }
                    }
                }
            }
        });
        Packed { values, width }
    }
}

/// Pads each group's bias with zeros to the columns of its panels.
pub(crate) fn pad_bias<E: Operand>(isa: &'static MicroKernels<E>, bias: &[f32], groups: usize) -> Buffer {
    let columns = bias.len() / groups;
    let padded = padded(&panels(isa, columns));
    let mut to = Buffer::zeroed(groups * padded);
    for (to, bias) in to.chunks_exact_mut(padded).zip(bias.chunks_exact(columns)) {
        to[..columns].copy_from_slice(bias);
    }
    to
}

/// Packed rows of pixels, for the rows of [`OuterArgs`](super::kernel::OuterArgs).
pub(crate) struct RowPanels<E: 'static> {
    panels: Vec<Panel<E>>,
    /// `[panel][rows / STEP][columns of the panel's tile][STEP]`.
    values: Buffer<E>,
    /// `[panel][step]`.
    pointers: Vec<*const E>,
}

impl<E: Operand> RowPanels<E> {
    /// Makes room for `rows` rows of `len` elements.
    pub(crate) fn new(isa: &'static MicroKernels<E>, rows: usize, len: usize) -> Self {
        // Without AMX tile registers, a kernel reads at most `MicroKernels::outer_rows` columns at once, so a narrow panel
        // suffices.
        let isa = if isa.amx.is_some() { isa } else { isa.narrower.first().unwrap_or(&isa) };
        let panels = panels(isa, len);
        Self { values: Buffer::new(rows * padded(&panels)), panels, pointers: Vec::new() }
    }

    /// Packs the elements of each row. Padding has arbitrary values, and so has the place after the row's elements.
    ///
    /// # Safety
    ///
    /// Each row points to `offset + available` elements, of which at least the rows' length are available.
    pub(crate) unsafe fn pack(&mut self, rows: &[*const E], offset: usize, available: usize) {
        self.pointers.clear();
        for panel in &self.panels {
            let cols = panel.isa.cols;
            let to = &mut self.values[panel.column * rows.len()..][..cols * rows.len()];
            // SAFETY: guaranteed by the caller.
            unsafe { panel.isa.pack(rows, offset + panel.column, available - panel.column, cols, to) };
            self.pointers.extend(to.chunks_exact(cols * E::STEP).map(<[E]>::as_ptr));
        }
    }

    pub(crate) fn panels(&self) -> &[Panel<E>] {
        &self.panels
    }

    /// Returns the packed elements from a panel on.
    pub(crate) fn values(&self, panel: &Panel<E>) -> &[E] {
        let steps = self.pointers.len() / self.panels.len();
        &self.values[panel.column * steps * E::STEP..]
    }

    /// Returns the pointers to the steps of an element's panel, and the element's offset in the panel.
    pub(crate) fn at(&self, element: usize) -> (*const *const E, usize) {
        let steps = self.pointers.len() / self.panels.len();
        // All panels but the last ones have the width of the first.
        let width = self.panels[0].isa.cols;
        let mut index = element / width;
        while index + 1 < self.panels.len() && self.panels[index + 1].column <= element {
            index += 1;
        }
        (self.pointers[index * steps..].as_ptr(), element - self.panels[index].column)
    }
}
