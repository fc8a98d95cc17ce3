//! Packing of weights for AMX tile registers. The result has the layout of [`Weights::pack`]. Packing element by element would take
//! much of a convolution's time, so this file transposes blocks.
//!
//! In memory, the taps of a filter's channel are adjacent. Squares of weights are transposed, so that the columns of a panel
//! become adjacent, and rows of columns are then packed in pairs.

use super::allocator::Buffer;
use super::kernel::{AmxKernels, MicroKernels, Operand};
use super::packing::{Packed, Weights};
use super::panels::{Panel, padded, panels};
use super::parallel::{SharedSlice, for_each};

impl Weights<'_> {
    /// Packs the weights of filters in PyTorch's order, for a convolution (columns are filters) or its data gradient (columns are
    /// channels).
    pub(crate) fn pack_amx<E: Operand>(&self, isa: &'static MicroKernels<E>, kernels: &AmxKernels<E>) -> Packed<E> {
        let width = self.taps.len() * self.depth.next_multiple_of(isa.depth);
        let panels = panels(isa, self.columns);
        let padded = padded(&panels);
        let mut values = Buffer::new(self.groups * padded * width);
        let rounded = (kernels.round)(self.data);
        let target = SharedSlice::new(&mut values);
        for_each(self.groups * panels.len(), |task| {
            let (group, panel) = (task / panels.len(), &panels[task % panels.len()]);
            let start = (group * padded + panel.column) * width;
            // SAFETY: each task has its own panel.
            let to = unsafe { target.slice(start..start + panel.isa.cols * width) };
            self.pack_panel(isa.depth, kernels, panel, &rounded[group * self.group_stride..], to);
        });
        Packed { values, width }
    }

    fn pack_panel<E: Operand>(
        &self,
        side: usize,
        kernels: &AmxKernels<E>,
        panel: &Panel<E>,
        group: &[E],
        to: &mut [E],
    ) {
        let from = &group[panel.column * self.column_stride..];
        let taps = self.column_stride.min(self.depth_stride);
        // For missing columns, and for missing elements of the depth.
        let zeros = Buffer::<E>::zeroed((self.depth * taps).max(side));
        // `[depth][tap][column]`; a square may exceed the last taps.
        let mut rows = Buffer::<E>::new((self.depth * taps + side) * side);
        let mut square = vec![zeros.as_ptr(); side];
        let mut transpose = |first: usize, stride: usize, len: usize, row: usize| {
            for (column, pointer) in square.iter_mut().enumerate().take(panel.cols) {
                *pointer = from[first + column * stride..].as_ptr();
            }
            for offset in (0..len).step_by(side) {
                let to = rows[(row + offset) * side..][..side * side].as_mut_ptr();
                // SAFETY: each column has `len` elements, and so do the zeros; the target has a square.
                unsafe { (kernels.transpose)(&square, offset, side.min(len - offset), to, side) };
            }
        };
        if self.column_stride < self.depth_stride {
            for d in 0..self.depth {
                transpose(d * self.depth_stride, taps, taps, d * taps);
            }
        } else {
            transpose(0, self.column_stride, self.depth * taps, 0);
        }
        let depth = self.depth.next_multiple_of(side);
        let cols = panel.isa.cols;
        let mut pointers = Vec::with_capacity(depth);
        for (&tap, to) in self.taps.iter().zip(to.chunks_exact_mut(depth * cols)) {
            pointers.clear();
            pointers.extend((0..self.depth).map(|d| rows[(d * taps + tap) * side..].as_ptr()));
            pointers.resize(depth, zeros.as_ptr());
            // SAFETY: each row has `side` elements, at least as many as the panel has columns.
            unsafe { panel.isa.pack(&pointers, 0, side, cols, to) };
        }
    }
}
