//! Carries a decision out: uint8 pixels in, normalised f32 pixels out, a row at a time.

use super::{Decision, Fill, Pipeline, place::source};

/// Normalised value of each of a channel's 256 pixel values.
pub(super) type Table = [f32; 256];

/// The table of one channel: `(x / 255 - mean) / std`, in the order of operations that PyTorch's `ToTensor` and
/// `Normalize` have, so that values are equal to theirs.
pub(super) fn table(mean: f32, std: f32) -> Table {
    std::array::from_fn(|x| (x as f32 / 255.0 - mean) / std)
}

impl Pipeline {
    /// Writes the augmented, normalised `image` into `out`, both `[C, H, W]`.
    ///
    /// Outside of the image a crop sees pixels of value 0 (black, not the mean: as `RandomCrop` before `Normalize`)
    /// or the mirrored image. A cut is 0 after normalisation, the mean.
    ///
    /// # Panics
    /// When `image` or `out` is not one image long, or `decision` moves the window further than a pixel less than the
    /// image's side; [`Pipeline::decide`] never does.
    pub fn apply(&self, image: &[u8], decision: &Decision, out: &mut [f32]) {
        let (height, width) = (self.shape.height, self.shape.width);
        assert_eq!(image.len(), self.shape.len(), "image of another shape");
        assert_eq!(out.len(), self.shape.len(), "output of another shape");
        let planes = image.chunks_exact(height * width).zip(out.chunks_exact_mut(height * width));
        for ((plane, out), table) in planes.zip(&self.tables) {
            for (y, out) in out.chunks_exact_mut(width).enumerate() {
                match source(y, decision.dy, height, self.fill) {
                    Some(row) => self.row(&plane[row * width..][..width], table, decision, out),
                    None => out.fill(table[0]),
                }
            }
            if let Some(cut) = decision.cut {
                for row in out.chunks_exact_mut(width).take(cut.bottom).skip(cut.top) {
                    row[cut.left..cut.right].fill(0.0);
                }
            }
        }
    }

    /// One row: what the window shows of the image in the middle, and on one side what lies outside of the image.
    fn row(&self, source: &[u8], table: &Table, decision: &Decision, out: &mut [f32]) {
        let width = source.len();
        let flip = decision.flip;
        // Columns of the window left and right of the image; one of the two is 0.
        let left = (-decision.dx).max(0) as usize;
        let right = decision.dx.max(0) as usize;
        let (start, end) = if flip { (right, left) } else { (left, right) };
        let (start_out, rest) = out.split_at_mut(start);
        let (middle_out, end_out) = rest.split_at_mut(width - start - end);
        let (left_out, right_out) = if flip { (end_out, start_out) } else { (start_out, end_out) };
        translate(&source[right..width - left], table, flip, middle_out);
        match self.fill {
            Fill::Zero => {
                left_out.fill(table[0]);
                right_out.fill(table[0]);
            }
            // The pixel at the border is the mirror and is not repeated.
            Fill::Reflect => {
                translate(&source[1..=left], table, !flip, left_out);
                translate(&source[width - 1 - right..width - 1], table, !flip, right_out);
            }
        }
    }
}

/// Looks every pixel up, in order or reversed.
fn translate(source: &[u8], table: &Table, reversed: bool, out: &mut [f32]) {
    if reversed {
        out.iter_mut().zip(source.iter().rev()).for_each(|(out, &x)| *out = table[usize::from(x)]);
    } else {
        out.iter_mut().zip(source).for_each(|(out, &x)| *out = table[usize::from(x)]);
    }
}
