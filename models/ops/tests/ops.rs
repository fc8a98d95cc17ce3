//! The operations with custom kernels against the same operations of burn, with autodiff.

use burn::tensor::ops::{ConvOptions as BurnConv, MaxPoolOptions};
use burn::tensor::{Device, Distribution, Tensor, activation, module};
use ops::Activation::{Gelu, Identity, Relu, Relu6, Silu};
use ops::{
    ConvOptions, Epilogue, PoolOptions, add, avg_pool2d, batch_norm_eval, batch_norm_train, concat, conv2d,
    cross_entropy, flatten, gelu, global_avg_pool, interleave, linear, max_pool2d, relu, scale_channels, sigmoid, silu,
    slice_channels,
};

fn random<const D: usize>(dims: [usize; D]) -> Tensor<D> {
    Tensor::random(dims, Distribution::Normal(0.5, 1.0), &Device::flex().autodiff()).require_grad()
}

fn close<const D: usize>(what: &str, custom: Tensor<D>, burns: Tensor<D>) {
    assert_eq!(custom.dims(), burns.dims(), "{what}");
    let values = |t: Tensor<D>| t.into_data().try_into_vec::<f32>().unwrap();
    let (custom, burns) = (values(custom), values(burns));
    let largest = burns.iter().fold(1.0_f32, |m, v| m.max(v.abs()));
    for (i, (a, b)) in custom.iter().zip(&burns).enumerate() {
        assert!((a - b).abs() <= 2e-5 * largest, "{what}[{i}]: {a} against burn's {b}");
    }
}

/// Compares the outputs and, with random upstream gradients, the gradients of all inputs of up to four axes.
macro_rules! same {
    ($what:expr, [$($input:ident),*], $custom:expr, $burns:expr) => {{
        let (custom, burns) = ($custom, $burns);
        close(concat!($what, " output"), custom.clone(), burns.clone());
        let weight = random(custom.dims()).detach();
        let (a, b) = ((custom * weight.clone()).sum().backward(), (burns * weight).sum().backward());
        $(close(
            concat!($what, " gradient of ", stringify!($input)),
            $input.grad(&a).expect("a gradient"),
            $input.grad(&b).expect("a gradient"),
        );)*
    }};
}

#[test]
fn convolution() {
    for (dims, filters, stride, padding, dilation, groups) in [
        ([2, 3, 9, 8], [6, 3, 5, 5], 1, 0, 1, 1),
        ([2, 16, 8, 8], [32, 16, 3, 3], 1, 1, 1, 1),
        ([2, 16, 9, 7], [24, 16, 3, 3], 2, 1, 1, 1),
        ([2, 16, 8, 8], [32, 16, 1, 1], 2, 0, 1, 1),
        ([2, 16, 9, 9], [16, 1, 3, 3], 2, 1, 1, 16),
        ([2, 8, 9, 9], [12, 4, 3, 3], 1, 2, 2, 2),
        ([2, 128, 6, 6], [128, 4, 3, 3], 1, 1, 1, 32),
        ([2, 72, 7, 7], [96, 3, 3, 3], 2, 1, 1, 24),
        ([2, 21, 6, 6], [35, 3, 3, 3], 1, 1, 1, 7),
        // The stem of ImageNet's ResNets.
        ([2, 3, 18, 15], [64, 3, 7, 7], 2, 3, 1, 1),
        ([1, 24, 9, 11], [32, 24, 7, 7], 2, 3, 1, 1),
        ([2, 48, 9, 7], [48, 1, 5, 5], 2, 2, 1, 48),
    ] {
        let (x, w, b) = (random(dims), random(filters), random([filters[0]]));
        let (s, p, d) = ([stride; 2], [padding; 2], [dilation; 2]);
        let options = ConvOptions { stride: s, padding: p, dilation: d, groups, norm_follows: false };
        let burn = || BurnConv::new(s, p, d, groups);
        let (x2, w2) = (x.clone(), w.clone());
        same!(
            "convolution",
            [x, w],
            conv2d(x2.clone(), w2.clone(), None, options, false),
            module::conv2d(x2, w2, None, burn())
        );
        let (x2, w2, b2) = (x.clone(), w.clone(), b.clone());
        same!(
            "convolution with bias and relu",
            [x, w, b],
            conv2d(x2.clone(), w2.clone(), Some(b2.clone()), options, true),
            activation::relu(module::conv2d(x2, w2, Some(b2), burn()))
        );
    }
}

