//! Packing of weights, and of rows of pixels, into the panels of the micro-kernels.

use super::allocator::Buffer;
use super::kernel::{Isa, Operand};
use super::panels::{padded, panels};
use super::parallel::{SharedSlice, for_each};

/// Channels that are packed together.
const BLOCK: usize = 16;

/// A weight tensor with its strides.
pub(crate) struct Weights<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) groups: usize,
    /// Columns and depth of one group.
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) group_stride: usize,
    pub(crate) column_stride: usize,
    pub(crate) depth_stride: usize,
    /// Offset of each tap.
    pub(crate) taps: &'a [usize],
}

/// Packed weights.
pub(crate) struct Packed<E> {
    /// `[group][panel][tap][depth / STEP][columns of the panel's tile][STEP]`, padded with zeros.
    pub(crate) values: Buffer<E>,
    /// Elements per column, including padding.
    pub(crate) width: usize,
}

impl Weights<'_> {
    /// Packs the weights. `merged` adjacent taps become one tap with as many times the depth.
    pub(crate) fn pack<E: Operand>(&self, isa: &'static Isa<E>, merged: usize) -> Packed<E> {
        let depth = self.depth * merged;
        let padded_depth = depth.next_multiple_of(E::STEP);
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
pub(crate) fn pad_bias<E: Operand>(isa: &'static Isa<E>, bias: &[f32], groups: usize) -> Buffer {
    let columns = bias.len() / groups;
    let padded = padded(&panels(isa, columns));
    let mut to = Buffer::zeroed(groups * padded);
    for (to, bias) in to.chunks_exact_mut(padded).zip(bias.chunks_exact(columns)) {
        to[..columns].copy_from_slice(bias);
    }
    to
}

/// Packed rows of pixels, for the rows of [`Outer`](super::kernel::Outer).
pub(crate) struct RowPanels<E: 'static> {
    /// Packs panels of its width.
    isa: &'static Isa<E>,
    /// `[channels / isa.cols][rows / STEP][isa.cols][STEP]`.
    values: Buffer<E>,
    /// One pointer per step, to the first panel.
    pointers: Vec<*const E>,
}

impl<E: Operand> RowPanels<E> {
    /// Makes room for `rows` rows of `len` elements.
    pub(crate) fn new(isa: &'static Isa<E>, rows: usize, len: usize) -> Self {
        let fits = |isa: &&'static Isa<E>| len.is_multiple_of(isa.cols);
        let narrowest = isa.narrower.last().copied().unwrap_or(isa);
        let isa = isa.narrower.iter().copied().find(fits).unwrap_or(narrowest);
        Self { isa, values: Buffer::new(rows * len.next_multiple_of(isa.cols)), pointers: Vec::new() }
    }

    /// Packs `len` elements of each row.
    ///
    /// # Safety
    ///
    /// Each row points to `offset + len` elements.
    pub(crate) unsafe fn pack(&mut self, rows: &[*const E], offset: usize, len: usize) {
        let cols = self.isa.cols;
        for (first, to) in (0..len).step_by(cols).zip(self.values.chunks_exact_mut(rows.len() * cols)) {
            // SAFETY: guaranteed by the caller.
            unsafe { self.isa.pack(rows, offset + first, cols.min(len - first), cols, to) };
        }
        let steps = self.values.chunks_exact(cols * E::STEP).take(rows.len() / E::STEP);
        self.pointers.clear();
        self.pointers.extend(steps.map(<[E]>::as_ptr));
    }

    /// Returns one pointer per step.
    pub(crate) fn steps(&self) -> &[*const E] {
        &self.pointers
    }

    /// Returns the offset of an element of a row from the step's pointer, for [`Outer`](super::kernel::Outer).
    pub(crate) fn offset(&self, element: usize) -> usize {
        let (steps, cols) = (self.pointers.len(), self.isa.cols);
        element / cols * cols * steps + element % cols
    }
}
