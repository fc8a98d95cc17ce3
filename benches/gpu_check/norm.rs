//! Compares batch norm over all ranks' batches (`torch.nn.SyncBatchNorm`) on GPUs with the CPU's over the whole batch.

use std::fmt::{Debug, Formatter};
use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use comm::cuda::{DeviceBackend, DeviceGroup, DeviceGroupOptions, layout::WireType};
use comm::{CommError, Communicator, ReduceOp};
use ops::{Activation, DeviceGather, Epilogue, RunningStats, StatisticsReduce, batch_norm_train};

use crate::matrix::other;
use crate::ops::{numbers, relative_error, values};

/// Largest difference from the CPU's results, relative to the largest value: rounding errors of long sums.
const NEAR: f32 = 2e-5;
/// The same for bf16 with 8 bits.
const NEAR_BF16: f32 = 8e-3;

/// The ranks' GPUs. The first error of an exchange is kept.
struct Gpus {
    world_size: usize,
    group: Mutex<(DeviceGroup, Option<CommError>)>,
}

impl Debug for Gpus {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpus({})", self.world_size)
    }
}

impl StatisticsReduce for Gpus {
    fn all_reduce_sum(&self, _: &mut [f64]) {
        let mut group = self.group.lock().unwrap();
        group.1.get_or_insert_with(|| other(&"the statistics went through the host"));
    }

    fn on_device(&self) -> Option<&dyn DeviceGather> {
        Some(self)
    }
}

impl DeviceGather for Gpus {
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&self, vectors: Vec<Tensor<1>>) -> Tensor<1> {
        let (device, each) = (vectors[0].device(), vectors.iter().map(|vector| vector.dims()[0]).sum::<usize>());
        let (group, failed) = &mut *self.group.lock().unwrap();
        group.all_gather_f32(vectors).unwrap_or_else(|error| {
            failed.get_or_insert(error);
            Tensor::zeros([self.world_size * each], &device)
        })
    }
}

/// A batch norm: images per rank, shape of an image, type, residual, activation.
type Case = (Vec<usize>, [usize; 3], DType, bool, Activation);

/// Returns the output, the running statistics and the gradients of input, residual, weight and bias for the images from `first`
/// on, `count` of them.
fn results(
    case: &Case,
    device: &Device,
    [first, count, all]: [usize; 3],
    process_group: Option<Arc<dyn StatisticsReduce>>,
) -> Result<Vec<Vec<f32>>, CommError> {
    let (_, [planes, height, width], _, residual, activation) = case;
    let (each, on_cpu) = (planes * height * width, device.clone().inner() == Device::flex());
    let image = |seed: u64| {
        // The mean of a channel is far from zero, and differs between ranks.
        let data: Vec<f32> = numbers(seed, all * each)
            .iter()
            .enumerate()
            .map(|(i, x)| x + (i / (height * width) % planes % 8 * 4) as f32 + (i / each) as f32)
            .collect();
        let data = data[first * each..(first + count) * each].to_vec();
        let image = Tensor::<4>::from_data(TensorData::new(data, [count, *planes, *height, *width]), device);
        // The CPU computes in f32 with the same numbers.
        let image = if case.2 == DType::BF16 { image.cast(FloatDType::BF16) } else { image };
        let image = if on_cpu { image.cast(FloatDType::F32) } else { image };
        image.detach().require_grad()
    };
    let vector = |seed: u64| {
        let data: Vec<f32> = numbers(seed, *planes).iter().map(|x| x * 0.3 + 1.0).collect();
        Tensor::<1>::from_data(TensorData::new(data, [*planes]), device)
    };
    let (input, second) = (image(1), image(2));
    let [weight, bias] = [3, 4].map(|seed| vector(seed).require_grad());
    let after = Epilogue { residual: residual.then(|| second.clone()), activation: *activation };
    let [mean, variance] = [5, 6].map(|seed| vector(seed).without_autodiff());
    let running = Some(RunningStats { mean, variance, momentum: 0.1 });
    let batch = batch_norm_train(input.clone(), weight.clone(), bias.clone(), 1e-5, after, process_group, running);
    let grad_output = numbers(7, all * each)[first * each..(first + count) * each].to_vec();
    let grad_output = Tensor::<4>::from_data(TensorData::new(grad_output, [count, *planes, *height, *width]), device);
    let mut gradients = (batch.output.clone().cast(FloatDType::F32) * grad_output).sum().backward();
    let read = |tensor: Tensor<1>| values(tensor).map_err(|error| other(&error));
    let flat = |tensor: Tensor<4>| read(tensor.reshape([count * each]));
    let mut found = vec![flat(batch.output.inner())?, read(batch.mean.inner())?, read(batch.variance.inner())?];
    for image in [&input, &second] {
        if let Some(gradient) = image.grad_remove(&mut gradients) {
            found.push(flat(gradient)?);
        }
    }
    for vector in [&weight, &bias] {
        found.push(read(vector.grad_remove(&mut gradients).ok_or_else(|| other(&"a parameter has no gradient"))?)?);
    }
    Ok(found)
}

