//! Tensors over external memory, as `torch.from_blob`.

use std::mem::MaybeUninit;
use std::ops::DerefMut;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};

/// External memory of a tensor.
struct Blob<V> {
    values: V,
    /// Length when the tensor was made. `Deref` of safe code may return another length later, so every access checks it.
    len: usize,
}

impl<V: DerefMut<Target = [f32]>> Blob<V> {
    /// Returns the floats.
    ///
    /// # Panics
    ///
    /// If `values` has another length than before.
    fn checked(&self) -> &[f32] {
        let values: &[f32] = &self.values;
        assert_eq!(values.len(), self.len, "the memory of a tensor has changed its length");
        values
    }

    fn checked_mut(&mut self) -> &mut [f32] {
        let values: &mut [f32] = &mut self.values;
        assert_eq!(values.len(), self.len, "the memory of a tensor has changed its length");
        values
    }
}

/// Makes a tensor of `values`, `[N]`, on `device`.
///
/// On burn's CPU backend, `values` is the tensor's memory: it is dropped with the last tensor that shares it, and
/// operations in place change it. On any other device, `values` is copied and dropped.
pub fn tensor_from_blob<V>(values: V, device: &Device) -> Tensor<1>
where
    V: DerefMut<Target = [f32]> + Send + Sync + 'static,
{
    let len = values.len();
    // SAFETY: `values` are `len` floats, whose bytes are initialised.
    let bytes = unsafe { Bytes::from_controller(Box::new(Blob { values, len }), len * size_of::<f32>()) };
    Tensor::from_data(TensorData::from_bytes(bytes, [len], DType::F32), device)
}

impl<V: DerefMut<Target = [f32]>> AllocationController for Blob<V> {
    fn alloc_align(&self) -> usize {
        align_of::<f32>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self, _: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let values = self.checked_mut();
        // SAFETY: the same memory, borrowed exclusively, in bytes; the caller writes only what is initialised.
        Ok(unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) })
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let values = self.checked();
        // SAFETY: the same memory in bytes.
        Ok(unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) })
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Deref;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    struct DropRecorder(Vec<f32>, Arc<AtomicBool>);

    impl Deref for DropRecorder {
        type Target = [f32];
        fn deref(&self) -> &[f32] {
            &self.0
        }
    }

    impl DerefMut for DropRecorder {
        fn deref_mut(&mut self) -> &mut [f32] {
            &mut self.0
        }
    }

    impl Drop for DropRecorder {
        fn drop(&mut self) {
            self.1.store(true, Ordering::Relaxed);
        }
    }

    /// Memory that becomes shorter.
    struct Shrinking(Vec<f32>, Arc<AtomicBool>);

    impl Deref for Shrinking {
        type Target = [f32];
        fn deref(&self) -> &[f32] {
            if self.1.load(Ordering::Relaxed) { &self.0[..1] } else { &self.0 }
        }
    }

    impl DerefMut for Shrinking {
        fn deref_mut(&mut self) -> &mut [f32] {
            &mut self.0
        }
    }

    #[test]
    #[should_panic(expected = "has changed its length")]
    fn memory_that_becomes_shorter_is_not_read() {
        let shrunk = Arc::new(AtomicBool::new(false));
        let tensor = tensor_from_blob(Shrinking(vec![1.0; 64], shrunk.clone()), &Device::flex());
        shrunk.store(true, Ordering::Relaxed);
        let _ = tensor.into_data().try_to_vec::<f32>();
    }

    #[test]
    fn memory_lives_as_long_as_its_views() {
        let dropped = Arc::new(AtomicBool::new(false));
        let values = DropRecorder(vec![1.0, 2.0, 3.0, 4.0], dropped.clone());
        let tensor = tensor_from_blob(values, &Device::flex());
        let view = tensor.clone().slice(1..3);
        let sum = tensor.clone() + tensor;
        assert_eq!(sum.into_data().try_to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0, 8.0]);
        assert!(!dropped.load(Ordering::Relaxed), "a view still shares the memory");
        assert_eq!(view.into_data().try_to_vec::<f32>().unwrap(), [2.0, 3.0]);
        assert!(dropped.load(Ordering::Relaxed), "the last view was dropped");
    }
}
