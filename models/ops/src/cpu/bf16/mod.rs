//! Convolutions in bf16: images and their gradients are stored in bf16, weights and their gradients in f32, sums are f32.

pub(crate) mod conv;
