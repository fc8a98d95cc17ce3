//! Convolutions in many narrow groups.
//!
//! Even the narrowest tile of a kernel is wider than groups of 3 or 4 channels: what is left of it would be padding. So
//! neighbouring groups become one with block-diagonal weights, as many as fit into such a tile: no more products than
//! before, and fewer, longer loops.

use super::kernel::Isa;
use super::memory::Buffer;
use super::shape::ConvShape;

/// Some groups taken together.
pub(crate) struct Merged {
    /// The same convolution in fewer groups.
    pub(crate) shape: ConvShape,
    /// Old groups in a new one.
    together: usize,
}

/// The convolution in groups of at most as many channels as the narrowest tile has; `None` where that leaves it as it is, and for a depthwise
/// convolution, which has kernels of its own.
pub(crate) fn merge(shape: &ConvShape, isa: &Isa) -> Option<Merged> {
    let [depth, columns] = shape.group_channels();
    if super::depthwise::fits(shape) {
        return None;
    }
    let widest = isa.narrower.last().map_or(isa.cols, |last| last.cols);
    let most = widest / depth.max(columns);
    let together = (2..=most.min(shape.groups)).rev().find(|&count| shape.groups.is_multiple_of(count))?;
    Some(Merged { shape: ConvShape { groups: shape.groups / together, ..*shape }, together })
}

impl Merged {
    /// Weights of the groups as blocks of the new groups' weights, with zeros around them.
    pub(crate) fn spread(&self, weight: &[f32]) -> Buffer {
        let mut wide = Buffer::zeroed(self.shape.weight_len());
        self.blocks(|narrow, block| wide[block].copy_from_slice(&weight[narrow]));
        wide
    }

    /// The blocks of the new groups' weights.
    pub(crate) fn collect(&self, wide: &[f32]) -> Buffer {
        let mut weight = Buffer::new(self.shape.weight_len() / self.together);
        self.blocks(|narrow, block| weight[narrow].copy_from_slice(&wide[block]));
        weight
    }

    /// Calls `each` with the place of every filter's weights in the groups' and in the new groups' layout.
    fn blocks(&self, mut each: impl FnMut(std::ops::Range<usize>, std::ops::Range<usize>)) {
        let [depth, columns] = self.shape.group_channels();
        let (row, narrow_columns) = (depth * self.shape.taps(), columns / self.together);
        let len = row / self.together;
        for filter in 0..self.shape.channels[1] {
            let start = filter * row + filter / narrow_columns % self.together * len;
            each(filter * len..(filter + 1) * len, start..start + len);
        }
    }
}
