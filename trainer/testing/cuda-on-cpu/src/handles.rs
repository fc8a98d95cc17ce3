//! C handles and the objects that they refer to. A handle is never reused, so that a use after its destruction is refused.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::RwLock;

use crate::cu_result::{DriverResult, INVALID_HANDLE};

/// The next handle. Handles look like addresses, but nothing is mapped there.
static NEXT: AtomicUsize = AtomicUsize::new(0xC0DE_0000_0000_0010);

/// Reserves `count` consecutive handles; returns the first.
pub(crate) fn reserve(count: usize) -> usize {
    NEXT.fetch_add(16 * count.max(1), Ordering::Relaxed)
}

/// Handles of one type.
pub(crate) struct Table<T>(LazyLock<RwLock<HashMap<usize, Arc<T>>>>);

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self(LazyLock::new(RwLock::default))
    }

    /// Adds an object; returns its handle.
    pub(crate) fn add(&self, value: Arc<T>) -> usize {
        let handle = reserve(1);
        self.0.write().insert(handle, value);
        handle
    }

    /// Returns the object of a handle.
    pub(crate) fn get(&self, handle: usize) -> DriverResult<Arc<T>> {
        self.0.read().get(&handle).cloned().ok_or(INVALID_HANDLE)
    }

    /// Removes a handle; returns its object.
    pub(crate) fn remove(&self, handle: usize) -> DriverResult<Arc<T>> {
        self.0.write().remove(&handle).ok_or(INVALID_HANDLE)
    }

    /// Returns the first result of `find` that is not `None`.
    pub(crate) fn find<R>(&self, find: impl FnMut(&Arc<T>) -> Option<R>) -> DriverResult<R> {
        let table = self.0.read();
        table.values().find_map(find).ok_or(INVALID_HANDLE)
    }
}
