//! Counters for kernels in which the last block merges the results of all blocks (`merge_parts.cu`, [`is_last_block`]).

use std::cell::RefCell;

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Number of counters per product. A launch has one or two products.
pub(super) const COUNTERS: usize = 1 << 16;

thread_local! {
    /// One pair per device. A thread's launches run one after the other, and each launch leaves its counters at zero.
    static ALL: RefCell<Vec<[CubeTensor; 2]>> = const { RefCell::new(Vec::new()) };
}

/// Returns two tensors of [`COUNTERS`] zeros on the device of `like`. Their addresses never change, because a recorded graph
/// contains them.
pub(super) fn counters(like: &CubeTensor) -> [CubeTensor; 2] {
    ALL.with_borrow_mut(|all| {
        if let Some(found) = all.iter().find(|[first, _]| first.device == like.device) {
            return found.clone();
        }
        let new =
            [0; 2].map(|_| zeros_client(like.client.clone(), like.device.clone(), Shape::from([COUNTERS]), DType::U32));
        all.push(new.clone());
        new
    })
}

/// Returns true in the last of the `count` blocks that call this function with `counter`. The counter is zero before and
/// afterwards. The last block sees everything that the other blocks wrote before their calls. All threads of a block must call
/// the function.
#[cube]
pub(super) fn is_last_block(counters: &mut [Atomic<u32>], counter: usize, count: usize) -> bool {
    let mut arrived = Shared::<u32>::new();
    sync_storage();
    if UNIT_POS == 0 {
        *arrived = counters[counter].fetch_add(1u32);
        if *arrived + 1 == count as u32 {
            counters[counter].store(0u32);
        }
    }
    sync_storage();
    *arrived + 1 == count as u32
}
