//! The thread that reduces buckets, while the backward pass goes on.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, channel},
    },
    thread::JoinHandle,
    time::Instant,
};

use burn::tensor::{Device, Tensor, TensorData};
use half::{bf16, f16};
use models::{GradientSink, ParameterInfo};

use super::{
    buckets::{self, Bucket},
    collector::{Collector, Packed, Values},
};
use crate::{
    config::Compression, device::StreamEvent, failure::Failure, optim::FlatGradients, report::timeline::BucketSpan,
};
use comm::{CommError, Communicator, ReduceOp, Shared};
use launch::WorkerStatus;

/// What a step's reduction gave.
pub(super) struct Sums {
    /// Summed over ranks. A parameter that this rank did not use has a gradient all the same: others may have used it.
    pub gradients: FlatGradients,
    /// Parameters that this rank used.
    pub used: Vec<bool>,
    pub buckets: Vec<BucketSpan>,
}

/// How buckets are cut, and what travels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    /// Bytes of the first bucket.
    pub first: usize,
    /// Bytes of the others.
    pub limit: usize,
    pub overlap: bool,
    pub compression: Compression,
}

/// Adds gradients up where they are.
pub(super) trait OnDevice: Send {
    /// Enqueues the sum over ranks of these tensors, one behind the other, made before `after`. Gives it, a mark that whoever
    /// uses it has to follow, and the bytes that a rank puts in.
    fn sum(
        &mut self,
        tensors: Vec<Tensor<1>>,
        after: &StreamEvent,
    ) -> Result<(Tensor<1>, StreamEvent, usize), CommError>;
    /// Waits until everything that was enqueued is done.
    fn settle(&mut self) -> Result<(), CommError>;
}

fn lock<'a>(sums: &'a Arc<Mutex<dyn OnDevice + 'static>>) -> MutexGuard<'a, dyn OnDevice + 'static> {
    sums.lock().unwrap_or_else(PoisonError::into_inner)
}

type Outcome = Result<(Values, BucketSpan), CommError>;

/// See the module.
pub(super) struct Reducer {
    collector: Arc<Collector>,
    done: Receiver<Outcome>,
    comm: Communicator,
    options: Options,
    thread: Option<JoinHandle<()>>,
    /// Where gradients stay on their device; shared with the thread.
    on_device: Option<Arc<Mutex<dyn OnDevice>>>,
}

