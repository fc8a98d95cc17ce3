//! Packing of weights, and of rows of pixels, into the panels of the micro-kernels.

use half::bf16;

use super::allocator::Buffer;
use super::kernel::{Isa, Operand};
use super::panels::{padded, panels};
use super::parallel::{SharedSlice, for_each};
use super::simd::multiversion;

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
            for column in 0..panel.cols {
                let from = group * self.group_stride + (panel.column + column) * self.column_stride;
                for d in 0..self.depth {
                    let from = &self.data[from + d * self.depth_stride..];
                    for (tap, &start) in self.taps.iter().enumerate() {
                        let k = tap / merged * padded_depth + tap % merged * self.depth + d;
                        to[(k / E::STEP * cols + column) * E::STEP + k % E::STEP] = E::from_f32(from[start]);
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

/// Packs `len` elements of each row for [`Outer`](super::kernel::Outer): `[rows / STEP][stride][STEP]`, where the columns
/// from `len` to `stride` are zero.
///
/// # Safety
///
/// Each row points to `offset + len` elements.
pub(crate) unsafe fn pack_steps<E: Operand>(rows: &[*const E], offset: usize, len: usize, stride: usize, to: &mut [E]) {
    assert!(rows.len().is_multiple_of(E::STEP) && len <= stride && to.len() >= rows.len() * stride);
    // SAFETY: guaranteed by the caller, except for the target, see the assertion.
    unsafe { E::pack_steps(rows, offset, len, stride, to) };
}

/// Packed rows of pixels, for the rows of [`Outer`](super::kernel::Outer).
pub(crate) struct RowPanels<E> {
    /// `[len / panel][rows / STEP][panel][STEP]`.
    values: Option<Buffer<E>>,
    /// One pointer per step, to the first panel.
    pointers: Vec<*const E>,
}

impl<E: Operand> RowPanels<E> {
    pub(crate) fn new() -> Self {
        Self { values: None, pointers: Vec::new() }
    }

    /// Packs `len` elements of each row into panels. Returns one pointer per step; row `n · panel` of `Outer` is then at
    /// offset `n · panel · steps`.
    ///
    /// # Safety
    ///
    /// Each row points to `offset + len` elements.
    pub(crate) unsafe fn pack(&mut self, rows: &[*const E], offset: usize, len: usize, panel: usize) -> &[*const E] {
        let panel_len = rows.len() * panel;
        let needed = len.div_ceil(panel) * panel_len;
        let values = match &mut self.values {
            Some(values) if values.len() >= needed => values,
            values => values.insert(Buffer::new(needed)),
        };
        for (index, to) in values.chunks_exact_mut(panel_len).take(len.div_ceil(panel)).enumerate() {
            let first = index * panel;
            // SAFETY: guaranteed by the caller.
            unsafe { pack_steps(rows, offset + first, panel.min(len - first), panel, to) };
        }
        self.pointers.clear();
        self.pointers.extend(values.chunks_exact(panel * E::STEP).take(rows.len() / E::STEP).map(<[E]>::as_ptr));
        &self.pointers
    }
}

/// Copies rows.
///
/// # Safety
///
/// As for [`pack_steps`], and `to` holds all rows.
pub(super) unsafe fn copy_rows(rows: &[*const f32], offset: usize, len: usize, stride: usize, to: &mut [f32]) {
    for (&row, to) in rows.iter().zip(to.chunks_exact_mut(stride)) {
        // SAFETY: guaranteed by the caller.
        let row = unsafe { std::slice::from_raw_parts(row.add(offset), len) };
        match (len, to.len()) {
            // The compiler knows the number of vectors.
            (32, 32) => to[..32].copy_from_slice(&row[..32]),
            (16, 16) => to[..16].copy_from_slice(&row[..16]),
            (8, 8) => to[..8].copy_from_slice(&row[..8]),
            _ => {
                to[..len].iter_mut().zip(row).for_each(|(to, from)| *to = *from);
                to[len..].fill(0.0);
            }
        }
    }
}

multiversion!(
    /// Interleaves pairs of rows.
    fn interleave_pairs(rows: &[*const bf16], offset: usize, len: usize, stride: usize, to: &mut [bf16]) = interleave_body
);

#[inline(always)]
fn interleave_body(rows: &[*const bf16], offset: usize, len: usize, stride: usize, to: &mut [bf16]) {
    for (rows, to) in rows.chunks_exact(2).zip(to.chunks_exact_mut(2 * stride)) {
        // SAFETY: guaranteed by the caller of `pack_steps`, the only user.
        let [first, second] = [0, 1].map(|i| unsafe { std::slice::from_raw_parts(rows[i].add(offset), len) });
        let (to, rest) = to.split_at_mut(2 * len);
        match len {
            32 => interleave::<32>(first, second, to),
            16 => interleave::<16>(first, second, to),
            8 => interleave::<8>(first, second, to),
            _ => interleave::<1>(first, second, to),
        }
        rest.fill(bf16::ZERO);
    }
}

/// Interleaves two rows, `N` elements at a time.
#[inline(always)]
fn interleave<const N: usize>(first: &[bf16], second: &[bf16], to: &mut [bf16]) {
    for ((first, second), to) in first.chunks_exact(N).zip(second.chunks_exact(N)).zip(to.chunks_exact_mut(2 * N)) {
        for i in 0..N {
            [to[2 * i], to[2 * i + 1]] = [first[i], second[i]];
        }
    }
}