#[test]
fn linear_layer() {
    for (batch, [input, output]) in [(1, [1, 1]), (7, [20, 10]), (130, [40, 33])] {
        let (x, w, b) = (random([batch, input]), random([output, input]), random([output]));
        let (x2, w2, b2) = (x.clone(), w.clone(), b.clone());
        same!(
            "linear",
            [x, w, b],
            linear(x2.clone(), w2.clone(), Some(b2.clone()), true),
            activation::relu(module::linear(x2, w2.transpose(), Some(b2)))
        );
    }
}

#[test]
fn batch_norm() {
    for dims in [[2, 3, 5, 4], [4, 32, 8, 8], [3, 70, 1, 3]] {
        let c = [dims[1]];
        let (x, w, b, r) = (random(dims), random(c), random(c), random(dims));
        // Each call makes new tensors, because a backward pass consumes the graph. With a larger offset the test would
        // compare how the two implementations round the mean to f32: the error of the mean, in standard deviations,
        // adds to the scale's gradient once per value.
        let x2 = || x.clone() * 0.5 + 2.0;
        let plain = |x: &Tensor<4>| module::batch_norm_train(x.clone(), w.clone(), b.clone(), 1e-5);
        let custom = |residual: Option<Tensor<4>>, activation| {
            batch_norm_train(x2(), w.clone(), b.clone(), 1e-5, Epilogue { residual, activation }, None, None)
        };
        // An offset of many standard deviations must not reduce the statistics' accuracy.
        let far = || x.clone() * 0.5 + 20.0;
        let custom_far = batch_norm_train(far(), w.clone(), b.clone(), 1e-5, Epilogue::default(), None, None);
        close("mean", custom_far.mean, plain(&far()).mean);
        // burn's variance is the biased one.
        let [n, _, h, width] = far().dims();
        let count = (n * h * width) as f64;
        close("variance", custom_far.variance, plain(&far()).variance * (count / (count - 1.0)));
        same!("batch norm", [x, w, b], custom(None, Identity).output, plain(&x2()).output);
        same!("batch norm, relu", [x, w, b], custom(None, Relu).output, activation::relu(plain(&x2()).output));
        same!(
            "batch norm, add",
            [x, w, b, r],
            custom(Some(r.clone()), Identity).output,
            plain(&x2()).output + r.clone()
        );
        same!(
            "batch norm, add, relu",
            [x, w, b, r],
            custom(Some(r.clone()), Relu).output,
            activation::relu(plain(&x2()).output + r.clone())
        );
        same!("batch norm, silu", [x, w, b], custom(None, Silu).output, activation::silu(plain(&x2()).output));
        let relu6 = |x: Tensor<4>| activation::relu(x).clamp_max(6.0);
        // Scaled, so that values are beyond both limits.
        let six = |x: Tensor<4>| x * 4.0;
        let wide = |x: &Tensor<4>| {
            let (w, b) = (w.clone() * 4.0, b.clone() * 4.0);
            batch_norm_train(x.clone(), w, b, 1e-5, Epilogue { residual: None, activation: Relu6 }, None, None).output
        };
        same!("batch norm, relu6", [x, w, b], wide(&x2()), relu6(six(plain(&x2()).output)));
        same!("batch norm, gelu", [x, w, b], custom(None, Gelu).output, activation::gelu(plain(&x2()).output));
        same!(
            "batch norm, add, silu",
            [x, w, b, r],
            custom(Some(r.clone()), Silu).output,
            activation::silu(plain(&x2()).output + r.clone())
        );

        let (mean, variance) = (random(c).detach(), random(c).detach().abs() + 0.1);
        let burns = module::batch_norm(x.clone(), w.clone(), b.clone(), mean.clone(), variance.clone(), 1e-5);
        let plain = |t: &Tensor<4>| t.clone().without_autodiff();
        let vector = |t: &Tensor<1>| t.clone().without_autodiff();
        for (residual, activation) in [(None, Identity), (None, Relu), (Some(plain(&r)), Relu), (Some(plain(&r)), Silu)]
        {
            let after = Epilogue { residual: residual.clone(), activation };
            let affine = [vector(&w), vector(&b)];
            let custom = batch_norm_eval(plain(&x), affine, [vector(&mean), vector(&variance)], 1e-5, after);
            let burns = residual.map_or_else(|| plain(&burns), |r| plain(&burns) + r);
            let burns = match activation {
                Relu => activation::relu(burns),
                Silu => activation::silu(burns),
                _ => burns,
            };
            close("evaluation", custom, burns);
        }

        // A frozen batch norm: gradients reach the image and the residual.
        let burns = || {
            let [w, b, mean, variance] = [&w, &b, &mean, &variance].map(vector);
            module::batch_norm(x.clone(), w, b, mean, variance, 1e-5)
        };
        let frozen = |residual: Option<Tensor<4>>, activation| {
            let affine = [vector(&w), vector(&b)];
            let after = Epilogue { residual, activation };
            batch_norm_eval(x.clone(), affine, [vector(&mean), vector(&variance)], 1e-5, after)
        };
        same!("frozen batch norm", [x], frozen(None, Identity), burns());
        same!("frozen batch norm, relu", [x], frozen(None, Relu), activation::relu(burns()));
        same!("frozen batch norm, silu", [x], frozen(None, Silu), activation::silu(burns()));
        same!(
            "frozen batch norm, add, relu",
            [x, r],
            frozen(Some(r.clone()), Relu),
            activation::relu(burns() + r.clone())
        );
        // Nothing that it depends on has a gradient: the output belongs to no graph.
        let image = x.clone().without_autodiff().autodiff();
        let (affine, of) = ([vector(&w), vector(&b)], [vector(&mean), vector(&variance)]);
        let output = batch_norm_eval(image, affine, of, 1e-5, Epilogue { residual: None, activation: Relu });
        assert!(output.is_autodiff() && !output.is_tracked());
        close("frozen batch norm without a graph", output, activation::relu(burns()));
    }
}

