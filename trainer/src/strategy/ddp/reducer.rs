//! The reducer: a thread all-reduces buckets while the backward pass runs.
//!
//! This file is the second half of PyTorch's `c10d::Reducer` (`buckets.rs` has the first). [`Reducer::finalize_backward`] waits
//! for each bucket's reduction and returns the gradients. Where PyTorch has asynchronous `Work`, this program has a thread. The
//! thread also runs the communication hook ([`CompressHook`]), in parallel to the backward pass. Custom kernels inside one machine
//! need no thread: the backward pass starts them on a second stream, so that they can be part of a CUDA graph.

use std::{
    cell::Cell,
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    thread::JoinHandle,
    time::Instant,
};

use burn::tensor::{Device, Tensor, TensorData};
use half::{bf16, f16};
use models::{GradientSink, ParameterInfo};
use parking_lot::Mutex;

use super::buckets::{self, Bucket, BucketValues, BucketWork, GradientBuckets};
use crate::{config::Compression, device::StreamEvent, failure::Failure, optim::FlatGradients, timeline::BucketSpan};
use comm::{CommError, Communicator, ReduceOp, SharedArray};
use launch::WorkerStatus;

/// The result of a step's reductions.
pub(super) struct ReducedGradients {
    /// Summed over ranks. Parameters that this rank did not use have a gradient too: other ranks may have used them.
    pub gradients: FlatGradients,
    /// The loss of [`Reducer::sum_loss`], summed over ranks, `[1]`.
    pub loss: Option<Tensor<1>>,
    /// Per parameter, in registration order: whether this rank used it.
    pub used: Vec<bool>,
    /// When each bucket was reduced.
    pub buckets: Vec<BucketSpan>,
}

/// The sizes of buckets and the wire format: `bucket_cap_mb` of `DistributedDataParallel`, and its communication hook.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReducerOptions {
    /// Bytes at which the first bucket is full.
    pub first_bucket_bytes: usize,
    /// Bytes at which another bucket is full. PyTorch: `bucket_cap_mb`.
    pub bucket_bytes_cap: usize,
    /// Whether buckets are launched while backward runs, or after it.
    pub overlap: bool,
    /// Whether the backward pass waits until the reduction of each full bucket is enqueued. Needed if other collectives run on
    /// the gradients' device (synchronised batch norm), since all collectives must have the same order on all ranks.
    pub in_order: bool,
    pub compression: Compression,
}

/// Collectives on the device of the gradients. All ranks must call them in the same order, on any thread.
pub(super) trait DeviceCollectives: Send {
    /// Enqueues the sum over ranks of the concatenated `tensors`, after the event `after`. Returns the sum, an event for which a
    /// reader of the sum must wait, and the bytes that this rank contributes.
    fn all_reduce(
        &mut self,
        tensors: Vec<Tensor<1>>,
        after: &StreamEvent,
    ) -> Result<(Tensor<1>, StreamEvent, usize), CommError>;
    /// Returns whether calls run beside the calling thread's work without waiting on the CPU. Only then
    /// [`start_all_reduce`](Self::start_all_reduce) works, and calls can be captured as part of a CUDA graph.
    fn runs_on_side_stream(&self) -> bool;
    /// Enqueues the sum over ranks of the concatenated `tensors`, which the calling thread has written. Returns the sum, which the
    /// thread may use after [`join`](Self::join), and the bytes that this rank contributes.
    fn start_all_reduce(&mut self, tensors: Vec<Tensor<1>>) -> Result<(Tensor<1>, usize), CommError>;
    /// Orders the calling thread's later work after all calls so far.
    fn join(&mut self);
    /// Checks that no rank was missing so far. Does not wait.
    fn check(&self) -> Result<(), CommError>;
    /// Enqueues the all-gather of `tensors`, in f32. Returns the tensors of all ranks in rank order. The calling thread must have
    /// written `tensors`, and must be the thread that reads the result.
    fn all_gather(&mut self, tensors: Vec<Tensor<1>>) -> Result<Tensor<1>, CommError>;
    /// Waits until all enqueued sums are computed.
    fn synchronize(&mut self) -> Result<(), CommError>;
}

