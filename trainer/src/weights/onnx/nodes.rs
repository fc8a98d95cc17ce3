//! The nodes of an ONNX graph, from those of a network's graph.

use std::collections::{HashMap, HashSet};

use models::graph::{Graph, Node, Operation, Value};
use ops::{Activation, ConvOptions, PoolOptions};

use super::proto::{self, Attribute, Tensor};
use super::{IMAGES, LOGITS};

/// Names of an activation in ONNX. Both hold the same elements; the missing one is computed when a node needs it.
#[derive(Debug, Clone, Default)]
struct Names {
    /// As images, `[N, C, H, W]`. Of features `[N, F]`: images of one pixel.
    images: Option<String>,
    /// As features, `[N, F]`.
    rows: Option<String>,
}

/// The nodes that compute the logits from the images, and their constants.
pub(super) struct Nodes {
    pub(super) nodes: Vec<proto::Node>,
    pub(super) constants: Vec<Tensor>,
}

/// Converts the nodes of `graph`. The tensors of the state dict are operands by their names. With `normalise`, mean and standard
/// deviation of each channel, the first nodes compute `(images - mean) / std`.
pub(super) fn convert(graph: &Graph, normalise: Option<(&[f32], &[f32])>) -> Nodes {
    let weights = graph.nodes.iter().flat_map(|node| node.weights.iter().cloned());
    let mut converter = Converter {
        graph,
        nodes: Vec::new(),
        constants: Vec::new(),
        names: HashMap::new(),
        modules: HashMap::new(),
        used: weights.chain([IMAGES, LOGITS].map(str::to_owned)).collect(),
    };
    let images = match normalise {
        None => IMAGES.to_owned(),
        Some((mean, std)) => converter.normalised(mean, std),
    };
    converter.names.insert(Value::Images, Names { images: Some(images), rows: None });
    for (index, node) in graph.nodes.iter().enumerate() {
        converter.convert(Value::Node(index), node);
    }
    let logits = converter.rows(graph.output);
    let Converter { mut nodes, constants, .. } = converter;
    for name in nodes.iter_mut().flat_map(|node| node.input.iter_mut().chain(&mut node.output)) {
        if *name == logits {
            LOGITS.clone_into(name);
        }
    }
    Nodes { nodes, constants }
}

struct Converter<'a> {
    graph: &'a Graph,
    nodes: Vec<proto::Node>,
    constants: Vec<Tensor>,
    names: HashMap<Value, Names>,
    /// The last module with weights before each activation: part of the names of nodes without weights.
    modules: HashMap<Value, String>,
    /// All names of activations, weights and constants.
    used: HashSet<String>,
}

