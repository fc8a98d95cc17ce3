//! The buckets' memory: arrays that ranks reduce in place, and that are a step's gradients afterwards.
//!
//! An array is made when its bucket leaves and has none: in the first step, or if a tensor of an earlier step still is a view of
//! it. All ranks keep the same tensors, so they make arrays in the same order, as collectives need it.

use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use comm::Shared;

/// Those that no tensor uses, by bucket.
#[derive(Debug, Default)]
pub(super) struct Arrays(Mutex<Vec<Option<Shared<f32>>>>);

impl Arrays {
    fn lock(&self) -> MutexGuard<'_, Vec<Option<Shared<f32>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The array of `bucket`, if it has one and that is free.
    pub(super) fn take(&self, bucket: usize) -> Option<Shared<f32>> {
        self.lock().get_mut(bucket)?.take()
    }

    /// Lends `values`, the sums of `bucket`, to a tensor. They come back when it ends.
    pub(super) fn lend(self: &Arc<Self>, bucket: usize, values: Shared<f32>) -> Lent {
        Lent { values: Some(values), bucket, home: self.clone() }
    }
}

/// An array on loan.
pub(super) struct Lent {
    values: Option<Shared<f32>>,
    bucket: usize,
    home: Arc<Arrays>,
}

impl Deref for Lent {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        self.values.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.values.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut arrays = self.home.lock();
        if arrays.len() <= self.bucket {
            arrays.resize_with(self.bucket + 1, || None);
        }
        // a bucket that had to get another one keeps that
        let place = &mut arrays[self.bucket];
        *place = place.take().or(self.values.take());
    }
}
