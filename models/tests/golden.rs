//! Networks against PyTorch's float64 values. `reference/README.md` describes the files.

use std::collections::BTreeMap;

use crate::formula;
use burn::module::Module;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use models::{Context, Network, Spec, StateKind, StateTensor};
use serde::Deserialize;

#[derive(Deserialize)]
struct Reference {
    model: String,
    params: usize,
    macs: u64,
    input: String,
    batch: usize,
    /// Shape of an image where it is not the one that the model is made for. The classes are ten in any case.
    image: Option<[usize; 3]>,
    /// Frozen modules.
    #[serde(default)]
    frozen: Vec<String>,
    state: Vec<(String, Vec<usize>)>,
    train_logits: Vec<Vec<f64>>,
    loss: f64,
    grad_l2: BTreeMap<String, f64>,
    running_mean_and_l2: BTreeMap<String, [f64; 2]>,
    eval_logits: Vec<Vec<f64>>,
    pytorch_f32_deviation: Deviation,
}

impl Reference {
    fn spec(&self) -> Spec {
        let made_for = models::find(&self.model).unwrap().spec;
        match self.image {
            Some([in_channels, height, width]) => Spec { num_classes: 10, in_channels, image_size: [height, width] },
            None => made_for,
        }
    }
}

/// Deviation of PyTorch's float32 from the float64 values. The tests allow ten times as much. It is relative to the largest
/// value: as an absolute number, LeNet's 4e-7 would be less than half a unit in the last place of its logits.
#[derive(Deserialize)]
struct Deviation {
    train_logits: f64,
    eval_logits: f64,
    loss: f64,
    worst_grad_l2: f64,
}

/// Asserts on the largest deviation and prints it.
fn assert_logits(what: &str, got: Tensor<2>, want: &[Vec<f64>], deviation: f64) {
    let got = got.into_data().try_into_vec_as::<f64>().unwrap();
    let want: Vec<f64> = want.iter().flatten().copied().collect();
    assert_eq!(got.len(), want.len(), "{what}");
    let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
    // Epilogue a single update of the statistics, evaluation logits grow with depth, to 1e5 for ResNet-101.
    let largest = want.iter().map(|w| w.abs()).fold(1.0, f64::max);
    let allowed = (10.0 * deviation * largest).max(1e-4);
    println!("{what}: worst deviation {worst:.2e}, allowed {allowed:.2e}, largest {largest:.3e}");
    assert!(worst <= allowed, "{what}: {worst:.2e} off, {allowed:.2e} allowed");
}

