//! Counts the bytes of the tensors that kernels read and write, for measurements: [`count`].

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::logging::{LaunchObservation, LaunchObserver};

use super::bf16_weights::{MemoryId, memory_id};
use super::counters::COUNTERS;
use crate::traffic::Traffic;

/// The count of a thread.
#[derive(Default)]
struct Count {
    /// Bytes of the arguments of the next launch.
    arguments: BTreeMap<MemoryId, usize>,
    traffic: Traffic,
}

thread_local! {
    static COUNT: RefCell<Option<Count>> = const { RefCell::new(None) };
}

/// Notes an argument of the next launch. A tensor that is several arguments counts once.
pub(super) fn note(tensor: &CubeTensor, bytes: usize) {
    // A launch uses few of the counters.
    if tensor.dtype == DType::U32 && tensor.meta.num_elements() == COUNTERS {
        return;
    }
    COUNT.with_borrow_mut(|count| {
        if let Some(Count { arguments, .. }) = count {
            let known = arguments.entry(memory_id(tensor)).or_default();
            *known = bytes.max(*known);
        }
    });
}

struct Launches;

impl LaunchObserver for Launches {
    fn launched(&self, _kernel: &'static str) {
        COUNT.with_borrow_mut(|count| {
            let Some(Count { arguments, traffic }) = count else { return };
            traffic.kernels += 1;
            traffic.others += usize::from(arguments.is_empty());
            traffic.bytes += std::mem::take(arguments).into_values().sum::<usize>();
        });
    }
}

/// See [`count`](crate::traffic::count).
pub(crate) fn count<T>(work: impl FnOnce() -> T) -> (T, Traffic) {
    COUNT.set(Some(Count::default()));
    let observation = LaunchObservation::new(Arc::new(Launches));
    let result = work();
    drop(observation);
    let counted = COUNT.take().expect("the count was started above");
    (result, counted.traffic)
}
