//! Tests `trainer export` with ONNX Runtime and PyTorch (onnx_check.py): the logits of every network, and folded batch norms.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use crate::common::{self, Bench, CONFIG, Ended, pictures::save_grey_png};
use burn::tensor::{Device, Tensor, TensorData};
use models::{Context, Graph, Network, Spec, StateTensor};
use serde::Deserialize;
use trainer::weights::{
    self,
    onnx::{self, OnnxDescription},
};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/onnx_check.py");
const PACKAGES: [&str; 3] = ["numpy", "onnx", "onnxruntime"];
/// Images of a comparison. The script evaluates one of them alone too.
const BATCH: usize = 3;
/// Networks with more parameters are not folded here: each large file takes seconds.
const FOLDED_PARAMETERS: usize = 16_000_000;

/// Largest difference of a logit, relative to the largest logit. Rounding was up to 1.1e-5, in mobilenet_v2_imagenet.
const TOLERANCE: f64 = 5e-5;
/// Smallest [`Case::variation`]: a wrong graph differs by more than the tolerance.
const VARIATION: f32 = 1e-3;
/// Networks with squeeze-and-excitation in which He's weights let values grow.
const EXCITED: [&str; 2] = ["senet18", "regnety_400mf"];

/// Returns `count` values in [0, 1), a function of `name`.
fn uniform(name: &str, count: usize) -> Vec<f32> {
    let start =
        name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3));
    let value = |i: u64| {
        let z = start.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 24) as f32
    };
    (1..=count as u64).map(value).collect()
}

/// Builds a network with random weights and with batch norms that do something: scales, shifts, means and variances that differ
/// by channel. Weights are He's, so that the images decide the logits, not the biases.
///
/// Squeeze-and-excitation scales large values by a sigmoid of other large values, which amplifies rounding. So the two networks in
/// which He's weights let values grow have smaller ones.
fn network(name: &str, spec: &Spec) -> (Network, Vec<StateTensor>) {
    let network = models::build(name, spec, 1, &Device::flex()).unwrap();
    let mut state = models::state_dict(&network);
    let norms: Vec<String> =
        state.iter().filter_map(|tensor| tensor.name.strip_suffix("running_var").map(str::to_owned)).collect();
    for tensor in &mut state {
        let Some((module, kind)) = tensor.name.rsplit_once('.') else { continue };
        if tensor.shape.len() > 1 {
            // PyTorch's default is a sixth of He's variance.
            let factor = if EXCITED.contains(&name) { 1.5 } else { 6f32.sqrt() };
            tensor.values.iter_mut().for_each(|value| *value *= factor);
        }
        if !norms.contains(&format!("{module}.")) {
            continue;
        }
        let (low, high) = match kind {
            "weight" | "running_var" => (0.5, 1.5),
            _ => (-0.3, 0.3),
        };
        tensor.values = uniform(&tensor.name, tensor.values.len()).iter().map(|u| low + (high - low) * u).collect();
    }
    (models::load_state_dict(network, &state).unwrap(), state)
}

/// Images and a network's logits, in files.
struct Case {
    images: PathBuf,
    logits: PathBuf,
    /// Of the images.
    shape: [usize; 4],
    /// Largest difference between the logits of the first image and of the others, divided by the largest logit. If the logits
    /// hardly depend on the images, a comparison proves little.
    variation: f32,
}