/// A device that reduces gradients in its own memory.
#[derive(Clone)]
pub(super) struct DeviceReduction {
    pub(super) device: Device,
    /// The collectives on the device. The reducing thread shares them.
    pub(super) collectives: Arc<Mutex<dyn DeviceCollectives>>,
}

/// A reduced bucket.
pub(super) type BucketResult = Result<(BucketValues, BucketSpan), CommError>;

/// Reduces a step's gradients over all ranks.
pub(super) struct Reducer {
    buckets: Arc<GradientBuckets>,
    done: Receiver<BucketResult>,
    comm: Communicator,
    options: ReducerOptions,
    /// The bytes that this rank contributes to the reductions of a step.
    bytes: Cell<u64>,
    thread: Option<JoinHandle<()>>,
    /// Set if gradients are reduced on their device.
    collectives: Option<Arc<Mutex<dyn DeviceCollectives>>>,
    /// Set if the backward pass itself starts the reductions on the device.
    side_stream: Option<Arc<Mutex<dyn DeviceCollectives>>>,
}

impl Reducer {
    /// Starts the reducing thread. With `reduction`, gradients are reduced on that device, otherwise on the CPU. `order` is the
    /// order of parameters in the buckets, if it is known from an earlier reducer.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn new(
        parameters: &[ParameterInfo],
        comm: &Communicator,
        status: &WorkerStatus,
        options: ReducerOptions,
        reduction: Option<DeviceReduction>,
        order: Option<&[usize]>,
    ) -> Result<Self, Failure> {
        let (queue, inbox) = channel();
        let mut hook = CompressHook::new(options.compression);
        let thread_comm = comm.clone();
        let (device, collectives) = reduction.map(|one| (one.device, one.collectives)).unzip();
        let group = collectives.clone();
        let side_stream = collectives.clone().filter(|group| group.lock().runs_on_side_stream());
        let reduce = move |values| match (values, &group) {
            (BucketValues::Device(tensors, event), Some(group)) => {
                let (sum, done, bytes) = group.lock().all_reduce(tensors, &event)?;
                Ok((BucketValues::Device(vec![sum], done), bytes))
            }
            (BucketValues::Device(..) | BucketValues::OnSideStream(_), _) => {
                Err(CommError::usage("gradients stayed on a device that cannot add them up"))
            }
            (BucketValues::Host(values), _) => hook.all_reduce(values, &thread_comm),
            (BucketValues::Shared(values), _) => all_reduce_shared(values, &thread_comm),
        };
        let (done, thread) = start_thread(inbox, status, reduce)?;
        let buckets = GradientBuckets::new(parameters, queue, device, side_stream.clone(), options.in_order);
        let buckets = Arc::new(buckets);
        let assumed = (!options.overlap).then(|| buckets::reverse_registration_order(parameters.len()));
        if let Some(order) = order.or(assumed.as_deref()) {
            buckets.assign_buckets(options.assignment(order, &buckets.lengths));
        }
        Ok(Self {
            buckets,
            done,
            comm: comm.clone(),
            options,
            bytes: Cell::new(0),
            thread: Some(thread),
            collectives,
            side_stream,
        })
    }

    /// Waits until the reductions that were enqueued on a GPU are done, and checks that no rank was missing.
    ///
    /// # Errors
    /// Names the rank that is missing or has ended.
    pub(super) fn synchronize(&self) -> Result<(), Failure> {
        Ok(self.collectives.as_ref().map_or(Ok(()), |group| group.lock().synchronize())?)
    }

    /// Returns the bytes that all ranks send in a step, counted as in a ring all-reduce, which sends the fewest bytes.
    pub(super) fn bytes_moved(&self) -> u64 {
        2 * (self.comm.world_size() as u64 - 1) * self.bytes.get()
    }

    /// Checks that no rank was missing in the reductions on a GPU so far. Does not wait.
    ///
    /// # Errors
    /// Names the rank that is missing or has ended.
    pub(super) fn check(&self) -> Result<(), Failure> {
        Ok(self.collectives.as_ref().map_or(Ok(()), |group| group.lock().check())?)
    }

    /// Sums `loss` `[1]` over all ranks together with the gradients of the following backward pass.
    pub(super) fn sum_loss(&self, loss: Tensor<1>) {
        self.buckets.sum_loss(loss);
    }

    /// Returns the order of the parameters in the buckets, and each parameter's number of elements. `None` until buckets are
    /// assigned.
    pub(super) fn layout(&self) -> Option<(Vec<usize>, &[usize])> {
        let order = self.buckets.buckets()?.into_iter().flat_map(|bucket| bucket.parameters).collect();
        Some((order, &self.buckets.lengths))
    }

    /// Returns the sink to which the hooks of a forward pass report.
    pub(super) fn sink(&self) -> Arc<dyn GradientSink> {
        self.buckets.clone()
    }

    /// Prepares for a forward and a backward pass. `last` marks the last passes of a step. Earlier passes only accumulate
    /// gradients, as under PyTorch's `no_sync`.
    pub(super) fn prepare_for_backward(&self, step: u64, last: bool) {
        self.buckets.prepare_for_backward(step, last && self.options.overlap);
    }

    /// Waits after a step's last backward pass until all buckets are summed over all ranks, and returns the gradients.
    ///
    /// In the first step all buckets are launched here, because the order in which gradients become ready is known only now.
    /// Rank 0's order decides the buckets of all ranks, already for the first reduction. So a run's sums do not depend on where
    /// the run was resumed.
    ///
    /// # Errors
    /// A rank has ended, or makes another call.
    pub(super) fn finalize_backward(&self, device: &Device) -> Result<ReducedGradients, Failure> {
        let buckets = match self.buckets.buckets() {
            Some(buckets) => buckets,
            None => self.sync_bucket_indices()?,
        };
        let used = self.buckets.flush();
        let mut gradients: Vec<Option<Tensor<1>>> = (0..self.buckets.lengths.len()).map(|_| None).collect();
        let (mut spans, mut loss) = (Vec::with_capacity(buckets.len()), None);
        if let Some(side_stream) = &self.side_stream {
            side_stream.lock().join();
        }
        let mut started = self.buckets.take_started().into_iter();
        for (index, bucket) in buckets.iter().enumerate() {
            let (values, span) = match started.next() {
                Some(result) => result?,
                None => self
                    .done
                    .recv()
                    .map_err(|_| Failure::run("the reducing thread has died", "please report this"))??,
            };
            spans.push(span);
            let flat = match values {
                BucketValues::Host(values) => {
                    Tensor::<1>::from_data(TensorData::new(values, [bucket.elements]), device)
                }
                BucketValues::Shared(values) => ops::tensor_from_blob(self.buckets.arrays.lend(index, values), device),
                BucketValues::Device(mut tensors, done) => {
                    done.wait();
                    tensors.remove(0)
                }
                BucketValues::OnSideStream(sum) => *sum,
            };
            let mut start = 0;
            for &parameter in &bucket.parameters {
                let end = start + self.buckets.lengths[parameter];
                // A gradient is a view of its bucket (`gradient_as_bucket_view`).
                gradients[parameter] = Some(flat.clone().slice(start..end));
                start = end;
            }
            if flat.dims()[0] > start {
                loss = Some(flat.slice(start..start + 1));
            }
        }
        self.bytes.set(spans.iter().map(|span| span.bytes as u64).sum());
        Ok(ReducedGradients { gradients: FlatGradients::from_tensors(gradients), loss, used, buckets: spans })
    }

    /// Assigns the buckets by rank 0's ready order (`sync_bucket_indices` of `reducer.cpp`).
    fn sync_bucket_indices(&self) -> Result<Vec<Bucket>, Failure> {
        let mut order: Vec<i64> = self.buckets.ready_order().into_iter().map(|index| index as i64).collect();
        self.comm.broadcast(&mut order, 0)?;
        let order: Vec<usize> = order.into_iter().map(|index| index as usize).collect();
        let buckets = self.options.assignment(&order, &self.buckets.lengths);
        self.buckets.assign_buckets(buckets.clone());
        Ok(buckets)
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        // Ends the thread's loop. No forward pass can hold the sink now, since it would borrow the strategy.
        self.buckets.disconnect();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl ReducerOptions {
    fn assignment(&self, order: &[usize], lengths: &[usize]) -> Vec<Bucket> {
        buckets::compute_bucket_assignment(order, lengths, self.first_bucket_bytes, self.bucket_bytes_cap)
    }
}

/// Sums a bucket in its array. Returns the sum and the bytes that this rank contributes.
fn all_reduce_shared(values: SharedArray<f32>, comm: &Communicator) -> Result<(BucketValues, usize), CommError> {
    let (count, bytes) = (values.len(), size_of_val(&*values));
    Ok((BucketValues::Shared(comm.all_reduce_shared(values, count, ReduceOp::Sum)?), bytes))
}

/// All-reduces buckets in ordinary memory, in the wire format of `parallel.compression`.
///
/// Source: `fp16_compress_hook` and `bf16_compress_hook` of `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`.
enum CompressHook {
    /// No compression. Each bucket gets its own array, and keeps it.
    F32,
    /// f16. All buckets use one array in turn. It is as long as the longest bucket so far.
    F16(Option<SharedArray<f16>>),
    /// bf16, with one array as for `F16`.
    Bf16(Option<SharedArray<bf16>>),
}

impl CompressHook {
    fn new(compression: Compression) -> Self {
        match compression {
            Compression::None => Self::F32,
            Compression::Fp16 => Self::F16(None),
            Compression::Bf16 => Self::Bf16(None),
        }
    }

    /// Sums `values` over ranks. Returns the sum and the bytes that this rank contributes.
    fn all_reduce(&mut self, mut values: Vec<f32>, comm: &Communicator) -> Result<(BucketValues, usize), CommError> {
        macro_rules! all_reduce_16_bits {
            ($array:expr, $ty:ty) => {{
                let count = values.len();
                let mut array = match $array.take().filter(|array| array.len() >= count) {
                    Some(array) => array,
                    None => comm.shared_array::<$ty>(count)?,
                };
                comm::round_to_16_bits(&values, &mut array[..count]);
                let array = $array.insert(comm.all_reduce_shared(array, count, ReduceOp::Sum)?);
                comm::widen_16_bits(&array[..count], &mut values);
                Ok((BucketValues::Host(values), size_of_val(&array[..count])))
            }};
        }
        match self {
            Self::F32 => {
                let mut array = comm.shared_array(values.len())?;
                array.copy_from_slice(&values);
                drop(values);
                all_reduce_shared(array, comm)
            }
            Self::F16(array) => all_reduce_16_bits!(array, f16),
            Self::Bf16(array) => all_reduce_16_bits!(array, bf16),
        }
    }
}

/// Starts the reducing thread. `reduce` returns a bucket's sum and the bytes that this rank contributes.
fn start_thread(
    inbox: Receiver<BucketWork>,
    status: &WorkerStatus,
    mut reduce: impl FnMut(BucketValues) -> Result<(BucketValues, usize), CommError> + Send + 'static,
) -> Result<(Receiver<BucketResult>, JoinHandle<()>), Failure> {
    let (results, done) = channel();
    let status = status.clone();
    let mut reduce_bucket = move |work: BucketWork| {
        let BucketWork { step, index, bucket_count, values, queued, enqueued } = work;
        status.set_status(format_args!("step {step}: reducing bucket {} of {bucket_count}", index + 1));
        let started = Instant::now();
        let (values, bytes) = reduce(values)?;
        drop(enqueued);
        let finished = Instant::now();
        status.set_status(format_args!("step {step}: bucket {} of {bucket_count} is reduced", index + 1));
        Ok((values, BucketSpan { step, bucket: index, bytes, queued, started, finished }))
    };
    let serve = move || {
        for work in inbox {
            if results.send(reduce_bucket(work)).is_err() {
                break;
            }
        }
    };
    let thread = std::thread::Builder::new().name("reducer".into()).spawn(serve);
    let thread = thread
        .map_err(|error| Failure::run(format!("cannot start the reducing thread: {error}"), "check ulimit -u"))?;
    Ok((done, thread))
}
