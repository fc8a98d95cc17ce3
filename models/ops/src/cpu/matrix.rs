//! CPU kernels of Newton–Schulz iterations, see [`orthogonalize`](crate::orthogonalize()).
//!
//! Checked by `models/ops/tests/orthogonalize.rs`.

use burn::backend::Flex;
use burn::tensor::Tensor;

use super::multiversion::multiversion;
use super::tensor;
use super::update::{CHUNK, contiguous, exclusive, for_each_chunk, from_vec, lerp, values, values_mut};

/// Returns `factors[0] · left + factors[1] · right`, elementwise.
pub(crate) fn combine(factors: [f32; 2], left: Tensor<1>, right: Tensor<1>) -> Tensor<1> {
    let (mut left, right) = (exclusive(left), contiguous(right));
    let (sums, terms) = (values_mut(&mut left), values(&right));
    assert_eq!(sums.len(), terms.len(), "the terms differ in length");
    let chunks = sums.chunks_mut(CHUNK).zip(terms.chunks(CHUNK)).collect();
    for_each_chunk(terms.len(), chunks, |(sum, term)| lerp(sum, term, factors[0], factors[1]));
    Tensor::from_primitive::<Flex>(left)
}

/// Replaces the elements whose magnitude is below `limit` by zeros.
pub(crate) fn zero_below(limit: f32, tensor: Tensor<1>) -> Tensor<1> {
    let mut tensor = exclusive(tensor);
    let elements = tensor.layout().num_elements();
    for_each_chunk(elements, values_mut(&mut tensor).chunks_mut(CHUNK).collect(), |chunk| cut_off(chunk, limit));
    Tensor::from_primitive::<Flex>(tensor)
}

multiversion!(fn cut_off(x: &mut [f32], limit: f32) = cut_off_body);

#[inline(always)]
fn cut_off_body(x: &mut [f32], limit: f32) {
    for x in x {
        *x = if x.abs() < limit { 0.0 } else { *x };
    }
}

/// Returns the transposed matrix in row-major order. Burn's copy is several times slower in this build.
pub(crate) fn transpose(matrix: Tensor<2>) -> Tensor<2> {
    let [rows, columns] = matrix.dims();
    let matrix = contiguous(matrix.reshape([rows * columns]));
    let mut transposed = vec![0.0; rows * columns];
    tensor::transpose(values(&matrix), &mut transposed, 1, rows, columns);
    Tensor::<1>::from_primitive::<Flex>(from_vec(transposed)).reshape([columns, rows])
}

/// Returns the square matrix with `value` added to its diagonal.
pub(crate) fn add_to_diagonal(matrix: Tensor<2>, value: f32) -> Tensor<2> {
    let shape = matrix.dims();
    let mut matrix = exclusive(matrix.reshape([shape[0] * shape[1]]));
    values_mut(&mut matrix).iter_mut().step_by(shape[0] + 1).for_each(|entry| *entry += value);
    Tensor::<1>::from_primitive::<Flex>(matrix).reshape(shape)
}
