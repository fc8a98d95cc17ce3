//! Runs all algorithms, types and sizes on one rank.

use std::time::Instant;

use burn::tensor::{Device, Tensor, TensorData};
use comm::cuda::layout::WireType;
use comm::cuda::protocol::Kernel;
use comm::cuda::{DeviceBackend, DeviceGroup, DeviceGroupOptions};
use comm::{CommError, Communicator, ReduceOp};
use trainer::device::{DeviceSet, LocalRank};

use crate::norm;

/// Returns element `i` of rank `rank`: 1, 2 or 3. Sums over 8 ranks are exact in every type.
fn input(rank: usize, i: usize) -> f32 {
    (1 + (rank * 7 + i) % 3) as f32
}

fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| input(rank, i)).collect()
}

fn sum(world_size: usize, i: usize) -> f32 {
    (0..world_size).map(|rank| input(rank, i)).sum()
}

/// Splits a tensor into views of uneven lengths, because the gradients of a bucket are separate tensors.
fn cut(tensor: &Tensor<1>) -> Vec<Tensor<1>> {
    let n = tensor.dims()[0];
    let cuts = [0, n / 7, n / 3, n / 2 + 1, n];
    let ends = cuts.windows(2).map(|pair| pair[0].min(n)..pair[1].min(n)).filter(|range| !range.is_empty());
    ends.map(|range| tensor.clone().slice(range)).collect()
}

fn read(tensor: Tensor<1>) -> Result<Vec<f32>, CommError> {
    tensor.try_into_vec_as::<f32>().map_err(|e| other(&e))
}

/// Returns an error that is not one of the collectives.
pub fn other(error: &dyn std::fmt::Display) -> CommError {
    CommError { kind: comm::ErrorKind::System, culprit: None, message: error.to_string(), hint: String::new() }
}

struct Row {
    wrong: i64,
    seconds: f64,
}

/// Makes the call once for its result and `rounds` times for its time.
fn measure(
    group: &mut DeviceGroup,
    comm: &Communicator,
    rounds: usize,
    want: &dyn Fn(usize) -> f32,
    call: &mut dyn FnMut(&mut DeviceGroup) -> Result<Tensor<1>, CommError>,
) -> Result<Row, CommError> {
    let got = read(call(group)?)?;
    group.check()?;
    let mut wrong = [got.iter().enumerate().filter(|(i, value)| value.to_bits() != want(*i).to_bits()).count() as i64];
    comm.all_reduce(&mut wrong, ReduceOp::Sum)?;
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..rounds {
        call(group)?;
    }
    group.synchronize()?;
    let mut seconds = [start.elapsed().as_secs_f64() / rounds.max(1) as f64];
    comm.all_reduce(&mut seconds, ReduceOp::Max)?;
    Ok(Row { wrong: wrong[0], seconds: seconds[0] })
}

/// Runs the matrix. Returns whether all results were correct on all ranks.
pub fn run(comm: &Communicator, sizes: &[usize], rounds: usize) -> Result<bool, CommError> {
    let ranks = LocalRank {
        local_rank: comm.rank(),
        local_world_size: comm.world_size(),
        oversubscribe: true,
        ..LocalRank::ALONE
    };
    let gpus = trainer::device::find_gpus().map_err(|missing| other(&missing.cause))?;
    let oversubscribed = ranks.oversubscribed(gpus.all.len());
    let device = DeviceSet::Gpus(gpus).select(&ranks).map_err(|failure| other(&failure))?.device().inner();
    if !oversubscribed {
        let mut passed = all(comm, &device, sizes, rounds, false)? & norm::run(comm, &device, DeviceBackend::Kernels)?;
        // All ranks are on one machine, so they all find NCCL or none does.
        if trainer::device::nccl().is_ok() {
            passed &= norm::run(comm, &device, DeviceBackend::Nccl)?;
        }
        return Ok(passed);
    }
    // With too few GPUs: once as in training, and once as with one GPU per rank, which tests the kernels' barriers.
    let passed = all(comm, &device, sizes, rounds, false)? & all(comm, &device, sizes, 1, true)?;
    Ok(passed & norm::run(comm, &device, DeviceBackend::Kernels)?)
}

