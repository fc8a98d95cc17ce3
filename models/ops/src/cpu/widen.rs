//! Few channels: neighbouring taps as one.
//!
//! In a channels-last image the pixels below one row of a kernel lie side by side, so with dilation 1 a row of `kw` taps
//! of `c` channels is one tap of `kw · c` contiguous floats. Only the image's edge breaks that; where windows reach over
//! it, the image is copied once with its padding around it (it has few channels). A first convolution of three channels
//! then sums runs of 9 or 15 products where it would turn to the next tap after three.

use super::igemm::Image;
use super::memory::Buffer;
use super::parallel::{Shared, for_each};

/// Channels from which taps are long enough as they are.
const FEW: usize = 32;

/// The source and taps that replace the original ones.
pub(crate) struct Widened {
    /// `None`: the original source.
    pub(crate) padded: Option<Buffer>,
    pub(crate) image: Image,
    pub(crate) taps: Vec<[isize; 2]>,
    pub(crate) depth: usize,
}

/// `None` where it does not apply. `taps` are sorted; grid pixel `g < grid` reads at `g · step + tap`.
pub(crate) fn widen(
    source: &[f32],
    batch: usize,
    image: Image,
    taps: &[[isize; 2]],
    depth: usize,
    grid: [usize; 2],
    step: [usize; 2],
) -> Option<Widened> {
    let width = taps.iter().take_while(|tap| tap[0] == taps[0][0]).count();
    let rows = taps.len() / width.max(1);
    let regular = taps.iter().enumerate().all(|(i, tap)| {
        let row = taps[i / width * width];
        tap[0] == row[0] && tap[1] == taps[0][1] + (i % width) as isize
    });
    if depth >= FEW || image.channels != depth || width < 2 || rows * width != taps.len() || !regular {
        return None;
    }
    let reach = |i: usize| {
        let (least, most) = taps.iter().fold((0, 0), |(a, b), tap| (tap[i].min(a), tap[i].max(b)));
        let last = (grid[i].saturating_sub(1) * step[i]) as isize + most;
        (least.unsigned_abs(), (last + 1 - image.size[i] as isize).max(0) as usize)
    };
    let [(top, bottom), (left, right)] = [reach(0), reach(1)];
    let size = [image.size[0] + top + bottom, image.size[1] + left + right];
    let taps = taps.iter().step_by(width).map(|tap| [tap[0] + top as isize, tap[1] + left as isize]).collect();
    let padded = (size != image.size).then(|| {
        let (from_row, to_row) = (image.size[1] * depth, size[1] * depth);
        let mut padded = Buffer::new(batch * size[0] * to_row);
        let target = Shared::new(&mut padded);
        for_each(batch, |n| {
            // SAFETY: each task has its own image.
            let to = unsafe { target.slice(n * size[0] * to_row..(n + 1) * size[0] * to_row) };
            to.fill(0.0);
            let from = &source[n * image.size[0] * from_row..(n + 1) * image.size[0] * from_row];
            for (from, to) in from.chunks_exact(from_row).zip(to.chunks_exact_mut(to_row).skip(top)) {
                to[left * depth..][..from_row].copy_from_slice(from);
            }
        });
        padded
    });
    Some(Widened { padded, image: Image { size, ..image }, taps, depth: depth * width })
}
