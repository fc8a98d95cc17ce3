//! How a forward pass behaves, given to every layer as an argument.
//!
//! Training mode is never read off the device: evaluating on an autodiff device and training statistics on a plain one
//! are both legitimate, and a clone of a network must not carry a hidden mode with it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Mode of one forward pass: training or evaluation, and whether multiply-adds are counted on the way.
#[derive(Debug, Default)]
pub struct Context {
    training: bool,
    macs: Option<AtomicU64>,
}

impl Context {
    /// Batch norm normalises by the batch's own statistics and updates its running ones.
    pub fn train() -> Self {
        Self { training: true, macs: None }
    }

    /// Batch norm normalises by its running statistics and leaves them alone.
    pub fn eval() -> Self {
        Self { training: false, macs: None }
    }

    /// Evaluation mode that also counts the multiply-adds of convolutions and linear layers; read them with
    /// [`Context::macs`].
    pub fn counting() -> Self {
        Self { training: false, macs: Some(AtomicU64::new(0)) }
    }

    /// True in training mode.
    pub fn training(&self) -> bool {
        self.training
    }

    /// Multiply-adds seen so far; `None` unless made by [`Context::counting`].
    pub fn macs(&self) -> Option<u64> {
        self.macs.as_ref().map(|macs| macs.load(Ordering::Relaxed))
    }

    /// A layer reports what it is about to spend, in multiply-adds over the whole batch.
    pub(crate) fn add_macs(&self, count: usize) {
        if let Some(macs) = &self.macs {
            macs.fetch_add(count as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_counting_context_counts() {
        let counting = Context::counting();
        counting.add_macs(3);
        counting.add_macs(4);
        assert_eq!(counting.macs(), Some(7));
        assert!(!counting.training());

        let train = Context::train();
        train.add_macs(3);
        assert_eq!(train.macs(), None);
        assert!(train.training());
        assert!(!Context::eval().training());
    }
}
