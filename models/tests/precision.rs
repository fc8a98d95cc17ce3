//! bf16 autocast (`Context::autocast_bf16`): which tensors are bf16, and that results differ from f32 by rounding alone.
//! The tests run the CPU's kernels. A GPU runs the same casts.

use burn::tensor::{DType, Device, Tensor, TensorData};
use models::{Context, Network, Spec, StateTensor, build, parameters, state_dict};

const BATCH: usize = 16;

/// Logits and flat gradients of one training pass, and the state after the pass.
struct Pass {
    logits: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    state: Vec<StateTensor>,
}

fn images(spec: &Spec, device: &Device) -> Tensor<4> {
    let [height, width] = spec.image_size;
    let shape = [BATCH, spec.in_channels, height, width];
    let count = shape.iter().product::<usize>();
    let values = (0..count).map(|i| ((i * 7 + i / 31) as f32 * 0.013).sin()).collect();
    Tensor::from_data(TensorData::new::<f32, _>(values, shape), device)
}

fn pass(network: &Network, spec: &Spec, bf16: bool) -> Pass {
    let device = Device::flex().autodiff();
    let logits = network.forward(images(spec, &device), &Context::train().autocast_bf16(bf16));
    assert_eq!(logits.dtype(), DType::F32, "the loss needs f32 logits");
    let weights = Tensor::<2>::from_data(
        TensorData::new::<f32, _>((0..BATCH * spec.num_classes).map(|i| (i as f32).cos()).collect(), logits.dims()),
        &device,
    );
    let found = models::take_gradients(&mut (logits.clone() * weights).sum().backward(), network);
    let gradients = parameters(network)
        .iter()
        .zip(found)
        .filter_map(|(info, gradient)| {
            // As in PyTorch, a network may have parameters that it does not use.
            let gradient = gradient?;
            assert_eq!(gradient.dtype(), DType::F32, "the gradient of {}", info.name);
            Some(gradient.into_data().try_into_vec::<f32>().unwrap())
        })
        .collect();
    Pass { logits: logits.into_data().try_into_vec::<f32>().unwrap(), gradients, state: state_dict(network) }
}

/// Returns `‖a − b‖ / ‖b‖`.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    difference / norm(&mut b.iter().map(|b| f64::from(*b))).max(1e-12)
}

/// These networks cover all operations: depthwise and grouped convolutions, squeeze-and-excitation, concatenation, residuals,
/// shuffled channels, both poolings and dropout. The two limits are for logits and gradients. They are wide because a random
/// network in training mode amplifies each batch norm's rounding. PyTorch's autocast (2.15, CPU, the same images, other
/// random weights) deviates by 0.003 and 0.05 with lenet, 0.034 and 0.28 with vgg11, 0.38 and 1.0 with shufflenetv2_x0_5.
#[test]
fn bf16_differs_from_f32_by_rounding_alone() {
    for (name, logits, gradients) in [
        ("lenet", 0.01, 0.1),
        ("mnist_net", 0.01, 0.2),
        ("vgg11", 0.1, 0.5),
        ("shufflenetv2_x0_5", 0.4, 1.5),
        ("efficientnet_b0", 0.4, 1.5),
        ("senet18", 0.2, 0.8),
        ("preact_resnet18", 0.2, 0.8),
        ("densenet121", 0.4, 1.5),
        ("googlenet", 0.4, 1.5),
    ] {
        let entry = models::find(name).unwrap();
        let network = build(name, &entry.spec, 1, &Device::flex().autodiff()).unwrap();
        let wide = pass(&network.clone(), &entry.spec, false);
        let narrow = pass(&network.clone(), &entry.spec, true);
        for (what, limit, narrow, wide) in [
            ("logits", logits, narrow.logits.clone(), wide.logits.clone()),
            ("gradients", gradients, narrow.gradients.concat(), wide.gradients.concat()),
        ] {
            let apart = distance(&narrow, &wide);
            assert!(apart > 1e-5 && apart < limit, "{name}: {what} {apart}");
        }
        // Running means are not compared: where the true mean is zero they are rounding alone.
        for (narrow, wide) in
            narrow.state.iter().zip(&wide.state).filter(|(state, _)| state.name.ends_with("running_var"))
        {
            let apart = distance(&narrow.values, &wide.values);
            assert!(apart < 0.1, "{name}: {} {apart}", wide.name);
        }
    }
}

/// Batch norm's sums are not rounded to bf16: with a mean of 300 and a standard deviation of 1, statistics in bf16 would have
/// no correct digit.
#[test]
fn batch_norm_computes_its_statistics_in_f32() {
    use models::Init;
    use models::layers::BatchNorm2d;
    let device = Device::flex().autodiff();
    let norm = BatchNorm2d::new(1, &Init::new(0, &device));
    let values: Vec<f32> = (0..2048).map(|i| 300.0 + if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
    let input = Tensor::<4>::from_data(TensorData::new(values, [2, 1, 32, 32]), &device);
    let output = norm.forward(input, &Context::train().autocast_bf16(true));
    assert_eq!(output.dtype(), DType::BF16, "the output is bf16");
    let mean = norm.running_mean.value().into_data().try_into_vec::<f32>().unwrap()[0];
    let variance = norm.running_var.value().into_data().try_into_vec::<f32>().unwrap()[0];
    assert!((mean - 30.0).abs() < 1e-4, "{mean}");
    assert!((variance - (0.9 + 0.1 * 2048.0 / 2047.0)).abs() < 1e-4, "{variance}");
}

#[test]
fn evaluation_is_in_f32_unless_asked_for() {
    let entry = models::find("lenet").unwrap();
    let network = build("lenet", &entry.spec, 1, &Device::flex()).unwrap();
    let run =
        |cx| network.forward(images(&entry.spec, &Device::flex()), &cx).into_data().try_into_vec::<f32>().unwrap();
    let (wide, narrow) = (run(Context::eval()), run(Context::eval().autocast_bf16(true)));
    assert_ne!(wide, narrow);
    assert!(distance(&narrow, &wide) < 0.05);
}
