//! Data types and reductions. Reductions run in rank order; 16-bit floats are computed in f32.

use std::ffi::c_int;

use super::{INVALID_ARGUMENT, refuse};
use crate::cu_result::DriverResult;

/// `ncclDataType_t`.
#[derive(Debug, Clone, Copy)]
pub(super) enum DataType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

/// `ncclRedOp_t`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reduction {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl Reduction {
    pub(super) fn of(number: c_int) -> DriverResult<Self> {
        Ok(match number {
            0 => Self::Sum,
            1 => Self::Product,
            2 => Self::Max,
            3 => Self::Min,
            4 => Self::Average,
            _ => return Err(refuse(INVALID_ARGUMENT, &format!("invalid reduction op {number}"))),
        })
    }
}

impl DataType {
    pub(super) fn of(number: c_int) -> DriverResult<Self> {
        Ok(match number {
            0 => Self::I8,
            1 => Self::U8,
            2 => Self::I32,
            3 => Self::U32,
            4 => Self::I64,
            5 => Self::U64,
            6 => Self::F16,
            7 => Self::F32,
            8 => Self::F64,
            9 => Self::Bf16,
            10 | 11 => return Err(refuse(INVALID_ARGUMENT, "the stand-in has no 8-bit floats")),
            _ => return Err(refuse(INVALID_ARGUMENT, &format!("invalid type {number}"))),
        })
    }

    /// Returns the size in bytes.
    pub(super) fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Reduces `count` elements of each source into `to`.
    ///
    /// # Safety
    /// All ranges are valid, the sources are aligned and not written to meanwhile, and `to` overlaps no source.
    pub(super) unsafe fn reduce(self, reduction: Reduction, sources: &[*const u8], to: *mut u8, count: usize) {
        let reduce = match self {
            Self::I8 => reduce::<i8>,
            Self::U8 => reduce::<u8>,
            Self::I32 => reduce::<i32>,
            Self::U32 => reduce::<u32>,
            Self::I64 => reduce::<i64>,
            Self::U64 => reduce::<u64>,
            Self::F16 => reduce::<F16>,
            Self::F32 => reduce::<f32>,
            Self::F64 => reduce::<f64>,
            Self::Bf16 => reduce::<Bf16>,
        };
        // SAFETY: required of the caller.
        unsafe { reduce(reduction, sources, to, count) };
    }
}

/// Number of elements reduced at a time, so that they stay in the cache.
const BLOCK: usize = 2048;

unsafe fn reduce<T: Number>(reduction: Reduction, sources: &[*const u8], to: *mut u8, count: usize) {
    let mut block: Vec<T::Wide> = Vec::with_capacity(BLOCK);
    for first in (0..count).step_by(BLOCK) {
        let len = BLOCK.min(count - first);
        block.clear();
        for source in sources {
            // SAFETY: required of the caller.
            let values = unsafe { std::slice::from_raw_parts(source.cast::<T>().add(first), len) };
            if block.is_empty() {
                block.extend(values.iter().map(|value| value.widen()));
                continue;
            }
            match reduction {
                Reduction::Sum | Reduction::Average => fold(&mut block, values, T::Wide::sum),
                Reduction::Product => fold(&mut block, values, T::Wide::product),
                Reduction::Max => fold(&mut block, values, T::Wide::larger),
                Reduction::Min => fold(&mut block, values, T::Wide::smaller),
            }
        }
        if matches!(reduction, Reduction::Average) {
            block.iter_mut().for_each(|value| *value = value.over(sources.len()));
        }
        for (index, value) in block.iter().enumerate() {
            // SAFETY: required of the caller.
            unsafe { to.cast::<T>().add(first + index).write_unaligned(T::narrow(*value)) };
        }
    }
}

fn fold<T: Number>(block: &mut [T::Wide], values: &[T], with: impl Fn(T::Wide, T::Wide) -> T::Wide) {
    for (into, value) in block.iter_mut().zip(values) {
        *into = with(*into, value.widen());
    }
}

/// Type of the computation.
trait Wide: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn over(self, count: usize) -> Self;
}

/// Type of an element.
trait Number: Copy {
    type Wide: Wide;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
}

macro_rules! wide {
    ($($type:ty: $sum:expr, $product:expr, $over:expr;)*) => { $(
        impl Wide for $type {
            fn sum(self, other: Self) -> Self { $sum(self, other) }
            fn product(self, other: Self) -> Self { $product(self, other) }
            fn larger(self, other: Self) -> Self { self.max(other) }
            fn smaller(self, other: Self) -> Self { self.min(other) }
            fn over(self, count: usize) -> Self { $over(self, count) }
        }

        impl Number for $type {
            type Wide = Self;
            fn widen(self) -> Self { self }
            fn narrow(wide: Self) -> Self { wide }
        }
    )* };
}