#[test]
fn pooling_and_relu() {
    for (dims, kernel, stride, padding) in [
        ([2, 6, 8, 8], 2, 2, 0),
        ([2, 33, 7, 9], 3, 2, 1),
        ([1, 5, 6, 6], 3, 1, 1),
        ([3, 6, 7, 9], 2, 2, 0),
        ([2, 20, 6, 5], 2, 2, 0),
        ([2, 10, 9, 10], 3, 3, 1),
        ([2, 7, 9, 10], 2, 3, 0),
        ([2, 16, 4, 4], 4, 4, 0),
        ([1, 1, 5, 5], 2, 2, 1),
        // Few channels, and pixels that are in no window
        ([4, 1, 5, 5], 2, 2, 0),
        ([4, 3, 7, 7], 2, 2, 0),
    ] {
        let x = random(dims);
        let x2 = x.clone();
        let options = PoolOptions { kernel: [kernel; 2], stride: [stride; 2], padding: [padding; 2] };
        let burn = MaxPoolOptions::new([kernel; 2]).with_stride([stride; 2]).with_padding([padding; 2]);
        same!("max pooling", [x], max_pool2d(x2.clone(), options), module::max_pool2d(x2.clone(), burn));
        same!(
            "mean",
            [x],
            global_avg_pool(x2.clone()),
            x2.clone().flatten::<3>(2, 3).mean_dim(2).reshape([dims[0] as i32, dims[1] as i32])
        );
        same!("relu", [x], relu(x2.clone() - 0.5), activation::relu(x2 - 0.5));
    }
}

#[test]
fn loss() {
    // Few and many classes, more rows than a task has, and no row.
    for dims in [[4, 10], [1, 1], [3, 1000], [900, 10], [0, 10]] {
        let targets = activation::softmax(random(dims).detach().inner(), 1);
        // Far apart, so that exponentials would overflow.
        let logits = (random(dims) * 60.0).detach().require_grad();
        let burns = |x: Tensor<2>| -(activation::log_softmax(x, 1) * targets.clone().autodiff()).sum() * 0.25;
        if dims[0] > 0 {
            same!("loss", [logits], cross_entropy(logits.clone(), targets.clone(), 0.25), burns(logits.clone()));
        } else {
            assert_eq!(cross_entropy(logits, targets, 0.25).into_scalar::<f32>(), 0.0);
        }
    }
    // Targets whose sum is not one: classes have weights.
    let targets = random([5, 7]).detach().abs().inner();
    let x = random([5, 7]);
    let burns = -(activation::log_softmax(x.clone(), 1) * targets.clone().autodiff()).sum();
    same!("weighted loss", [x], cross_entropy(x.clone(), targets.clone(), 1.0), burns);
}

