//! How a forward pass behaves, given to every layer as an argument.
//!
//! Training mode is never read off the device: evaluating on an autodiff device and training statistics on a plain one
//! are both legitimate, and a clone of a network must not carry a hidden mode with it.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::Param;
use burn::tensor::Tensor;

use crate::hook::{self, GradientSink};

/// Adds up batch-norm statistics over all that share a batch: synchronised batch norm, `torch.nn.SyncBatchNorm`.
///
/// Every batch norm calls it once in a training forward pass and once in the backward pass, on the thread that runs the
/// pass, so all that share the batch must run the same network. A failure to add up is the implementation's to
/// remember: a forward or backward pass cannot be stopped in the middle, and its result is then void.
pub trait StatisticsReduce: Debug + Send + Sync {
    /// Every element of `values` becomes its sum over all that share the batch, the same bits for all of them.
    fn all_reduce_sum(&self, values: &mut [f64]);
}

/// Mode of one forward pass: training or evaluation, whether multiply-adds are counted on the way, with whom batch
/// statistics are shared, and who takes gradients as they become ready.
#[derive(Debug, Default)]
pub struct Context {
    training: bool,
    macs: Option<AtomicU64>,
    statistics: Option<Arc<dyn StatisticsReduce>>,
    gradients: Option<Arc<dyn GradientSink>>,
}

impl Context {
    /// Batch norm normalises by the batch's own statistics and updates its running ones.
    pub fn train() -> Self {
        Self { training: true, ..Self::default() }
    }

    /// [`Context::train`], with statistics of the whole batch of which this network sees a part, and with gradients that go
    /// to a sink instead of into what `backward` returns; each where given.
    pub fn train_with(statistics: Option<Arc<dyn StatisticsReduce>>, gradients: Option<Arc<dyn GradientSink>>) -> Self {
        Self { training: true, statistics, gradients, ..Self::default() }
    }

    /// With whom batch statistics are shared.
    pub fn statistics(&self) -> Option<&Arc<dyn StatisticsReduce>> {
        self.statistics.as_ref()
    }

    /// A layer's parameter as it goes into the layer's operation on `input`.
    pub(crate) fn parameter<const D: usize, const I: usize>(
        &self,
        parameter: &Param<Tensor<D>>,
        input: &Tensor<I>,
    ) -> Tensor<D> {
        hook::parameter(parameter, input, self.gradients.as_ref())
    }

    /// Batch norm normalises by its running statistics and leaves them alone.
    pub fn eval() -> Self {
        Self::default()
    }

    /// Evaluation mode that also counts the multiply-adds of convolutions and linear layers; read them with
    /// [`Context::macs`].
    pub fn counting() -> Self {
        Self { macs: Some(AtomicU64::new(0)), ..Self::default() }
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
