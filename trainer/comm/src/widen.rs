//! 16-bit floats are widened to f32, accumulated in f32, and rounded once.

use bytemuck::{cast_slice, cast_slice_mut};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::aligned::AlignedBytes;
use super::dtype::{DType, Element, ReduceOp};
use super::kernels;

/// Conversion of a 16-bit float to f32 and back.
pub(super) trait Narrow: Element {
    fn widen(from: &[Self], to: &mut [f32]);
    fn round(from: &[f32], to: &mut [Self]);
}

impl Narrow for f16 {
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
    fn round(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Narrow for bf16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        for (t, f) in to.iter_mut().zip(from) {
            *t = f32::from_bits(u32::from(f.to_bits()) << 16);
        }
    }
    // Rounds to nearest, ties to even, without a branch, so that it vectorises. A NaN stays a NaN (quiet).
    #[inline(always)]
    fn round(from: &[f32], to: &mut [Self]) {
        for (t, f) in to.iter_mut().zip(from) {
            let bits = f.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let nan = (bits >> 16) | 0x40;
            *t = bf16::from_bits(if f.is_nan() { nan } else { rounded } as u16);
        }
    }
}

/// Widens 16-bit floats to f32. Both arrays have the same number of elements.
pub(crate) fn widen(dtype: DType, from: &[u8], to: &mut [u8]) {
    let to: &mut [f32] = cast_slice_mut(to);
    match dtype {
        DType::F16 => pulp::Arch::new().dispatch(|| f16::widen(cast_slice(from), to)),
        DType::BF16 => pulp::Arch::new().dispatch(|| bf16::widen(cast_slice(from), to)),
        other => debug_assert!(false, "{other} needs no widening"),
    }
}

/// Rounds f32 to a 16-bit type. Both arrays have the same number of elements.
pub(crate) fn round(dtype: DType, from: &[u8], to: &mut [u8]) {
    let from: &[f32] = cast_slice(from);
    match dtype {
        DType::F16 => pulp::Arch::new().dispatch(|| f16::round(from, cast_slice_mut(to))),
        DType::BF16 => pulp::Arch::new().dispatch(|| bf16::round(from, cast_slice_mut(to))),
        other => debug_assert!(false, "{other} needs no rounding"),
    }
}

/// Widens 16-bit floats (`f16` or `bf16`) to f32.
///
/// # Panics
///
/// When the elements are not 16-bit floats, or the lengths differ.
pub fn widen_16_bits<T: Element>(from: &[T], to: &mut [f32]) {
    assert!(size_of::<T>() == 2 && from.len() == to.len(), "16-bit floats, and as many f32");
    widen(T::DTYPE, cast_slice(from), cast_slice_mut(to));
}

/// Rounds f32 to 16-bit floats (`f16` or `bf16`), to nearest, ties to even.
///
/// # Panics
///
/// When the elements are not 16-bit floats, or the lengths differ.
pub fn round_to_16_bits<T: Element>(from: &[f32], to: &mut [T]) {
    assert!(size_of::<T>() == 2 && from.len() == to.len(), "16-bit floats, and as many f32");
    round(T::DTYPE, cast_slice(from), cast_slice_mut(to));
}

/// Copies `data`, converted from `dtype` to its accumulator type.
pub(crate) fn to_accumulators(dtype: DType, data: &[u8]) -> AlignedBytes {
    let wide = dtype.accumulator();
    if dtype == wide {
        return AlignedBytes::copy(data);
    }
    let mut accumulators = AlignedBytes::zero(data.len() / dtype.size() * wide.size());
    widen(dtype, data, accumulators.get_mut());
    accumulators
}

/// Converts the accumulators of a reduction over `ranks` ranks to results of type `dtype`: divides for a mean, and rounds 16-bit
/// floats once.
pub(crate) fn to_results(dtype: DType, op: ReduceOp, ranks: usize, accumulators: &mut [u8], results: &mut [u8]) {
    let wide = dtype.accumulator();
    if op == ReduceOp::Mean {
        kernels::divide(wide, accumulators, ranks);
    }
    if dtype == wide { results.copy_from_slice(accumulators) } else { round(dtype, accumulators, results) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_equals_halfs_own() {
        let mut values = vec![0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45];
        let mut z = 1u32;
        for _ in 0..100_000 {
            z = z.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            values.push(f32::from_bits(z));
        }
        let mut out = vec![bf16::ZERO; values.len()];
        round_to_16_bits(&values, &mut out);
        for (v, o) in values.iter().zip(&out) {
            let want = bf16::from_f32(*v);
            assert!(o.to_bits() == want.to_bits() || (v.is_nan() && o.is_nan()), "{v:e} gives {o:?}, not {want:?}");
        }
    }

    #[test]
    fn a_mean_of_16_bit_floats_is_rounded_once() {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let bytes = |values: [f32; 2]| -> Vec<u8> {
                match dtype {
                    DType::F16 => cast_slice(&values.map(f16::from_f32)).to_vec(),
                    DType::BF16 => cast_slice(&values.map(bf16::from_f32)).to_vec(),
                    _ => cast_slice(&values).to_vec(),
                }
            };
            let mut sums = to_accumulators(dtype, &bytes([3.0, -5.0]));
            assert_eq!(cast_slice::<u8, f32>(sums.get_mut()), [3.0, -5.0], "{dtype}");
            // The sum of two ranks. It needs more bits than a 16-bit float has, and its half does not.
            cast_slice_mut::<u8, f32>(sums.get_mut()).copy_from_slice(&[4098.0, 258.0 * 65536.0]);
            let mut mean = bytes([0.0; 2]);
            to_results(dtype, ReduceOp::Mean, 2, sums.get_mut(), &mut mean);
            assert_eq!(mean, bytes([2049.0, 129.0 * 65536.0]), "{dtype}");
        }
    }
}
