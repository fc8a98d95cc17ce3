//! Support for data parallelism: synchronised batch norm, and gradients that are reported when they are ready.

use std::sync::{Arc, Barrier, Mutex};

use burn::module::ParamId;
use burn::tensor::{Device, Tensor, TensorData};
use models::layers::BatchNorm2d;
use models::{Context, GradientSink, Init, Spec, state};
use ops::StatisticsReduce;

/// All-reduce between threads.
#[derive(Debug)]
struct Threads {
    barrier: Barrier,
    total: Mutex<Vec<f64>>,
}

impl StatisticsReduce for Threads {
    fn all_reduce_sum(&self, values: &mut [f64]) {
        {
            let mut total = self.total.lock().unwrap();
            total.resize(values.len(), 0.0);
            total.iter_mut().zip(&*values).for_each(|(total, value)| *total += value);
        }
        self.barrier.wait();
        values.copy_from_slice(&self.total.lock().unwrap());
        if self.barrier.wait().is_leader() {
            self.total.lock().unwrap().clear();
        }
        self.barrier.wait();
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().unwrap()
}

fn close(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let largest = theirs.iter().fold(1e-3_f32, |m, v| m.max(v.abs()));
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!((a - b).abs() <= 3e-5 * largest, "{what}[{i}]: {a} against {b}");
    }
}

/// Returns the output, the gradients of input, weight and bias, and the running statistics after a step on images `range`.
fn run(data: &[Vec<f32>; 3], range: std::ops::Range<usize>, relu: bool, residual: bool, cx: &Context) -> [Vec<f32>; 6] {
    const DIMS: [usize; 4] = [1, 4, 5, 3];
    let (device, one) = (Device::flex().autodiff(), DIMS[1] * DIMS[2] * DIMS[3]);
    let tensor = |values: &[f32]| -> Tensor<4> {
        let part = values[range.start * one..range.end * one].to_vec();
        Tensor::from_data(TensorData::new(part, [range.len(), DIMS[1], DIMS[2], DIMS[3]]), &device)
    };
    let [x, weight, other] = data;
    let layer = BatchNorm2d::new(4, &Init::new(0, &device));
    let x = tensor(x).require_grad();
    let output = match (relu, residual) {
        (true, true) => layer.forward_add_relu(x.clone(), tensor(other), cx),
        (true, false) => layer.forward_relu(x.clone(), cx),
        _ => layer.forward(x.clone(), cx),
    };
    let gradients = (output.clone() * tensor(weight)).sum().backward();
    [
        values(output),
        values(x.grad(&gradients).unwrap()),
        values(layer.weight.value().grad(&gradients).unwrap()),
        values(layer.bias.value().grad(&gradients).unwrap()),
        values(layer.running_mean.value()),
        values(layer.running_var.value()),
    ]
}

