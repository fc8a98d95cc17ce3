//! EfficientNet: "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", Tan & Le, 2019,
//! <https://arxiv.org/abs/1905.11946>.
//!
//! torchvision's variant, `torchvision.models.efficientnet_b0`, with stochastic depth in training.

use burn::module::Module;
use burn::tensor::Tensor;

use super::depthwise_norm;
use crate::blocks::{ConvNorm, conv_norm, sequence, squeeze_excite};
use crate::efficientnet::{STAGES, Stage};
use crate::layers::{Conv2d, Conv2dConfig, Dropout, Linear, StochasticDepth, global_avg_pool};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, silu};

/// Dropout rate before the linear layer.
const DROPOUT: f64 = 0.2;
/// The rate of stochastic depth grows with the block's number, from 0 towards this rate.
const STOCHASTIC_DEPTH: f64 = 0.2;

/// Squeeze-and-excitation with torchvision's names.
#[derive(Module, Debug)]
struct SqueezeExcitation {
    fc1: Conv2d,
    fc2: Conv2d,
}

/// One entry of a block's `nn.Sequential`.
#[derive(Module, Debug)]
enum Part {
    /// Convolution and batch norm, followed by SiLU except in the last layer of the block.
    Layer(ConvNorm),
    Excite(SqueezeExcitation),
}

/// The paper's MBConv: an inverted residual with squeeze-and-excitation.
#[derive(Module, Debug)]
struct MbConv {
    block: Vec<Part>,
    stochastic_depth: StochasticDepth,
    /// True where the input is added to the output.
    has_skip: bool,
}

impl MbConv {
    /// `drop`: the rate of stochastic depth.
    fn new(input: usize, stage: Stage, stride: usize, drop: f64, init: &Init) -> Self {
        let width = stage.expansion * input;
        let init = init.child("block");
        let mut block = Vec::new();
        let mut add = |part: &dyn Fn(&Init) -> Part| {
            let made = part(&init.child(&block.len().to_string()));
            block.push(made);
        };
        if stage.expansion != 1 {
            add(&|init| Part::Layer(conv_norm([input, width], 1, 1, init)));
        }
        add(&|init| Part::Layer(depthwise_norm(width, stage.kernel, stride, init)));
        let narrow = (input / 4).max(1);
        let linear = |channels, init: &Init, name| Conv2dConfig::new(channels, 1).init(&init.child(name));
        add(&|init| {
            Part::Excite(SqueezeExcitation {
                fc1: linear([width, narrow], init, "fc1"),
                fc2: linear([narrow, width], init, "fc2"),
            })
        });
        add(&|init| Part::Layer(conv_norm([width, stage.width], 1, 1, init)));
        Self { block, stochastic_depth: StochasticDepth::new(drop), has_skip: stride == 1 && input == stage.width }
    }

    /// `[B, input, H, W]` → `[B, output, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let last = self.block.len() - 1;
        let x = self.block.iter().enumerate().fold(input.clone(), |x, (index, part)| match part {
            Part::Layer((conv, norm)) if index == last => norm.after(conv, x, Activation::Identity, cx).into_images(),
            Part::Layer((conv, norm)) => norm.after(conv, x, Activation::Silu, cx).into_images(),
            Part::Excite(SqueezeExcitation { fc1, fc2 }) => squeeze_excite(x, [fc1, fc2], silu, cx),
        });
        if self.has_skip { self.stochastic_depth.add(x, input, cx) } else { x }
    }
}

/// One entry of `features`.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "a few dozen values next to megabytes of weights")]
enum Feature {
    /// The stem or the last 1x1 convolution, each with batch norm and SiLU.
    Layer(ConvNorm),
    Stage(Vec<MbConv>),
}

/// EfficientNet-B0: a stem, sixteen MBConv blocks, a 1x1 convolution, dropout and a linear layer.
#[derive(Module, Debug)]
pub struct EfficientNet {
    features: Vec<Feature>,
    classifier: (Dropout, Linear),
}

impl EfficientNet {
    /// Builds EfficientNet-B0 for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 32 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        super::require_side("efficientnet_b0_imagenet", spec)?;
        let of_features = init.child("features");
        let mut features = vec![Feature::Layer(conv_norm([spec.in_channels, 32], 3, 2, &of_features.child("0")))];
        let (mut channels, mut number) = (32, 0);
        let blocks: usize = STAGES.iter().map(|stage| stage.blocks).sum();
        for stage in STAGES {
            let of_stage = of_features.child(&features.len().to_string());
            features.push(Feature::Stage(sequence(&of_stage, stage.blocks, |block, init| {
                let input = std::mem::replace(&mut channels, stage.width);
                let drop = STOCHASTIC_DEPTH * number as f64 / blocks as f64;
                number += 1;
                MbConv::new(input, stage, if block == 0 { stage.stride } else { 1 }, drop, init)
            })));
        }
        let last = of_features.child(&features.len().to_string());
        features.push(Feature::Layer(conv_norm([channels, 4 * channels], 1, 1, &last)));
        let linear = Linear::new([4 * channels, spec.num_classes], &init.child("classifier").child("1"));
        Ok(Self { features, classifier: (Dropout::new(DROPOUT), linear) })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shape in the comment is for 3x224x224.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.features.iter().fold(images, |x, feature| match feature {
            Feature::Layer((conv, norm)) => norm.after(conv, x, Activation::Silu, cx).into_images(),
            Feature::Stage(blocks) => blocks.iter().fold(x, |x, block| block.forward(x, cx)),
        }); // [B, 1280, 7, 7]
        let (dropout, linear) = &self.classifier;
        linear.forward(dropout.forward(global_avg_pool(x), cx), cx) // [B, classes]
    }
}
