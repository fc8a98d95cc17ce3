//! Reduction loops over host memory.
//!
//! Loops work on blocks that stay in the first-level cache. Inside a block they are simple loops that the compiler vectorises;
//! [`pulp`] picks the machine's widest instruction set at run time. The order of summation is the order of the sources, which
//! transports pass in rank order: every rank runs the same instructions on the same operands, and so gets the same bits.
//! 16-bit floats are widened to f32, accumulated in f32, and rounded once (`widen.rs`).

use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};

use super::dtype::{DType, Element, ReduceOp};
use super::widen::Narrow;

/// Elements of a block: 4 KB of f32.
const BLOCK: usize = 1024;

/// Arithmetic of the accumulators.
trait Number: Element {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn divide(self, count: usize) -> Self;
}

macro_rules! float {
    ($($ty:ty),*) => {$(impl Number for $ty {
        #[inline(always)] fn add(self, other: Self) -> Self { self + other }
        #[inline(always)] fn mul(self, other: Self) -> Self { self * other }
        // A NaN in either operand wins, and the order decides between -0 and 0: `f32::min` guarantees neither.
        #[inline(always)] fn min(self, other: Self) -> Self { if self < other || self.is_nan() { self } else { other } }
        #[inline(always)] fn max(self, other: Self) -> Self { if self > other || self.is_nan() { self } else { other } }
        #[inline(always)] fn divide(self, count: usize) -> Self { self / count as $ty }
    })*};
}
macro_rules! integer {
    ($($ty:ty),*) => {$(impl Number for $ty {
        #[inline(always)] fn add(self, other: Self) -> Self { self.wrapping_add(other) }
        #[inline(always)] fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
        #[inline(always)] fn min(self, other: Self) -> Self { Ord::min(self, other) }
        #[inline(always)] fn max(self, other: Self) -> Self { Ord::max(self, other) }
        // Never called: `communicator::check` refuses the mean of integers before any data moves.
        #[inline(always)] fn divide(self, _count: usize) -> Self { self }
    })*};
}
float!(f32, f64);
integer!(i32, i64, u8);

#[inline(always)]
fn combine<T: Number>(dst: &mut [T], src: &[T], f: impl Fn(T, T) -> T) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = f(*d, *s);
    }
}

#[inline(always)]
fn reduce_native<T: Number>(dst: &mut [T], sources: &[&[T]], mean: Option<usize>, f: impl Fn(T, T) -> T + Copy) {
    let len = dst.len();
    for start in (0..len).step_by(BLOCK) {
        let end = (start + BLOCK).min(len);
        let out = &mut dst[start..end];
        match sources {
            [] => {}
            [only] => out.copy_from_slice(&only[start..end]),
            [first, second, rest @ ..] => {
                for ((o, a), b) in out.iter_mut().zip(&first[start..end]).zip(&second[start..end]) {
                    *o = f(*a, *b);
                }
                for source in rest {
                    combine(out, &source[start..end], f);
                }
            }
        }
        if let Some(count) = mean {
            for o in out.iter_mut() {
                *o = o.divide(count);
            }
        }
    }
}

#[inline(always)]
fn reduce_half<T: Narrow>(dst: &mut [T], sources: &[&[T]], mean: Option<usize>, f: impl Fn(f32, f32) -> f32 + Copy) {
    let len = dst.len();
    let (mut sum, mut next) = ([0f32; BLOCK], [0f32; BLOCK]);
    for start in (0..len).step_by(BLOCK) {
        let end = (start + BLOCK).min(len);
        let (sum, next) = (&mut sum[..end - start], &mut next[..end - start]);
        for (i, source) in sources.iter().enumerate() {
            if i == 0 {
                T::widen(&source[start..end], sum);
            } else {
                T::widen(&source[start..end], next);
                combine(sum, next, f);
            }
        }
        if let Some(count) = mean {
            for s in sum.iter_mut() {
                *s = s.divide(count);
            }
        }
        T::round(sum, &mut dst[start..end]);
    }
}

/// Evaluates `$body` once with `$f` bound to the operation, in code compiled for this machine's vector units.
macro_rules! with_op {
    ($number:ty, $op:expr, $f:ident => $body:expr) => {
        match $op {
            ReduceOp::Sum | ReduceOp::Mean => pulp::Arch::new().dispatch(|| {
                let $f = <$number as Number>::add;
                $body
            }),
            ReduceOp::Product => pulp::Arch::new().dispatch(|| {
                let $f = <$number as Number>::mul;
                $body
            }),
            ReduceOp::Min => pulp::Arch::new().dispatch(|| {
                let $f = <$number as Number>::min;
                $body
            }),
            ReduceOp::Max => pulp::Arch::new().dispatch(|| {
                let $f = <$number as Number>::max;
                $body
            }),
        }
    };
}

