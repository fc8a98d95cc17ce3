//! The memory of buckets that are reduced on the CPU.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
};

use parking_lot::Mutex;

use comm::SharedArray;

/// The free arrays of the buckets, by bucket. An array is free while no tensor uses it. Ranks reduce arrays in place, and then
/// the arrays are the memory of the step's gradients.
///
/// If no array is free when a bucket is launched, the bucket gets a new array: in the first step, or while a tensor of an
/// earlier step is still a view of the old array. All ranks keep the same tensors, so all ranks make arrays in the same order,
/// as collectives require.
#[derive(Debug, Default)]
pub(super) struct BucketArrays(Mutex<Vec<Option<SharedArray<f32>>>>);

impl BucketArrays {
    /// Takes the array of `bucket`, if the array is free.
    pub(super) fn take(&self, bucket: usize) -> Option<SharedArray<f32>> {
        self.0.lock().get_mut(bucket)?.take()
    }

    /// Wraps `values`, the reduced array of `bucket`, for use as the memory of tensors. The array becomes free again when the
    /// last of these tensors is dropped.
    pub(super) fn lend(self: &Arc<Self>, bucket: usize, values: SharedArray<f32>) -> BucketView {
        BucketView { values: Some(values), bucket, arrays: self.clone() }
    }
}

/// The array of a bucket while tensors are views of it.
pub(super) struct BucketView {
    values: Option<SharedArray<f32>>,
    bucket: usize,
    arrays: Arc<BucketArrays>,
}

impl Deref for BucketView {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        self.values.as_deref().unwrap_or_default()
    }
}

impl DerefMut for BucketView {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.values.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for BucketView {
    fn drop(&mut self) {
        let mut arrays = self.arrays.0.lock();
        if arrays.len() <= self.bucket {
            arrays.resize_with(self.bucket + 1, || None);
        }
        // If the bucket has got a new array meanwhile, keep the new one and free this one.
        let place = &mut arrays[self.bucket];
        *place = place.take().or(self.values.take());
    }
}
