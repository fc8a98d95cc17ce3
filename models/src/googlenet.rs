//! GoogLeNet: "Going Deeper with Convolutions", Szegedy et al., 2014, <https://arxiv.org/abs/1409.4842>.
//!
//! pytorch-cifar's variant: batch norm after every convolution, and two 3x3 convolutions instead of each 5x5. The stem is
//! a single 3x3 convolution, and there are no auxiliary classifiers.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::classify;
use crate::layers::{BatchNorm2d, Conv2dConfig, Layer, Linear, MaxPool2d, Relu, forward_sequential};
use crate::{BuildError, Context, Init, Spec};
use ops::concat;

/// Smallest image side in pixels: the last modules have more than one pixel.
const MIN_SIDE: usize = 5;

/// Appends a convolution with bias, batch norm and ReLU. Layers are named by their index in `layers`.
fn conv_norm_relu(layers: &mut Vec<Layer>, channels: [usize; 2], kernel: usize, init: &Init) {
    let at = |offset: usize| init.child(&(layers.len() + offset).to_string());
    let conv = Conv2dConfig::new(channels, kernel).with_padding(kernel / 2).init(&at(0));
    let norm = BatchNorm2d::new(channels[1], &at(1));
    layers.extend([Layer::Conv(conv), Layer::Norm(norm), Layer::Relu(Relu)]);
}

/// Four branches with different receptive fields. Their outputs are concatenated.
#[derive(Module, Debug)]
struct Inception {
    b1: Vec<Layer>,
    b2: Vec<Layer>,
    b3: Vec<Layer>,
    b4: Vec<Layer>,
}

/// Output channels of an [`Inception`]'s convolutions.
#[derive(Debug, Clone, Copy)]
struct Widths {
    /// The 1x1 convolution.
    one: usize,
    /// Reduction, then the 3x3 convolution.
    three: [usize; 2],
    /// Reduction, then two 3x3 convolutions with the receptive field of a 5x5.
    five: [usize; 2],
    /// The 1x1 convolution after the pooling.
    pool: usize,
}

const fn widths(one: usize, three: [usize; 2], five: [usize; 2], pool: usize) -> Widths {
    Widths { one, three, five, pool }
}

impl Inception {
    fn new(input: usize, widths: Widths, init: &Init) -> Self {
        let Widths { one, three, five, pool } = widths;
        let branch = |name: &str, start: Vec<Layer>, convolutions: &[([usize; 2], usize)]| {
            let mut layers = start;
            for &(channels, kernel) in convolutions {
                conv_norm_relu(&mut layers, channels, kernel, &init.child(name));
            }
            layers
        };
        let five_deep = [([input, five[0]], 1), (five, 3), ([five[1]; 2], 3)];
        Self {
            b1: branch("b1", vec![], &[([input, one], 1)]),
            b2: branch("b2", vec![], &[([input, three[0]], 1), (three, 3)]),
            b3: branch("b3", vec![], &five_deep),
            b4: branch("b4", vec![Layer::Pool(MaxPool2d::overlapping(1))], &[([input, pool], 1)]),
        }
    }

    /// `[B, input, H, W]` → `[B, one + three[1] + five[1] + pool, H, W]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let branches = [&self.b1, &self.b2, &self.b3, &self.b4];
        cx.count_activations(concat(branches.map(|branch| forward_sequential(branch, input.clone(), cx)).into()))
    }
}

/// A stem, nine inception modules and a linear layer.
#[derive(Module, Debug)]
pub struct GoogLeNet {
    pre_layers: Vec<Layer>,
    a3: Inception,
    b3: Inception,
    maxpool: MaxPool2d,
    a4: Inception,
    b4: Inception,
    c4: Inception,
    d4: Inception,
    e4: Inception,
    a5: Inception,
    b5: Inception,
    linear: Linear,
}

impl GoogLeNet {
    /// Builds GoogLeNet for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 5 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("googlenet", MIN_SIDE, 32)?;
        let mut pre_layers = Vec::new();
        conv_norm_relu(&mut pre_layers, [spec.in_channels, 192], 3, &init.child("pre_layers"));
        let inception = |name: &str, input: usize, widths: Widths| Inception::new(input, widths, &init.child(name));
        Ok(Self {
            pre_layers,
            a3: inception("a3", 192, widths(64, [96, 128], [16, 32], 32)),
            b3: inception("b3", 256, widths(128, [128, 192], [32, 96], 64)),
            maxpool: MaxPool2d::overlapping(2),
            a4: inception("a4", 480, widths(192, [96, 208], [16, 48], 64)),
            b4: inception("b4", 512, widths(160, [112, 224], [24, 64], 64)),
            c4: inception("c4", 512, widths(128, [128, 256], [24, 64], 64)),
            d4: inception("d4", 512, widths(112, [144, 288], [32, 64], 64)),
            e4: inception("e4", 528, widths(256, [160, 320], [32, 128], 128)),
            a5: inception("a5", 832, widths(256, [160, 320], [32, 128], 128)),
            b5: inception("b5", 832, widths(384, [192, 384], [48, 128], 128)),
            linear: Linear::new([1024, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let modules = |x, modules: &[&Inception]| modules.iter().fold(x, |x, module| module.forward(x, cx));
        let x = forward_sequential(&self.pre_layers, images, cx); // [B, 192, 32, 32]
        let x = modules(x, &[&self.a3, &self.b3]); // [B, 480, 32, 32]
        let x = cx.count_activations(self.maxpool.forward(x)); // [B, 480, 16, 16]
        let x = modules(x, &[&self.a4, &self.b4, &self.c4, &self.d4, &self.e4]); // [B, 832, 16, 16]
        let x = cx.count_activations(self.maxpool.forward(x)); // [B, 832, 8, 8]
        let x = modules(x, &[&self.a5, &self.b5]); // [B, 1024, 8, 8]
        classify(x, &self.linear, cx) // [B, classes]
    }
}
