//! Orthogonalization of matrices by Newton–Schulz iterations, which the optimizer Muon applies to its updates.

use burn::tensor::Tensor;

use crate::cpu::{matrix as cpu, symmetric};
use crate::dispatch::{has_cpu_parameter_kernels, has_gpu_kernels};
use crate::functional::linear;
use crate::update::square_sum;

/// The coefficients `a`, `b` and `c` of an iteration: `X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X`.
///
/// Source: Keller Jordan, <https://kellerjordan.github.io/posts/muon/>; the defaults of `torch.optim.Muon`.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
/// Number of Newton–Schulz iterations, `ns_steps` of `torch.optim.Muon`.
const ITERATIONS: usize = 5;
/// Minimum divisor of the normalisation, so that a zero matrix stays zero.
const EPSILON: f64 = 1e-7;
/// On a CPU, elements below this fraction of the norm become 0. The iterations would multiply such an element by at most 485, so it
/// would stay below the rounding errors.
const NEGLIGIBLE: f64 = 1e-9;

/// Returns approximately the orthogonal matrix that is closest to `matrix`: for the singular value decomposition `U S Vᵀ` the
/// matrix `U S' Vᵀ`, with singular values `S'` of about 0.7 to 1.2. Values close to zero become larger by a factor of up to 485.
///
/// These are the five iterations of `torch.optim.Muon`, which computes them in bfloat16. Here they have the precision of
/// `matrix`, and on a GPU the rounding of [`linear`].
///
/// # Shapes
///
/// - matrix and result `[rows, columns]`
pub fn orthogonalize(matrix: Tensor<2>) -> Tensor<2> {
    let [rows, columns] = matrix.dims();
    let squares = square_sum(&[&matrix.clone().reshape([rows * columns])]).expect("one matrix has a sum");
    // The iterations start from the side on which X Xᵀ is smaller.
    let is_wide = rows <= columns;
    if has_gpu_kernels(&matrix) {
        let norm = squares.sqrt().clamp_min(EPSILON).reshape([1, 1]);
        let wide = if is_wide { matrix } else { matrix.transpose() };
        let result = iterate_on_matrix(wide / norm);
        return if is_wide { result } else { result.transpose() };
    }
    let norm = squares.into_scalar::<f64>().sqrt().max(EPSILON);
    let matrix = without_negligible(matrix, norm);
    let transposed = transpose(matrix.clone());
    let (wide, tall) = if is_wide { (matrix, transposed) } else { (transposed, matrix) };
    let factor = iterate_on_gram(wide, norm);
    if is_wide { multiply_transposed(&factor, &tall) } else { multiply_transposed(&tall, &factor) }
}

/// Iterates on the matrix itself, as PyTorch does. Rounding errors do not grow from iteration to iteration, so TF32 is precise
/// enough.
fn iterate_on_matrix(mut wide: Tensor<2>) -> Tensor<2> {
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..ITERATIONS {
        let gram = multiply_transposed(&wide, &wide);
        let polynomial = multiply_transposed(&gram, &gram).mul_scalar(c) + gram.mul_scalar(b);
        wide = multiply_transposed(&polynomial, &wide.clone().transpose()) + wide.mul_scalar(a);
    }
    wide
}

/// Returns the symmetric matrix `Q` for which `Q X` is the result of the iterations on `X = wide / norm`.
///
/// Each iteration multiplies `X` by a polynomial `P` of `G = X Xᵀ`, and `G` becomes `P G P`. So all iterations need `G` only, and
/// two instead of ten products have the size of `wide`. Small eigenvalues of `G` grow by up to 2·10⁵, and their errors with
/// them: this needs f32.
fn iterate_on_gram(wide: Tensor<2>, norm: f64) -> Tensor<2> {
    let mut gram = symmetric_product(&wide, &wide);
    gram = combine([norm.powi(-2), 0.0], gram.clone(), gram);
    let mut step = polynomial(&gram);
    let mut factor = step.clone();
    for _ in 1..ITERATIONS {
        // All these matrices are polynomials of one symmetric matrix. So they are symmetric, and the order of factors is free.
        gram = symmetric_product(&symmetric_product(&step, &gram), &step);
        step = polynomial(&gram);
        factor = symmetric_product(&factor, &step);
    }
    combine([norm.recip(), 0.0], factor.clone(), factor)
}

/// Returns `a I + b G + c G²` for a symmetric matrix `G` on the CPU.
fn polynomial(gram: &Tensor<2>) -> Tensor<2> {
    let [a, b, c] = COEFFICIENTS;
    let sum = combine([c, b], symmetric_product(gram, gram), gram.clone());
    if has_cpu_parameter_kernels(&sum) {
        return cpu::add_to_diagonal(sum, a as f32);
    }
    let identity = Tensor::<2>::eye(sum.dims()[0], &sum.device()).cast(sum.dtype());
    sum + identity.mul_scalar(a)
}

/// Returns `factors[0] · left + factors[1] · right` of two tensors on the CPU.
fn combine(factors: [f64; 2], left: Tensor<2>, right: Tensor<2>) -> Tensor<2> {
    let shape = left.dims();
    let (flat_left, flat_right) = (left.reshape([-1]), right.reshape([-1]));
    let sum = if has_cpu_parameter_kernels(&flat_left) {
        cpu::combine(factors.map(|factor| factor as f32), flat_left, flat_right)
    } else {
        flat_left.mul_scalar(factors[0]) + flat_right.mul_scalar(factors[1])
    };
    sum.reshape(shape)
}

/// Replaces elements below [`NEGLIGIBLE`] by zeros. The gradient of a channel that is always 0 after its ReLU is 0, and its
/// momentum shrinks in each step until the products are denormal numbers, which take a CPU many times longer.
fn without_negligible(matrix: Tensor<2>, norm: f64) -> Tensor<2> {
    let shape = matrix.dims();
    let flat = matrix.reshape([-1]);
    let flat = if has_cpu_parameter_kernels(&flat) { cpu::zero_below((norm * NEGLIGIBLE) as f32, flat) } else { flat };
    flat.reshape(shape)
}

/// Returns the transposed matrix.
fn transpose(matrix: Tensor<2>) -> Tensor<2> {
    if has_cpu_parameter_kernels(&matrix) { cpu::transpose(matrix) } else { matrix.transpose() }
}

/// Returns `left · rightᵀ` where the result is symmetric. On a CPU, only half of it is computed.
fn symmetric_product(left: &Tensor<2>, right: &Tensor<2>) -> Tensor<2> {
    if has_cpu_parameter_kernels(left) {
        return symmetric::product(left.clone(), right.clone());
    }
    multiply_transposed(left, right)
}

/// Returns `left · rightᵀ`.
fn multiply_transposed(left: &Tensor<2>, right: &Tensor<2>) -> Tensor<2> {
    linear(left.clone(), right.clone(), None, false)
}