fn l2(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// Builds the reference's network and images with the formula's values. Running statistics keep their initial 0 and 1.
fn network_and_images(reference: &Reference) -> (Network, Tensor<4>) {
    let device = Device::flex().autodiff();
    let spec = reference.spec();
    let network = models::build_frozen(&reference.model, &spec, 1, &device, &reference.frozen).unwrap();
    let weights: Vec<StateTensor> = models::state_dict(&network)
        .into_iter()
        .map(|t| match t.name.contains(".running_") {
            false => StateTensor { values: formula::weights(&t.name, &t.shape), ..t },
            true => t,
        })
        .collect();
    let network = models::load_state_dict(network, &weights).unwrap();
    let [height, width] = spec.image_size;
    let shape = [reference.batch, spec.in_channels, height, width];
    let images = TensorData::new(formula::input(&reference.input, shape), shape);
    (network, Tensor::from_data(images, &device))
}

/// Returns the mean cross-entropy; label i is i modulo 10.
fn cross_entropy(logits: Tensor<2>) -> Tensor<1> {
    let [batch, _] = logits.dims();
    let labels: Vec<i32> = (0..batch as i32).map(|i| i % 10).collect();
    let labels = Tensor::<2, Int>::from_data(TensorData::new(labels, [batch, 1]), &logits.device());
    -log_softmax(logits, 1).gather(1, labels).mean()
}

fn check(json: &str) {
    let reference: Reference = serde_json::from_str(json).unwrap();
    let (network, images) = network_and_images(&reference);
    let spec = reference.spec();

    // Sizes and names.
    assert_eq!(models::parameters(&network).iter().map(|p| p.len()).sum::<usize>(), reference.params);
    assert_eq!(models::cost(&network, &spec).macs, reference.macs);
    let state: Vec<_> = models::state_dict(&network).into_iter().map(|t| (t.name, t.shape)).collect();
    assert_eq!(state, reference.state);

    // Training mode: logits and loss.
    let logits = network.forward(images.clone(), &Context::train());
    assert_logits(
        "train logits",
        logits.clone(),
        &reference.train_logits,
        reference.pytorch_f32_deviation.train_logits,
    );
    let loss = cross_entropy(logits);
    let value = f64::from(loss.clone().into_scalar::<f32>());
    // The loss may deviate as the logits do: PyTorch's own deviates less in resnet152_imagenet by chance.
    let deviation = &reference.pytorch_f32_deviation;
    let allowed = (10.0 * deviation.loss.max(deviation.train_logits)).max(1e-4);
    assert!((value - reference.loss).abs() <= allowed, "loss {value}, PyTorch's {}", reference.loss);

    check_gradients(&network, loss, &reference);
    check_statistics(&network, &reference);

    let eval = network.valid().forward(images.without_autodiff(), &Context::eval());
    assert_logits("eval logits", eval, &reference.eval_logits, reference.pytorch_f32_deviation.eval_logits);
}

fn check_gradients(network: &Network, loss: Tensor<1>, reference: &Reference) {
    let gradients = models::take_gradients(&mut loss.backward(), network);
    let largest = reference.grad_l2.values().copied().fold(0.0, f64::max);
    // The upper bound is for VGG: its reference deviation is that of vanishing biases, which are compared absolutely.
    let tolerance = (10.0 * reference.pytorch_f32_deviation.worst_grad_l2).clamp(2e-2, 1e-1);
    let parameters = models::parameters(network);
    assert_eq!(gradients.len(), parameters.len());
    let mut worst = (0.0, String::new());
    let mut unused = 0;
    for (parameter, gradient) in parameters.iter().zip(gradients) {
        let Some(&want) = reference.grad_l2.get(&parameter.name) else {
            // EfficientNet's first block has layers that it does not use.
            assert!(gradient.is_none(), "{} has a gradient", parameter.name);
            unused += 1;
            continue;
        };
        let gradient = gradient.unwrap();
        assert_eq!(gradient.dims(), [parameter.len()]);
        let got = l2(&gradient.into_data().try_into_vec_as::<f64>().unwrap());
        if want < 1e-6 * largest {
            // A bias before a batch norm has no gradient; the value is rounding alone.
            assert!((got - want).abs() <= 1e-5 * largest, "{}: {got:e}, PyTorch's {want:e}", parameter.name);
            continue;
        }
        let relative = (got / want - 1.0).abs();
        if relative > worst.0 {
            worst = (relative, parameter.name.clone());
        }
        assert!(relative <= tolerance, "{}: norm {got}, PyTorch's {want}", parameter.name);
    }
    assert_eq!(parameters.len(), reference.grad_l2.len() + unused);
    println!("gradient norms: worst {:.2e} at {}, allowed {tolerance:.2e}", worst.0, worst.1);
}

fn check_statistics(network: &Network, reference: &Reference) {
    let mut worst: f64 = 0.0;
    let mut seen = 0;
    // Rounding adds up over the 152 layers of the deepest network. A tenth of what PyTorch's float32 loses in the logits is
    // allowed.
    let allowed = (0.1 * reference.pytorch_f32_deviation.train_logits).max(1e-5);
    for buffer in models::state_dict(network).into_iter().filter(|t| t.kind == StateKind::Buffer) {
        let [mean, norm] = reference.running_mean_and_l2[&buffer.name];
        let values: Vec<f64> = buffer.values.iter().map(|&v| f64::from(v)).collect();
        let got_mean = values.iter().sum::<f64>() / values.len() as f64;
        let got_norm = l2(&values);
        if norm == 0.0 {
            // The running mean of a batch norm that the network does not use is never updated.
            assert_eq!(got_norm, 0.0, "{}", buffer.name);
            seen += 1;
            continue;
        }
        // Both deviations are relative to the buffer's magnitude: a mean may be near zero by cancellation.
        let scale = norm / (values.len() as f64).sqrt();
        let deviation = ((got_mean - mean).abs() / scale).max((got_norm / norm - 1.0).abs());
        worst = worst.max(deviation);
        assert!(deviation <= allowed, "{}: {got_mean} {got_norm}, PyTorch's {mean} {norm}", buffer.name);
        seen += 1;
    }
    println!("running statistics: {seen}, worst {worst:.2e}");
    // Those of frozen batch norms are still the initial ones.
    let frozen = models::state_dict(network).into_iter().filter(|t| t.kind == StateKind::Frozen);
    for buffer in frozen.filter(|t| t.name.contains(".running_")) {
        let initial = if buffer.name.ends_with("running_mean") { 0.0 } else { 1.0 };
        assert!(buffer.values.iter().all(|value| *value == initial), "{}", buffer.name);
        seen += 1;
    }
    assert_eq!(seen, reference.running_mean_and_l2.len());
}

/// Makes one test per file, so that a failure names its model.
macro_rules! references {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            check(include_str!(concat!("reference/", stringify!($name), ".json")));
        })*
    };
}

