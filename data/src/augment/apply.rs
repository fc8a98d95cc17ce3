//! Applies augmentation parameters row by row: uint8 pixels in, normalised f32 pixels out.

use super::{AugmentParams, Fill, Pipeline, source_lines::source};

/// The normalised value of each of a channel's 256 pixel values.
pub(super) type Table = [f32; 256];

/// Computes the table of one channel: `(x / 255 - mean) / std`. The order of operations is that of PyTorch's `ToTensor` and
/// `Normalize`, so the values are equal.
pub(super) fn table(mean: f32, std: f32) -> Table {
    std::array::from_fn(|x| (x as f32 / 255.0 - mean) / std)
}

/// Maps each pixel to its own value.
const UNCHANGED: [u8; 256] = {
    let mut table = [0; 256];
    let mut x = 0;
    while x < 256 {
        table[x] = x as u8;
        x += 1;
    }
    table
};

impl Pipeline {
    /// Writes the augmented, normalised `image` into `out`, both `[C, H, W]`.
    ///
    /// Outside the image a crop shows pixels of value 0 (black, not the mean: `RandomCrop` before `Normalize`) or the
    /// mirrored image. A cut-out pixel is 0 after normalisation, which is the mean.
    ///
    /// # Panics
    /// If `image` or `out` is not one image long, or if `params` moves the window by the image's side or more, which
    /// [`Pipeline::params`] never does.
    pub fn apply(&self, image: &[u8], params: &AugmentParams, out: &mut [f32]) {
        let (height, width) = (self.shape.height, self.shape.width);
        assert_eq!(image.len(), self.shape.len(), "image of another shape");
        assert_eq!(out.len(), self.shape.len(), "output of another shape");
        if params.operations.is_empty() {
            self.crop_and_flip(image, params, |channel| &self.tables[channel], out);
        } else {
            let mut pixels = vec![0; image.len()];
            self.crop_and_flip(image, params, |_| &UNCHANGED, &mut pixels);
            params.operations.iter().for_each(|operation| operation.apply(&mut pixels, self.shape));
            let planes = pixels.chunks_exact(height * width).zip(out.chunks_exact_mut(height * width));
            planes.zip(&self.tables).for_each(|((plane, out), table)| lookup_row(plane, table, false, out));
        }
        if let Some(cut) = params.cut {
            for plane in out.chunks_exact_mut(height * width) {
                for row in plane.chunks_exact_mut(width).take(cut.bottom).skip(cut.top) {
                    row[cut.left..cut.right].fill(0.0);
                }
            }
        }
    }

    /// Writes the window of `image` that `params` choose, mirrored if they say so. `table` maps the pixels of a channel.
    fn crop_and_flip<'a, T: Copy + 'a>(
        &self,
        image: &[u8],
        params: &AugmentParams,
        table: impl Fn(usize) -> &'a [T; 256],
        out: &mut [T],
    ) {
        let (height, width) = (self.shape.height, self.shape.width);
        let planes = image.chunks_exact(height * width).zip(out.chunks_exact_mut(height * width));
        for (channel, (plane, out)) in planes.enumerate() {
            let table = table(channel);
            for (y, out) in out.chunks_exact_mut(width).enumerate() {
                let seen = if params.vertical_flip { height - 1 - y } else { y };
                match source(seen, params.dy, height, self.fill) {
                    Some(row) => self.row(&plane[row * width..][..width], table, params, out),
                    None => out.fill(table[0]),
                }
            }
        }
    }

    /// Writes one row: the visible part of the image in the middle, and the fill outside the image on one side.
    fn row<T: Copy>(&self, source: &[u8], table: &[T; 256], params: &AugmentParams, out: &mut [T]) {
        let width = source.len();
        let flip = params.flip;
        // Columns of the window that are left and right of the image. At least one of the two is 0.
        let left = (-params.dx).max(0) as usize;
        let right = params.dx.max(0) as usize;
        let (start, end) = if flip { (right, left) } else { (left, right) };
        let (start_out, rest) = out.split_at_mut(start);
        let (middle_out, end_out) = rest.split_at_mut(width - start - end);
        let (left_out, right_out) = if flip { (end_out, start_out) } else { (start_out, end_out) };
        lookup_row(&source[right..width - left], table, flip, middle_out);
        match self.fill {
            Fill::Zero => {
                left_out.fill(table[0]);
                right_out.fill(table[0]);
            }
            // The border pixel is the mirror axis and is not repeated.
            Fill::Reflect => {
                lookup_row(&source[1..=left], table, !flip, left_out);
                lookup_row(&source[width - 1 - right..width - 1], table, !flip, right_out);
            }
        }
    }
}

/// Looks up every pixel of `source` in `table`, in order or reversed.
fn lookup_row<T: Copy>(source: &[u8], table: &[T; 256], reversed: bool, out: &mut [T]) {
    if reversed {
        out.iter_mut().zip(source.iter().rev()).for_each(|(out, &x)| *out = table[usize::from(x)]);
    } else {
        out.iter_mut().zip(source).for_each(|(out, &x)| *out = table[usize::from(x)]);
    }
}
