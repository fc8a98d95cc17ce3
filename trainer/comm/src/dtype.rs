//! Element types, reduction operations, and the sealed trait that ties Rust types to element types.

use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};

/// Type of the elements that a collective moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// IEEE single precision.
    F32 = 1,
    /// IEEE double precision.
    F64 = 2,
    /// IEEE half precision; accumulated in f32.
    F16 = 3,
    /// bfloat16; accumulated in f32.
    BF16 = 4,
    /// Signed 32 bits; sums and products wrap.
    I32 = 5,
    /// Signed 64 bits; sums and products wrap.
    I64 = 6,
    /// Unsigned 8 bits; sums and products wrap.
    U8 = 7,
}

impl DType {
    /// All types.
    pub const ALL: [DType; 7] = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64, DType::U8];

    /// Returns the bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// Returns the name that messages and the bench use.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
        }
    }

    /// Returns the type with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Returns the type in which values are accumulated: f32 for 16-bit floats, otherwise the type itself.
    pub fn accumulator(self) -> DType {
        match self {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        }
    }

    /// Returns whether the type is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }

    /// Returns the type whose discriminant is `code`. `None` for other numbers.
    pub(crate) fn from_code(code: u8) -> Option<DType> {
        DType::ALL.into_iter().find(|d| *d as u8 == code)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The reduction of the values of all ranks to one value (PyTorch: `ReduceOp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum. Integers wrap around.
    Sum = 1,
    /// The sum divided by the number of ranks. For floating-point types only.
    Mean = 2,
    /// The smallest value. If any rank has a NaN, the result is NaN.
    Min = 3,
    /// The largest value. If any rank has a NaN, the result is NaN.
    Max = 4,
    /// The product. Integers wrap around.
    Product = 5,
}

impl ReduceOp {
    /// All operations.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

    /// Returns the name that messages and the bench use.
    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
        }
    }

    /// Returns the operation whose discriminant is `code`. `None` for other numbers.
    pub(crate) fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| *op as u8 == code)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that collectives carry. Sealed: transports know exactly these seven types.
pub trait Element: sealed::Sealed + Pod + Send + Sync + PartialEq + fmt::Debug {
    /// The element type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($ty:ty => $tag:ident),*) => {$(
        impl sealed::Sealed for $ty {}
        impl Element for $ty { const DTYPE: DType = DType::$tag; }
    )*};
}

element!(f32 => F32, f64 => F64, f16 => F16, bf16 => BF16, i32 => I32, i64 => I64, u8 => U8);

/// Divides `len` bytes into `parts` parts of almost equal length. An element has `element` bytes, and no element is divided. The
/// first parts may be one element longer. Returns `parts + 1` byte offsets, the same on every rank.
pub(crate) fn split(len: usize, element: usize, parts: usize) -> Vec<usize> {
    let count = len / element;
    let (base, extra) = (count / parts, count % parts);
    (0..=parts).map(|p| (p * base + p.min(extra)) * element).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_covers_everything_once() {
        for parts in 1..9 {
            for count in [0usize, 1, 2, 7, 8, 9, 1000] {
                let cut = split(count * 4, 4, parts);
                assert_eq!((cut[0], cut[parts]), (0, count * 4));
                let sizes: Vec<_> = cut.windows(2).map(|w| (w[1] - w[0]) / 4).collect();
                assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{sizes:?}");
            }
        }
    }

    #[test]
    fn codes_round_trip() {
        for d in DType::ALL {
            assert_eq!(DType::from_code(d as u8), Some(d));
        }
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op as u8), Some(op));
        }
        assert_eq!(DType::from_code(0), None);
        assert_eq!(ReduceOp::from_code(9), None);
    }
}
