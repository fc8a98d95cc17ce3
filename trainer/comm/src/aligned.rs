//! Bytes with the alignment of every element type.

use bytemuck::cast_slice_mut;

/// Bytes that can be viewed as a slice of any element type.
pub(crate) struct AlignedBytes {
    words: Vec<u64>,
    len: usize,
}

impl AlignedBytes {
    /// Makes `len` zero bytes.
    pub(crate) fn zero(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(8)], len }
    }

    /// Copies `bytes`.
    pub(crate) fn copy(bytes: &[u8]) -> Self {
        let mut copy = Self::zero(bytes.len());
        copy.get_mut().copy_from_slice(bytes);
        copy
    }

    /// Returns the bytes.
    #[cfg(feature = "mpi")]
    pub(crate) fn get(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    /// Returns the bytes for writing.
    pub(crate) fn get_mut(&mut self) -> &mut [u8] {
        &mut cast_slice_mut(&mut self.words)[..self.len]
    }
}