/// Devices and types without a custom kernel use burn's operations. On the CPU, f64 is such a type.
#[test]
fn synchronised_batch_norm_without_kernels_equals_the_whole_batch() {
    use burn::tensor::DType;
    use ops::{Epilogue, batch_norm_train};
    const DIMS: [usize; 3] = [3, 4, 2];
    let one = DIMS.iter().product::<usize>();
    let wave = |scale: f64, shift: f64, step: f64| -> Vec<f64> {
        (0..7 * one).map(|i| (i as f64 * step).sin() * scale + shift).collect()
    };
    let (x, upstream) = (wave(2.0, 40.0, 0.37), wave(1.0, 0.0, 0.11));
    let pass = |range: std::ops::Range<usize>, shared: Option<Arc<dyn StatisticsReduce>>| {
        let device = Device::flex().autodiff();
        let tensor = |values: &[f64]| -> Tensor<4> {
            let part = values[range.start * one..range.end * one].to_vec();
            Tensor::from_data(TensorData::new(part, [range.len(), DIMS[0], DIMS[1], DIMS[2]]), (&device, DType::F64))
        };
        let vector = |values: [f64; 3]| -> Tensor<1> {
            Tensor::from_data(TensorData::new(values.to_vec(), [3]), (&device, DType::F64)).require_grad()
        };
        let (input, weight, bias) = (tensor(&x).require_grad(), vector([0.5, 1.0, 2.0]), vector([0.1, 0.0, -0.3]));
        let after = Epilogue { residual: None, activation: ops::Activation::Relu };
        let out = batch_norm_train(input.clone(), weight.clone(), bias.clone(), 1e-5, after, shared, None);
        let gradients = (out.output.clone() * tensor(&upstream)).sum().backward();
        let values = |data: TensorData| data.try_into_vec::<f64>().unwrap();
        [
            values(out.output.into_data()),
            values(input.grad(&gradients).unwrap().into_data()),
            values(weight.grad(&gradients).unwrap().into_data()),
            values(bias.grad(&gradients).unwrap().into_data()),
            values(out.mean.into_data()),
            values(out.variance.into_data()),
        ]
    };
    let [output, input, weight, bias, mean, variance] = pass(0..7, None);
    let threads: Arc<Threads> = Arc::new(Threads { barrier: Barrier::new(2), total: Mutex::default() });
    let [first, second] = std::thread::scope(|scope| {
        let run = |range| {
            scope.spawn({
                let (pass, threads) = (&pass, threads.clone());
                move || pass(range, Some(threads))
            })
        };
        [run(0..3), run(3..7)].map(|handle| handle.join().unwrap())
    });
    let joined = |i: usize| [first[i].clone(), second[i].clone()].concat();
    let summed = |i: usize| first[i].iter().zip(&second[i]).map(|(a, b)| a + b).collect::<Vec<_>>();
    let same = |what: &str, ours: &[f64], theirs: &[f64]| {
        assert_eq!(ours.len(), theirs.len(), "{what}");
        let far = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(far < 1e-10, "{what}: {far}");
    };
    same("output", &joined(0), &output);
    same("gradient of the input", &joined(1), &input);
    same("gradient of the weight", &summed(2), &weight);
    same("gradient of the bias", &summed(3), &bias);
    for rank in [&first, &second] {
        same("mean", &rank[4], &mean);
        same("variance", &rank[5], &variance);
    }
}

#[test]
fn synchronised_batch_norm_equals_the_whole_batch() {
    let one = 4 * 5 * 3;
    let wave = |scale: f32, shift: f32| -> Vec<f32> {
        (0..8 * one).map(|i| ((i * i % 97) as f32 * 0.11).sin() * scale + shift + (i % 7) as f32 * 0.1).collect()
    };
    let data = [wave(2.0, 30.0), wave(1.0, 0.0), wave(0.5, 0.2)];
    for (cut, relu, residual) in [(4, false, false), (3, true, false), (7, true, true)] {
        let whole = run(&data, 0..8, relu, residual, &Context::train());
        let shared: Arc<dyn StatisticsReduce> =
            Arc::new(Threads { barrier: Barrier::new(2), total: Mutex::new(Vec::new()) });
        let parts = std::thread::scope(|scope| {
            let threads = [0..cut, cut..8].map(|range| {
                let (data, cx) = (&data, Context::train_with(Some(Arc::clone(&shared)), None));
                scope.spawn(move || run(data, range, relu, residual, &cx))
            });
            threads.map(|thread| thread.join().unwrap())
        });
        let [a, b] = &parts;
        close("output", &[a[0].as_slice(), &b[0]].concat(), &whole[0]);
        close("gradient of the input", &[a[1].as_slice(), &b[1]].concat(), &whole[1]);
        for (what, i) in [("gradient of the weight", 2), ("gradient of the bias", 3)] {
            let sum: Vec<f32> = a[i].iter().zip(&b[i]).map(|(a, b)| a + b).collect();
            close(what, &sum, &whole[i]);
        }
        for (what, i) in [("running mean", 4), ("running variance", 5)] {
            close(what, &a[i], &whole[i]);
            assert_eq!(a[i], b[i], "{what}: the same bits for all");
        }
        // Without the reduction the result differs.
        let alone = run(&data, 0..cut, relu, residual, &Context::train());
        assert!(alone[0].iter().zip(&whole[0]).any(|(a, b)| (a - b).abs() > 1e-3));
    }
}

