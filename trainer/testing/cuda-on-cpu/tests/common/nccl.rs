//! Helpers of the NCCL tests: ids, arrays of floats, and their sums.
#![allow(unsafe_code, dead_code, reason = "tests of a C library; no test uses all helpers")]

use std::ffi::{CStr, c_int};

use cuda_on_cpu::exports::*;
use cuda_on_cpu::nccl::*;

use crate::common::{allocate, get, upload};

pub(crate) const NOT_READY: i32 = 600;
pub(crate) const F32: c_int = 7;
pub(crate) const SUM: c_int = 0;

pub(crate) struct Id(pub(crate) UniqueId);

impl Default for Id {
    fn default() -> Self {
        Self(UniqueId { internal: [0; 128] })
    }
}

pub(crate) fn id() -> UniqueId {
    get::<Id>(|id| ncclGetUniqueId(id.map(|id| &mut id.0))).0
}

/// Returns the path of the file in an id.
pub(crate) fn file(id: UniqueId) -> String {
    CStr::from_bytes_until_nul(&id.internal[8..]).unwrap().to_str().unwrap().to_owned()
}

/// Copies an array to the GPU; returns its address.
pub(crate) fn array<T: Copy>(values: &[T]) -> usize {
    let address = allocate(size_of_val(values));
    // SAFETY: numbers are plain bytes.
    upload(address, unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) });
    address
}

pub(crate) fn read<T: Copy + Default>(from: usize, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    // SAFETY: the memory of the vector.
    assert_eq!(unsafe { cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), from, count * size_of::<T>()) }, 0);
    values
}

/// Returns a small integer that differs by rank and index.
pub(crate) fn value(rank: usize, index: usize) -> f32 {
    ((index % 1013) as f32 - 500.0) * (rank + 1) as f32 + rank as f32
}

pub(crate) fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|index| value(rank, index)).collect()
}

pub(crate) fn sums(world_size: usize, count: usize) -> Vec<f32> {
    (0..count).map(|index| (0..world_size).map(|rank| value(rank, index)).sum()).collect()
}

/// Frees arrays.
pub(crate) fn free(arrays: &[usize]) {
    arrays.iter().for_each(|address| assert_eq!(cuMemFree_v2(*address), 0));
}
