//! Counters for kernels whose last block finishes what all blocks have begun (`finish.cu`, [`is_last_block`]).

use std::cell::RefCell;

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Counters of a launch, or of each of two products of a launch.
pub(super) const COUNTERS: usize = 1 << 16;

thread_local! {
    /// Of each device. A thread's launches run one after the other, and each leaves zeros behind.
    static ALL: RefCell<Vec<[CubeTensor; 2]>> = const { RefCell::new(Vec::new()) };
}

/// Returns [`COUNTERS`] zeros on the device of `like`, twice. They stay where they are, as a graph of the step has their address.
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

/// Returns true in the last of `count` blocks that call this with a counter, which is zero before and afterwards. That block sees
/// what the others have written before. All threads of a block call it.
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
