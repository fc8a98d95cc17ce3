//! Initial weights: PyTorch's default distributions from a counter-based generator.
//!
//! Every element is a pure function of (seed, parameter name, index). The same seed therefore yields the same weights on every
//! device, thread and rank, and a new layer does not change another layer's weights. burn's generator is a global state of
//! the device and guarantees none of this.

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};

use crate::layers::Weight;
use crate::state::is_within;

/// Increment of splitmix64, from the golden ratio.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Computes the output function of splitmix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
fn splitmix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Hashes `text` with 64-bit FNV-1a.
fn fnv1a64(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// Returns `count` values, uniform in `[-bound, bound)`, a function of `(seed, name)` alone.
///
/// The 24 random bits fill an f32's mantissa exactly, so the only rounding is the product with `bound`.
pub(crate) fn uniform(seed: u64, name: &str, count: usize, bound: f32) -> Vec<f32> {
    // Mix the seed before combining it with the name: the streams of seeds 0, 1, 2 must not overlap.
    let start = splitmix64(seed.wrapping_add(GAMMA)) ^ fnv1a64(name);
    (1..=count as u64)
        .map(|i| {
            let z = splitmix64(start.wrapping_add(i.wrapping_mul(GAMMA)));
            let u = (z >> 40) as f32 / (1u32 << 24) as f32;
            (2.0 * u - 1.0) * bound
        })
        .collect()
}

/// Returns the stream `index` of `key`: values uniform in `[0, 1)`.
pub(crate) fn unit_interval(key: u64, index: u64) -> impl Iterator<Item = f64> {
    let start = splitmix64(splitmix64(key.wrapping_add(GAMMA)).wrapping_add(index.wrapping_mul(GAMMA)));
    (1_u64..).map(move |i| (splitmix64(start.wrapping_add(i.wrapping_mul(GAMMA))) >> 40) as f64 / (1u32 << 24) as f64)
}

/// Source of initial weights for a network under construction: the seed, the device, the path of the module being built, and
/// the weights that are frozen.
#[derive(Debug, Clone)]
pub struct Init {
    /// `None`: all weights are 0.
    seed: Option<u64>,
    device: Device,
    path: String,
    frozen: Arc<[String]>,
}

impl Init {
    /// Starts at the root of a network.
    pub fn new(seed: u64, device: &Device) -> Self {
        Self { seed: Some(seed), device: device.clone(), path: String::new(), frozen: Arc::default() }
    }

    /// Starts at the root of a network whose weights do not matter: they are 0, which takes less time.
    pub(crate) fn zeros(device: &Device) -> Self {
        Self { seed: None, ..Self::new(0, device) }
    }

    /// Freezes all weights within `names`: modules or weights of the state dict, such as `layer1` or `fc.bias`.
    pub fn freezing(self, names: &[String]) -> Self {
        Self { frozen: names.into(), ..self }
    }

    /// Returns the source for the sub-module `name`, e.g. `init.child("layer1").child("0")`.
    pub fn child(&self, name: &str) -> Self {
        Self { path: self.full_name(name), ..self.clone() }
    }

    /// Returns the device of the parameters.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Makes a parameter with PyTorch's default distribution for weights and biases of convolutions and linear layers: uniform
    /// in ±1/√`fan_in` (`kaiming_uniform_(a=√5)`, `torch/nn/modules/{conv,linear}.py`).
    pub fn fan_in_uniform<const D: usize>(&self, name: &str, shape: [usize; D], fan_in: usize) -> Weight<D> {
        self.weight(name, self.uniform(name, shape.iter().product(), fan_in), shape)
    }

    /// Makes a convolution's weight, `[out, in, kernel, kernel]`, whose first filters pass on one input channel each
    /// (`torch.nn.init.dirac_(weight[:in])`). The other filters are those of [`Init::fan_in_uniform`].
    pub fn identity(&self, name: &str, shape: [usize; 4], fan_in: usize) -> Weight<4> {
        let [output, input, height, width] = shape;
        let mut values = self.uniform(name, shape.iter().product(), fan_in);
        let filter = input * height * width;
        for channel in 0..input.min(output) {
            let weights = &mut values[channel * filter..][..filter];
            weights.fill(0.0);
            weights[(channel * height + height / 2) * width + width / 2] = 1.0;
        }
        self.weight(name, values, shape)
    }

    /// Makes a parameter `[count]` with the same value everywhere, e.g. batch norm's scale.
    pub fn constant(&self, name: &str, count: usize, value: f32) -> Weight<1> {
        self.weight(name, vec![value; count], [count])
    }

    fn uniform(&self, name: &str, count: usize, fan_in: usize) -> Vec<f32> {
        match self.seed {
            Some(seed) => uniform(seed, &self.full_name(name), count, 1.0 / (fan_in as f32).sqrt()),
            None => vec![0.0; count],
        }
    }

    fn weight<const D: usize>(&self, name: &str, values: Vec<f32>, shape: [usize; D]) -> Weight<D> {
        let path = self.full_name(name);
        let frozen = self.frozen.iter().any(|module| is_within(&path, module));
        Weight::new(Tensor::from_data(TensorData::new(values, shape), &self.device), frozen)
    }

    fn full_name(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kolmogorov-Smirnov distance of `values` from the uniform distribution on ±`bound`.
    fn ks_distance(mut values: Vec<f32>, bound: f32) -> f64 {
        values.sort_by(f32::total_cmp);
        let n = values.len() as f64;
        values
            .iter()
            .enumerate()
            .map(|(i, &v)| {
                let cdf = (f64::from(v) / f64::from(bound) + 1.0) / 2.0;
                (cdf - i as f64 / n).abs().max((cdf - (i as f64 + 1.0) / n).abs())
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn values_are_uniform_between_the_bounds() {
        let bound = 1.0 / (576f32).sqrt();
        for seed in [0, 1, 42, u64::MAX] {
            let values = uniform(seed, "layer1.0.conv1.weight", 36_864, bound);
            let n = values.len() as f64;
            assert!(values.iter().all(|v| v.abs() <= bound));
            assert!(values.iter().any(|v| *v > 0.999 * bound) && values.iter().any(|v| *v < -0.999 * bound));

            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let variance = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
            let expected = f64::from(bound).powi(2) / 3.0;
            // Four standard errors of the mean and of the variance of a uniform sample.
            assert!(mean.abs() < 4.0 * (expected / n).sqrt(), "mean {mean}");
            assert!((variance / expected - 1.0).abs() < 4.0 * (0.8 / n).sqrt(), "variance {variance} of {expected}");
            // 1.95/√n is the 0.1 % critical value; the seeds are fixed, so the test is not random.
            assert!(ks_distance(values, bound) < 1.95 / n.sqrt());
        }
    }

    #[test]
    fn streams_of_other_seeds_and_names_are_unrelated() {
        let base = uniform(1, "conv1.weight", 10_000, 1.0);
        for other in [uniform(2, "conv1.weight", 10_000, 1.0), uniform(1, "conv2.weight", 10_000, 1.0)] {
            let dot: f64 = base.iter().zip(&other).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            // Correlation of independent samples: standard deviation 1/√n.
            assert!((dot / (10_000.0 / 3.0)).abs() < 0.04, "correlation {}", dot / (10_000.0 / 3.0));
            // Neither stream is a shifted copy of the other.
            assert!(!other.iter().take(100).any(|v| base[..100].contains(v)));
        }
        // Neighbouring elements are uncorrelated as well.
        let lag: f64 = base.windows(2).map(|w| f64::from(w[0]) * f64::from(w[1])).sum();
        assert!((lag / (9_999.0 / 3.0)).abs() < 0.04);
    }

    #[test]
    fn values_never_change() {
        // The program guarantees these numbers: other ones would change the initial weights of every run.
        assert_eq!(uniform(0, "conv1.weight", 3, 1.0), GOLDEN);
        assert_eq!(uniform(0, "conv1.weight", 100, 1.0)[..3], GOLDEN);
    }

    const GOLDEN: [f32; 3] = [-0.195_371_51, 0.900_874_6, 0.438_771_6];
}
