//! The engine of `trainer bench allreduce`: the measurements of nccl-tests, in a function that every rank runs.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use serde::Serialize;

use super::communicator::Communicator;
use super::dtype::{DType, Element, ReduceOp};
use super::error::Result;
use super::shared_array::SharedArray;

/// The settings of a measurement.
#[derive(Clone, Debug)]
pub struct BenchConfig {
    /// Sizes of the array that each rank contributes, in bytes; rounded down to whole elements.
    pub sizes: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// The reduction.
    pub op: ReduceOp,
    /// Whether to use memory that ranks share ([`super::SharedArray`], as training does) where the transport has it.
    pub shared: bool,
    /// Approximate time to measure each size. The warm-up before takes a quarter of this time.
    pub time: Duration,
    /// Measurements of each size; the median counts.
    pub rounds: usize,
}

impl Default for BenchConfig {
    /// Measures f32 sums from 4 bytes to 64 MiB, and the size of ResNet-18's gradients.
    fn default() -> Self {
        let mut sizes: Vec<usize> = (1..=13).map(|i| 1usize << (2 * i)).collect();
        sizes.push(44_695_848);
        sizes.sort_unstable();
        Self { sizes, dtype: DType::F32, op: ReduceOp::Sum, shared: true, time: Duration::from_millis(400), rounds: 3 }
    }
}

/// One size, in the columns of nccl-tests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchRow {
    /// Bytes that each rank contributes.
    pub bytes: usize,
    /// Elements that each rank contributes.
    pub count: usize,
    /// Type of the elements.
    #[serde(rename = "type")]
    pub dtype: &'static str,
    /// The reduction.
    pub redop: &'static str,
    /// Microseconds per all-reduce, on the slowest rank.
    pub time_us: f64,
    /// `bytes / time`, in 10^9 bytes per second.
    pub algbw_gbs: f64,
    /// `algbw · 2(n-1)/n`, in 10^9 bytes per second: the traffic that a rank's link has to carry at least.
    pub busbw_gbs: f64,
    /// Number of elements that differ from the exact result, over all ranks.
    pub wrong: u64,
}

/// An element type whose reductions can be predicted exactly.
trait Exact: Element {
    /// Converts a small integer.
    fn small(value: u32) -> Self;
    /// Returns the value as `f64`.
    fn value(self) -> f64;
}

macro_rules! exact {
    ($($ty:ty: $from:expr, $to:expr);*) => {$(impl Exact for $ty {
        fn small(value: u32) -> Self { $from(value) }
        fn value(self) -> f64 { $to(self) }
    })*};
}
exact!(
    f32: |v| v as f32, f64::from;
    f64: f64::from, |v| v;
    f16: |v| f16::from_f32(v as f32), f64::from;
    bf16: |v| bf16::from_f32(v as f32), f64::from;
    i32: |v| v as i32, f64::from;
    i64: i64::from, |v| v as f64;
    u8: |v| v as u8, f64::from
);

/// Returns element `i` of rank `rank`: 1, 2 or 3 for sums; mostly 1, sometimes 2, for products. Results are exact in all types
/// for up to 60 ranks.
pub(super) fn input(op: ReduceOp, rank: usize, i: usize) -> u32 {
    match op {
        ReduceOp::Product => 1 + u32::from((rank + i).is_multiple_of(31)),
        _ => 1 + ((rank * 7 + i) % 3) as u32,
    }
}

pub(super) fn expected(op: ReduceOp, world_size: usize, i: usize) -> f64 {
    let values = (0..world_size).map(|rank| f64::from(input(op, rank, i)));
    match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Mean => values.sum::<f64>() / world_size as f64,
        ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => values.fold(0.0, f64::max),
        ReduceOp::Product => values.product(),
    }
}

/// Measures all sizes. Every rank of the group calls this function with the same configuration and gets the same rows. Calls
/// `report` with each row as soon as the row is ready.
///
/// # Errors
/// Those of [`Communicator`].
pub fn all_reduce(
    comm: &Communicator,
    config: &BenchConfig,
    mut report: impl FnMut(&BenchRow),
) -> Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    for size in &config.sizes {
        let count = size / config.dtype.size();
        let row = match config.dtype {
            DType::F32 => measure::<f32>(comm, config, count)?,
            DType::F64 => measure::<f64>(comm, config, count)?,
            DType::F16 => measure::<f16>(comm, config, count)?,
            DType::BF16 => measure::<bf16>(comm, config, count)?,
            DType::I32 => measure::<i32>(comm, config, count)?,
            DType::I64 => measure::<i64>(comm, config, count)?,
            DType::U8 => measure::<u8>(comm, config, count)?,
        };
        report(&row);
        rows.push(row);
    }
    Ok(rows)
}

/// The array that is reduced in place.
enum Array<T> {
    Ordinary(Vec<T>),
    Shared(SharedArray<T>),
}

impl<T: Element> Array<T> {
    fn new(comm: &Communicator, shared: bool, count: usize) -> Result<Self> {
        Ok(if shared { Self::Shared(comm.shared_array(count)?) } else { Self::Ordinary(vec![T::zeroed(); count]) })
    }

