//! Element types of images: f32, and bf16 as storage. Arithmetic is f32 in both cases.

use burn::tensor::DType;
use bytemuck::Pod;
use half::bf16;

/// An element type of images and their gradients. The conversions are plain integer operations, so that the compiler
/// vectorises loops over them.
pub(crate) trait Element: Pod + Send + Sync {
    const DTYPE: DType;
    fn to_f32(self) -> f32;
    /// Rounds to the nearest value, ties to even. NaN stays NaN.
    fn from_f32(value: f32) -> Self;
    /// Inverse of [`Self::to_f32`], for values that need no rounding.
    fn from_exact(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn from_exact(value: f32) -> f32 {
        value
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // Rounding up could make an infinity or zero of a NaN. A quiet NaN is exact in the upper half.
        let bits = if value.is_nan() { bits | 0x40_0000 } else { rounded };
        bf16::from_bits((bits >> 16) as u16)
    }

    #[inline(always)]
    fn from_exact(value: f32) -> bf16 {
        bf16::from_bits((value.to_bits() >> 16) as u16)
    }
}

/// Expands `body` once per element type, with `E` as the type of `dtype`: `with_element!(dtype, E => body)`.
macro_rules! with_element {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype {
            burn::tensor::DType::BF16 => {
                type $ty = half::bf16;
                $body
            }
            _ => {
                type $ty = f32;
                $body
            }
        }
    };
}
pub(crate) use with_element;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_equals_that_of_half() {
        // All upper halves, with lower halves around the ties.
        for upper in 0..=u32::from(u16::MAX) {
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(upper << 16 | lower);
                let (ours, expected) = (<bf16 as Element>::from_f32(value), bf16::from_f32(value));
                assert_eq!(ours.is_nan(), value.is_nan());
                assert!(
                    ours.to_bits() == expected.to_bits() || value.is_nan(),
                    "{value:e}: {ours:?}, not {expected:?}"
                );
            }
            let narrow = bf16::from_bits(upper as u16);
            assert_eq!(Element::to_f32(narrow).to_bits(), upper << 16);
            assert_eq!(<bf16 as Element>::from_exact(Element::to_f32(narrow)).to_bits(), narrow.to_bits());
        }
    }
}