impl Converter<'_> {
    fn convert(&mut self, value: Value, node: &Node) {
        let input = node.inputs[0];
        let module = match node.module() {
            Some(module) => module.to_owned(),
            None => self.modules.get(&input).cloned().unwrap_or_default(),
        };
        self.modules.insert(value, module);
        let names = match &node.operation {
            Operation::Conv2d(options) => self.layer(value, node, "Conv", Form::Images, conv(options)),
            Operation::Linear => self.layer(value, node, "Gemm", Form::Rows, vec![Attribute::int("transB", 1)]),
            Operation::BatchNorm { epsilon } => {
                let attributes = vec![Attribute::float("epsilon", *epsilon as f32)];
                self.layer(value, node, "BatchNormalization", Form::Images, attributes)
            }
            Operation::MaxPool(options) => self.images_node(value, node, "MaxPool", max_pool(options)),
            Operation::AvgPool { kernel } => {
                let sides = |name| Attribute::ints(name, [*kernel; 2]);
                self.images_node(value, node, "AveragePool", vec![sides("kernel_shape"), sides("strides")])
            }
            Operation::GlobalAvgPool => self.images_node(value, node, "GlobalAveragePool", Vec::new()),
            Operation::Add => self.images_node(value, node, "Add", Vec::new()),
            Operation::ScaleChannels => self.images_node(value, node, "Mul", Vec::new()),
            Operation::Concat => self.images_node(value, node, "Concat", vec![Attribute::int("axis", 1)]),
            Operation::SliceChannels(range) => {
                let bounds = [range.start, range.end, 1].map(|bound| self.integers(&[bound as i64]));
                let operands = [vec![self.images(input)], bounds.to_vec()].concat();
                Form::Images.named(self.node(value, "Slice", operands, Vec::new()))
            }
            Operation::Interleave => self.interleave(value, node),
            Operation::Activation(activation) => self.activation(value, input, *activation),
            Operation::Divide(divisor) => {
                let (form, name) = self.either(input);
                let operands = vec![name, self.scalar(*divisor)];
                form.named(self.node(value, "Div", operands, Vec::new()))
            }
            Operation::Flatten if self.graph.shape(input)[1..] == [1, 1] => self.names[&input].clone(),
            Operation::Flatten => Form::Rows.named(self.rows(input)),
            // Nothing to add: the image form of features is already images of one pixel.
            Operation::Unflatten => self.names[&input].clone(),
        };
        self.names.insert(value, names);
    }

    /// Adds the nodes that normalise the input.
    fn normalised(&mut self, mean: &[f32], std: &[f32]) -> String {
        let [mean, std] = [("normalise.mean", mean), ("normalise.std", std)].map(|(name, values)| {
            let name = self.unique_name(name.to_owned());
            self.constants.push(Tensor::floats(&name, &[1, values.len(), 1, 1], values));
            name
        });
        let centred = self.unique_name("normalise.sub".to_owned());
        let centred = self.push(centred, "Sub", vec![IMAGES.to_owned(), mean], Vec::new());
        let scaled = self.unique_name("normalise.div".to_owned());
        self.push(scaled, "Div", vec![centred, std], Vec::new())
    }

    /// Adds a node with weights.
    fn layer(&mut self, value: Value, node: &Node, kind: &str, form: Form, attributes: Vec<Attribute>) -> Names {
        let input = self.as_form(node.inputs[0], form);
        let operands = std::iter::once(input).chain(node.weights.iter().cloned()).collect();
        let name = self.unique_name(self.modules[&value].clone());
        form.named(self.push(name, kind, operands, attributes))
    }

    /// Adds a node whose operands and result are images.
    fn images_node(&mut self, value: Value, node: &Node, kind: &str, attributes: Vec<Attribute>) -> Names {
        let operands = node.inputs.iter().map(|&input| self.images(input)).collect();
        Form::Images.named(self.node(value, kind, operands, attributes))
    }

    /// Adds the nodes of ShuffleNet's channel shuffle with two groups.
    fn interleave(&mut self, value: Value, node: &Node) -> Names {
        let operands = node.inputs.iter().map(|&input| self.images(input)).collect();
        let joined = self.node(value, "Concat", operands, vec![Attribute::int("axis", 1)]);
        let [channels, height, width] = [0, 1, 2].map(|axis| node.shape[axis] as i64);
        // 0: the length of the input's axis, the batch.
        let shape = self.integers(&[0, 2, channels / 2, height, width]);
        let groups = self.node(value, "Reshape", vec![joined, shape], Vec::new());
        let swapped = self.node(value, "Transpose", vec![groups], vec![Attribute::ints("perm", [0, 2, 1, 3, 4])]);
        let shape = self.integers(&[0, channels, height, width]);
        Form::Images.named(self.node(value, "Reshape", vec![swapped, shape], Vec::new()))
    }

    fn activation(&mut self, value: Value, input: Value, activation: Activation) -> Names {
        let (form, x) = self.either(input);
        let name = match activation {
            Activation::Identity => x,
            Activation::Relu => self.node(value, "Relu", vec![x], Vec::new()),
            Activation::Relu6 => {
                let operands = vec![x, self.scalar(0.0), self.scalar(6.0)];
                self.node(value, "Clip", operands, Vec::new())
            }
            Activation::Sigmoid => self.node(value, "Sigmoid", vec![x], Vec::new()),
            Activation::Silu => {
                let factor = self.node(value, "Sigmoid", vec![x.clone()], Vec::new());
                self.node(value, "Mul", vec![x, factor], Vec::new())
            }
            // x · (1 + erf(x / √2)) / 2. The operator Gelu is part of opset 20 and later only.
            Activation::Gelu => {
                let mut with = |kind: &str, x: String, scalar: f32| {
                    let operands = vec![x, self.scalar(scalar)];
                    self.node(value, kind, operands, Vec::new())
                };
                let scaled = with("Div", x.clone(), std::f32::consts::SQRT_2);
                let half = with("Mul", x, 0.5);
                let erf = self.node(value, "Erf", vec![scaled], Vec::new());
                let operands = vec![erf, self.scalar(1.0)];
                let sum = self.node(value, "Add", operands, Vec::new());
                self.node(value, "Mul", vec![half, sum], Vec::new())
            }
        };
        form.named(name)
    }

    /// Returns the activation as `form`.
    fn as_form(&mut self, value: Value, form: Form) -> String {
        match form {
            Form::Images => self.images(value),
            Form::Rows => self.rows(value),
        }
    }

    /// Returns a form that the activation already has, and its name in this form.
    fn either(&self, value: Value) -> (Form, String) {
        match &self.names[&value] {
            Names { images: Some(name), .. } => (Form::Images, name.clone()),
            Names { rows, .. } => (Form::Rows, rows.clone().expect("an activation has a name")),
        }
    }

    fn images(&mut self, value: Value) -> String {
        match self.either(value) {
            (Form::Images, name) => name,
            (Form::Rows, rows) => {
                let operands = vec![rows, self.integers(&[2, 3])];
                let name = self.node(value, "Unsqueeze", operands, Vec::new());
                self.names.entry(value).or_default().images = Some(name.clone());
                name
            }
        }
    }

    fn rows(&mut self, value: Value) -> String {
        if let Some(name) = &self.names[&value].rows {
            return name.clone();
        }
        let operands = vec![self.images(value)];
        let name = self.node(value, "Flatten", operands, vec![Attribute::int("axis", 1)]);
        self.names.entry(value).or_default().rows = Some(name.clone());
        name
    }

    /// Adds a node without weights. Its name is that of the last module before it and the kind.
    fn node(&mut self, value: Value, kind: &str, operands: Vec<String>, attributes: Vec<Attribute>) -> String {
        let module = self.modules.get(&value).map_or("", String::as_str);
        let kind_name = kind.to_ascii_lowercase();
        let name = if module.is_empty() { kind_name } else { format!("{module}.{kind_name}") };
        let name = self.unique_name(name);
        self.push(name, kind, operands, attributes)
    }

    fn push(&mut self, name: String, kind: &str, input: Vec<String>, attribute: Vec<Attribute>) -> String {
        let node =
            proto::Node { input, output: vec![name.clone()], name: name.clone(), op_type: kind.to_owned(), attribute };
        self.nodes.push(node);
        name
    }

    /// Returns the name with a number if the name is in use.
    fn unique_name(&mut self, name: String) -> String {
        let numbered = (2..).map(|number| format!("{name}_{number}"));
        let free = std::iter::once(name.clone()).chain(numbered).find(|name| !self.used.contains(name));
        let free = free.expect("the numbers do not end");
        self.used.insert(free.clone());
        free
    }

    /// Returns the name of a constant vector of integers.
    fn integers(&mut self, values: &[i64]) -> String {
        let text: Vec<_> = values.iter().map(i64::to_string).collect();
        self.constant(Tensor::integers(&format!("constant.{}", text.join("_")), values))
    }

    /// Returns the name of a constant number.
    fn scalar(&mut self, value: f32) -> String {
        self.constant(Tensor::floats(&format!("constant.{value:?}"), &[], &[value]))
    }

    /// Adds a constant unless it exists. The name contains the value, so equal names are equal constants.
    fn constant(&mut self, constant: Tensor) -> String {
        let name = constant.name.clone();
        if self.used.insert(name.clone()) {
            self.constants.push(constant);
        }
        name
    }
}

/// The shape in which a node takes or writes an activation: `[N, C, H, W]` or `[N, F]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Images,
    Rows,
}

impl Form {
    /// Returns the names of an activation that has only this form so far.
    fn named(self, name: String) -> Names {
        match self {
            Self::Images => Names { images: Some(name), rows: None },
            Self::Rows => Names { images: None, rows: Some(name) },
        }
    }
}

fn conv(options: &ConvOptions) -> Vec<Attribute> {
    let ConvOptions { stride, padding, dilation, groups, .. } = *options;
    vec![
        Attribute::ints("dilations", dilation),
        Attribute::int("group", groups),
        Attribute::ints("pads", [padding, padding].concat()),
        Attribute::ints("strides", stride),
    ]
}

fn max_pool(options: &PoolOptions) -> Vec<Attribute> {
    let PoolOptions { kernel, stride, padding } = *options;
    vec![
        Attribute::ints("kernel_shape", kernel),
        Attribute::ints("pads", [padding, padding].concat()),
        Attribute::ints("strides", stride),
    ]
}