#[test]
fn nan_is_propagated() {
    let x = Tensor::<4>::from_floats([[[[f32::NAN, -1.0], [1.0, 2.0]]]], &Device::flex());
    let values = |t: Tensor<4>| t.into_data().try_into_vec::<f32>().unwrap();
    assert!(values(relu(x.clone()))[0].is_nan());
    let options = PoolOptions { kernel: [2, 2], stride: [2, 2], padding: [0, 0] };
    assert!(values(max_pool2d(x, options))[0].is_nan());
    for bad in [f32::NAN, f32::INFINITY] {
        let logits =
            Tensor::<2>::from_floats([[1.0, bad, 2.0], [0.0, 0.0, 0.0]], &Device::flex().autodiff()).require_grad();
        let targets = Tensor::from_floats([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], &Device::flex());
        let loss = cross_entropy(logits.clone(), targets, 1.0);
        let gradient = logits.grad(&loss.backward()).unwrap().into_data().try_into_vec::<f32>().unwrap();
        assert!(loss.into_scalar::<f32>().is_nan());
        assert!(
            gradient[..3].iter().all(|value| value.is_nan()) && gradient[3..].iter().all(|value| value.is_finite())
        );
    }
}

#[test]
fn other_element_types_use_burns_operations() {
    let device = Device::flex();
    let x = Tensor::<4>::ones([1, 2, 4, 4], &device).cast(burn::tensor::FloatDType::F64);
    let w = Tensor::<4>::ones([3, 2, 3, 3], &device).cast(burn::tensor::FloatDType::F64);
    let options = ConvOptions::stride_one(1);
    let y = conv2d(x, w, None, options, false);
    assert_eq!(y.dtype(), burn::tensor::DType::F64);
    assert_eq!(y.into_data().try_into_vec::<f64>().unwrap(), [18.0; 12]);

    let side = |first: f64| {
        Tensor::<4>::from_data(
            burn::tensor::TensorData::new(vec![first, first + 1.0], [1, 2, 1, 1]),
            (&device, burn::tensor::DType::F64),
        )
    };
    let both = interleave(side(1.0), side(10.0));
    assert_eq!(both.into_data().try_into_vec::<f64>().unwrap(), [1.0, 10.0, 2.0, 11.0]);
}

#[test]
fn runs_repeat_bit_for_bit() {
    let run = |x: &Tensor<4>, w: &Tensor<4>| {
        let options = ConvOptions { stride: [1, 1], padding: [1, 1], dilation: [1, 1], groups: 1, norm_follows: false };
        let y = conv2d(x.clone(), w.clone(), None, options, true);
        let grads = y.clone().powf_scalar(2.0).sum().backward();
        let bits = |t: Tensor<4>| t.into_data().try_into_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
        let all: [Vec<u32>; 3] = [bits(y), bits(x.grad(&grads).unwrap()), bits(w.grad(&grads).unwrap())];
        all
    };
    let (x, w) = (random([16, 32, 16, 16]), random([32, 32, 3, 3]));
    let first = run(&x, &w);
    for _ in 0..5 {
        assert_eq!(run(&x, &w), first);
    }
}

#[test]
fn gradients_of_several_uses_add_up() {
    let (x, w) = (random([2, 6, 5, 4]), random([6, 6, 3, 3]));
    let options = ConvOptions { stride: [1, 1], padding: [1, 1], dilation: [1, 1], groups: 1, norm_follows: false };
    // Three uses by custom steps, with one of burn's steps between them.
    let inner = |y: Tensor<4>| {
        let conv = conv2d(y.clone(), w.clone(), None, options, false);
        add(add(conv, y.clone()), silu(y.clone()) * y)
    };
    let burn = |y: Tensor<4>| {
        let conv = module::conv2d(y.clone(), w.clone(), None, BurnConv::new([1, 1], [1, 1], [1, 1], 1));
        conv + y.clone() + activation::silu(y.clone()) * y
    };
    // Repeat, because the nodes of the first pass are recorded.
    for _ in 0..2 {
        same!("several uses", [x, w], inner(inner(relu(x.clone()))), burn(burn(activation::relu(x.clone()))));
    }
}

