//! Buckets of gradients: their assignment, how they fill during backward, and their memory.
//!
//! This file has the part of PyTorch's `c10d::Reducer` (`reducer.cpp`) that runs during backward. `reducer.rs` has the rest.
//!
//! | here | `reducer.cpp` |
//! | --- | --- |
//! | [`compute_bucket_assignment`] | `compute_bucket_assignment_by_size` |
//! | [`GradientBuckets::assign_buckets`] | `initialize_buckets` |
//! | [`GradientBuckets::prepare_for_backward`] | `prepare_for_backward`, `reset_bucket_counting` |
//! | [`GradientBuckets::mark_ready`] | `autograd_hook`, `mark_variable_ready` |
//! | [`GradientBuckets::launch_next_bucket`] | `mark_bucket_ready`, `all_reduce_bucket` |
//! | [`GradientBuckets::flush`] | `mark_variable_ready` of the unused parameters |
//! | [`BucketWork`] | `GradBucket` |
//! | [`BucketView`](super::bucket_arrays::BucketView) | `bucket_views_out` with `gradient_as_bucket_view=True` |
//!
//! Every rank launches buckets in the order of their numbers, even if a later bucket is full first. So all ranks reduce the same
//! bucket at the same time (`next_bucket_` in `reducer.cpp`).

use std::{
    collections::HashMap,
    fmt::{Debug, Formatter},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Instant,
};

use burn::{
    module::ParamId,
    tensor::{Device, Tensor},
};
use models::{GradientSink, ParameterInfo};
use parking_lot::Mutex;

use super::bucket_arrays::BucketArrays;
use super::reducer::{BucketResult, DeviceCollectives};
use crate::{device::StreamEvent, timeline::BucketSpan};
use comm::SharedArray;

/// Gradients that are reduced in one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// The parameters, as indices in registration order. They are listed in the order of their gradients in the bucket.
    pub parameters: Vec<usize>,
    /// Number of elements of all these parameters.
    pub elements: usize,
}

/// Assigns parameters to buckets, in the order `order`. `lengths` are the parameters' numbers of elements, in registration
/// order. A bucket is complete once it has `first_bucket_bytes` (the first bucket) or `bucket_bytes_cap` (the other buckets). The
/// last bucket may be smaller. An element has 4 bytes (f32).
///
/// Source: `torch.distributed._compute_bucket_assignment_by_size` as `DistributedDataParallel` calls it. The limit of the first
/// bucket is small, so that communication starts early.
pub fn compute_bucket_assignment(
    order: &[usize],
    lengths: &[usize],
    first_bucket_bytes: usize,
    bucket_bytes_cap: usize,
) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    let mut open = Bucket { parameters: Vec::new(), elements: 0 };
    for (position, &index) in order.iter().enumerate() {
        open.parameters.push(index);
        open.elements += lengths[index];
        let full = if buckets.is_empty() { first_bucket_bytes } else { bucket_bytes_cap };
        if open.elements * size_of::<f32>() >= full || position + 1 == order.len() {
            buckets.push(std::mem::replace(&mut open, Bucket { parameters: Vec::new(), elements: 0 }));
        }
    }
    buckets
}

/// Returns the number of elements of each parameter.
pub fn lengths(parameters: &[ParameterInfo]) -> Vec<usize> {
    parameters.iter().map(ParameterInfo::len).collect()
}

/// Returns the order that PyTorch assumes before it has seen a backward pass: reverse registration.
pub fn reverse_registration_order(count: usize) -> Vec<usize> {
    (0..count).rev().collect()
}

/// One bucket that is sent to the reducing thread.
pub(super) struct BucketWork {
    pub step: u64,
    pub index: usize,
    /// Number of buckets in the step.
    pub bucket_count: usize,
    pub values: BucketValues,
    /// When the bucket was launched.
    pub queued: Instant,
    /// Set if the backward pass waits until the reduction is enqueued. The reducing thread then drops the sender.
    pub enqueued: Option<Sender<()>>,
}