/// Records the sink's calls, in order.
#[derive(Debug, Default)]
struct Seen {
    used: Mutex<Vec<ParamId>>,
    ready: Mutex<Vec<(ParamId, Vec<f32>)>>,
}

impl GradientSink for Seen {
    fn used(&self, parameter: ParamId) {
        self.used.lock().unwrap().push(parameter);
    }
    fn ready(&self, parameter: ParamId, gradient: Tensor<1>) {
        self.ready.lock().unwrap().push((parameter, values(gradient)));
    }
}

#[test]
fn hooked_gradients_equal_those_of_backward_and_come_last_layer_first() {
    let device = Device::flex().autodiff();
    let spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };
    let network = models::build("resnet18", &spec, 7, &device).unwrap();
    let pixels: Vec<f32> = (0..2 * 3 * 32 * 32).map(|i| ((i * 31 % 101) as f32 * 0.3).sin()).collect();
    let images = || Tensor::<4>::from_data(TensorData::new(pixels.clone(), [2, 3, 32, 32]), &device);
    let parameters = state::parameters(&network);
    let index_of = |id: ParamId| parameters.iter().position(|p| p.id == id).unwrap();

    let seen = Arc::new(Seen::default());
    let loss = network.forward(images(), &Context::train_with(None, Some(seen.clone()))).powf_scalar(2.0).mean();
    let used: Vec<usize> = seen.used.lock().unwrap().iter().map(|id| index_of(*id)).collect();
    assert_eq!(used.len(), parameters.len());
    assert!(seen.ready.lock().unwrap().is_empty(), "nothing is ready before the backward pass");
    let left = models::take_gradients(&mut loss.backward(), &network);
    assert!(left.iter().all(Option::is_none), "gradients are moved out, not copied");

    let loss = network.forward(images(), &Context::train()).powf_scalar(2.0).mean();
    let gradients = models::take_gradients(&mut loss.backward(), &network);
    let ready = std::mem::take(&mut *seen.ready.lock().unwrap());
    assert_eq!(ready.len(), parameters.len());
    for (id, gradient) in &ready {
        let index = index_of(*id);
        assert_eq!(*gradient, values(gradients[index].clone().unwrap()), "{}", parameters[index].name);
    }
    // The backward pass reverses the forward pass, except for branches at the same depth.
    let order: Vec<usize> = ready.iter().map(|(id, _)| index_of(*id)).collect();
    for (turn, index) in order.iter().rev().enumerate() {
        assert!(index.abs_diff(turn) <= 8, "parameter {index} comes {turn} before the end: {order:?}");
    }
}

/// Adds nothing; records how many gradients were ready at each call.
#[derive(Debug)]
struct Asked(Arc<Seen>, Mutex<Vec<usize>>);

impl StatisticsReduce for Asked {
    fn all_reduce_sum(&self, _: &mut [f64]) {
        self.1.lock().unwrap().push(self.0.ready.lock().unwrap().len());
    }
}

#[test]
fn gradients_are_ready_while_the_backward_pass_runs() {
    let device = Device::flex().autodiff();
    let spec = Spec { num_classes: 10, in_channels: 1, image_size: [28, 28] };
    let network = models::build("lenet", &spec, 7, &device).unwrap();
    let seen = Arc::new(Seen::default());
    let asked = Arc::new(Asked(seen.clone(), Mutex::default()));
    // A batch norm before the network. Its all-reduce shows when its step of the backward pass runs.
    let first = BatchNorm2d::new(1, &Init::new(0, &device));
    let images = first.forward(Tensor::ones([2, 1, 28, 28], &device), &Context::train_with(Some(asked.clone()), None));
    network.forward(images, &Context::train_with(None, Some(seen.clone()))).sum().backward();
    assert_eq!(
        *asked.1.lock().unwrap(),
        [0, state::parameters(&network).len()],
        "once in the forward pass, once in the backward pass"
    );
}