#[test]
fn composed_operations() {
    let dims = [2, 6, 4, 8];
    let (x, y) = (random(dims), random(dims));
    // Returns a tensor that is channels-last in memory, like a kernel's output.
    let last = |t: &Tensor<4>| relu(t.clone() + 10.0) - 10.0;
    same!("sum", [x, y], add(last(&x), last(&y)), x.clone() + y.clone());
    same!("concat", [x, y], concat(vec![last(&x), y.clone()]), Tensor::cat(vec![x.clone(), y.clone()], 1));
    same!("channels", [x], slice_channels(last(&x), 1..4), x.clone().slice([0..2, 1..4, 0..4, 0..8]));
    same!("silu", [x], silu(last(&x)), x.clone() * activation::sigmoid(x.clone()));
    same!("gelu", [x], gelu(last(&x)), activation::gelu(x.clone()));
    same!("sigmoid", [x], sigmoid(last(&x)), activation::sigmoid(x.clone()));
    let burn = burn::tensor::ops::AvgPoolOptions::new([2, 2]).with_stride([2, 2]);
    same!("mean of windows", [x], avg_pool2d(last(&x), 2), module::avg_pool2d(x.clone(), burn));
    let s = random([2, 6]);
    same!("scale", [x, s], scale_channels(last(&x), s.clone()), x.clone() * s.clone().reshape([2, 6, 1, 1]));
    let both = Tensor::cat(vec![x.clone(), y.clone()], 1);
    let shuffled = both.reshape([2, 2, 6, 4, 8]).swap_dims(1, 2).reshape([2, 12, 4, 8]);
    same!("interleaved", [x, y], interleave(last(&x), y.clone()), shuffled);
    let z = random([2, 3, 4, 8]);
    let parts = || vec![last(&x), z.clone(), last(&y), x.clone(), z.clone()];
    for count in [3, 4, 5] {
        let plain = [&x, &z, &y, &x, &z].into_iter().take(count).cloned().collect();
        same!("concat of many", [x, y, z], concat(parts()[..count].to_vec()), Tensor::cat(plain, 1));
    }
}

/// Images in both memory orders.
#[test]
fn flattening() {
    for dims in [[2, 16, 5, 5], [3, 7, 2, 9], [2, 5, 1, 1], [1, 1, 3, 3]] {
        let x = random(dims);
        same!("flatten of row-major images", [x], flatten(x.clone()), x.clone().flatten::<2>(1, 3));
        // The kernel of ReLU returns images channels-last.
        let last = || relu(x.clone());
        same!("flatten of channels-last images", [x], flatten(last()), last().flatten::<2>(1, 3));
    }
}

/// Returns the message of a panic.
fn message<T>(call: impl FnOnce() -> T + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(call).err().expect("the call panics");
    panic.downcast_ref::<String>().cloned().unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string())
}

/// The kernels read memory unchecked.
#[test]
fn operands_that_do_not_fit_are_refused() {
    let images = || random([2, 16, 8, 8]);
    let options = ConvOptions { stride: [1, 1], padding: [1, 1], dilation: [1, 1], groups: 1, norm_follows: false };
    let bias = message(|| conv2d(images(), random([32, 16, 3, 3]), Some(random([1])), options, false));
    assert!(bias.contains("a bias of Some(1) values for 32 output channels"), "{bias}");
    let bias = message(|| linear(random([2, 3]), random([5, 3]), Some(random([4])), false));
    assert!(bias.contains("for 5 output channels"), "{bias}");
    let weight = message(|| linear(random([2, 3]), random([5, 4]), None, false));
    assert!(weight.contains("a linear layer of 5x4 weights for 3 features"), "{weight}");
    let sizes = message(|| concat(vec![images(), random([2, 16, 4, 4])]));
    assert!(sizes.contains("differ in batch, height or width"), "{sizes}");
    let shapes = message(|| interleave(images(), random([2, 8, 8, 8])));
    assert!(shapes.contains("two images to interleave differ in shape"), "{shapes}");
    let factors = message(|| scale_channels(images(), random([2, 8])));
    assert!(factors.contains("one factor for each channel of each image"), "{factors}");
    let vectors = || [random([16]), random([8])];
    let epilogue = Epilogue { residual: None, activation: Identity };
    let statistics = message(|| batch_norm_eval(images(), vectors(), vectors(), 1e-5, epilogue));
    assert!(statistics.contains("batch norm of 16 channels"), "{statistics}");
    let window = message(|| avg_pool2d(images(), 9));
    assert!(window.contains("average pooling of 8x8 pixels with windows of 9"), "{window}");
}
