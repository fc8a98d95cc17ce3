//! Merging of narrow groups of a grouped convolution.
//!
//! Groups of 3 or 4 channels are narrower than the narrowest register tile, so most of a tile would be padding.
//! Neighbouring groups are therefore merged into one group with block-diagonal weights, as many as fit into the
//! narrowest tile. The zeros of these weights replace the padding, so the kernels compute as many products as before, in
//! fewer and longer loops. With AMX tile registers, groups are merged to the width of a full tile.
//!
//! Checked by `conv_tests`.

use super::allocator::Buffer;
use super::kernel::MicroKernels;
use crate::shape::ConvShape;

/// A convolution with merged groups.
pub(crate) struct Merged {
    /// The convolution with fewer groups.
    pub(crate) shape: ConvShape,
    /// Number of original groups per merged group.
    factor: usize,
}

/// Merges groups into groups of at most as many channels as the narrowest tile has columns. Returns `None` if no groups
/// can be merged, and for a depthwise convolution, which has separate kernels.
pub(crate) fn merge<E>(shape: &ConvShape, isa: &MicroKernels<E>) -> Option<Merged> {
    let [depth, columns] = shape.group_channels();
    if super::depthwise::fits(shape) {
        return None;
    }
    // An AMX tile register takes the same time for narrow groups as for one that fills it.
    let narrowest = isa.narrower.last().map_or(isa.cols, |last| last.cols);
    let widest = if isa.amx.is_some() { isa.cols } else { narrowest };
    let most = widest / depth.max(columns);
    let factor = (2..=most.min(shape.groups)).rev().find(|&count| shape.groups.is_multiple_of(count))?;
    Some(Merged { shape: ConvShape { groups: shape.groups / factor, ..*shape }, factor })
}

impl Merged {
    /// Returns the merged groups' weights: the groups' weights as diagonal blocks, zeros elsewhere.
    pub(crate) fn block_diagonal(&self, weight: &[f32]) -> Buffer {
        let mut wide = Buffer::zeroed(self.shape.weight_len());
        self.blocks(|narrow, block| wide[block].copy_from_slice(&weight[narrow]));
        wide
    }

    /// Returns the diagonal blocks of the merged groups' weights, the inverse of [`Self::block_diagonal`].
    pub(crate) fn diagonal_blocks(&self, wide: &[f32]) -> Buffer {
        let mut weight = Buffer::new(self.shape.weight_len() / self.factor);
        self.blocks(|narrow, block| weight[narrow].copy_from_slice(&wide[block]));
        weight
    }

    /// Calls `each` for every filter with the range of its weights in the original layout and in the merged layout.
    fn blocks(&self, mut each: impl FnMut(std::ops::Range<usize>, std::ops::Range<usize>)) {
        let [depth, columns] = self.shape.group_channels();
        let (row, narrow_columns) = (depth * self.shape.taps(), columns / self.factor);
        let len = row / self.factor;
        for filter in 0..self.shape.channels[1] {
            let start = filter * row + filter / narrow_columns % self.factor * len;
            each(filter * len..(filter + 1) * len, start..start + len);
        }
    }
}