/// The gradients of a bucket.
pub(super) enum BucketValues {
    /// Flat, in ordinary memory.
    Host(Vec<f32>),
    /// Flat, in the bucket's array, which all ranks of this host map.
    Shared(SharedArray<f32>),
    /// One tensor per gradient, on the gradients' device, and an event that was recorded after the work that computes them.
    Device(Vec<Tensor<1>>, StreamEvent),
    /// The sum over ranks, which a second stream computes while the backward pass runs.
    OnSideStream(Box<Tensor<1>>),
}

/// The buckets of a rank. The hooks of the backward pass fill the buckets. A full bucket is sent to the reducing thread, or its
/// reduction is started on a second stream (`side_stream`).
pub(super) struct GradientBuckets {
    index_of: HashMap<ParamId, usize>,
    /// Elements of each parameter, in registration order.
    pub lengths: Vec<usize>,
    state: Mutex<BucketState>,
    /// The gradients' device, if gradients are reduced on it. `None` if they are reduced on the CPU.
    device: Option<Device>,
    /// Collectives that the backward pass itself starts, without the reducing thread ([`DeviceCollectives::runs_on_side_stream`]).
    side_stream: Option<Arc<Mutex<dyn DeviceCollectives>>>,
    /// The buckets' memory, if buckets are reduced on the CPU.
    pub arrays: Arc<BucketArrays>,
    /// Sends buckets to the reducing thread.
    queue: Mutex<Sender<BucketWork>>,
    /// Whether the backward pass waits until the reduction of each full bucket is enqueued.
    in_order: bool,
}

#[derive(Default)]
struct BucketState {
    step: u64,
    /// Gradients that have arrived and are not launched yet, in registration order.
    gradients: Vec<Option<Tensor<1>>>,
    /// Per parameter: the number of uses in this forward pass whose gradients have not arrived yet.
    pending: Vec<u32>,
    /// Per parameter: whether it got a gradient in this step.
    used: Vec<bool>,
    /// The order in which gradients became ready in this backward pass.
    ready_order: Vec<usize>,
    /// `None` until the buckets are assigned.
    assignment: Option<Assignment>,
    /// Whether full buckets are launched during this backward pass (`require_backward_grad_sync`).
    sync: bool,
    /// The next bucket to launch.
    next_bucket: usize,
    /// The step's loss `[1]`, which the last bucket sums too.
    loss: Option<Tensor<1>>,
    /// The results of the buckets that the backward pass has started, with [`GradientBuckets::side_stream`].
    started: Vec<BucketResult>,
}

#[derive(Debug)]
struct Assignment {
    buckets: Vec<Bucket>,
    /// Per parameter: the index of its bucket.
    bucket_of: Vec<usize>,
    /// Per bucket: the number of gradients that are not ready.
    pending: Vec<usize>,
}

/// Message for buckets that [`GradientBuckets::launch_next_bucket`] has found.
const ASSIGNED: &str = "`launch_next_bucket` has found the bucket";

impl GradientBuckets {
    /// Makes buckets that are not assigned yet. If `device` is set, gradients stay on it. With `in_order`, the backward pass
    /// waits until the reduction of each full bucket is enqueued. With `side_stream`, the backward pass itself starts the
    /// reductions.
    pub(super) fn new(
        parameters: &[ParameterInfo],
        queue: Sender<BucketWork>,
        device: Option<Device>,
        side_stream: Option<Arc<Mutex<dyn DeviceCollectives>>>,
        in_order: bool,
    ) -> Self {
        let count = parameters.len();
        let state = BucketState {
            gradients: (0..count).map(|_| None).collect(),
            pending: vec![0; count],
            used: vec![false; count],
            ..BucketState::default()
        };
        Self {
            index_of: parameters.iter().enumerate().map(|(index, info)| (info.id, index)).collect(),
            lengths: lengths(parameters),
            state: Mutex::new(state),
            device,
            side_stream,
            arrays: Arc::default(),
            queue: Mutex::new(queue),
            in_order,
        }
    }

    /// Sets the buckets, once for the whole run.
    pub(super) fn assign_buckets(&self, buckets: Vec<Bucket>) {
        let elements = || buckets.iter().map(|bucket| bucket.elements).collect::<Vec<_>>();
        tracing::debug!(elements = ?elements(), "assigned {} buckets", buckets.len());
        let mut bucket_of = vec![0; self.lengths.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            bucket.parameters.iter().for_each(|&parameter| bucket_of[parameter] = index);
        }
        let pending = vec![0; buckets.len()];
        self.state.lock().assignment = Some(Assignment { buckets, bucket_of, pending });
    }