/// Writes images and the network's logits.
fn case(folder: &Path, name: &str, network: &Network, spec: &Spec) -> Case {
    let [height, width] = spec.image_size;
    let shape = [BATCH, spec.in_channels, height, width];
    let images: Vec<f32> = uniform(name, shape.iter().product()).iter().map(|u| 3.4 * u - 1.7).collect();
    let tensor = Tensor::from_data(TensorData::new(images.clone(), shape), &Device::flex());
    let logits = network.forward(tensor, &Context::eval()).into_data().try_into_vec::<f32>().unwrap();
    let (one, other) = (&logits[..spec.num_classes], &logits[spec.num_classes..]);
    let most = |values: &mut dyn Iterator<Item = f32>| values.map(f32::abs).fold(0.0, f32::max);
    let variation = most(&mut one.iter().zip(other).map(|(a, b)| a - b)) / most(&mut logits.iter().copied());
    let write = |what: &str, values: &[f32]| {
        let path = folder.join(format!("{name}.{what}"));
        fs::write(&path, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
        path
    };
    Case { images: write("images", &images), logits: write("logits", &logits), shape, variation }
}

/// The script in the background, which answers line by line.
struct Checker {
    child: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// The comparison of a model with its logits.
#[derive(Debug, Deserialize)]
struct Compared {
    /// Largest difference of a logit.
    worst: f64,
    /// Largest logit.
    largest: f64,
    /// Operators of the model.
    nodes: Vec<String>,
}

impl Checker {
    fn start(python: &std::ffi::OsStr) -> Self {
        let mut child = Command::new(python)
            .args([SCRIPT, "models"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python starts");
        let (questions, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, questions, answers }
    }

    fn compare(&mut self, model: &Path, case: &Case) -> Compared {
        let Case { images, logits, shape, .. } = case;
        let question = serde_json::json!({ "model": model, "images": images, "logits": logits, "shape": shape });
        writeln!(self.questions, "{question}").expect("the script reads");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("the script writes");
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{}: {error}: {answer}", model.display()))
    }

    fn finish(self) {
        let Self { mut child, questions, .. } = self;
        drop(questions);
        assert!(child.wait().unwrap().success());
    }
}

fn encode(name: &str, graph: &Graph, state: &[StateTensor], path: &Path) {
    let description = OnnxDescription { model: name, input: "images", metadata: &[], normalise: None };
    fs::write(path, onnx::encode(graph, state, &description).unwrap().bytes).unwrap();
}

/// Compares one network, as it is and folded. Returns the larger difference, relative to the largest logit.
fn compare(name: &str, folder: &Path, checker: &mut Checker) -> Result<f64, String> {
    let channels = models::find(name).unwrap().spec.in_channels;
    let side = if channels == 1 { 28 } else { 32 };
    let spec = Spec { num_classes: 10, in_channels: channels, image_size: [side; 2] };
    let (network, state) = network(name, &spec);
    let case = case(folder, name, &network, &spec);
    let graph = Graph::from_network(&network, &spec).map_err(|error| format!("{name}: {error}"))?;
    let path = folder.join("model.onnx");
    encode(name, &graph, &state, &path);
    let plain = checker.compare(&path, &case);
    let norms = |compared: &Compared| compared.nodes.iter().filter(|kind| *kind == "BatchNormalization").count();
    assert_eq!(norms(&plain), graph.batch_norms(), "{name}");
    let mut relative = plain.worst / plain.largest;
    let mut nodes = plain.nodes.len().to_string();
    if state.iter().map(|tensor| tensor.values.len()).sum::<usize>() <= FOLDED_PARAMETERS {
        let (graph, state, pairs) = graph.fold_batch_norms(state);
        encode(name, &graph, &state, &path);
        let folded = checker.compare(&path, &case);
        assert_eq!(norms(&folded), norms(&plain) - pairs.len(), "{name}");
        assert_eq!(folded.nodes.len(), plain.nodes.len() - pairs.len(), "{name}");
        relative = relative.max(folded.worst / folded.largest);
        nodes.push_str(&format!(", folded {}", folded.nodes.len()));
    }
    let report = format!("{name}: {nodes} nodes, variation {:.1e}, difference {relative:.1e}", case.variation);
    println!("{report}");
    if relative < TOLERANCE && case.variation > VARIATION { Ok(relative) } else { Err(report) }
}

#[test]
fn onnx_runtime_computes_the_logits_of_every_network() {
    let Some(python) = common::python_with(&PACKAGES) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut checker = Checker::start(&python);
    let results: Vec<_> =
        models::entries().iter().map(|entry| compare(entry.name, folder.path(), &mut checker)).collect();
    checker.finish();
    let wrong: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert!(wrong.is_empty(), "large differences, or logits that hardly depend on the images: {wrong:#?}");
    println!("largest difference {:.1e}", results.into_iter().flatten().fold(0.0, f64::max));
}

#[test]
fn pytorch_loads_folded_weights_and_computes_the_same() {
    let Some(python) = common::python_with(&["torch", "torchvision", "safetensors"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };
    let (network, state) = network("resnet18_imagenet", &spec);
    let Case { images, logits, .. } = case(folder.path(), "resnet18", &network, &spec);
    let [plain, folded] = ["plain", "folded"].map(|name| folder.path().join(format!("{name}.safetensors")));
    fs::write(&plain, weights::encode(&state, 1).unwrap()).unwrap();
    let (_, state, pairs) = Graph::from_network(&network, &spec).unwrap().fold_batch_norms(state);
    assert_eq!(pairs.len(), 20);
    let bytes = weights::encode_folded(&state, 1, &pairs).unwrap();
    assert_eq!(bytes, weights::encode_folded(&state, 1, &pairs).unwrap(), "equal states give equal files");
    fs::write(&folded, bytes).unwrap();
    let output = Command::new(python).args([SCRIPT, "fold"]).args([plain, folded, images, logits]).output().unwrap();
    let said = Ended::from(output).expect(0).stdout;
    let result: serde_json::Value = serde_json::from_str(&said).unwrap();
    let number = |key: &str| result[key].as_f64().unwrap();
    println!("{result}");
    // PyTorch folds in f32.
    assert!(number("weights") < 1e-5, "{result}");
    assert!(number("worst") < 1e-4 * number("largest"), "{result}");
    assert_eq!(number("norms"), 0.0);
}

#[test]
fn an_exported_run_classifies_as_predict_does() {
    let Some(python) = common::python_with(&[&PACKAGES[..], &["PIL"]].concat()) else { return };
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &["--quiet", "--epochs", "1"]);
    let run = run.to_str().unwrap();
    let pictures: Vec<String> = (0..4)
        .map(|number| {
            let name = format!("{number}.png");
            let pixels: Vec<u8> = uniform(&name, 28 * 28).iter().map(|u| (255.0 * u) as u8).collect();
            save_grey_png(bench.path(&name), 28, 28, &pixels);
            name
        })
        .collect();
    let said = bench.run(&["export", "--run", run, "--to", "run.onnx"]).expect(0).stdout;
    assert!(said.contains("12 nodes of ONNX opset 17") && said.contains("[batch, 1, 28, 28]"), "{said}");
    let said = bench.run(&["export", "--run", run, "--to", "pixels.onnx", "--normalise"]).expect(0).stdout;
    assert!(said.contains("14 nodes of ONNX opset 17") && said.contains("pixels in 0..1"), "{said}");
    let refused = bench.run(&["export", "--run", run, "--to", "run.safetensors", "--normalise"]).expect(2).stderr;
    assert!(
        refused.contains("--normalise: run.safetensors holds weights alone") && refused.contains("hint:"),
        "{refused}"
    );
    let mut arguments = vec!["predict", "--run", run, "--format", "jsonl"];
    arguments.extend(pictures.iter().map(String::as_str));
    let ours = bench.run(&arguments).expect(0).stdout;
    let by_onnx_runtime = |model: &str| -> serde_json::Value {
        let mut command = Command::new(&python);
        command.args([SCRIPT, "predict", model]).args(&pictures).current_dir(bench.folder.path());
        let said = Ended::from(command.output().unwrap()).expect(0).stdout;
        serde_json::from_str(&said).unwrap()
    };
    let (theirs, of_pixels) = (by_onnx_runtime("run.onnx"), by_onnx_runtime("pixels.onnx"));
    assert_eq!(of_pixels["metadata"]["normalised"], "in the model");
    let [plain, normalising] = [&theirs, &of_pixels].map(|all| all["predictions"].as_array().unwrap());
    assert_eq!((plain.len(), normalising.len()), (pictures.len(), pictures.len()));
    for (one, other) in plain.iter().zip(normalising) {
        let [a, b] = [one, other].map(|prediction| prediction["probability"].as_f64().unwrap());
        assert!(one["class"] == other["class"] && (a - b).abs() < 1e-5, "{one} against {other}");
    }
    assert_eq!(theirs["metadata"]["model"], "lenet");
    assert_eq!(theirs["metadata"]["data"], "fashion-mini");
    assert_eq!(ours.lines().count(), pictures.len());
    for (line, theirs) in ours.lines().zip(theirs["predictions"].as_array().unwrap()) {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let ours = &line["predictions"][0];
        assert_eq!((&ours["class"], &ours["index"]), (&theirs["class"], &theirs["index"]));
        let [a, b] = [ours, theirs].map(|prediction| prediction["probability"].as_f64().unwrap());
        assert!((a - b).abs() < 1e-5, "{a} against {b}");
    }
}

#[test]
fn folded_weights_are_refused_as_weights_of_a_network() {
    let bench = Bench::new(&CONFIG.replace("lenet", "shufflenetv2_x0_5").replace("= 520", "= 32"));
    let run = bench.train("runs", &["--quiet", "--epochs", "1"]);
    let run = run.to_str().unwrap();
    let said = bench.run(&["export", "--run", run, "--fold", "--to", "folded.safetensors"]).expect(0).stdout;
    assert!(said.contains("(56 of 56 batch norms folded)"), "{said}");
    let eval = ["eval", "--model", "shufflenetv2_x0_5", "--data", "fashion-mini", "--weights", "folded.safetensors"];
    let said = bench.run(&eval).expect(2).stderr;
    insta::assert_snapshot!(said, @r"
    error: folded.safetensors: batch norms of these weights are folded into convolutions, for inference elsewhere
      hint: name a file that `trainer export` wrote without --fold
    ");
    let said =
        bench.run(&["export", "--run", run, "--fold", "--format", "onnx", "--to", "folded.onnx"]).expect(0).stdout;
    assert!(said.contains("186 nodes of ONNX opset 17 (56 of 56 batch norms folded)"), "{said}");
}

#[test]
fn folding_a_network_without_batch_norms_changes_nothing() {
    let bench = Bench::new(CONFIG);
    let run = bench.train("runs", &["--quiet", "--epochs", "1"]);
    let run = run.to_str().unwrap();
    let said = bench.run(&["export", "--run", run, "--fold", "--to", "folded.safetensors"]).expect(0).stdout;
    assert!(said.contains("(0 of 0 batch norms folded)"), "{said}");
    bench.run(&["export", "--run", run, "--to", "plain.safetensors"]).expect(0);
    let [folded, plain] = ["folded", "plain"].map(|name| fs::read(bench.path(&format!("{name}.safetensors"))).unwrap());
    assert_eq!(folded, plain);
}
