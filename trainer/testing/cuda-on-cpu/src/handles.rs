//! Handles as C has them, and what they stand for. A handle is never given out twice, so that one which is used after its
//! end is refused.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use crate::code::{Answer, INVALID_HANDLE};

/// Looks like an address, and is none: nothing is mapped there.
static NEXT: AtomicUsize = AtomicUsize::new(0xC0DE_0000_0000_0010);

/// Room for `count` handles in a row.
pub(crate) fn reserve(count: usize) -> usize {
    NEXT.fetch_add(16 * count.max(1), Ordering::Relaxed)
}

/// Handles of one kind.
pub(crate) struct Table<T>(LazyLock<RwLock<HashMap<usize, Arc<T>>>>);

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self(LazyLock::new(RwLock::default))
    }

    /// Gives `value` a handle.
    pub(crate) fn add(&self, value: Arc<T>) -> usize {
        let handle = reserve(1);
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(handle, value);
        handle
    }

    /// What a handle stands for.
    pub(crate) fn get(&self, handle: usize) -> Answer<Arc<T>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned().ok_or(INVALID_HANDLE)
    }

    /// Ends a handle.
    pub(crate) fn remove(&self, handle: usize) -> Answer<Arc<T>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&handle).ok_or(INVALID_HANDLE)
    }

    /// The first value that `find` likes.
    pub(crate) fn find<R>(&self, find: impl FnMut(&Arc<T>) -> Option<R>) -> Answer<R> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.values().find_map(find).ok_or(INVALID_HANDLE)
    }
}
