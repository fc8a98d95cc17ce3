//! The timed parts of a layer: calls of the CPU kernels without autodiff.

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use ops::{self, Activation, ConvKernels, HeadKernels, LayerKernels, NormKernels, NormOptions};

use super::resnet18::Kind;

type Values = FloatTensor<Flex>;
/// A part's name and its computation. The results are dropped after the time was taken.
pub type Part = (&'static str, Box<dyn FnMut() -> Vec<Values>>);

/// Returns pseudo-random numbers between -1 and 1.
fn values<const D: usize>(dims: [usize; D], seed: usize) -> Values {
    let count = dims.iter().product();
    let values: Vec<f32> = (0..count).map(|i| ((i.wrapping_mul(7919) + seed) as f32 * 0.618).sin()).collect();
    let tensor = Tensor::<D>::from_data(TensorData::new(values, dims), &Device::flex());
    tensor.try_into_primitive::<Flex>().expect("made on burn-flex")
}

/// Returns the same numbers in the kernels' memory order (channels-last), as in the middle of a network.
fn image(dims: [usize; 4], seed: usize, dtype: FloatDType) -> Values {
    let last = Flex::float_permute(values(dims, seed), &[0, 2, 3, 1]).to_contiguous();
    Flex::float_permute(cast(last, dtype), &[0, 3, 1, 2])
}

fn cast(values: Values, dtype: FloatDType) -> Values {
    if dtype == FloatDType::F32 { values } else { Flex::float_cast(values, dtype) }
}

/// Returns the parts of a layer: the CPU kernels of the crate `ops`, on activations of `dtype` and weights in f32.
pub fn ours(kind: Kind, batch: usize, dtype: FloatDType) -> Vec<Part> {
    let image = |dims, seed| image(dims, seed, dtype);
    let grad = |output: &Values, seed| {
        let shape: [usize; 4] = output_dims(output);
        image(shape, seed)
    };
    match kind {
        Kind::Conv([input, out, kernel, stride, side]) => {
            let x = image([batch, input, side, side], 1);
            let w = values([out, input, kernel, kernel], 2);
            let options = ops::ConvOptions {
                stride: [stride; 2],
                padding: [kernel / 2; 2],
                dilation: [1; 2],
                groups: 1,
                norm_follows: false,
            };
            let forward = move || Flex::conv_forward(x.clone(), w.clone(), None, options, false);
            let (y, kept) = forward();
            let dy = grad(&y, 3);
            apart(move || forward().0, move |wanted| Flex::conv_backward(kept.clone(), dy.clone(), None, wanted))
        }
        Kind::Linear([input, out]) => {
            let (x, w, b) = (cast(values([batch, input], 1), dtype), values([out, input], 2), values([out], 3));
            let forward = move || Flex::linear_forward(x.clone(), w.clone(), b.clone(), false);
            let (_, kept) = forward();
            let dy = cast(values([batch, out], 4), dtype);
            apart(move || forward().0, move |wanted| Flex::conv_backward(kept.clone(), dy.clone(), None, wanted))
        }
        Kind::Norm([channels, side, relu, add]) => {
            let dims = [batch, channels, side, side];
            let (x, w, b) = (image(dims, 1), values([channels], 2), values([channels], 3));
            let residual = (add == 1).then(|| image(dims, 4));
            let activation = if relu == 1 { Activation::Relu } else { Activation::Identity };
            let options = NormOptions { epsilon: 1e-5, activation, process_group: None, running: None };
            let forward =
                move || Flex::norm_forward(x.clone(), w.clone(), b.clone(), residual.clone(), options.clone());
            let ([y, ..], kept) = forward();
            let dy = grad(&y, 5);
            vec![
                ("forward", Box::new(move || forward().0.into())),
                (
                    "data",
                    Box::new(move || {
                        let grads = Flex::norm_backward(kept.clone(), dy.clone());
                        vec![grads.input, grads.weight, grads.bias, grads.residual]
                    }),
                ),
            ]
        }
        Kind::Mean([channels, side]) => {
            let (x, dy) = (image([batch, channels, side, side], 1), values([batch, channels], 2));
            vec![
                ("forward", Box::new(move || vec![Flex::global_avg_pool_forward(x.clone())])),
                (
                    "data",
                    Box::new(move || vec![Flex::global_avg_pool_backward([side; 2], dtype.into(), dy.clone(), None)]),
                ),
            ]
        }
    }
}

fn output_dims(output: &Values) -> [usize; 4] {
    output.layout().shape().dims()
}

/// Computes the gradients of data and weights separately.
fn apart(
    forward: impl Fn() -> Values + 'static,
    backward: impl Fn([bool; 3]) -> ops::ConvGrads<Flex> + Clone + 'static,
) -> Vec<Part> {
    let all = |grads: ops::ConvGrads<Flex>| [grads.input, grads.weight, grads.bias].into_iter().flatten().collect();
    let again = backward.clone();
    vec![
        ("forward", Box::new(move || vec![forward()])),
        ("data", Box::new(move || all(again([true, false, false])))),
        ("weight", Box::new(move || all(backward([false, true, true])))),
    ]
}
