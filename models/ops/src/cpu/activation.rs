//! Elementwise activations and their derivatives.
//!
//! The exponential is a custom function, because the standard library's is a call per value, which the compiler cannot
//! vectorise.

use super::allocator::Buffer;
use super::element::Element;
use super::multiversion::multiversion;
use super::parallel::{VECTOR, elementwise};
use crate::extension::Activation;

/// Computes `e^x` within two units in the last place, for |x| <= 87. Larger magnitudes are clamped to 87. NaN stays
/// NaN.
///
/// With `x = n · ln 2 + r`, `e^x = 2^n · e^r`. Since `|r| <= ln 2 / 2`, the series needs few terms.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Added to a small number, this rounds the number to an integer in the last bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 as a sum of two parts. The products of the first part with small integers are exact.
    const LN2: [f32; 2] = [355.0 / 512.0, -2.121_944_4e-4];
    // NaN fails both comparisons and passes through.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 87.0 { 87.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2[0]) - n * LN2[1];
    // Coefficients of Cephes' expf (Moshier), close to those of the series.
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let value = p * (r * r) + r + 1.0;
    // 2^n from a float's bits, |n| <= 126.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    value * f32::from_bits(n.wrapping_add(127) << 23)
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// An activation as a type, so that loops are compiled once per activation.
pub(crate) trait ElementwiseFn {
    fn value(x: f32) -> f32;
    /// Computes `dy` times the derivative at `x`.
    fn grad(x: f32, dy: f32) -> f32;
}

pub(crate) struct Identity;
pub(crate) struct Relu;
pub(crate) struct Relu6;
pub(crate) struct Sigmoid;
pub(crate) struct Silu;
pub(crate) struct Gelu;

impl ElementwiseFn for Identity {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn grad(_: f32, dy: f32) -> f32 {
        dy
    }
}

impl ElementwiseFn for Relu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        // `max` would drop NaN.
        if x < 0.0 { 0.0 } else { x }
    }
    #[inline(always)]
    fn grad(x: f32, dy: f32) -> f32 {
        if x > 0.0 { dy } else { 0.0 }
    }
}

impl ElementwiseFn for Relu6 {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        // NaN fails both comparisons and passes through.
        let x = if x < 0.0 { 0.0 } else { x };
        if x > 6.0 { 6.0 } else { x }
    }
    #[inline(always)]
    fn grad(x: f32, dy: f32) -> f32 {
        if x > 0.0 && x < 6.0 { dy } else { 0.0 }
    }
}

impl ElementwiseFn for Sigmoid {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        sigmoid(x)
    }
    #[inline(always)]
    fn grad(x: f32, dy: f32) -> f32 {
        let s = sigmoid(x);
        dy * s * (1.0 - s)
    }
}

impl ElementwiseFn for Silu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid(x)
    }
    #[inline(always)]
    fn grad(x: f32, dy: f32) -> f32 {
        let s = sigmoid(x);
        dy * s * (1.0 + x * (1.0 - s))
    }
}

/// Returns `Φ(x)` of the normal distribution and `e^(-x²/2)`, within 1.5e-7. NaN stays NaN.
///
/// erf is Abramowitz & Stegun's formula 7.1.26: a polynomial in `1 / (1 + p·z)` times `e^(-z²)`, here with `z = |x| / √2`.
/// The derivative of GELU needs the same exponential.
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    let e = exp(-0.5 * x * x);
    let t = 1.0 / (1.0 + (0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2) * x.abs());
    let p = 1.061_405_4;
    let p = p * t - 1.453_152;
    let p = p * t + 1.421_413_7;
    let p = p * t - 0.284_496_74;
    let p = p * t + 0.254_829_6;
    let tail = 0.5 * p * t * e;
    (if x < 0.0 { tail } else { 1.0 - tail }, e)
}

impl ElementwiseFn for Gelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * normal(x).0
    }
    #[inline(always)]
    fn grad(x: f32, dy: f32) -> f32 {
        /// `1 / √(2π)`
        const DENSITY: f32 = 0.398_942_3;
        let (phi, e) = normal(x);
        dy * (phi + x * (DENSITY * e))
    }
}

/// Expands `body` once per activation, with `K` as its type: `with_activation!(activation, K => body)`.
macro_rules! with_activation {
    ($activation:expr, $ty:ident => $body:expr) => {{
        use crate::cpu::activation as types;
        match $activation {
            Activation::Identity => {
                type $ty = types::Identity;
                $body
            }
            Activation::Relu => {
                type $ty = types::Relu;
                $body
            }
            Activation::Relu6 => {
                type $ty = types::Relu6;
                $body
            }
            Activation::Sigmoid => {
                type $ty = types::Sigmoid;
                $body
            }
            Activation::Silu => {
                type $ty = types::Silu;
                $body
            }
            Activation::Gelu => {
                type $ty = types::Gelu;
                $body
            }
        }
    }};
}
pub(crate) use with_activation;