impl Reducer {
    /// With `on_device` gradients stay where they are.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn new(
        parameters: &[ParameterInfo],
        comm: &Communicator,
        status: &WorkerStatus,
        options: Options,
        on_device: Option<(Device, Arc<Mutex<dyn OnDevice>>)>,
    ) -> Result<Self, Failure> {
        let (outbox, inbox) = channel();
        let mut wire = Wire::new(options.compression);
        let (thread_comm, on_device) = (comm.clone(), on_device.map(|(device, sums)| (Some(device), Some(sums))));
        let (device, on_device) = on_device.unwrap_or_default();
        let sums = on_device.clone();
        let reduce = move |values| match (values, &sums) {
            (Values::Device(tensors, mark), Some(sums)) => {
                let (sum, done, bytes) = lock(sums).sum(tensors, &mark)?;
                Ok((Values::Device(vec![sum], done), bytes))
            }
            (Values::Device(..), None) => Err(CommError::usage("gradients stayed on a device that cannot add them up")),
            (Values::Host(values), _) => wire.all_reduce(values, &thread_comm),
            (Values::Shared(values), _) => shared_sum(values, &thread_comm),
        };
        let (done, thread) = start(inbox, status, reduce)?;
        let collector = Arc::new(Collector::new(parameters, outbox, device));
        if !options.overlap {
            let order = buckets::assumed_order(parameters.len());
            collector.lay_out(buckets::assign(&order, &collector.lengths, options.first, options.limit));
        }
        Ok(Self { collector, done, comm: comm.clone(), options, thread: Some(thread), on_device })
    }

    /// After a step: makes sure that the reductions that were enqueued on a GPU are done, and nobody was missing.
    ///
    /// # Errors
    /// Names the rank that is missing or gone.
    pub(super) fn settle(&self) -> Result<(), Failure> {
        Ok(self.on_device.as_ref().map_or(Ok(()), |sums| lock(sums).settle())?)
    }

    /// Where a forward pass's gradients shall go.
    pub(super) fn sink(&self) -> Arc<dyn GradientSink> {
        self.collector.clone()
    }

    /// Before each forward pass; `last` of those of a step.
    pub(super) fn begin(&self, step: u64, last: bool) {
        self.collector.begin(step, last && self.options.overlap);
    }

    /// After a step's last backward pass: waits until all buckets are summed over all ranks.
    ///
    /// In the first step, all are reduced now: the order in which gradients become ready is known only then. It decides
    /// the buckets from here on, rank 0's for all, and from the first reduction on, so that a run's sums do not depend on
    /// where it was resumed.
    ///
    /// # Errors
    /// A rank is gone, or disagrees.
    pub(super) fn finish(&self, device: &Device) -> Result<Sums, Failure> {
        let buckets = match self.collector.buckets() {
            Some(buckets) => buckets,
            None => self.agree_on_buckets()?,
        };
        let used = self.collector.close();
        let mut gradients: Vec<Option<Tensor<1>>> = (0..self.collector.lengths.len()).map(|_| None).collect();
        let mut reduced = Vec::with_capacity(buckets.len());
        for bucket in &buckets {
            let (values, times) =
                self.done.recv().map_err(|_| Failure::run("the reducing thread has died", "please report this"))??;
            reduced.push(times);
            let flat = match values {
                Values::Host(values) => Tensor::<1>::from_data(TensorData::new(values, [bucket.elements]), device),
                Values::Shared(values) => {
                    ops::tensor_over(self.collector.arrays.lend(reduced.len() - 1, values), device)
                }
                Values::Device(mut tensors, done) => {
                    done.wait();
                    tensors.remove(0)
                }
            };
            let mut start = 0;
            for &parameter in &bucket.parameters {
                let end = start + self.collector.lengths[parameter];
                // a view: the bucket is the gradients' memory
                gradients[parameter] = Some(flat.clone().slice(start..end));
                start = end;
            }
        }
        Ok(Sums { gradients: FlatGradients::from_tensors(gradients), used, buckets: reduced })
    }

    fn agree_on_buckets(&self) -> Result<Vec<Bucket>, Failure> {
        let mut order: Vec<i64> = self.collector.order().into_iter().map(|index| index as i64).collect();
        self.comm.broadcast(&mut order, 0)?;
        let order: Vec<usize> = order.into_iter().map(|index| index as usize).collect();
        let buckets = buckets::assign(&order, &self.collector.lengths, self.options.first, self.options.limit);
        self.collector.lay_out(buckets.clone());
        Ok(buckets)
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        // the last sender: the thread's loop ends. A forward pass cannot be under way, it borrows the strategy.
        let (outbox, _) = channel();
        self.collector.replace_outbox(outbox);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sums a bucket in its array; gives it, and the bytes that a rank puts in.
fn shared_sum(values: Shared<f32>, comm: &Communicator) -> Result<(Values, usize), CommError> {
    let (count, bytes) = (values.len(), size_of_val(&*values));
    Ok((Values::Shared(comm.all_reduce_shared(values, count, ReduceOp::Sum)?), bytes))
}

/// How a bucket travels that comes in ordinary memory.
enum Wire {
    /// In an array of its own, which it keeps.
    F32,
    /// In an array that all buckets use in turn, as long as the longest so far.
    F16(Option<Shared<f16>>),
    Bf16(Option<Shared<bf16>>),
}

impl Wire {
    fn new(compression: Compression) -> Self {
        match compression {
            Compression::None => Self::F32,
            Compression::Fp16 => Self::F16(None),
            Compression::Bf16 => Self::Bf16(None),
        }
    }

    /// Sums `values` over ranks; gives the bytes that a rank puts in.
    fn all_reduce(&mut self, mut values: Vec<f32>, comm: &Communicator) -> Result<(Values, usize), CommError> {
        macro_rules! narrow {
            ($array:expr, $ty:ty) => {{
                let count = values.len();
                let mut array = match $array.take().filter(|array| array.len() >= count) {
                    Some(array) => array,
                    None => comm.shared::<$ty>(count)?,
                };
                array.iter_mut().zip(&values).for_each(|(narrow, &value)| *narrow = <$ty>::from_f32(value));
                let array = $array.insert(comm.all_reduce_shared(array, count, ReduceOp::Sum)?);
                values.iter_mut().zip(array.iter()).for_each(|(value, narrow)| *value = narrow.to_f32());
                Ok((Values::Host(values), size_of_val(&array[..count])))
            }};
        }
        match self {
            Self::F32 => {
                let mut array = comm.shared(values.len())?;
                array.copy_from_slice(&values);
                drop(values);
                shared_sum(array, comm)
            }
            Self::F16(array) => narrow!(array, f16),
            Self::Bf16(array) => narrow!(array, bf16),
        }
    }
}

/// Starts the thread: `reduce` gives the sums and the bytes that a rank puts in.
fn start(
    inbox: Receiver<Packed>,
    status: &WorkerStatus,
    mut reduce: impl FnMut(Values) -> Result<(Values, usize), CommError> + Send + 'static,
) -> Result<(Receiver<Outcome>, JoinHandle<()>), Failure> {
    let (results, done) = channel();
    let says = status.clone();
    let mut one = move |packed: Packed| {
        let Packed { step, index, of, values, queued } = packed;
        says.set_status(format_args!("step {step}: reducing bucket {} of {of}", index + 1));
        let started = Instant::now();
        let (values, bytes) = reduce(values)?;
        let finished = Instant::now();
        says.set_status(format_args!("step {step}: bucket {} of {of} is reduced", index + 1));
        Ok((values, BucketSpan { step, bucket: index, bytes, queued, started, finished }))
    };
    let serve = move || {
        for packed in inbox {
            if results.send(one(packed)).is_err() {
                break;
            }
        }
    };
    let thread = std::thread::Builder::new().name("reducer".into()).spawn(serve);
    let thread = thread
        .map_err(|error| Failure::run(format!("cannot start the reducing thread: {error}"), "check ulimit -u"))?;
    Ok((done, thread))
}
