//! Folds the taps of a kernel row into one tap, for images with few channels.
//!
//! In a channels-last image, the pixels under one kernel row are adjacent in memory. With dilation 1, a row of `kw`
//! taps with `c` channels each is therefore one tap of `kw · c` contiguous elements, except at the image's edge. Where
//! windows exceed the image, the image (which has few channels) is copied once with its padding. A first convolution of
//! three channels then has inner loops of 9 or 15 products per tap instead of three.
//!
//! Checked by `conv_tests`.

use super::allocator::Buffer;
use super::element::Element;
use super::igemm::ImageSize;
use super::parallel::{SharedSlice, for_each};

/// Number of channels from which taps are long enough without folding.
const LONG_ENOUGH: usize = 32;

/// Elements after the last pixel of a padded copy, so that whole vectors can be read.
const SLACK: usize = 32;

/// The folded source and taps.
pub(crate) struct FoldedTaps<E> {
    /// Padded copy of the source; `None` if no padding is needed.
    pub(crate) padded: Option<Buffer<E>>,
    pub(crate) image: ImageSize,
    pub(crate) taps: Vec<[isize; 2]>,
    pub(crate) depth: usize,
    /// Elements after a pixel's first that can be read: at least `depth`.
    pub(crate) readable: usize,
}

/// Folds the taps of each kernel row; `None` where folding does not apply. `taps` are sorted. Output pixel `g < grid` reads the
/// source at `g · stride + tap`.
pub(crate) fn fold_taps<E: Element>(
    source: &[E],
    batch: usize,
    image: ImageSize,
    taps: &[[isize; 2]],
    depth: usize,
    grid: [usize; 2],
    stride: [usize; 2],
) -> Option<FoldedTaps<E>> {
    let width = taps.iter().take_while(|tap| tap[0] == taps[0][0]).count();
    let rows = taps.len() / width.max(1);
    let regular = taps.iter().enumerate().all(|(i, tap)| {
        let row = taps[i / width * width];
        tap[0] == row[0] && tap[1] == taps[0][1] + (i % width) as isize
    });
    if depth >= LONG_ENOUGH || image.channels != depth || width < 2 || rows * width != taps.len() || !regular {
        return None;
    }
    // Padding before and after the image along an axis.
    let padding = |i: usize| {
        let (least, most) = taps.iter().fold((0, 0), |(a, b), tap| (tap[i].min(a), tap[i].max(b)));
        let last = (grid[i].saturating_sub(1) * stride[i]) as isize + most;
        (least.unsigned_abs(), (last + 1 - image.size[i] as isize).max(0) as usize)
    };
    let [(top, bottom), (left, right)] = [padding(0), padding(1)];
    let size = [image.size[0] + top + bottom, image.size[1] + left + right];
    let taps = taps.iter().step_by(width).map(|tap| [tap[0] + top as isize, tap[1] + left as isize]).collect();
    let padded = (size != image.size).then(|| {
        let (from_row, to_row) = (image.size[1] * depth, size[1] * depth);
        let mut padded = Buffer::new(batch * size[0] * to_row + SLACK);
        let target = SharedSlice::new(&mut padded);
        for_each(batch, |n| {
            // SAFETY: each task has its own image.
            let to = unsafe { target.slice(n * size[0] * to_row..(n + 1) * size[0] * to_row) };
            to.fill(E::zeroed());
            let from = &source[n * image.size[0] * from_row..(n + 1) * image.size[0] * from_row];
            for (from, to) in from.chunks_exact(from_row).zip(to.chunks_exact_mut(to_row).skip(top)) {
                to[left * depth..][..from_row].copy_from_slice(from);
            }
        });
        padded
    });
    let readable = depth * width + if padded.is_some() { SLACK } else { 0 };
    Some(FoldedTaps { padded, image: ImageSize { size, ..image }, taps, depth: depth * width, readable })
}