fn native<T: Number>(op: ReduceOp, dst: &mut [u8], sources: &[&[u8]]) {
    let dst: &mut [T] = cast_slice_mut(dst);
    let sources: Vec<&[T]> = sources.iter().map(|s| cast_slice(s)).collect();
    let mean = (op == ReduceOp::Mean).then_some(sources.len());
    with_op!(T, op, f => reduce_native(dst, &sources, mean, f));
}

fn narrow<T: Narrow>(op: ReduceOp, dst: &mut [u8], sources: &[&[u8]]) {
    let dst: &mut [T] = cast_slice_mut(dst);
    let sources: Vec<&[T]> = sources.iter().map(|s| cast_slice(s)).collect();
    let mean = (op == ReduceOp::Mean).then_some(sources.len());
    with_op!(f32, op, f => reduce_half(dst, &sources, mean, f));
}

/// Computes `dst = sources[0] op sources[1] op …`, in that order. [`ReduceOp::Mean`] also divides by the number of sources. All
/// slices have `dst`'s length and `dtype`'s alignment.
pub(crate) fn reduce_into(dtype: DType, op: ReduceOp, dst: &mut [u8], sources: &[&[u8]]) {
    match dtype {
        DType::F32 => native::<f32>(op, dst, sources),
        DType::F64 => native::<f64>(op, dst, sources),
        DType::I32 => native::<i32>(op, dst, sources),
        DType::I64 => native::<i64>(op, dst, sources),
        DType::U8 => native::<u8>(op, dst, sources),
        DType::F16 => narrow::<f16>(op, dst, sources),
        DType::BF16 => narrow::<bf16>(op, dst, sources),
    }
}

/// Elements that stay in registers between the arrays of [`reduce_into_all`].
const LANES: usize = 64;

#[inline(always)]
fn reduce_all_native<T: Number>(arrays: &mut [&mut [T]], mean: Option<usize>, f: impl Fn(T, T) -> T + Copy) {
    let Some(len) = arrays.first().map(|first| first.len()) else { return };
    let mut at = 0;
    let mut sums = [T::zeroed(); LANES];
    while at + LANES <= len {
        // Arrays of a fixed size: copying a slice would be a function call.
        sums.copy_from_slice(&arrays[0][at..at + LANES]);
        for array in &arrays[1..] {
            combine(&mut sums, &array[at..at + LANES], f);
        }
        if let Some(count) = mean {
            sums.iter_mut().for_each(|s| *s = s.divide(count));
        }
        for array in arrays.iter_mut() {
            array[at..at + LANES].copy_from_slice(&sums);
        }
        at += LANES;
    }
    for i in at..len {
        let sum = arrays[1..].iter().fold(arrays[0][i], |sum, array| f(sum, array[i]));
        let sum = mean.map_or(sum, |count| sum.divide(count));
        arrays.iter_mut().for_each(|array| array[i] = sum);
    }
}

fn reduce_all<T: Number>(op: ReduceOp, arrays: &mut [&mut [u8]]) {
    let mut arrays: Vec<&mut [T]> = arrays.iter_mut().map(|array| cast_slice_mut(array)).collect();
    let mean = (op == ReduceOp::Mean).then_some(arrays.len());
    with_op!(T, op, f => reduce_all_native(&mut arrays, mean, f));
}

/// Sets every array to `arrays[0] op arrays[1] op …`, with the bits of [`reduce_into`]. All arrays have one length and
/// `dtype`'s alignment.
pub(crate) fn reduce_into_all(dtype: DType, op: ReduceOp, arrays: &mut [&mut [u8]]) {
    match dtype {
        DType::F32 => reduce_all::<f32>(op, arrays),
        DType::F64 => reduce_all::<f64>(op, arrays),
        DType::I32 => reduce_all::<i32>(op, arrays),
        DType::I64 => reduce_all::<i64>(op, arrays),
        DType::U8 => reduce_all::<u8>(op, arrays),
        DType::F16 | DType::BF16 => {
            let len = arrays.first().map_or(0, |first| first.len());
            let mut sums = [0u16; BLOCK];
            for start in (0..len).step_by(size_of_val(&sums)) {
                let at = start..(start + size_of_val(&sums)).min(len);
                let sums = &mut cast_slice_mut(&mut sums)[..at.len()];
                let sources: Vec<&[u8]> = arrays.iter().map(|array| &array[at.clone()]).collect();
                reduce_into(dtype, op, sums, &sources);
                arrays.iter_mut().for_each(|array| array[at.clone()].copy_from_slice(sums));
            }
        }
    }
}

fn pair<T: Number>(op: ReduceOp, dst: &mut [u8], src: &[u8], dst_first: bool) {
    let (dst, src): (&mut [T], &[T]) = (cast_slice_mut(dst), cast_slice(src));
    if dst_first {
        with_op!(T, op, f => combine(dst, src, f));
    } else {
        with_op!(T, op, f => combine(dst, src, |d, s| f(s, d)));
    }
}

