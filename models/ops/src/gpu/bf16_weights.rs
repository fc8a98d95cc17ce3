//! bf16 copies of weights, which the optimizer's kernels write together with the weights.
//!
//! Convolutions in bf16 read rounded weights. Rounding in every step would take one launch per layer and another pass over all
//! weights. So the optimizer keeps a bf16 copy of each weight that was rounded, and updates both.
//!
//! A copy is found by the memory of its weight. The copy is valid as long as nobody else writes this memory. So an entry also
//! holds the weight: burn writes in place only if no other tensor shares the memory.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::DType;
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::tensor::CubeTensor;

/// Identifies the memory of a tensor while the tensor exists: an id that is never used twice, and an offset.
pub(super) type MemoryId = [u64; 2];

pub(super) fn memory_id(tensor: &CubeTensor) -> MemoryId {
    let id = tensor.handle.memory.clone().binding().id();
    [id.value as u64, tensor.handle.offset_start.unwrap_or(0)]
}

/// Limit of [`Copies::rounded`], more weights than any network has.
const MOST: usize = 10_000;

/// A weight and its copy, both flat.
struct Bf16Copy {
    weight: CubeTensor,
    copy: CubeTensor,
}

#[derive(Default)]
struct Copies {
    all: BTreeMap<MemoryId, Bf16Copy>,
    /// Weights that were rounded and have no copy.
    rounded: BTreeSet<MemoryId>,
}

thread_local! {
    static COPIES: RefCell<Copies> = RefCell::default();
}

/// Casts a weight to the type in which a convolution computes.
pub(super) fn cast(weight: CubeTensor, dtype: DType) -> CubeTensor {
    if weight.dtype == dtype {
        return weight;
    }
    if (weight.dtype, dtype) == (DType::F32, DType::BF16) {
        let at = memory_id(&weight);
        let found = COPIES.with_borrow_mut(|copies| {
            let found = copies.all.get(&at).filter(|found| same_length(&found.weight, &weight));
            if found.is_none() {
                // In a thread without an optimizer (a replica of mode `dp`), weights have new memory in each step: limit the set.
                if copies.rounded.len() == MOST {
                    copies.rounded.clear();
                }
                copies.rounded.insert(at);
            }
            found.map(|found| found.copy.clone())
        });
        if let Some(copy) = found {
            let CubeTensor { client, device, meta, .. } = weight;
            return CubeTensor::new(client, copy.handle, *meta, device, dtype);
        }
    }
    Cube::float_cast(weight, dtype.into())
}

fn same_length(one: &CubeTensor, other: &CubeTensor) -> bool {
    one.meta.num_elements() == other.meta.num_elements()
}

/// Takes out the copy of a flat f32 weight, for writing. Allocates a copy if the weight was rounded and has none.
pub(super) fn take(weight: &CubeTensor) -> Option<CubeTensor> {
    let at = memory_id(weight);
    let (found, rounded) = COPIES.with_borrow_mut(|copies| (copies.all.remove(&at), copies.rounded.remove(&at)));
    let new = || {
        let shape = weight.meta.shape().clone();
        empty_device_dtype(weight.client.clone(), weight.device.clone(), shape, DType::BF16)
    };
    match found {
        Some(Bf16Copy { copy, .. }) if copy.can_mut() && same_length(&copy, weight) => Some(copy),
        Some(_) => Some(new()),
        None => rounded.then(new),
    }
}

/// Keeps the copy of a weight that was just written.
pub(super) fn keep(weight: &CubeTensor, copy: CubeTensor) {
    COPIES.with_borrow_mut(|copies| copies.all.insert(memory_id(weight), Bf16Copy { weight: weight.clone(), copy }));
}

/// Drops the entries whose weight no other tensor shares any more.
pub(super) fn drop_unused() {
    COPIES.with_borrow_mut(|copies| copies.all.retain(|_, copied| !copied.weight.can_mut()));
}

/// Returns the memory of all copies, in the order of their weights' memory.
pub(crate) fn memory_ids() -> Vec<MemoryId> {
    COPIES.with_borrow(|copies| copies.all.values().map(|copied| memory_id(&copied.copy)).collect())
}
