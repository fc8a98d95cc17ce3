//! Settings of one forward pass, an argument of every layer.
//!
//! Training mode does not depend on the device: evaluation on an autodiff device and training mode on a plain device are both
//! valid. A network has no mode (PyTorch's `module.training`), so a clone cannot inherit a hidden one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use burn::tensor::Tensor;
use ops::StatisticsReduce;

use crate::hook::{self, GradientSink};
use crate::layers::Weight;

/// Settings of one forward pass: training or evaluation mode, bf16 autocast, the keys of dropout, counting of multiply-adds,
/// the reduction of batch statistics, and the sink of gradients.
#[derive(Debug, Default)]
pub struct Context {
    training: bool,
    bf16: bool,
    dropout: Option<DropoutKeys>,
    counts: Option<OpCounts>,
    statistics: Option<Arc<dyn StatisticsReduce>>,
    gradients: Option<Arc<dyn GradientSink>>,
    host_data: AtomicBool,
}

/// Counts of the passes with one [`Context::counting`].
#[derive(Debug, Default)]
struct OpCounts {
    macs: AtomicU64,
    activations: AtomicU64,
}

/// Seeds of dropout's random numbers.
#[derive(Debug)]
struct DropoutKeys {
    /// One key per sample.
    keys: Vec<u64>,
    /// Number of dropout layers that this pass has applied.
    layer: AtomicU64,
}

impl Context {
    /// Training mode: batch norm normalises with the batch's statistics and updates its running statistics. Dropout needs
    /// [`Context::with_dropout`] too.
    pub fn train() -> Self {
        Self { training: true, ..Self::default() }
    }

    /// [`Context::train`] for data parallelism. With `statistics`, batch norm uses the statistics of the global batch, of which
    /// this network sees a part. With `gradients`, the parameters' gradients go to the sink; `backward` does not return them.
    pub fn train_with(statistics: Option<Arc<dyn StatisticsReduce>>, gradients: Option<Arc<dyn GradientSink>>) -> Self {
        Self { training: true, statistics, gradients, ..Self::default() }
    }

    /// Returns the reduction of batch statistics; `None` without synchronised batch norm.
    pub fn statistics(&self) -> Option<&Arc<dyn StatisticsReduce>> {
        self.statistics.as_ref()
    }

    /// Returns the value of `weight` for the layer's operation on `input`. If the weight is trained and the context
    /// has a gradient sink, its gradient goes to the sink.
    ///
    /// A layer calls the function for each of its weights, directly before the operation.
    pub fn parameter<const D: usize, const I: usize>(&self, weight: &Weight<D>, input: &Tensor<I>) -> Tensor<D> {
        match weight {
            Weight::Trained(parameter) => hook::parameter(parameter, input, self.gradients.as_ref()),
            Weight::Frozen(buffer) => buffer.value(),
        }
    }

    /// Enables dropout in training mode, with one key per sample. It has no effect in evaluation mode.
    ///
    /// A sample's dropout mask depends only on its key and on the index of the dropout layer. With keys made of seed, epoch
    /// and sample id, a sample has the same mask on any number of ranks and another mask in each epoch.
    pub fn with_dropout(mut self, keys: Vec<u64>) -> Self {
        self.dropout = Some(DropoutKeys { keys, layer: AtomicU64::new(0) });
        self
    }

    /// If `on` is true, computes convolutions and linear layers in bf16, as `torch.autocast(dtype=torch.bfloat16)`.
    ///
    /// Parameters and their gradients stay f32; the operations round them to bf16 where they use them. Activations are bf16;
    /// batch norm computes its statistics in f32.
    pub fn autocast_bf16(mut self, on: bool) -> Self {
        self.bf16 = on;
        self
    }