    /// Returns the buckets, or `None` before they are assigned.
    pub(super) fn buckets(&self) -> Option<Vec<Bucket>> {
        self.state.lock().assignment.as_ref().map(|assignment| assignment.buckets.clone())
    }

    /// Drops the sender to the reducing thread, so that the thread's loop ends.
    pub(super) fn disconnect(&self) {
        let (queue, _) = std::sync::mpsc::channel();
        *self.queue.lock() = queue;
    }

    /// Resets the counts before a forward pass. With `sync` the following backward pass launches full buckets. Without `sync`
    /// gradients only accumulate, as under PyTorch's `no_sync`.
    pub(super) fn prepare_for_backward(&self, step: u64, sync: bool) {
        let state = &mut *self.state.lock();
        state.step = step;
        state.pending.fill(0);
        state.ready_order.clear();
        state.sync = sync && state.assignment.is_some();
        if let Some(Assignment { buckets, pending, .. }) = &mut state.assignment {
            pending.iter_mut().zip(buckets).for_each(|(pending, bucket)| *pending = bucket.parameters.len());
        }
    }

    /// Sums `loss` `[1]` over all ranks together with the last bucket of the following backward pass.
    pub(super) fn sum_loss(&self, loss: Tensor<1>) {
        self.state.lock().loss = Some(loss);
    }

    /// Returns the results of the buckets that the backward pass has started.
    pub(super) fn take_started(&self) -> Vec<BucketResult> {
        std::mem::take(&mut self.state.lock().started)
    }

    /// Adds the gradient of one use of a parameter, and launches the buckets that are full now. The backward pass calls this
    /// method as soon as the gradient is computed.
    fn mark_ready(&self, parameter: ParamId, gradient: Tensor<1>) {
        let Some(&index) = self.index_of.get(&parameter) else { return };
        let state = &mut *self.state.lock();
        let slot = &mut state.gradients[index];
        *slot = Some(match slot.take() {
            Some(sum) => sum + gradient,
            None => gradient,
        });
        state.used[index] = true;
        state.pending[index] = state.pending[index].saturating_sub(1);
        if state.pending[index] > 0 {
            return;
        }
        state.ready_order.push(index);
        if !state.sync {
            return;
        }
        if let Some(assignment) = &mut state.assignment {
            assignment.pending[assignment.bucket_of[index]] -= 1;
        }
        while state.assignment.as_ref().is_some_and(|all| all.pending.get(state.next_bucket) == Some(&0)) {
            self.launch_next_bucket(state);
        }
    }

    /// Returns the order in which the last backward pass made gradients ready. Parameters without a gradient come last.
    pub(super) fn ready_order(&self) -> Vec<usize> {
        let mut order = self.state.lock().ready_order.clone();
        let rest: Vec<usize> = (0..self.lengths.len()).rev().filter(|index| !order.contains(index)).collect();
        order.extend(rest);
        order
    }

    /// Launches the remaining buckets after a step's last backward pass, with zeros for parameters without a gradient. Returns
    /// whether this rank used the parameter, for each parameter.
    pub(super) fn flush(&self) -> Vec<bool> {
        let state = &mut *self.state.lock();
        state.sync = false;
        while self.launch_next_bucket(state) {}
        state.next_bucket = 0;
        let count = state.used.len();
        std::mem::replace(&mut state.used, vec![false; count])
    }

    /// Starts the reduction of the next bucket, on the side stream or in the reducing thread. Returns `false` after the last one.
    fn launch_next_bucket(&self, state: &mut BucketState) -> bool {
        let index = state.next_bucket;
        if state.assignment.as_ref().is_none_or(|all| index >= all.buckets.len()) {
            return false;
        }
        state.next_bucket += 1;
        match (&self.side_stream, &self.device) {
            (Some(side_stream), Some(device)) => self.start_on_side_stream(index, state, side_stream, device),
            _ => self.send_to_thread(index, state),
        }
        true
    }