fn all(
    comm: &Communicator,
    device: &Device,
    sizes: &[usize],
    rounds: usize,
    device_barrier: bool,
) -> Result<bool, CommError> {
    let (me, world_size) = (comm.rank(), comm.world_size());
    let mut passed = true;
    let say = |line: String| {
        if me == 0 {
            println!("{line}");
        }
    };
    for wire in WireType::ALL {
        let elements = sizes.iter().copied().max().unwrap_or(1);
        let mut group = DeviceGroup::new(
            comm,
            device,
            DeviceGroupOptions { backend: DeviceBackend::Kernels, elements, wire, device_barrier },
        )?;
        if wire == WireType::F32 {
            say(format!("# {}", group.description()));
            say(format!(
                "{:>14} {:>5} {:>5} {:>12} {:>12} {:>10} {:>9} {:>7}",
                "algorithm", "ranks", "type", "elements", "bytes", "time us", "busbw GB/s", "#wrong"
            ));
        }
        for &size in sizes {
            let own = Tensor::from_data(TensorData::new(values(me, size), [size]), device);
            let parts = Tensor::from_data(TensorData::new(values(me, size * world_size), [size * world_size]), device);
            let total = |i: usize| sum(world_size, i);
            let own_part = |i: usize| sum(world_size, me * size + i);
            let everybodys = |i: usize| input(i / size, i % size);
            let roots = |i: usize| input(world_size - 1, i);
            for kernel in Kernel::ALL {
                let row = match kernel {
                    Kernel::OneShot | Kernel::TwoShot => {
                        let call = &mut |g: &mut DeviceGroup| g.all_reduce_with(kernel, cut(&own), 1.0);
                        measure(&mut group, comm, rounds, &total, call)
                    }
                    Kernel::ReduceScatter => {
                        let call = &mut |g: &mut DeviceGroup| g.reduce_scatter(parts.clone(), 1.0);
                        measure(&mut group, comm, rounds, &own_part, call)
                    }
                    Kernel::AllGather => {
                        measure(&mut group, comm, rounds, &everybodys, &mut |g| g.all_gather(own.clone()))
                    }
                    Kernel::Broadcast => {
                        measure(&mut group, comm, rounds, &roots, &mut |g| g.broadcast(own.clone(), world_size - 1))
                    }
                    Kernel::Probe | Kernel::Order => continue,
                }?;
                let bytes = size * wire.size();
                // The factors of nccl-tests.
                let factor = match kernel {
                    Kernel::OneShot | Kernel::TwoShot => 2.0 * (world_size as f64 - 1.0) / world_size as f64,
                    Kernel::Broadcast => 1.0,
                    _ => world_size as f64 - 1.0,
                };
                let busbw = bytes as f64 * factor / row.seconds / 1e9;
                passed &= row.wrong == 0;
                say(format!(
                    "{:>14} {world_size:>5} {:>5} {size:>12} {bytes:>12} {:>10.1} {busbw:>9.2} {:>7}",
                    kernel.name(),
                    wire.name(),
                    row.seconds * 1e6,
                    row.wrong
                ));
            }
        }
        // Scaling and rounding: a third is exact in no type, and all ranks must round it equally.
        let third = Tensor::from_data(TensorData::new(values(me, 1000), [1000]), device);
        let sums = read(group.all_reduce(vec![third], 1.0 / 3.0)?)?;
        let mut all = vec![0f32; 1000 * world_size];
        comm.all_gather(&sums, &mut all)?;
        let alike =
            all.chunks_exact(1000).all(|other| other.iter().zip(&sums).all(|(a, b)| a.to_bits() == b.to_bits()));
        let near = sums.iter().enumerate().all(|(i, value)| (value - sum(world_size, i) / 3.0).abs() < 0.1);
        say(format!(
            "{} sums of thirds: {}",
            wire.name(),
            if alike && near { "the same bits on every rank" } else { "WRONG" }
        ));
        passed &= alike && near;
        group.close()?;
    }
    Ok(passed)
}