    /// Casts an activation to the element type in which convolutions and linear layers compute.
    pub(crate) fn autocast<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        if self.bf16 { ops::to_bf16(tensor) } else { tensor }
    }

    /// Evaluation mode: batch norm normalises with its running statistics and does not update them.
    pub fn eval() -> Self {
        Self::default()
    }

    /// Evaluation mode that also counts operations, see [`Context::macs`] and [`Context::activations`].
    pub fn counting() -> Self {
        Self { counts: Some(OpCounts::default()), ..Self::default() }
    }

    /// Returns true in training mode.
    pub fn training(&self) -> bool {
        self.training
    }

    /// Returns the multiply-adds of convolutions and linear layers so far; `None` unless made by [`Context::counting`].
    pub fn macs(&self) -> Option<u64> {
        self.counts.as_ref().map(|counts| counts.macs.load(Ordering::Relaxed))
    }

    /// Returns the elements of all activations that layers wrote so far; `None` unless made by [`Context::counting`].
    pub fn activations(&self) -> Option<u64> {
        self.counts.as_ref().map(|counts| counts.activations.load(Ordering::Relaxed))
    }

    /// Draws the factors of the next dropout layer, `[samples, each]` in row-major order: 0 with probability `rate`, else
    /// 1 / (1 − rate). `None` if nothing is dropped. Every dropout layer must call this exactly once per pass, in order.
    ///
    /// # Panics
    ///
    /// When the number of samples differs from the number of keys.
    pub(crate) fn dropout(&self, rate: f64, samples: usize, each: usize) -> Option<Vec<f32>> {
        let dropout = self.dropout.as_ref().filter(|_| self.training)?;
        let layer = dropout.layer.fetch_add(1, Ordering::Relaxed);
        if rate <= 0.0 {
            return None;
        }
        self.note_host_data();
        assert_eq!(dropout.keys.len(), samples, "dropout has one key for each sample of the batch");
        let kept = (1.0 / (1.0 - rate)) as f32;
        let factors = dropout.keys.iter().flat_map(|&key| {
            let numbers = crate::init::unit_interval(key, layer);
            numbers.take(each).map(move |u| if u < rate { 0.0 } else { kept })
        });
        Some(factors.collect())
    }

    /// Marks that this pass copies data from the host that differs in each step, such as random numbers or a schedule. Such a step
    /// is not captured as a CUDA graph, because the graph would replay the captured data.
    pub fn note_host_data(&self) {
        self.host_data.store(true, Ordering::Relaxed);
    }

    /// Returns true if this pass has called [`Context::note_host_data`], as dropout does.
    pub fn uses_host_data(&self) -> bool {
        self.host_data.load(Ordering::Relaxed)
    }

    /// Adds a layer's multiply-adds for the whole batch to the count.
    pub(crate) fn add_macs(&self, count: usize) {
        if let Some(counts) = &self.counts {
            counts.macs.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    /// Adds the elements of `activations`, which a layer has just written, to the count, and returns the tensor.
    pub(crate) fn count_activations<const D: usize>(&self, activations: Tensor<D>) -> Tensor<D> {
        if let Some(counts) = &self.counts {
            counts.activations.fetch_add(activations.dims().iter().product::<usize>() as u64, Ordering::Relaxed);
        }
        activations
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

    #[test]
    fn dropout_depends_on_key_and_layer_alone() {
        let draw = |keys: &[u64]| {
            let cx = Context::train().with_dropout(keys.to_vec());
            [0, 1].map(|_| cx.dropout(0.25, keys.len(), 4000).unwrap())
        };
        let [first, second] = draw(&[7, 8]);
        assert_ne!(first, second, "two layers");
        assert_ne!(first[..4000], first[4000..], "two samples");
        // Neither the other samples of the batch nor the sample's position change its mask.
        let [alone, _] = draw(&[8]);
        assert_eq!(alone, first[4000..]);

        let dropped = first.iter().filter(|&&factor| factor == 0.0).count() as f64;
        assert!(first.iter().all(|&factor| factor == 0.0 || (factor - 4.0 / 3.0).abs() < 1e-6));
        // Five standard deviations of a binomial.
        assert!((dropped - 2000.0).abs() < 5.0 * (8000.0_f64 * 0.25 * 0.75).sqrt(), "{dropped} of 8000");
    }

    #[test]
    fn nothing_is_dropped_without_keys_or_in_evaluation() {
        assert!(Context::train().dropout(0.5, 2, 3).is_none());
        assert!(Context::eval().with_dropout(vec![1, 2]).dropout(0.5, 2, 3).is_none());
        assert!(Context::train().with_dropout(vec![1, 2]).dropout(0.0, 2, 3).is_none());
    }
}
