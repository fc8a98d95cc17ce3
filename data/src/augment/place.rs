//! A decision as places: which row and column of an image each row and column of the augmented one shows. For devices that
//! carry decisions out by gathering pixels; [`Pipeline::apply`] is the same on the host.

use super::{Decision, Fill, Pipeline};

/// The row (or column) of an image of `side` that row `at` of a window moved by `offset` shows; none where that is black.
pub(super) fn source(at: usize, offset: i32, side: usize, fill: Fill) -> Option<usize> {
    let (side, row) = (side as isize, at as isize + offset as isize);
    let mirrored = match fill {
        _ if (0..side).contains(&row) => row,
        Fill::Zero => return None,
        Fill::Reflect if row < 0 => -row,
        Fill::Reflect => 2 * (side - 1) - row,
    };
    Some(mirrored as usize)
}

/// What one row or column of an augmented image shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    /// The row or column of the image; none where it is black.
    pub source: Option<usize>,
    /// Goes through the cut-out square: pixels in cut rows and cut columns are the mean.
    pub cut: bool,
}

impl Pipeline {
    /// The rows of an augmented image, from the top.
    pub fn rows(&self, decision: &Decision) -> impl Iterator<Item = Line> {
        let (height, fill, dy) = (self.shape.height, self.fill, decision.dy);
        let cut = decision.cut.map_or(0..0, |cut| cut.top..cut.bottom);
        (0..height).map(move |y| Line { source: source(y, dy, height, fill), cut: cut.contains(&y) })
    }

    /// The columns of an augmented image, from the left.
    pub fn columns(&self, decision: &Decision) -> impl Iterator<Item = Line> {
        let (width, fill, Decision { dx, flip, .. }) = (self.shape.width, self.fill, *decision);
        let cut = decision.cut.map_or(0..0, |cut| cut.left..cut.right);
        (0..width).map(move |x| {
            // mirrored after the window was moved
            let seen = if flip { width - 1 - x } else { x };
            Line { source: source(seen, dx, width, fill), cut: cut.contains(&x) }
        })
    }

    /// The normalised value of each pixel value, a channel after the other, `[C, 256]`.
    pub fn values(&self) -> impl Iterator<Item = f32> {
        self.tables.iter().flatten().copied()
    }
}
