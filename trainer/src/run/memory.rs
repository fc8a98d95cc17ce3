//! Compares the memory that images need on the CPU with the memory of this machine. Without this check, a failed allocation or
//! the kernel's out-of-memory killer would end the process without a hint.

use models::Spec;

use crate::text::counted;

/// Hint for a refusal.
pub(crate) const HINT: &str = "use a smaller image_size, or a smaller batch_size with train.accumulate";

/// Smaller images are not checked, since the estimate takes tenths of a second, unless a batch has many of them.
const MANY_PIXELS: usize = 128 * 128;
const MANY_PIXELS_OF_A_BATCH: usize = 2048 * 2048;

/// The use of the memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MemoryUse {
    /// Forward and backward of `batch` images.
    Training { batch: usize, bytes_per_element: usize },
    /// Evaluation, one image at a time or more.
    Evaluation,
}

/// Returns the reason why this machine has not enough memory for `model` and images of the size in `spec`, or `None` if the
/// memory may be enough.
pub(crate) fn refusal(model: &str, spec: &Spec, memory_use: MemoryUse) -> Option<String> {
    let [height, width] = spec.image_size;
    let images = match memory_use {
        MemoryUse::Training { batch, .. } => batch,
        MemoryUse::Evaluation => 1,
    };
    if height * width < MANY_PIXELS && images * height * width < MANY_PIXELS_OF_A_BATCH {
        return None;
    }
    let memory = data::total_memory()? as f64;
    let [parameters, activations] = models::estimate_elements(model, spec).ok()?;
    let pixels = (spec.in_channels * height * width) as f64;
    let (needed, what) = match memory_use {
        // As in `models::Cost::step_bytes`: weights, gradients and momentum, and what the backward pass needs.
        MemoryUse::Training { batch, bytes_per_element } => {
            let needed = 12.0 * parameters + bytes_per_element as f64 * batch as f64 * (activations + pixels);
            (needed, format!("a training batch of {}", counted(batch as u64, "image")))
        }
        MemoryUse::Evaluation => (4.0 * (parameters + pixels), "an evaluation".to_owned()),
    };
    let gib = |bytes: f64| format!("{:.1} GiB", bytes / (1u64 << 30) as f64);
    (needed > memory).then(|| {
        format!(
            "{what} of {}x{height}x{width} pixels needs at least {} of memory, this machine has {}",
            spec.in_channels,
            gib(needed),
            gib(memory)
        )
    })
}
