//! The engine of `trainer bench allreduce --gpus N`: the measurements of [`crate::bench`], for tensors on GPUs.

use burn::tensor::{Device, Tensor, TensorData};

use super::group::{DeviceGroup, DeviceGroupOptions};
use super::layout::WireType;
use super::route::DeviceBackend;
use crate::Communicator;
use crate::bench::{BenchConfig, BenchRow, expected, input, timed};
use crate::dtype::ReduceOp;
use crate::error::{CommError, Result};

/// Measures sums of all sizes. Every rank calls this function with the same configuration. Sizes are bytes on the wire, in
/// elements of the configuration's type; tensors are f32. Calls `describe` with the route, then `report` with each row as soon
/// as the row is ready.
///
/// # Errors
/// Those of [`DeviceGroup`].
pub fn all_reduce(
    comm: &Communicator,
    device: &Device,
    backend: DeviceBackend,
    config: &BenchConfig,
    describe: impl FnOnce(&str),
    mut report: impl FnMut(&BenchRow),
) -> Result<Vec<BenchRow>> {
    let Some(wire) = WireType::ALL.into_iter().find(|wire| wire.dtype() == config.dtype) else {
        return Err(CommError::usage(format!("{} does not travel between GPUs", config.dtype.name())));
    };
    let elements = config.sizes.iter().max().map_or(0, |bytes| bytes / wire.size());
    let mut group =
        DeviceGroup::new(comm, device, DeviceGroupOptions { backend, elements, wire, device_barrier: false })?;
    describe(&group.description());
    let mut rows = Vec::new();
    for size in &config.sizes {
        let row = measure(&mut group, comm, device, config, size / wire.size())?;
        report(&row);
        rows.push(row);
    }
    group.close()?;
    Ok(rows)
}

fn measure(
    group: &mut DeviceGroup,
    comm: &Communicator,
    device: &Device,
    config: &BenchConfig,
    count: usize,
) -> Result<BenchRow> {
    let (world_size, op) = (comm.world_size(), ReduceOp::Sum);
    let own: Vec<f32> = (0..count).map(|i| input(op, comm.rank(), i) as f32).collect();
    let own = Tensor::<1>::from_data(TensorData::new(own, [count]), device);
    let sum = group.all_reduce(vec![own.clone()], 1.0)?;
    group.synchronize()?;
    let sum = sum.try_into_vec_as::<f32>().map_err(|error| CommError::system(format!("reading a sum: {error}")))?;
    let exact = |i: usize| expected(op, world_size, i) as f32;
    let mut wrong = [sum.iter().enumerate().filter(|(i, value)| **value != exact(*i)).count() as i64];
    comm.all_reduce(&mut wrong, ReduceOp::Sum)?;
    let seconds = timed(comm, config, &mut |calls| {
        for _ in 0..calls {
            // The sum is a new tensor, as in training.
            group.all_reduce(vec![own.clone()], 1.0)?;
        }
        group.synchronize()
    })?;
    Ok(BenchRow::new(group.wire().dtype(), op, count, world_size, seconds, wrong[0] as u64))
}
