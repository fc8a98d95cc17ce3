//! Filters that whiten patches of images: initial weights that depend on the training images.
//!
//! All arithmetic is f64 in a fixed order, so every machine computes the same bits from the same images.

/// Added to the eigenvalues: directions in which patches hardly differ are not amplified without limit.
const EPSILON: f64 = 5e-4;
/// Images that determine the filters: more do not change them visibly.
pub const IMAGES: usize = 5000;

/// Computes the filters that whiten the `patch` x `patch` patches of `images` (`[N, C, H, W]`, normalised): the eigenvectors of
/// the patches' second moments, divided by the root of their eigenvalues, largest first, and the same filters negated. Over
/// these patches the outputs of the first half are uncorrelated and have the mean square 1.
///
/// Source: "94% on CIFAR-10 in 3.29 seconds on a single GPU", Jordan, 2024, section 3.2, after Page's "How to train your ResNet".
///
/// # Shapes
///
/// - result `[2·C·patch², C, patch, patch]`, row-major
///
/// # Panics
///
/// When `images` has another length than `shape`, or no patch fits into an image.
pub fn filters(images: &[f32], shape: [usize; 4], patch: usize) -> Vec<f32> {
    let values = shape[1] * patch * patch;
    let moments = second_moments(images, shape, patch);
    let (eigenvalues, vectors) = eigenvectors(moments, values);
    let mut order: Vec<usize> = (0..values).collect();
    order.sort_by(|&a, &b| eigenvalues[b].total_cmp(&eigenvalues[a]));
    let filter = |&index: &usize| {
        let scale = 1.0 / (eigenvalues[index].max(0.0) + EPSILON).sqrt();
        vectors[index * values..][..values].iter().map(move |v| (v * scale) as f32).collect::<Vec<f32>>()
    };
    let positive: Vec<f32> = order.iter().flat_map(filter).collect();
    let negative = positive.iter().map(|v| -v);
    positive.iter().copied().chain(negative).collect()
}

/// Computes the mean of `p · pᵀ` over all patches `p` (`[C, patch, patch]` in row-major order). The result is a symmetric
/// matrix in row-major order.
fn second_moments(images: &[f32], [count, channels, height, width]: [usize; 4], patch: usize) -> Vec<f64> {
    assert_eq!(images.len(), count * channels * height * width, "images of another shape");
    assert!(count > 0 && height >= patch && width >= patch, "no patch fits into an image");
    let values = channels * patch * patch;
    let mut sums = vec![0.0; values * values];
    let mut p = vec![0.0; values];
    for image in images.chunks_exact(channels * height * width) {
        for y in 0..=height - patch {
            for x in 0..=width - patch {
                for (value, p) in p.iter_mut().enumerate() {
                    let (c, dy, dx) = (value / (patch * patch), value / patch % patch, value % patch);
                    *p = f64::from(image[(c * height + y + dy) * width + x + dx]);
                }
                for (row, &value) in sums.chunks_exact_mut(values).zip(&p) {
                    row.iter_mut().zip(&p).for_each(|(sum, other)| *sum += value * other);
                }
            }
        }
    }
    let patches = (count * (height - patch + 1) * (width - patch + 1)) as f64;
    sums.iter_mut().for_each(|sum| *sum /= patches);
    sums
}

/// Computes eigenvalues and eigenvectors (one per row, of length 1) of a symmetric `n` x `n` matrix by Jacobi's rotations.
fn eigenvectors(mut a: Vec<f64>, n: usize) -> (Vec<f64>, Vec<f64>) {
    /// After this many sweeps only rounding errors remain, for any matrix of a few dozen rows: convergence is quadratic.
    const SWEEPS: usize = 30;
    let mut vectors = vec![0.0; n * n];
    (0..n).for_each(|i| vectors[i * n + i] = 1.0);
    for _ in 0..SWEEPS {
        for p in 0..n {
            for q in p + 1..n {
                let off = a[p * n + q];
                if off == 0.0 {
                    continue;
                }
                // The root of t² + 2·θ·t − 1 = 0 with the smaller magnitude: the tangent of the angle that makes `a[p][q]` zero.
                let theta = (a[q * n + q] - a[p * n + p]) / (2.0 * off);
                let tangent = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let cosine = 1.0 / (tangent * tangent + 1.0).sqrt();
                let sine = tangent * cosine;
                for k in 0..n {
                    let (left, right) = (a[k * n + p], a[k * n + q]);
                    a[k * n + p] = cosine * left - sine * right;
                    a[k * n + q] = sine * left + cosine * right;
                }
                for k in 0..n {
                    let (upper, lower) = (a[p * n + k], a[q * n + k]);
                    a[p * n + k] = cosine * upper - sine * lower;
                    a[q * n + k] = sine * upper + cosine * lower;
                    let (upper, lower) = (vectors[p * n + k], vectors[q * n + k]);
                    vectors[p * n + k] = cosine * upper - sine * lower;
                    vectors[q * n + k] = sine * upper + cosine * lower;
                }
            }
        }
    }
    ((0..n).map(|i| a[i * n + i]).collect(), vectors)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Images whose pixels depend on their neighbours, in other neighbourhoods on other channels.
    fn images([count, channels, height, width]: [usize; 4]) -> Vec<f32> {
        let noise = crate::init::uniform(3, "images", count * channels * height * width, 1.5);
        let mix =
            |i: usize| noise[i] + 0.7 * noise[i.saturating_sub(1)] + 0.4 * noise[i.saturating_sub(height * width)];
        (0..noise.len()).map(mix).collect()
    }

    #[test]
    fn whitened_patches_are_uncorrelated() {
        let (shape, patch, values) = ([20, 3, 12, 9], 2, 12);
        let images = images(shape);
        let moments = second_moments(&images, shape, patch);
        let filters = filters(&images, shape, patch);
        assert_eq!(filters.len(), 2 * values * values);
        let output = |i: usize, j: usize| -> f64 {
            let (a, b) = (&filters[i * values..][..values], &filters[j * values..][..values]);
            (0..values * values).map(|k| f64::from(a[k / values]) * moments[k] * f64::from(b[k % values])).sum()
        };
        let before: Vec<f64> = (0..values).map(|i| moments[i * values + (i + 1) % values]).collect();
        assert!(before.iter().any(|moment| *moment > 0.5), "the patches are correlated: {before:?}");
        for i in 0..values {
            for j in 0..values {
                // The smallest eigenvalue here is above 0.05: EPSILON changes the mean square by less than 1 %.
                let expected = f64::from(u8::from(i == j));
                assert!((output(i, j) - expected).abs() < 0.01, "{i} {j}: {}", output(i, j));
                assert!((output(i, j + values) + expected).abs() < 0.01, "the second half is the first one negated");
                if i != j {
                    assert!(output(i, j).abs() < 1e-6, "{i} {j}: {}", output(i, j));
                }
            }
        }
    }

    #[test]
    fn eigenvectors_of_a_known_matrix() {
        let (mut values, vectors) = eigenvectors(vec![2.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 5.0], 3);
        for (row, value) in vectors.chunks_exact(3).zip(&values) {
            let product = [2.0 * row[0] + row[1], row[0] + 2.0 * row[1], 5.0 * row[2]];
            assert!(product.iter().zip(row).all(|(product, v)| (product - value * v).abs() < 1e-14));
        }
        values.sort_by(f64::total_cmp);
        assert!(values.iter().zip([1.0, 3.0, 5.0]).all(|(value, exact)| (value - exact).abs() < 1e-14), "{values:?}");
    }
}
