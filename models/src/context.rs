//! How a forward pass behaves, given to every layer as an argument.
//!
//! Training mode is never read off the device: evaluating on an autodiff device and training statistics on a plain one
//! are both legitimate, and a clone of a network must not carry a hidden mode with it.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::Param;
use burn::tensor::{FloatDType, Tensor};
use ops::StatisticsReduce;

use crate::hook::{self, GradientSink};

/// Mode of one forward pass: training or evaluation, what dropout is drawn from, whether multiply-adds are counted on the
/// way, with whom batch statistics are shared, and who takes gradients as they become ready.
#[derive(Debug, Default)]
pub struct Context {
    training: bool,
    bf16: bool,
    dropout: Option<Draw>,
    counts: Option<Counts>,
    statistics: Option<Arc<dyn StatisticsReduce>>,
    gradients: Option<Arc<dyn GradientSink>>,
}

/// What a counting pass adds up.
#[derive(Debug, Default)]
struct Counts {
    macs: AtomicU64,
    written: AtomicU64,
}

/// What dropout is drawn from.
#[derive(Debug)]
struct Draw {
    /// One a sample.
    keys: Vec<u64>,
    /// Dropouts met so far in this pass.
    layer: AtomicU64,
}

impl Context {
    /// Batch norm normalises by the batch's own statistics and updates its running ones. Dropout drops nothing before
    /// [`Context::with_dropout`].
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

    /// Turns dropout on in training mode; it drops nothing in evaluation mode.
    ///
    /// What is dropped of a sample is a function of its key and of the place in the network alone: keys made of seed,
    /// epoch and sample give every sample the same fate on any number of ranks, and another one in each epoch.
    pub fn with_dropout(mut self, keys: Vec<u64>) -> Self {
        self.dropout = Some(Draw { keys, layer: AtomicU64::new(0) });
        self
    }

    /// Convolutions and linear layers compute in bf16 where `on`, on weights that stay f32; what they write is bf16 as far
    /// as the next batch norm, which takes its statistics in f32. Gradients of parameters are f32.
    pub fn in_bf16(mut self, on: bool) -> Self {
        self.bf16 = on;
        self
    }

    /// The tensor in the type that convolutions and linear layers compute in.
    pub(crate) fn narrow<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        if self.bf16 { tensor.cast(FloatDType::BF16) } else { tensor }
    }

    /// Batch norm normalises by its running statistics and leaves them alone.
    pub fn eval() -> Self {
        Self::default()
    }

    /// Evaluation mode that also counts; read with [`Context::macs`] and [`Context::written`].
    pub fn counting() -> Self {
        Self { counts: Some(Counts::default()), ..Self::default() }
    }

    /// True in training mode.
    pub fn training(&self) -> bool {
        self.training
    }

    /// Multiply-adds of convolutions and linear layers so far; `None` unless made by [`Context::counting`].
    pub fn macs(&self) -> Option<u64> {
        self.counts.as_ref().map(|counts| counts.macs.load(Ordering::Relaxed))
    }

    /// Elements of all features that layers wrote so far; `None` unless made by [`Context::counting`].
    pub fn written(&self) -> Option<u64> {
        self.counts.as_ref().map(|counts| counts.written.load(Ordering::Relaxed))
    }

    /// Factors of one dropout layer for a batch, `[samples, each]` row by row: 0 with probability `rate`, else
    /// 1 / (1 − rate). `None` where nothing is dropped. Every layer of a pass has to ask exactly once, in order.
    ///
    /// # Panics
    ///
    /// Where the batch is not the one that the keys are for.
    pub(crate) fn dropout(&self, rate: f64, samples: usize, each: usize) -> Option<Vec<f32>> {
        let draw = self.dropout.as_ref().filter(|_| self.training)?;
        let layer = draw.layer.fetch_add(1, Ordering::Relaxed);
        if rate <= 0.0 {
            return None;
        }
        assert_eq!(draw.keys.len(), samples, "dropout has one key for each sample of the batch");
        let kept = (1.0 / (1.0 - rate)) as f32;
        let factors = draw.keys.iter().flat_map(|&key| {
            let numbers = crate::init::unit_interval(key, layer);
            numbers.take(each).map(move |u| if u < rate { 0.0 } else { kept })
        });
        Some(factors.collect())
    }

    /// A layer reports what it is about to spend, in multiply-adds over the whole batch.
    pub(crate) fn add_macs(&self, count: usize) {
        if let Some(counts) = &self.counts {
            counts.macs.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    /// Passes on features that have just been written.
    pub(crate) fn wrote<const D: usize>(&self, features: Tensor<D>) -> Tensor<D> {
        if let Some(counts) = &self.counts {
            counts.written.fetch_add(features.dims().iter().product::<usize>() as u64, Ordering::Relaxed);
        }
        features
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
    fn dropout_depends_on_key_and_place_alone() {
        let draw = |keys: &[u64]| {
            let cx = Context::train().with_dropout(keys.to_vec());
            [0, 1].map(|_| cx.dropout(0.25, keys.len(), 4000).unwrap())
        };
        let [first, second] = draw(&[7, 8]);
        assert_ne!(first, second, "two layers");
        assert_ne!(first[..4000], first[4000..], "two samples");
        // The other sample of the batch has no influence, nor has its place.
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
