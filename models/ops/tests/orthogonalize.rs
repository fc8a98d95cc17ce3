//! [`ops::orthogonalize`] against the iterations of `torch.optim.Muon`, computed in f64 without kernels.

use burn::tensor::{DType, Device, Tensor, TensorData};

type Matrix = Vec<Vec<f64>>;

fn product(left: &Matrix, right: &Matrix) -> Matrix {
    let entry = |row: &Vec<f64>, column: usize| row.iter().zip(right).map(|(x, of_row)| x * of_row[column]).sum();
    left.iter().map(|row| (0..right[0].len()).map(|column| entry(row, column)).collect()).collect()
}

fn transposed(matrix: &Matrix) -> Matrix {
    (0..matrix[0].len()).map(|column| matrix.iter().map(|row| row[column]).collect()).collect()
}

fn norm(matrix: &Matrix) -> f64 {
    matrix.iter().flatten().map(|x| x * x).sum::<f64>().sqrt()
}

fn sum(terms: &[(f64, &Matrix)]) -> Matrix {
    let entry = |row: usize, column: usize| terms.iter().map(|(factor, matrix)| factor * matrix[row][column]).sum();
    let (rows, columns) = (terms[0].1.len(), terms[0].1[0].len());
    (0..rows).map(|row| (0..columns).map(|column| entry(row, column)).collect()).collect()
}

/// Five iterations `X ← a X + (b G + c G²) X` with `G = X Xᵀ`, on the matrix itself.
fn expected(matrix: &Matrix) -> Matrix {
    if matrix.len() > matrix[0].len() {
        return transposed(&expected(&transposed(matrix)));
    }
    let mut x = sum(&[(1.0 / norm(matrix).max(1e-7), matrix)]);
    for _ in 0..5 {
        let gram = product(&x, &transposed(&x));
        let polynomial = sum(&[(-4.7750, &gram), (2.0315, &product(&gram, &gram))]);
        x = sum(&[(3.4445, &x), (1.0, &product(&polynomial, &x))]);
    }
    x
}

fn orthogonalized(matrix: &Matrix, dtype: DType) -> Matrix {
    let values: Vec<f64> = matrix.iter().flatten().copied().collect();
    let data = TensorData::new(values, [matrix.len(), matrix[0].len()]);
    let result = ops::orthogonalize(Tensor::from_data(data, (&Device::flex(), dtype)));
    result.try_to_vec_as::<f64>().unwrap().chunks(matrix[0].len()).map(<[f64]>::to_vec).collect()
}

/// Values between -1 and 1 that look random.
fn noise(rows: usize, columns: usize) -> Matrix {
    let value = |i: usize| (((i as f64 + 1.0) * 12.9898).sin() * 43758.5453).fract();
    (0..rows).map(|row| (0..columns).map(|column| value(row * columns + column)).collect()).collect()
}

fn assert_close(what: &str, got: &Matrix, expected: &Matrix, tolerance: f64) {
    let difference = norm(&sum(&[(1.0, got), (-1.0, expected)])) / norm(expected);
    assert!(difference <= tolerance, "{what}: differs by {difference:.1e} of the norm");
}

#[test]
fn equals_the_iterations_on_the_matrix_itself() {
    for (rows, columns) in [(1, 1), (1, 9), (9, 1), (6, 6), (16, 144), (70, 18), (33, 130), (96, 24)] {
        let matrix = noise(rows, columns);
        for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 1e-4)] {
            let what = format!("{rows}x{columns} in {dtype:?}");
            assert_close(&what, &orthogonalized(&matrix, dtype), &expected(&matrix), tolerance);
        }
    }
}

/// The gradients of real layers have singular values of very different sizes.
#[test]
fn is_precise_for_singular_values_from_1_to_a_millionth() {
    let (left, right) = (expected(&noise(24, 24)), expected(&noise(24, 80)));
    let scaled: Matrix = left
        .iter()
        .map(|row| row.iter().enumerate().map(|(i, x)| x * 10f64.powf(-6.0 * i as f64 / 23.0)).collect())
        .collect();
    let matrix = product(&scaled, &right);
    assert_close("24x80", &orthogonalized(&matrix, DType::F32), &expected(&matrix), 1e-3);
}

#[test]
fn the_result_is_nearly_orthogonal_whatever_the_scale() {
    for scale in [1e-5, 1.0, 1e5] {
        let matrix = sum(&[(scale, &noise(20, 200))]);
        let result = orthogonalized(&matrix, DType::F32);
        let gram = product(&result, &transposed(&result));
        for (row, values) in gram.iter().enumerate() {
            for (column, value) in values.iter().enumerate() {
                let (low, high) = if row == column { (0.4, 1.5) } else { (-0.3, 0.3) };
                assert!((low..=high).contains(value), "scale {scale}, entry {row}, {column}: {value}");
            }
        }
    }
}

/// The momentum of dead channels: rows and columns whose products are denormal numbers or 0.
#[test]
fn negligible_rows_and_columns_count_as_zeros() {
    let matrix = noise(24, 60);
    let with = |small: f64| -> Matrix {
        let entry =
            |row: usize, (column, x): (usize, &f64)| if row % 5 == 2 || column % 7 == 3 { x * small } else { *x };
        matrix
            .iter()
            .enumerate()
            .map(|(row, values)| values.iter().enumerate().map(|x| entry(row, x)).collect())
            .collect()
    };
    for small in [1e-10, 1e-20, 1e-30] {
        let result = orthogonalized(&with(small), DType::F32);
        assert_close(&format!("{small}"), &result, &expected(&with(small)), 1e-4);
        assert_eq!(result, orthogonalized(&with(0.0), DType::F32));
    }
    let [small, zero] = [1e-7, 0.0].map(|small| orthogonalized(&with(small), DType::F32));
    assert_ne!(small, zero, "a ten millionth is kept");
}

#[test]
fn zeros_stay_zeros() {
    let zeros = vec![vec![0.0; 5]; 3];
    assert_eq!(orthogonalized(&zeros, DType::F32), zeros);
}
