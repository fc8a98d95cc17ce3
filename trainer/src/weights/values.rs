//! Converts the elements of a tensor in a weight file to f32.

use half::{bf16, f16};

use super::WeightDType;

/// Converts little-endian `bytes` to f32: exact for f16 and bf16, rounded to nearest for f64.
///
/// # Errors
/// When the type is another, or the number of bytes is not a multiple of the element size.
pub(super) fn to_f32(dtype: WeightDType, bytes: &[u8]) -> Result<Vec<f32>, String> {
    fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f32) -> Result<Vec<f32>, String> {
        let (chunks, rest) = bytes.as_chunks::<N>();
        match rest.len() {
            0 => Ok(chunks.iter().map(|chunk| value(*chunk)).collect()),
            left => Err(format!("ends with {left} bytes of an element of {N}")),
        }
    }
    match dtype {
        WeightDType::F64 => each(bytes, |b| f64::from_le_bytes(b) as f32),
        WeightDType::F32 => each(bytes, f32::from_le_bytes),
        WeightDType::F16 => each(bytes, |b| f16::from_le_bytes(b).to_f32()),
        WeightDType::Bf16 => each(bytes, |b| bf16::from_le_bytes(b).to_f32()),
        WeightDType::Other(name) => Err(format!("is of type {name}, weights are floats")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_type_becomes_f32() {
        let f32s = |dtype, bytes: &[u8]| to_f32(dtype, bytes).unwrap();
        assert_eq!(f32s(WeightDType::F64, &0.1f64.to_le_bytes()), [0.1f32]);
        assert_eq!(f32s(WeightDType::F64, &1e300f64.to_le_bytes()), [f32::INFINITY], "as PyTorch's own cast");
        assert_eq!(f32s(WeightDType::F32, &[0, 0, 128, 63, 0, 0, 0, 192]), [1.0, -2.0]);
        assert_eq!(f32s(WeightDType::F16, &[0x00, 0x3c, 0x01, 0x00]), [1.0, 5.960_464_5e-8], "subnormals too");
        assert_eq!(f32s(WeightDType::Bf16, &[0x80, 0x3f, 0x49, 0x40]), [1.0, 3.140_625]);
        assert_eq!(f32s(WeightDType::F32, &[]), [0f32; 0]);
    }

    #[test]
    fn types_other_than_floats_are_refused() {
        assert_eq!(to_f32(WeightDType::Other("int64"), &[0; 8]).unwrap_err(), "is of type int64, weights are floats");
        assert_eq!(to_f32(WeightDType::F32, &[0; 6]).unwrap_err(), "ends with 2 bytes of an element of 4");
    }
}