/// Computes one step of a longer reduction, without the mean's division: `dst = dst op src`, or `src op dst` unless
/// `dst_first`. `dtype` is an accumulator type ([`DType::accumulator`]).
pub(crate) fn accumulate(dtype: DType, op: ReduceOp, dst: &mut [u8], src: &[u8], dst_first: bool) {
    match dtype {
        DType::F32 => pair::<f32>(op, dst, src, dst_first),
        DType::F64 => pair::<f64>(op, dst, src, dst_first),
        DType::I32 => pair::<i32>(op, dst, src, dst_first),
        DType::I64 => pair::<i64>(op, dst, src, dst_first),
        DType::U8 => pair::<u8>(op, dst, src, dst_first),
        DType::F16 | DType::BF16 => debug_assert!(false, "{dtype} is not an accumulator type"),
    }
}

/// Divides floats by `count` in place: the last part of a mean. `dtype` is an accumulator type.
pub(crate) fn divide(dtype: DType, data: &mut [u8], count: usize) {
    match dtype {
        DType::F32 => cast_slice_mut::<u8, f32>(data).iter_mut().for_each(|v| *v = v.divide(count)),
        DType::F64 => cast_slice_mut::<u8, f64>(data).iter_mut().for_each(|v| *v = v.divide(count)),
        other => debug_assert!(false, "no mean of {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_are_rounded_once() {
        // 2048 + 1 is a tie in f16, and would stay 2048 if every addition rounded. The exact sum of all three is 2050.
        let sources = [f16::from_f32(2048.0), f16::from_f32(1.0), f16::from_f32(1.0)];
        let mut dst = [f16::ZERO];
        let bytes: Vec<&[u8]> = sources.iter().map(bytemuck::bytes_of).collect();
        reduce_into(DType::F16, ReduceOp::Sum, cast_slice_mut(&mut dst), &bytes);
        assert_eq!(dst[0].to_f32(), 2050.0);
    }

    #[test]
    fn all_arrays_get_the_bits_of_one_reduction() {
        for dtype in DType::ALL {
            for (ranks, bytes) in [(2, 0), (2, 8), (3, 808), (4, 8192), (8, 10_008)] {
                let noise = |rank: usize| (0..bytes).map(move |i| ((i * 7919 + rank * 104_729) % 251) as u8);
                // Exponents that neither overflow nor are infinite in any of the types.
                let sane = |(i, byte): (usize, u8)| if i % 2 == 1 { byte % 32 + 32 } else { byte };
                let mut arrays: Vec<Vec<u64>> = vec![vec![0; bytes / 8]; ranks];
                for (rank, array) in arrays.iter_mut().enumerate() {
                    let array: &mut [u8] = cast_slice_mut(array);
                    array.iter_mut().zip(noise(rank).enumerate().map(sane)).for_each(|(a, b)| *a = b);
                }
                for op in ReduceOp::ALL.into_iter().filter(|op| *op != ReduceOp::Mean || dtype.is_float()) {
                    let mut want = vec![0u64; bytes / 8];
                    let sources: Vec<&[u8]> = arrays.iter().map(|array| cast_slice(array)).collect();
                    reduce_into(dtype, op, cast_slice_mut(&mut want), &sources);
                    let mut copies = arrays.clone();
                    let mut views: Vec<&mut [u8]> = copies.iter_mut().map(|array| cast_slice_mut(array)).collect();
                    reduce_into_all(dtype, op, &mut views);
                    assert!(copies.iter().all(|copy| *copy == want), "{op} of {bytes} bytes of {dtype}, {ranks} ranks");
                }
            }
        }
    }

    #[test]
    fn nan_wins_in_min_and_max_at_any_position() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for position in 0..3 {
                let mut values = [1f32, 2.0, 3.0];
                values[position] = f32::NAN;
                let sources: Vec<&[u8]> = values.iter().map(bytemuck::bytes_of).collect();
                let mut dst = [0f32];
                reduce_into(DType::F32, op, cast_slice_mut(&mut dst), &sources);
                assert!(dst[0].is_nan(), "{op} with NaN in place {position} gives {}", dst[0]);
            }
        }
    }

    #[test]
    fn order_of_sources_is_the_order_of_summation() {
        let values = [1e8f32, -1e8, 1.0];
        let fold_of = |order: [usize; 3]| {
            let sources: Vec<&[u8]> = order.iter().map(|i| bytemuck::bytes_of(&values[*i])).collect();
            let mut dst = [0f32];
            reduce_into(DType::F32, ReduceOp::Sum, cast_slice_mut(&mut dst), &sources);
            dst[0]
        };
        assert_eq!(fold_of([0, 1, 2]), 1.0);
        assert_eq!(fold_of([0, 2, 1]), 0.0);
    }
}
