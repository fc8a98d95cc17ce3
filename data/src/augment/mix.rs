//! Mixup and cutmix: each image of a batch is mixed with its partner, the image at the same position of the reversed batch.

use super::params::Rect;
use super::random::{CounterRng, Purpose};
use crate::{DataError, ImageShape};

/// How batches are mixed: mixup, cutmix or both, and their alphas.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MixConfig {
    mixup: Option<f64>,
    cutmix: Option<f64>,
}

/// How one batch is mixed. All of its samples are mixed alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MixParams {
    /// `lambda * own + (1 - lambda) * partner` (Zhang et al.: "mixup: beyond empirical risk minimization", 2018).
    Mixup {
        /// Weight of a sample's own image and label, in [0, 1].
        lambda: f32,
    },
    /// A rectangle of the partner's image replaces that of the sample's own image (Yun et al.: "CutMix", 2019).
    Cutmix {
        /// Fraction of the sample's own image that remains, and weight of its own label, in [0, 1].
        lambda: f32,
        /// The replaced rectangle.
        rect: Rect,
    },
}

/// Counter of the draw that chooses between mixup and cutmix. Lambda consumes the counters from 0 on and stays far below.
const CHOICE: u64 = 1 << 40;
const CENTRE_Y: u64 = CHOICE + 1;
const CENTRE_X: u64 = CHOICE + 2;

impl MixConfig {
    /// Makes the configuration. Lambda is drawn from Beta(alpha, alpha). With both alphas, each batch uses mixup or cutmix with
    /// probability 1/2 each (timm's `Mixup`).
    ///
    /// # Errors
    /// An alpha that is not a positive number.
    pub fn new(mixup: Option<f64>, cutmix: Option<f64>) -> Result<Self, DataError> {
        for (name, alpha) in [("mixup", mixup), ("cutmix", cutmix)] {
            if let Some(alpha) = alpha.filter(|alpha| !alpha.is_finite() || *alpha <= 0.0) {
                let cause = format!("alpha = {alpha} is not a positive number");
                return Err(DataError::new("", cause, "use for instance 0.2, or leave it out to mix nothing").at(name));
            }
        }
        Ok(Self { mixup, cutmix })
    }

    /// Draws how global batch `index` of `epoch` is mixed; none without mixup and cutmix.
    pub fn params(&self, seed: u64, epoch: usize, index: usize, shape: ImageShape) -> Option<MixParams> {
        let mut stream = CounterRng::new(seed, Purpose::Batch, epoch as u64, index as u64);
        let mixup = match (self.mixup, self.cutmix) {
            (None, None) => return None,
            (Some(_), Some(_)) => stream.below(CHOICE, 2) == 0,
            (mixup, _) => mixup.is_some(),
        };
        let alpha = if mixup { self.mixup } else { self.cutmix }?;
        let lambda = beta(alpha, &mut stream);
        if mixup {
            return Some(MixParams::Mixup { lambda: lambda as f32 });
        }
        let (height, width) = (shape.height, shape.width);
        let ratio = (1.0 - lambda).sqrt();
        let size = ((height as f64 * ratio) as usize, (width as f64 * ratio) as usize);
        let centre = (stream.below(CENTRE_Y, height as u32) as usize, stream.below(CENTRE_X, width as u32) as usize);
        let rect = Rect::around(centre, size, (height, width));
        // Clipping and rounding change the area, so the label's weight follows the pixels.
        let lambda = 1.0 - rect.area() as f32 / (height * width) as f32;
        Some(MixParams::Cutmix { lambda, rect })
    }
}

impl MixParams {
    /// Returns the weight of a sample's own label; the partner's label has the rest.
    pub fn lambda(&self) -> f32 {
        match *self {
            Self::Mixup { lambda } | Self::Cutmix { lambda, .. } => lambda,
        }
    }

    /// Mixes `partner` into `own`, both `[C, H, W]` of `shape`, both augmented and normalised.
    pub fn apply(&self, own: &mut [f32], partner: &[f32], shape: ImageShape) {
        match *self {
            Self::Mixup { lambda } => {
                own.iter_mut().zip(partner).for_each(|(own, partner)| *own = lambda * *own + (1.0 - lambda) * partner);
            }
            Self::Cutmix { rect, .. } => {
                for plane in 0..shape.channels {
                    for row in rect.top..rect.bottom {
                        let start = (plane * shape.height + row) * shape.width;
                        let columns = start + rect.left..start + rect.right;
                        own[columns.clone()].copy_from_slice(&partner[columns]);
                    }
                }
            }
        }
    }
}

/// Draws from Beta(alpha, alpha): x / (x + y) of two Gamma(alpha) draws. Computed in logarithms, because with a small alpha
/// both draws can underflow.
fn beta(alpha: f64, stream: &mut CounterRng) -> f64 {
    let (x, y) = (ln_gamma_draw(alpha, stream), ln_gamma_draw(alpha, stream));
    1.0 / (1.0 + (y - x).exp())
}

/// Draws the logarithm of Gamma(shape, 1) (Marsaglia, Tsang: "A simple method for generating gamma variables", 2000). For a
/// shape below 1 it uses Gamma(shape + 1) * U^(1/shape).
fn ln_gamma_draw(shape: f64, stream: &mut CounterRng) -> f64 {
    if shape < 1.0 {
        return ln_gamma_draw(shape + 1.0, stream) + stream.next_unit().ln() / shape;
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let normal = normal_draw(stream);
        let v = (1.0 + c * normal).powi(3);
        if v > 0.0 && stream.next_unit().ln() < 0.5 * normal * normal + d * (1.0 - v + v.ln()) {
            return d.ln() + v.ln();
        }
    }
}

/// Draws from the standard normal distribution (Box, Muller 1958).
fn normal_draw(stream: &mut CounterRng) -> f64 {
    let radius = (-2.0 * stream.next_unit().ln()).sqrt();
    radius * (std::f64::consts::TAU * stream.next_unit()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the largest distance between the draws' distribution and `cdf` (Kolmogorov-Smirnov).
    fn distance(alpha: f64, cdf: impl Fn(f64) -> f64) -> f64 {
        let mut draws: Vec<f64> = (0..20_000)
            .map(|index| beta(alpha, &mut CounterRng::new(5, Purpose::Batch, 0, index)))
            .inspect(|draw| assert!((0.0..=1.0).contains(draw)))
            .collect();
        draws.sort_by(f64::total_cmp);
        let n = draws.len() as f64;
        draws.iter().enumerate().map(|(i, &x)| ((i as f64 + 0.5) / n - cdf(x)).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn beta_draws_have_the_beta_distribution() {
        // Random draws exceed 1.95 / sqrt(n) once in a thousand times. The draws are fixed, so the test never changes.
        let limit = 1.95 / 20_000f64.sqrt();
        let arcsine = |x: f64| 2.0 / std::f64::consts::PI * x.sqrt().asin();
        assert!(distance(0.5, arcsine) < limit);
        assert!(distance(1.0, |x| x) < limit);
        assert!(distance(2.0, |x| x * x * (3.0 - 2.0 * x)) < limit);
        assert!(distance(2.0, |x| x) > 5.0 * limit, "the test distinguishes distributions");
    }

    #[test]
    fn beta_draws_with_a_tiny_alpha_are_finite() {
        for index in 0..1000 {
            let draw = beta(1e-4, &mut CounterRng::new(1, Purpose::Batch, 0, index));
            assert!((0.0..=1.0).contains(&draw), "{draw}");
        }
    }
}