    fn values(&mut self) -> &mut [T] {
        match self {
            Self::Ordinary(values) => values,
            Self::Shared(values) => values,
        }
    }

    fn reduced(self, comm: &Communicator, op: ReduceOp) -> Result<Self> {
        Ok(match self {
            Self::Ordinary(mut values) => {
                comm.all_reduce(&mut values, op)?;
                Self::Ordinary(values)
            }
            Self::Shared(values) => {
                let count = values.len();
                Self::Shared(comm.all_reduce_shared(values, count, op)?)
            }
        })
    }
}

fn measure<T: Exact>(comm: &Communicator, config: &BenchConfig, count: usize) -> Result<BenchRow> {
    let (world_size, op) = (comm.world_size(), config.op);
    let mut data = Array::new(comm, config.shared, count)?;
    data.values().iter_mut().enumerate().for_each(|(i, value)| *value = T::small(input(op, comm.rank(), i)));
    data = data.reduced(comm, op)?;
    let exact = |i: usize| match T::DTYPE {
        // The mean is rounded once, to the type.
        DType::F32 => f64::from(expected(op, world_size, i) as f32),
        DType::F16 => f16::from_f32(expected(op, world_size, i) as f32).value(),
        DType::BF16 => bf16::from_f32(expected(op, world_size, i) as f32).value(),
        _ => expected(op, world_size, i),
    };
    let wrong = data.values().iter().enumerate().filter(|(i, v)| v.value() != exact(*i)).count();
    let mut wrong = [wrong as i64];
    comm.all_reduce(&mut wrong, ReduceOp::Sum)?;

    // Each result is the next input. Sums may overflow to infinity, which is not slower, and the first result was checked above.
    // Products may become denormal numbers, which are slower.
    let mut array = Some(data);
    let seconds = timed(comm, config, &mut |turns| {
        for _ in 0..turns {
            array = array.take().map(|data| data.reduced(comm, op)).transpose()?;
        }
        Ok(())
    })?;
    Ok(BenchRow::new(T::DTYPE, op, count, world_size, seconds, wrong[0] as u64))
}

/// Returns the seconds per call on the slowest rank: the median of the rounds, after warming up. `turns(n)` makes `n` calls.
pub(super) fn timed(
    comm: &Communicator,
    config: &BenchConfig,
    turns: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<f64> {
    let mut measured = |count: usize| -> Result<f64> {
        comm.barrier()?;
        let start = Instant::now();
        turns(count)?;
        let mut slowest = [start.elapsed().as_secs_f64() / count as f64];
        comm.all_reduce(&mut slowest, ReduceOp::Max)?;
        Ok(slowest[0])
    };
    let guess = measured(3)?;
    let warm = config.time.as_secs_f64() / 4.0;
    let guess = measured(((warm / guess) as usize).clamp(2, 20_000))?;
    let share = config.time.as_secs_f64() / config.rounds.max(1) as f64;
    let each = ((share / guess) as usize).clamp(3, 100_000);
    let mut rounds = (0..config.rounds.max(1)).map(|_| measured(each)).collect::<Result<Vec<_>>>()?;
    rounds.sort_unstable_by(f64::total_cmp);
    Ok(rounds[rounds.len() / 2])
}

/// Returns the heading of the table, with units.
pub fn header() -> String {
    let mut out = String::new();
    let names = ["size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"];
    let units = ["(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", ""];
    for line in [names, units] {
        let [a, b, c, d, e, f, g, h] = line;
        let _ = writeln!(out, "{a:>12} {b:>12} {c:>6} {d:>8} {e:>10} {f:>8} {g:>8} {h:>7}");
    }
    out
}

impl BenchRow {
    pub(super) fn new(dtype: DType, op: ReduceOp, count: usize, world_size: usize, seconds: f64, wrong: u64) -> Self {
        let bytes = count * dtype.size();
        let algbw_gbs = bytes as f64 / seconds / 1e9;
        Self {
            bytes,
            count,
            dtype: dtype.name(),
            redop: op.name(),
            time_us: seconds * 1e6,
            algbw_gbs,
            busbw_gbs: algbw_gbs * 2.0 * (world_size as f64 - 1.0) / world_size as f64,
            wrong,
        }
    }

    /// Returns a line of the table.
    pub fn line(&self) -> String {
        format!(
            "{:>12} {:>12} {:>6} {:>8} {:>10.2} {:>8.3} {:>8.3} {:>7}",
            self.bytes, self.count, self.dtype, self.redop, self.time_us, self.algbw_gbs, self.busbw_gbs, self.wrong
        )
    }
}

/// Returns `{"results": [...]}`, the text that `--json` prints.
///
/// # Errors
/// Serialization errors, which do not occur for these rows.
pub fn json(rows: &[BenchRow]) -> serde_json::Result<String> {
    serde_json::to_string_pretty(&serde_json::json!({ "results": rows }))
}