references!(
    lenet,
    vgg16,
    resnet18,
    resnet50,
    resnet101,
    regnetx_200mf,
    regnety_400mf,
    mobilenetv2,
    resnext29_32x4d,
    resnext29_2x64d,
    simple_dla,
    densenet121,
    preact_resnet18,
    dpn92,
    dla,
    mnist_net,
    mobilenet,
    senet18,
    shufflenetv2_x0_5,
    shufflenetv2_x1,
    shufflenetv2_x1_5,
    shufflenetv2_x2,
    efficientnet_b0,
    googlenet,
    dpn26,
    airbench94,
    resnet18_imagenet,
    resnet34_imagenet,
    resnet50_imagenet,
    resnet101_imagenet,
    resnet152_imagenet,
    mobilenet_v2_imagenet,
    efficientnet_b0_imagenet,
    frozen_resnet18_imagenet,
);

/// Deviation of bf16 autocast from the float64 values: `|a - b| / |b|` of the logits and of the parameters' gradient norms, and
/// the loss's difference.
#[derive(Deserialize, Debug)]
struct Bf16Deviation {
    train_logits: f64,
    loss: f64,
    grad_l2: f64,
}

impl Bf16Deviation {
    fn measure(reference: &Reference) -> Self {
        let apart = |pairs: Vec<(f64, f64)>| {
            l2(&pairs.iter().map(|(got, want)| got - want).collect::<Vec<_>>())
                / l2(&pairs.iter().map(|pair| pair.1).collect::<Vec<_>>())
        };
        let (network, images) = network_and_images(reference);
        let logits = network.forward(images, &Context::train().autocast_bf16(true));
        let got = logits.clone().into_data().try_into_vec_as::<f64>().unwrap();
        let loss = cross_entropy(logits);
        let value = f64::from(loss.clone().into_scalar::<f32>());
        let gradients = models::take_gradients(&mut loss.backward(), &network);
        let norms = models::parameters(&network).into_iter().zip(gradients).filter_map(|(parameter, gradient)| {
            let norm = l2(&gradient?.into_data().try_into_vec_as::<f64>().unwrap());
            Some((norm, reference.grad_l2[&parameter.name]))
        });
        Self {
            train_logits: apart(got.into_iter().zip(reference.train_logits.iter().flatten().copied()).collect()),
            loss: (value - reference.loss).abs(),
            grad_l2: apart(norms.collect()),
        }
    }
}

/// bf16 deviates from float64 at most twice as much as PyTorch's autocast on a CPU, whose deviation is in `bf16.json`, and a
/// little more where PyTorch's happens to be small.
#[test]
fn bf16_deviates_no_more_than_pytorchs_autocast() {
    let peers: BTreeMap<String, Bf16Deviation> = serde_json::from_str(include_str!("reference/bf16.json")).unwrap();
    assert!(peers.len() > 10);
    for (name, peer) in peers {
        let path = format!("{}/tests/reference/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let reference: Reference = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let ours = Bf16Deviation::measure(&reference);
        println!("{name}: ours {ours:?}, PyTorch's {peer:?}");
        for (what, ours, peer, least) in [
            ("logits", ours.train_logits, peer.train_logits, 0.01),
            ("loss", ours.loss, peer.loss, 0.05),
            ("gradient norms", ours.grad_l2, peer.grad_l2, 0.02),
        ] {
            assert!(ours <= 2.0 * peer + least, "{name}: {what} {ours}, PyTorch's {peer}");
            assert!(ours > 0.0, "{name}: {what} are not rounded");
        }
    }
}