macro_rules! integers {
    ($($type:ty)*) => { wide! { $(
        // If the type cannot represent the number of ranks, divide by the type's maximum.
        $type: Self::wrapping_add, Self::wrapping_mul, |sum, count| sum / Self::try_from(count).unwrap_or(Self::MAX);
    )* } };
}
integers!(i8 u8 i32 u32 i64 u64);
wide! {
    f32: |a, b| a + b, |a, b| a * b, |sum, count| sum / count as f32;
    f64: |a, b| a + b, |a, b| a * b, |sum, count| sum / count as f64;
}

/// `__nv_bfloat16`: the upper half of an f32.
#[derive(Clone, Copy)]
struct Bf16(u16);

impl Number for Bf16 {
    type Wide = f32;

    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        if wide.is_nan() {
            return Self((bits >> 16) as u16 | 0x40);
        }
        Self(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16)
    }
}

/// `__half`.
#[derive(Clone, Copy)]
struct F16(u16);

impl Number for F16 {
    type Wide = f32;

    fn widen(self) -> f32 {
        let (sign, exponent, fraction) =
            (u32::from(self.0 >> 15) << 31, self.0 >> 10 & 0x1F, u32::from(self.0 & 0x3FF));
        match exponent {
            // Subnormal: the fraction times 2^-24.
            0 => f32::from_bits((fraction as f32 * (-24f32).exp2()).to_bits() | sign),
            31 => f32::from_bits(sign | 0x7F80_0000 | fraction << 13),
            exponent => f32::from_bits(sign | (u32::from(exponent) + 112) << 23 | fraction << 13),
        }
    }

    fn narrow(wide: f32) -> Self {
        const LARGEST: u32 = 0x4780_0000; // 2^16
        const SMALLEST: u32 = 0x3880_0000; // 2^-14; smaller numbers are subnormal
        let sign = (wide.to_bits() >> 16 & 0x8000) as u16;
        let bits = wide.to_bits() & 0x7FFF_FFFF;
        let half = match bits {
            _ if wide.is_nan() => 0x7E00,
            LARGEST.. => 0x7C00,
            // Rounds to even, possibly up to infinity.
            SMALLEST.. => ((bits - (112 << 23) + 0xFFF + (bits >> 13 & 1)) >> 13) as u16,
            // Adding 0.5 rounds to multiples of 2^-24.
            _ => ((f32::from_bits(bits) + 0.5).to_bits() - 0.5f32.to_bits()) as u16,
        };
        Self(sign | half)
    }
}

#[cfg(test)]
mod tests {
    use super::{Bf16, F16, Number};

    #[test]
    fn sixteen_bit_floats_round_trip() {
        for bits in 0..=u16::MAX {
            let half = F16(bits).widen();
            assert_eq!(half.is_nan(), bits & 0x7FFF > 0x7C00);
            assert!(half.is_nan() || F16::narrow(half).0 == bits, "{bits:x}");
            let brain = Bf16(bits).widen();
            assert!(brain.is_nan() || Bf16::narrow(brain).0 == bits, "{bits:x}");
        }
        assert_eq!((F16(0x3C00).widen(), F16(1).widen(), F16(0xFBFF).widen()), (1.0, 5.960_464_5e-8, -65504.0));
        assert!(F16::narrow(f32::NAN).widen().is_nan() && Bf16::narrow(f32::NAN).widen().is_nan());
    }

    #[test]
    fn ties_round_to_even() {
        // The bits of neighbours differ by one.
        for low in 0..0x7BFFu16 {
            let middle = (F16(low).widen() + F16(low + 1).widen()) / 2.0;
            assert_eq!(F16::narrow(middle).0, low + (low & 1), "{low:x}");
            assert_eq!(F16::narrow(middle.next_up()).0, low + 1);
            assert_eq!(F16::narrow(middle.next_down()).0, low);
        }
        assert_eq!((F16::narrow(65519.0).0, F16::narrow(65520.0).0, F16::narrow(-1e9).0), (0x7BFF, 0x7C00, 0xFC00));
        assert_eq!(
            (Bf16::narrow(f32::from_bits(0x3F80_8000)).0, Bf16::narrow(f32::from_bits(0x3F81_8000)).0),
            (0x3F80, 0x3F82)
        );
        assert_eq!(Bf16::narrow(f32::MAX).0, 0x7F80);
    }
}
