//! Activations of single values, and their slopes.
//!
//! The exponential is of our own: the standard library's is a call for each value, which the compiler cannot put into
//! vectors.

use super::super::extension::Activation;
use super::memory::Buffer;
use super::parallel::{Shared, for_each, part, pieces};
use super::simd::multiversion;

/// Elements of one task of an elementwise pass.
const PIECE: usize = 1 << 16;

/// `e^x` within two units in the last place, for |x| <= 87; values beyond count as the nearest of these. NaN stays.
///
/// With `x = n · ln 2 + r` it is `2^n · e^r`, where `|r| <= ln 2 / 2` leaves the series few terms.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Added to a small number, this leaves the number rounded to an integer in the last bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the first one's products with small integers are exact.
    const LN2: [f32; 2] = [355.0 / 512.0, -2.121_944_4e-4];
    // Comparisons that NaN fails, so that it gets through.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 87.0 { 87.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2[0]) - n * LN2[1];
    // Coefficients of Cephes' expf (Moshier), near those of the series.
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let value = p * (r * r) + r + 1.0;
    // 2^n as a float's bits, |n| <= 126.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    value * f32::from_bits(n.wrapping_add(127) << 23)
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The kinds as types, so that a loop over values is compiled for each of them.
pub(crate) trait Kind {
    fn value(x: f32) -> f32;
    /// `dy` times the derivative at `x`.
    fn grad(x: f32, dy: f32) -> f32;
}

pub(crate) struct Identity;
pub(crate) struct Relu;
pub(crate) struct Sigmoid;
pub(crate) struct Swish;

impl Kind for Identity {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn grad(_: f32, dy: f32) -> f32 {
        dy
    }
}

impl Kind for Relu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        // Not `max`, which would swallow NaN.
        if x < 0.0 { 0.0 } else { x }
    }
    #[inline(always)]
    fn grad(x: f32, dy: f32) -> f32 {
        if x > 0.0 { dy } else { 0.0 }
    }
}

impl Kind for Sigmoid {
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

impl Kind for Swish {
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

/// Calls a generic function with the [`Kind`] of an activation: `of_kind!(activation, K => body)`.
macro_rules! of_kind {
    ($activation:expr, $kind:ident => $body:expr) => {{
        use crate::cpu::activation as kinds;
        match $activation {
            Activation::Identity => {
                type $kind = kinds::Identity;
                $body
            }
            Activation::Relu => {
                type $kind = kinds::Relu;
                $body
            }
            Activation::Sigmoid => {
                type $kind = kinds::Sigmoid;
                $body
            }
            Activation::Swish => {
                type $kind = kinds::Swish;
                $body
            }
        }
    }};
}
pub(crate) use of_kind;

/// Of each value.
pub(crate) fn forward(x: &[f32], activation: Activation) -> Buffer {
    let mut y = Buffer::new(x.len());
    let target = Shared::new(&mut y);
    let parts = pieces(x.len(), PIECE);
    for_each(parts, |index| {
        let range = part(x.len(), 16, parts, index);
        // SAFETY: each task has its own range.
        forward_piece(&x[range.clone()], activation, unsafe { target.slice(range) });
    });
    y
}

multiversion!(fn forward_piece(x: &[f32], activation: Activation, y: &mut [f32]) = forward_piece_body);

#[inline(always)]
fn forward_piece_body(x: &[f32], activation: Activation, y: &mut [f32]) {
    of_kind!(activation, K => y.iter_mut().zip(x).for_each(|(y, &x)| *y = K::value(x)));
}

/// `dy` times the slope at `x`.
pub(crate) fn backward(x: &[f32], dy: &[f32], activation: Activation) -> Buffer {
    let mut dx = Buffer::new(x.len());
    let target = Shared::new(&mut dx);
    let parts = pieces(x.len(), PIECE);
    for_each(parts, |index| {
        let range = part(x.len(), 16, parts, index);
        // SAFETY: each task has its own range.
        backward_piece(&x[range.clone()], &dy[range.clone()], activation, unsafe { target.slice(range) });
    });
    dx
}

multiversion!(fn backward_piece(x: &[f32], dy: &[f32], activation: Activation, dx: &mut [f32]) = backward_piece_body);

#[inline(always)]
fn backward_piece_body(x: &[f32], dy: &[f32], activation: Activation, dx: &mut [f32]) {
    of_kind!(activation, K => {
        for ((dx, &dy), &x) in dx.iter_mut().zip(dy).zip(x) {
            *dx = K::grad(x, dy);
        }
    });
}

/// The gradient where the result `y` of a ReLU is positive, else zero.
pub(crate) fn relu_grad(y: &[f32], dy: &[f32]) -> Buffer {
    backward(y, dy, Activation::Relu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_is_near_the_exact_one() {
        for i in -87_000..=87_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2.4e-7, "e^{x} = {} is not {exact}", exp(x));
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn far_values_saturate() {
        assert_eq!((Sigmoid::value(200.0), Swish::value(200.0), Swish::grad(200.0, 1.0)), (1.0, 200.0, 1.0));
        assert!(Sigmoid::value(-200.0) < 1e-37 && Swish::value(-200.0).abs() < 1e-34);
        assert!(Swish::grad(-200.0, 1.0).abs() < 1e-34);
        assert!(Swish::value(f32::NAN).is_nan() && Relu::value(f32::NAN).is_nan());
    }
}
