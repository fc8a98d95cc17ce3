//! The parts of a layer on burn's CPU backend: with our kernels and with burn's operations. No graph is recorded.

use burn::backend::Flex;
use burn::backend::ops::{ActivationOps, ConvOptions, FloatTensorOps, ModuleOps};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use ops::{self, Activation, ConvKernels, HeadKernels, Kernels, NormKernels, NormOptions};

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
fn image(dims: [usize; 4], seed: usize) -> Values {
    let last = Flex::float_permute(values(dims, seed), &[0, 2, 3, 1]).to_contiguous();
    Flex::float_permute(last, &[0, 3, 1, 2])
}

/// Our side: the CPU kernels of the crate `ops`.
pub fn ours(kind: Kind, batch: usize) -> Vec<Part> {
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
            let (x, w, b) = (values([batch, input], 1), values([out, input], 2), values([out], 3));
            let forward = move || Flex::linear_forward(x.clone(), w.clone(), b.clone(), false);
            let (_, kept) = forward();
            let dy = values([batch, out], 4);
            apart(move || forward().0, move |wanted| Flex::conv_backward(kept.clone(), dy.clone(), None, wanted))
        }
        Kind::Norm([channels, side, relu, add]) => {
            let dims = [batch, channels, side, side];
            let (x, w, b) = (image(dims, 1), values([channels], 2), values([channels], 3));
            let residual = (add == 1).then(|| image(dims, 4));
            let activation = if relu == 1 { Activation::Relu } else { Activation::Identity };
            let options = NormOptions { epsilon: 1e-5, activation, shared: None, running: None };
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
                ("data", Box::new(move || vec![Flex::global_avg_pool_backward([side; 2], DType::F32, dy.clone())])),
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

/// burn's side: the operations that a layer without our kernels runs, on images in burn's memory order, and the functions
/// that burn's backward pass calls.
pub fn burns(kind: Kind, batch: usize) -> Vec<Part> {
    match kind {
        Kind::Conv([input, out, kernel, stride, side]) => {
            let (x, w) = (values([batch, input, side, side], 1), values([out, input, kernel, kernel], 2));
            let options = ConvOptions::new([stride; 2], [kernel / 2; 2], [1; 2], 1);
            let half = side.div_ceil(stride);
            let dy = values([batch, out, half, half], 3);
            let (x2, w2, dy2, options2) = (x.clone(), w.clone(), dy.clone(), options.clone());
            let (x3, w3, options3) = (x.clone(), w.clone(), options.clone());
            vec![
                ("forward", Box::new(move || vec![Flex::conv2d(x.clone(), w.clone(), None, options.clone())])),
                (
                    "data",
                    Box::new(move || {
                        vec![Flex::conv2d_x_backward(x2.clone(), w2.clone(), dy2.clone(), options2.clone())]
                    }),
                ),
                (
                    "weight",
                    Box::new(move || {
                        vec![Flex::conv2d_weight_backward(x3.clone(), w3.clone(), dy.clone(), options3.clone())]
                    }),
                ),
            ]
        }
        Kind::Linear([input, out]) => {
            let (x, w, b) = (values([batch, input], 1), values([input, out], 2), values([out], 3));
            let dy = values([batch, out], 4);
            let (x2, w2, dy2) = (x.clone(), w.clone(), dy.clone());
            vec![
                ("forward", Box::new(move || vec![Flex::linear(x.clone(), w.clone(), Some(b.clone()))])),
                ("data", Box::new(move || vec![Flex::linear_x_backward(w2.clone(), dy2.clone())])),
                (
                    "weight",
                    Box::new(move || {
                        vec![
                            Flex::linear_weight_backward(x2.clone(), dy.clone()),
                            Flex::linear_bias_backward(dy.clone()),
                        ]
                    }),
                ),
            ]
        }
        Kind::Norm([channels, side, relu, add]) => {
            let dims = [batch, channels, side, side];
            let (x, w, b) = (values(dims, 1), values([channels], 2), values([channels], 3));
            let residual = (add == 1).then(|| values(dims, 4));
            let dy = values(dims, 5);
            let (x2, w2) = (x.clone(), w.clone());
            let forward = move || {
                let normed = Flex::batch_norm_train(x.clone(), w.clone(), b.clone(), 1e-5);
                let output = match &residual {
                    Some(residual) => Flex::float_add(normed.output, residual.clone()),
                    None => normed.output,
                };
                let output = if relu == 1 { Flex::relu(output) } else { output };
                vec![output, normed.mean, normed.variance]
            };
            let kept = forward();
            let backward = move || {
                let [y, mean, variance] = kept.as_slice() else { unreachable!("forward gives three tensors") };
                let g = if relu == 1 { Flex::relu_backward(y.clone(), dy.clone()) } else { dy.clone() };
                let grads =
                    Flex::batch_norm_train_backward(x2.clone(), w2.clone(), mean.clone(), variance.clone(), 1e-5, g);
                vec![grads.x_grad, grads.gamma_grad, grads.beta_grad]
            };
            vec![("forward", Box::new(forward)), ("data", Box::new(backward))]
        }
        Kind::Mean([channels, side]) => {
            let (x, dy) = (values([batch, channels, side, side], 1), values([batch, channels, 1], 2));
            let flat = Shape::new([batch, channels, side * side]);
            let count = (side * side) as f32;
            let expanded = flat.clone();
            vec![
                (
                    "forward",
                    Box::new(move || vec![Flex::float_mean_dim(Flex::float_reshape(x.clone(), flat.clone()), 2)]),
                ),
                (
                    "data",
                    Box::new(move || {
                        let share = Flex::float_div_scalar(dy.clone(), count.into());
                        let ones =
                            Flex::float_ones(expanded.clone(), &Default::default(), burn::tensor::FloatDType::F32);
                        vec![Flex::float_mul(ones, share)]
                    }),
                ),
            ]
        }
    }
}
