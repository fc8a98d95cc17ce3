//! Where gradients land during backward: a bucket leaves for the other ranks as soon as it is full.
//!
//! Buckets leave in their order on every rank, whatever the order in which they fill up, so that all ranks reduce the same
//! one at the same time.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::Sender},
    time::Instant,
};

use burn::{
    module::ParamId,
    tensor::{Device, Tensor},
};
use models::{GradientSink, ParameterInfo};

use super::{
    arrays::Arrays,
    buckets::{self, Bucket},
};
use crate::device::StreamEvent;
use comm::Shared;

/// A full bucket on its way.
pub(super) struct Packed {
    pub step: u64,
    pub index: usize,
    pub of: usize,
    pub values: Values,
    pub queued: Instant,
}

/// The gradients of a bucket.
pub(super) enum Values {
    /// One after the other.
    Host(Vec<f32>),
    /// The same, in the bucket's own array.
    Shared(Shared<f32>),
    /// Each for itself, where it is, and a mark behind the work that makes them.
    Device(Vec<Tensor<1>>, StreamEvent),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Collector {
    places: HashMap<ParamId, usize>,
    pub lengths: Vec<usize>,
    state: Mutex<State>,
    /// Where gradients stay, unless they are reduced on the host.
    device: Option<Device>,
    /// Where buckets are packed, those that have an array.
    pub arrays: Arc<Arrays>,
    /// To the thread that reduces.
    outbox: Mutex<Sender<Packed>>,
}

#[derive(Debug, Default)]
struct State {
    step: u64,
    /// What has arrived and not left, in registration order.
    gradients: Vec<Option<Tensor<1>>>,
    /// Uses in this forward pass whose gradients are still to come.
    expected: Vec<u32>,
    /// Parameters that got a gradient in this step.
    used: Vec<bool>,
    /// The order in which gradients became complete in this backward pass.
    order: Vec<usize>,
    /// Once it is known.
    layout: Option<Layout>,
    /// Whether full buckets leave during this backward pass.
    open: bool,
    /// The next bucket to leave.
    next: usize,
}

#[derive(Debug)]
struct Layout {
    buckets: Vec<Bucket>,
    /// The bucket of each parameter.
    home: Vec<usize>,
    /// Incomplete gradients of each bucket.
    missing: Vec<usize>,
}

impl Collector {
    /// Gradients stay on `device` where one is given.
    pub(super) fn new(parameters: &[ParameterInfo], outbox: Sender<Packed>, device: Option<Device>) -> Self {
        let count = parameters.len();
        let state = State {
            gradients: (0..count).map(|_| None).collect(),
            expected: vec![0; count],
            used: vec![false; count],
            ..State::default()
        };
        Self {
            places: parameters.iter().enumerate().map(|(place, info)| (info.id, place)).collect(),
            lengths: buckets::lengths(parameters),
            state: Mutex::new(state),
            device,
            arrays: Arc::default(),
            outbox: Mutex::new(outbox),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the buckets for good.
    pub(super) fn lay_out(&self, buckets: Vec<Bucket>) {
        let mut home = vec![0; self.lengths.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            bucket.parameters.iter().for_each(|&parameter| home[parameter] = index);
        }
        let missing = vec![0; buckets.len()];
        self.lock().layout = Some(Layout { buckets, home, missing });
    }

    /// The buckets, once they are set.
    pub(super) fn buckets(&self) -> Option<Vec<Bucket>> {
        self.lock().layout.as_ref().map(|layout| layout.buckets.clone())
    }

    /// Drops the way to the reducing thread, whose loop then ends.
    pub(super) fn replace_outbox(&self, outbox: Sender<Packed>) {
        *self.outbox.lock().unwrap_or_else(PoisonError::into_inner) = outbox;
    }

    /// Before each forward pass; `last` of those of a step, whose backward pass completes the gradients.
    pub(super) fn begin(&self, step: u64, last: bool) {
        let state = &mut *self.lock();
        state.step = step;
        state.expected.fill(0);
        state.order.clear();
        state.open = last && state.layout.is_some();
        if let Some(layout) = &mut state.layout {
            layout.missing.iter_mut().zip(&layout.buckets).for_each(|(missing, b)| *missing = b.parameters.len());
        }
    }

    /// After the last backward pass: the order in which the gradients became complete, those that have none last.
    pub(super) fn order(&self) -> Vec<usize> {
        let mut order = self.lock().order.clone();
        let rest: Vec<usize> = (0..self.lengths.len()).rev().filter(|index| !order.contains(index)).collect();
        order.extend(rest);
        order
    }

    /// After the last backward pass: sends what has not left, zeros for what has no gradient. Gives which parameters have.
    pub(super) fn close(&self) -> Vec<bool> {
        let state = &mut *self.lock();
        state.open = false;
        while self.send_next(state) {}
        state.next = 0;
        let count = state.used.len();
        std::mem::replace(&mut state.used, vec![false; count])
    }

    /// Packs the next bucket and sends it off; `false` after the last.
    fn send_next(&self, state: &mut State) -> bool {
        let Some((layout, bucket)) = state.layout.as_ref().and_then(|l| l.buckets.get(state.next).map(|b| (l, b)))
        else {
            return false;
        };
        let values = self.pack(state.next, bucket, &mut state.gradients);
        let (of, queued) = (layout.buckets.len(), Instant::now());
        let packed = Packed { step: state.step, index: state.next, of, values, queued };
        state.next += 1;
        // the thread ends with this strategy, not before
        let _ = self.outbox.lock().unwrap_or_else(PoisonError::into_inner).send(packed);
        true
    }

    /// Takes the gradients of bucket number `index`, zeros for parameters that have none, into its array if it is free.
    fn pack(&self, index: usize, bucket: &Bucket, gradients: &mut [Option<Tensor<1>>]) -> Values {
        let parameters = &bucket.parameters;
        if let Some(device) = &self.device {
            let zeros = |parameter: usize| Tensor::zeros([self.lengths[parameter]], device);
            let gradient = |&parameter: &usize| gradients[parameter].take().unwrap_or_else(|| zeros(parameter));
            let tensors = parameters.iter().map(gradient).collect();
            return Values::Device(tensors, StreamEvent::record(device));
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
            let (place, behind) = rest.split_at_mut(self.lengths[parameter]);
            match gradients[parameter].take() {
                Some(gradient) => {
                    let gradient = gradient.into_data();
                    place.copy_from_slice(gradient.as_slice::<f32>().expect("gradients are f32"));
                }
                None => place.fill(0.0),
            }
            rest = behind;
        }
        array.map_or(Values::Host(fresh), Values::Shared)
    }
}

impl GradientSink for Collector {
    fn used(&self, parameter: ParamId) {
        if let Some(&place) = self.places.get(&parameter) {
            self.lock().expected[place] += 1;
        }
    }

    fn ready(&self, parameter: ParamId, gradient: Tensor<1>) {
        let Some(&place) = self.places.get(&parameter) else { return };
        let state = &mut *self.lock();
        let slot = &mut state.gradients[place];
        *slot = Some(match slot.take() {
            Some(sum) => sum + gradient,
            None => gradient,
        });
        state.used[place] = true;
        state.expected[place] = state.expected[place].saturating_sub(1);
        if state.expected[place] > 0 {
            return;
        }
        state.order.push(place);
        if !state.open {
            return;
        }
        if let Some(layout) = &mut state.layout {
            layout.missing[layout.home[place]] -= 1;
        }
        while state.layout.as_ref().is_some_and(|layout| layout.missing.get(state.next) == Some(&0)) {
            self.send_next(state);
        }
    }
}
