//! Tests of the reduction and of the comparisons between ranks. Ranks are threads, and no neural network is involved.

use std::{
    cell::Cell,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burn::{
    module::ParamId,
    tensor::{Device, Tensor},
};
use models::{ParameterInfo, Spec, StateTensor};
use ops::StatisticsReduce;
use parking_lot::Mutex;

use super::{
    bucket_arrays::BucketArrays,
    buckets::{compute_bucket_assignment, lengths, reverse_registration_order},
    reducer::{DeviceCollectives, DeviceReduction, Reducer, ReducerOptions},
    statistics::StatisticsGroup,
    verify::{self, RunningStatistics},
};
use crate::config::Compression;
use crate::device::StreamEvent;
use crate::failure::Failure;
use crate::snapshot::Snapshot;
use crate::state_file::NamedTensor;
use comm::{CommConfig, CommError, Communicator, ReduceOp, Secret, StoreConfig, StoreServer, TransportKind, join};
use launch::WorkerStatus;

/// Runs `body` as every rank.
fn ranks<R: Send + 'static>(world_size: usize, body: impl Fn(Communicator) -> R + Send + Sync + 'static) -> Vec<R> {
    let secret = Secret::random().unwrap();
    let server = StoreServer::bind("127.0.0.1:0", StoreConfig::new(secret.clone(), world_size), |_| ()).unwrap();
    let (address, body) = (server.local_addr().to_string(), Arc::new(body));
    let threads: Vec<_> = (0..world_size)
        .map(|rank| {
            let mut config = CommConfig::new(rank, world_size, address.clone(), secret.clone(), TransportKind::Shm);
            config.timeout = Duration::from_secs(60);
            let body = body.clone();
            thread::spawn(move || body(join(&config).unwrap()))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn a_failure_of_one_rank_is_the_failure_of_all() {
    let ended = ranks(3, |comm| {
        let all_well = verify::succeed_together(Ok(comm.rank()), &comm).unwrap();
        assert_eq!(all_well, comm.rank());
        let own = match comm.rank() {
            0 => Ok(()),
            rank => {
                Err(Failure { is_permanent: true, ..Failure::usage(format!("image {rank} is damaged"), "replace it") })
            }
        };
        let failure = verify::succeed_together(own, &comm).unwrap_err();
        // All ranks are still in the job.
        comm.barrier().unwrap();
        failure
    });
    assert_eq!(ended, vec![Failure { is_permanent: true, ..Failure::usage("image 1 is damaged", "replace it") }; 3]);
}

const LENGTHS: [usize; 5] = [3, 700, 1, 64, 50];

fn parameters() -> Vec<ParameterInfo> {
    let info = |(index, &length): (usize, &usize)| ParameterInfo {
        name: format!("p{index}"),
        shape: vec![length],
        id: ParamId::new(),
        of_norm: false,
    };
    LENGTHS.iter().enumerate().map(info).collect()
}

fn options() -> ReducerOptions {
    ReducerOptions {
        first_bucket_bytes: 400,
        bucket_bytes_cap: 1000,
        overlap: true,
        in_order: false,
        compression: Compression::None,
    }
}

fn values(gradient: Tensor<1>) -> Vec<f32> {
    gradient.into_data().try_into_vec().unwrap()
}

/// Replaces a GPU: takes gradients as tensors and returns their sum over ranks as one tensor, which the CPU computes.
struct FakeGpu {
    comm: Communicator,
    enqueued: usize,
    has_side_stream: bool,
}

impl DeviceCollectives for FakeGpu {
    fn all_reduce(
        &mut self,
        tensors: Vec<Tensor<1>>,
        after: &StreamEvent,
    ) -> Result<(Tensor<1>, StreamEvent, usize), CommError> {
        after.wait();
        let mut flat = values(Tensor::cat(tensors, 0));
        self.comm.all_reduce(&mut flat, ReduceOp::Sum)?;
        self.enqueued += 1;
        let device = Device::flex();
        Ok((Tensor::from_floats(flat.as_slice(), &device), StreamEvent::record(&device), 4 * flat.len()))
    }

    fn runs_on_side_stream(&self) -> bool {
        self.has_side_stream
    }

    fn start_all_reduce(&mut self, tensors: Vec<Tensor<1>>) -> Result<(Tensor<1>, usize), CommError> {
        let (sum, _, bytes) = self.all_reduce(tensors, &StreamEvent::record(&Device::flex()))?;
        Ok((sum, bytes))
    }

    fn join(&mut self) {}

    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    fn all_gather(&mut self, tensors: Vec<Tensor<1>>) -> Result<Tensor<1>, CommError> {
        let own = values(Tensor::cat(tensors, 0));
        let mut all = vec![0.0; own.len() * self.comm.world_size()];
        self.comm.all_gather(&own, &mut all)?;
        Ok(Tensor::from_floats(all.as_slice(), &Device::flex()))
    }

    fn synchronize(&mut self) -> Result<(), CommError> {
        assert_eq!(std::mem::take(&mut self.enqueued), 3, "the buckets of a step");
        Ok(())
    }
}

/// PyTorch tests its averaging in the same way: each rank's gradient is a small integer divided by twice the world size, so the sum
/// is exact. Each iteration has two passes. The order in which gradients become ready changes, and one parameter is unused on some
/// ranks.
#[test]
fn a_hundred_iterations_average_exactly() {
    let kinds = [(true, false), (false, false), (true, true), (false, true)];
    for ((overlap, on_device), has_side_stream) in kinds.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        ranks(4, move |comm| {
            let (parameters, device, world_size) = (parameters(), Device::flex(), comm.world_size());
            let gpu: Arc<Mutex<dyn DeviceCollectives>> =
                Arc::new(Mutex::new(FakeGpu { comm: comm.clone(), enqueued: 0, has_side_stream }));
            let reduction = on_device.then(|| DeviceReduction { device: device.clone(), collectives: gpu });
            let reducer = Reducer::new(
                &parameters,
                &comm,
                &WorkerStatus::detached().unwrap(),
                ReducerOptions { overlap, ..options() },
                reduction,
                None,
            )
            .unwrap();
            for iteration in 0..100 {
                for last in [false, true] {
                    reducer.prepare_for_backward(iteration, last);
                    let sink = reducer.sink();
                    // Only rank 1 uses parameter 2, and no rank in the last ten iterations.
                    let here = |index: usize| index != 2 || (comm.rank() == 1 && iteration < 90);
                    let mut order: Vec<usize> = (0..LENGTHS.len()).filter(|&index| here(index)).rev().collect();
                    order.rotate_left(iteration as usize % 3);
                    order.iter().for_each(|&index| sink.used(parameters[index].id));
                    for index in order {
                        let value = (comm.rank() as u64 + iteration + index as u64) as f32 / (2 * world_size) as f32;
                        sink.ready(parameters[index].id, Tensor::full([LENGTHS[index]], value, &device));
                    }
                }
                let reduced = reducer.finalize_backward(&device).unwrap();
                let used: Vec<bool> =
                    (0..LENGTHS.len()).map(|p| p != 2 || (comm.rank() == 1 && iteration < 90)).collect();
                assert_eq!(reduced.used, used);
                for (index, gradient) in reduced.gradients.into_inner().into_iter().enumerate() {
                    // The mean over ranks of rank + iteration + index.
                    let want = match index {
                        2 if iteration < 90 => (1 + iteration + 2) as f32 / 4.0,
                        2 => 0.0,
                        _ => 1.5 + (iteration + index as u64) as f32,
                    };
                    assert_eq!(values(gradient.unwrap()), vec![want; LENGTHS[index]], "{iteration}, parameter {index}");
                }
                let elements: usize = reduced.buckets.iter().map(|bucket| bucket.bytes / 4).sum();
                assert_eq!(elements, LENGTHS.iter().sum::<usize>());
                assert!(reduced.buckets.iter().all(|b| b.queued <= b.started && b.started <= b.finished));
                assert_eq!(reduced.buckets.len(), 3, "{:?}", reduced.buckets);
                reducer.synchronize().unwrap();
            }
        });
    }
}

/// Ranks whose gradients become ready in different orders reduce the same buckets, those of rank 0's order.
#[test]
fn a_full_bucket_is_launched_before_the_pass_ends_in_rank_0s_order() {
    ranks(2, |comm| {
        let (parameters, device) = (parameters(), Device::flex());
        let reducer =
            Reducer::new(&parameters, &comm, &WorkerStatus::detached().unwrap(), options(), None, None).unwrap();
        let pass = |step: u64, order: &[usize], between: &dyn Fn()| {
            reducer.prepare_for_backward(step, true);
            let sink = reducer.sink();
            parameters.iter().for_each(|parameter| sink.used(parameter.id));
            for &index in order {
                if index == 0 {
                    between();
                }
                sink.ready(parameters[index].id, Tensor::full([LENGTHS[index]], index as f32, &device));
            }
            reducer.finalize_backward(&device).unwrap()
        };
        let order = if comm.rank() == 0 { [4, 1, 3, 2, 0] } else { [3, 4, 1, 2, 0] };
        pass(0, &order, &|| ());
        // In rank 0's order 4 and 1 fill the first bucket.
        let start = Instant::now();
        let last_gradient = Cell::new(start);
        let reduced = pass(1, &order, &|| last_gradient.set(Instant::now()));
        let [first, last] = &reduced.buckets[..] else { panic!("{:?}", reduced.buckets) };
        assert_eq!([first.bytes / 4, last.bytes / 4], [750, 68]);
        assert!(start <= first.queued && first.queued <= last_gradient.get(), "launched before the last gradient");
        assert!(last_gradient.get() <= last.queued);
    });
}

/// Statistics of batch norm that follow a gradient are gathered behind the bucket that the gradient has completed, on all ranks.
#[test]
fn with_in_order_a_full_bucket_is_enqueued_before_the_pass_continues() {
    ranks(2, |comm| {
        let (parameters, device) = (parameters(), Device::flex());
        let gpu = Arc::new(Mutex::new(FakeGpu { comm: comm.clone(), enqueued: 0, has_side_stream: false }));
        let collectives: Arc<Mutex<dyn DeviceCollectives>> = gpu.clone();
        let options = ReducerOptions { in_order: true, ..options() };
        let status = WorkerStatus::detached().unwrap();
        let reduction = DeviceReduction { device: device.clone(), collectives: collectives.clone() };
        let reducer = Reducer::new(&parameters, &comm, &status, options, Some(reduction), None).unwrap();
        let statistics = StatisticsGroup::new(comm.duplicate().unwrap(), Some(collectives));
        for step in 0..20 {
            reducer.prepare_for_backward(step, true);
            let sink = reducer.sink();
            parameters.iter().for_each(|parameter| sink.used(parameter.id));
            let before = gpu.lock().enqueued;
            let mut enqueued = Vec::new();
            for index in (0..LENGTHS.len()).rev() {
                sink.ready(parameters[index].id, Tensor::full([LENGTHS[index]], index as f32, &device));
                enqueued.push(gpu.lock().enqueued - before);
                let mine = Tensor::full([2], comm.rank() as f32, &device);
                let gathered = statistics.on_device().unwrap().all_gather(vec![mine.clone(), mine]);
                assert_eq!(values(gathered), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
            }
            // The first pass assigns the buckets: 4 and 3, 2 and 1, 0 (lengths 50 + 64, 1 + 700, 3).
            let buckets = reducer.finalize_backward(&device).unwrap().buckets.len();
            assert_eq!(enqueued, if step == 0 { [0; 5] } else { [0, 1, 1, 2, 3] }, "{buckets} buckets");
        }
        statistics.check().unwrap();
    });
}

fn snapshot() -> Snapshot {
    Snapshot {
        model: vec![
            StateTensor::new("conv.weight", vec![2], vec![1.0, 2.0]),
            StateTensor::new("bn.running_mean", vec![1], vec![0.5]),
        ],
        optimizer: vec![NamedTensor { name: "momentum.conv.weight".into(), shape: vec![2], values: vec![0.0, 3.0] }],
        optimizer_steps: 5,
        ema: None,
    }
}

/// Returns the result of [`verify::check_in_sync`] on each of three ranks, after `change` on rank 2.
fn in_sync_after(
    change: impl Fn(&mut Snapshot) + Send + Sync + 'static,
    statistics: RunningStatistics,
) -> Vec<Result<(), Failure>> {
    ranks(3, move |comm| {
        let mut snapshot = snapshot();
        if comm.rank() == 2 {
            change(&mut snapshot);
        }
        verify::check_in_sync(&snapshot, statistics, &comm)
    })
}

#[test]
fn a_rank_with_other_state_is_named_with_its_first_different_tensor_on_every_rank() {
    use RunningStatistics::{EqualOnAllRanks, PerRank};
    let messages = |results: Vec<Result<(), Failure>>| -> Vec<String> {
        results.into_iter().map(|result| result.expect_err("they differ").message).collect()
    };
    for message in messages(in_sync_after(|snapshot| snapshot.model[0].values[1] = 2.000_000_2, PerRank)) {
        let start = "the ranks have drifted apart: rank 2: another state than rank 0: rank 0 has conv.weight ";
        assert!(message.starts_with(start), "{message}");
    }
    for message in messages(in_sync_after(|snapshot| snapshot.optimizer[0].values[0] = -0.0, PerRank)) {
        assert!(message.contains("rank 0 has optimizer's momentum.conv.weight "), "{message}");
    }
    let statistics = |snapshot: &mut Snapshot| snapshot.model[1].values[0] = 0.25;
    assert!(in_sync_after(statistics, PerRank).iter().all(Result::is_ok), "each rank may have its own statistics");
    assert!(messages(in_sync_after(statistics, EqualOnAllRanks))[1].contains("bn.running_mean"));
    assert!(in_sync_after(|_| (), EqualOnAllRanks).iter().all(Result::is_ok));
}

#[test]
fn an_array_is_free_again_when_the_last_tensor_that_uses_it_is_dropped() {
    let comm = comm::solo().unwrap();
    let arrays = Arc::new(BucketArrays::default());
    assert!(arrays.take(1).is_none(), "no array was made");
    let mut array = comm.shared_array::<f32>(3).unwrap();
    array.copy_from_slice(&[1.0, 2.0, 3.0]);
    let tensor = ops::tensor_from_blob(arrays.lend(1, array), &Device::flex());
    let view = tensor.slice(1..2);
    assert!(arrays.take(1).is_none(), "a tensor uses it");
    assert_eq!(view.into_scalar::<f32>(), 2.0);
    assert_eq!(&arrays.take(1).unwrap()[..], [1.0, 2.0, 3.0]);
    assert!(arrays.take(1).is_none(), "the array was taken");
}

/// `ddp_buckets.json`, computed by PyTorch, has for each model its buckets' parameter counts, bytes, first and last index.
#[test]
fn buckets_equal_pytorch() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/reference/ddp_buckets.json")).expect("golden file");
    let spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };
    let mut seen = 0;
    for (name, expected) in golden["models"].as_object().expect("models") {
        let Ok(network) = models::skip_init(name, &spec) else { continue };
        let lengths = lengths(&models::parameters(&network));
        let buckets =
            compute_bucket_assignment(&reverse_registration_order(lengths.len()), &lengths, 1 << 20, 25 << 20);
        let expected = expected.as_array().expect("buckets");
        assert_eq!(buckets.len(), expected.len(), "{name}");
        for (bucket, expected) in buckets.iter().zip(expected) {
            let number = |key: &str| expected[key].as_u64().expect(key) as usize;
            assert_eq!(bucket.parameters.len(), number("params"), "{name}");
            assert_eq!(bucket.elements * 4, number("bytes"), "{name}");
            let in_turn: Vec<usize> = (number("last")..number("first") + 1).rev().collect();
            assert_eq!(bucket.parameters, in_turn, "{name}");
        }
        seen += 1;
    }
    assert!(seen >= 5, "{seen} models of the golden file are in the registry");
}

#[test]
fn buckets_follow_the_order_given() {
    let buckets = compute_bucket_assignment(&[1, 2, 0, 3], &[10, 20, 30, 40], 80, 400);
    let found: Vec<_> = buckets.iter().map(|b| (b.parameters.as_slice(), b.elements)).collect();
    assert_eq!(found, [(&[1][..], 20), (&[2, 0, 3], 80)]);
    assert_eq!(compute_bucket_assignment(&[], &[], 1, 1), []);
}
