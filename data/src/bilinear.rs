//! The weights of bilinear resampling with antialiasing. PIL (`precompute_coeffs`) and PyTorch (`interpolate` with
//! `antialias=True`) compute the same weights and round them differently.

use std::ops::Range;

/// The source pixels of one pixel of the result, along one axis.
pub(crate) struct Weights<T> {
    /// The first source pixel.
    pub(crate) first: usize,
    /// The weights of that pixel and of those after it. Before they are rounded, their sum is 1.
    pub(crate) weights: Vec<T>,
}

/// Returns the weights of the pixels `part` of `target` pixels, from `source` pixels, each converted by `round`.
pub(crate) fn weights<T>(
    source: usize,
    target: usize,
    part: Range<usize>,
    round: impl Fn(f64) -> T,
) -> Vec<Weights<T>> {
    let scale = source as f64 / target as f64;
    // The triangle has a half width of one source pixel, or of one target pixel if that is larger.
    let support = scale.max(1.0);
    part.map(|at| {
        let centre = (at as f64 + 0.5) * scale;
        // Truncation, as of a C cast; negative numbers become 0.
        let first = (centre - support + 0.5) as usize;
        let end = ((centre + support + 0.5) as usize).min(source);
        let triangle = |x: usize| (1.0 - ((x as f64 - centre + 0.5) * (1.0 / support)).abs()).max(0.0);
        let weights: Vec<f64> = (first..end).map(triangle).collect();
        let sum: f64 = weights.iter().sum();
        Weights { first, weights: weights.iter().map(|weight| round(weight / sum)).collect() }
    })
    .collect()
}