/// Runs all cases. Returns whether all ranks have the CPU's results, and the same statistics to the bit, twice.
pub fn run(comm: &Communicator, device: &Device, backend: DeviceBackend) -> Result<bool, CommError> {
    let (me, world_size) = (comm.rank(), comm.world_size());
    let options = DeviceGroupOptions { backend, elements: 1 << 16, wire: WireType::Bf16, device_barrier: false };
    let group = DeviceGroup::new(comm, device, options)?;
    if me == 0 {
        println!("# {}", group.description());
    }
    let gpus = Arc::new(Gpus { world_size, group: Mutex::new((group, None)) });
    let equal = vec![4; world_size];
    // The last partial batch: the first ranks have more images.
    let partial: Vec<usize> = (0..world_size).map(|rank| 1 + (world_size - 1 - rank) * 2).collect();
    let mut all_passed = true;
    for case in [
        (equal.clone(), [64, 8, 8], DType::F32, false, Activation::Relu),
        (partial.clone(), [64, 8, 8], DType::F32, true, Activation::Relu),
        (partial.clone(), [6, 5, 7], DType::F32, false, Activation::Silu),
        (partial, [24, 3, 3], DType::BF16, true, Activation::Identity),
        (equal, [200, 1, 1], DType::BF16, false, Activation::Identity),
    ] {
        let (counts, shape, dtype, ..) = &case;
        let (first, all) = (counts[..me].iter().sum::<usize>(), counts.iter().sum());
        let autodiff = device.clone().autodiff();
        let ours = || results(&case, &autodiff, [first, counts[me], all], Some(gpus.clone()));
        let (ours, again) = (ours()?, ours()?);
        let mut whole = results(&case, &Device::flex().autodiff(), [0, all, all], None)?;
        let each: usize = shape.iter().product();
        let last = whole.len();
        let mut most = 0f32;
        let mut alike = ours == again;
        for (index, theirs) in whole.iter_mut().enumerate() {
            let mut ours = ours[index].clone();
            if index + 2 >= last {
                // Each rank has the gradients of weight and bias of its own rows.
                comm.all_reduce(&mut ours, ReduceOp::Sum)?;
            } else if theirs.len() == all * each {
                *theirs = theirs[first * each..(first + counts[me]) * each].to_vec();
            } else {
                // Statistics of all rows.
                let mut everybodys = vec![0f32; ours.len() * world_size];
                comm.all_gather(&ours, &mut everybodys)?;
                alike &= everybodys.chunks_exact(ours.len()).all(|other| other == ours);
            }
            let error = relative_error(&ours, theirs);
            most = if error <= most { most } else { error };
        }
        let mut of_all = [most];
        comm.all_reduce(&mut of_all, ReduceOp::Max)?;
        let mut unlike = [i64::from(!alike)];
        comm.all_reduce(&mut unlike, ReduceOp::Max)?;
        let limit = if *dtype == DType::BF16 { NEAR_BF16 } else { NEAR };
        let passed = of_all[0] <= limit && unlike[0] == 0;
        all_passed &= passed;
        if me == 0 {
            let bits = if unlike[0] == 0 { "the same bits" } else { "OTHER BITS" };
            println!(
                "batch norm over {world_size} ranks of {counts:?} images of {shape:?}, {}: error {:.1e}, limit {limit:.0e}, \
                 {bits}{}",
                dtype.name(),
                of_all[0],
                if passed { "" } else { "  WRONG" }
            );
        }
    }
    let gpus = Arc::into_inner(gpus).ok_or_else(|| other(&"a graph still has the GPUs"))?;
    let (group, failed) = gpus.group.into_inner().map_err(|error| other(&error))?;
    group.close()?;
    failed.map_or(Ok(all_passed), Err)
}