    /// Starts the reduction of bucket `index` on the side stream. The last bucket sums the step's loss too.
    fn start_on_side_stream(
        &self,
        index: usize,
        state: &mut BucketState,
        side_stream: &Mutex<dyn DeviceCollectives>,
        device: &Device,
    ) {
        let BucketState { step, assignment, gradients, loss, started, .. } = state;
        let Assignment { buckets, .. } = assignment.as_ref().expect(ASSIGNED);
        let (bucket, queued) = (&buckets[index], Instant::now());
        let mut tensors = self.tensors(bucket, gradients, device);
        if index + 1 == buckets.len() {
            tensors.extend(loss.take());
        }
        let result = side_stream.lock().start_all_reduce(tensors).map(|(sum, bytes)| {
            // Leave out the bytes of the loss, so that steps with and without a graph report the same number of bytes.
            let bytes = bytes / sum.dims()[0] * bucket.elements;
            let (step, finished) = (*step, Instant::now());
            let span = BucketSpan { step, bucket: index, bytes, queued, started: queued, finished };
            (BucketValues::OnSideStream(Box::new(sum)), span)
        });
        started.push(result);
    }

    /// Packs bucket `index` and sends it to the reducing thread. With [`Self::in_order`], waits until the reduction is enqueued.
    fn send_to_thread(&self, index: usize, state: &mut BucketState) {
        let BucketState { step, assignment, gradients, .. } = state;
        let Assignment { buckets, .. } = assignment.as_ref().expect(ASSIGNED);
        let values = self.pack(index, &buckets[index], gradients);
        let (enqueued, wait) = if self.in_order { Some(channel()).unzip() } else { (None, None) };
        let queued = Instant::now();
        let work = BucketWork { step: *step, index, bucket_count: buckets.len(), values, queued, enqueued };
        // An error means that the thread has ended. The reducer notices this when it waits for the bucket.
        let _ = self.queue.lock().send(work);
        // The thread sends nothing here: the wait ends when the thread drops the sender.
        if let Some(wait) = wait {
            let wait: Receiver<()> = wait;
            let _ = wait.recv();
        }
    }

    /// Takes the gradients of `bucket` on `device`, with zeros for parameters without a gradient.
    fn tensors(&self, bucket: &Bucket, gradients: &mut [Option<Tensor<1>>], device: &Device) -> Vec<Tensor<1>> {
        let zeros = |parameter: usize| Tensor::zeros([self.lengths[parameter]], device);
        let gradient = |&parameter: &usize| gradients[parameter].take().unwrap_or_else(|| zeros(parameter));
        bucket.parameters.iter().map(gradient).collect()
    }

    /// Takes the gradients of bucket `index`, with zeros for parameters without a gradient. On the CPU the gradients are copied
    /// into the bucket's array, if the array is free.
    fn pack(&self, index: usize, bucket: &Bucket, gradients: &mut [Option<Tensor<1>>]) -> BucketValues {
        let parameters = &bucket.parameters;
        if let Some(device) = &self.device {
            return BucketValues::Device(self.tensors(bucket, gradients, device), StreamEvent::record(device));
        }
        let mut array = self.arrays.take(index);
        let mut fresh = Vec::new();
        let mut rest = match &mut array {
            Some(array) => &mut array[..],
            None => {
                fresh.resize(bucket.elements, 0.0);
                &mut fresh[..]
            }
        };
        for &parameter in parameters {
            let (slot, behind) = rest.split_at_mut(self.lengths[parameter]);
            match gradients[parameter].take() {
                Some(gradient) => {
                    let gradient = gradient.into_data();
                    slot.copy_from_slice(gradient.as_slice::<f32>().expect("gradients are f32"));
                }
                None => slot.fill(0.0),
            }
            rest = behind;
        }
        array.map_or(BucketValues::Host(fresh), BucketValues::Shared)
    }
}

impl Debug for GradientBuckets {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GradientBuckets").field("lengths", &self.lengths).finish_non_exhaustive()
    }
}

/// The hooks on the parameters (`models/src/hook.rs`) call these methods on the thread that runs the pass.
impl GradientSink for GradientBuckets {
    fn used(&self, parameter: ParamId) {
        if let Some(&index) = self.index_of.get(&parameter) {
            self.state.lock().pending[index] += 1;
        }
    }

    fn ready(&self, parameter: ParamId, gradient: Tensor<1>) {
        self.mark_ready(parameter, gradient);
    }
}