/// Applies an activation to every element.
pub(crate) fn forward<E: Element>(x: &[E], activation: Activation) -> Buffer<E> {
    elementwise(x.len(), VECTOR, |range, y| forward_piece(&x[range], activation, y))
}

multiversion!(fn forward_piece<E: Element>(x: &[E], activation: Activation, y: &mut [E]) = forward_piece_body);

#[inline(always)]
fn forward_piece_body<E: Element>(x: &[E], activation: Activation, y: &mut [E]) {
    with_activation!(activation, K => y.iter_mut().zip(x).for_each(|(y, &x)| *y = E::from_f32(K::value(x.to_f32()))));
}

/// Computes `dy` times the derivative at `x`.
pub(crate) fn backward<E: Element>(x: &[E], dy: &[E], activation: Activation) -> Buffer<E> {
    elementwise(x.len(), VECTOR, |range, dx| backward_piece(&x[range.clone()], &dy[range], activation, dx))
}

multiversion!(fn backward_piece<E: Element>(x: &[E], dy: &[E], activation: Activation, dx: &mut [E]) = backward_piece_body);

#[inline(always)]
fn backward_piece_body<E: Element>(x: &[E], dy: &[E], activation: Activation, dx: &mut [E]) {
    with_activation!(activation, K => {
        for ((dx, &dy), &x) in dx.iter_mut().zip(dy).zip(x) {
            *dx = E::from_f32(K::grad(x.to_f32(), dy.to_f32()));
        }
    });
}

/// Computes ReLU's gradient from its output `y`: `dy` where `y` is positive, else zero.
pub(crate) fn relu_grad<E: Element>(y: &[E], dy: &[E]) -> Buffer<E> {
    backward(y, dy, Activation::Relu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_is_accurate() {
        for i in -87_000..=87_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2.4e-7, "e^{x} = {} is not {exact}", exp(x));
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    /// erf of `z`, |z| <= 4: the series with positive terms only, so nothing cancels.
    fn erf(z: f64) -> f64 {
        let (mut term, mut sum) = (z, z);
        for n in 1..200 {
            term *= 2.0 * z * z / (2 * n + 1) as f64;
            sum += term;
        }
        sum * (-z * z).exp() * std::f64::consts::FRAC_2_SQRT_PI
    }

    #[test]
    fn gelu_is_accurate() {
        let (mut worst, mut worst_grad) = (0.0_f64, 0.0_f64);
        for i in -50_000..=50_000 {
            let x = i as f32 / 10_000.0;
            let exact = f64::from(x);
            let phi = 0.5 * (1.0 + erf(exact * std::f64::consts::FRAC_1_SQRT_2));
            let density = (-0.5 * exact * exact).exp() / (2.0 * std::f64::consts::PI).sqrt();
            let scale = exact.abs().max(1.0);
            worst = worst.max((f64::from(Gelu::value(x)) - exact * phi).abs() / scale);
            worst_grad = worst_grad.max((f64::from(Gelu::grad(x, 1.0)) - phi - exact * density).abs());
        }
        println!("gelu: {worst:.2e}, its derivative: {worst_grad:.2e}");
        assert!(worst < 2e-7 && worst_grad < 4e-7, "{worst:e} {worst_grad:e}");
    }

    #[test]
    fn far_values_saturate() {
        assert_eq!((Sigmoid::value(200.0), Silu::value(200.0), Silu::grad(200.0, 1.0)), (1.0, 200.0, 1.0));
        assert!(Sigmoid::value(-200.0) < 1e-37 && Silu::value(-200.0).abs() < 1e-34);
        assert!(Silu::grad(-200.0, 1.0).abs() < 1e-34);
        assert!(Silu::value(f32::NAN).is_nan() && Relu::value(f32::NAN).is_nan());
        assert_eq!((Gelu::value(200.0), Gelu::grad(200.0, 1.0)), (200.0, 1.0));
        assert!(Gelu::value(-200.0).abs() < 1e-34 && Gelu::grad(-200.0, 1.0).abs() < 1e-34);
        assert!(Gelu::value(f32::NAN).is_nan() && Gelu::grad(f32::NAN, 1.0).is_nan());
    }
}
