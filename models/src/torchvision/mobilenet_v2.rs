//! MobileNetV2: "Inverted Residuals and Linear Bottlenecks", Sandler, Howard, Zhu, Zhmoginov & Chen, 2018,
//! <https://arxiv.org/abs/1801.04381>.
//!
//! torchvision's variant, `torchvision.models.mobilenet_v2`.

use burn::module::Module;
use burn::tensor::Tensor;

use super::depthwise_norm;
use crate::blocks::{ConvNorm, conv, conv_norm};
use crate::layers::{BatchNorm2d, Conv2d, Dropout, Linear, global_avg_pool};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, Features};

/// Dropout rate before the linear layer.
const DROPOUT: f64 = 0.2;

/// Expansion, channels, blocks and stride of each stage.
const STAGES: [(usize, usize, usize, usize); 7] =
    [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)];

/// One entry of a block's `nn.Sequential`.
#[derive(Module, Debug)]
enum Part {
    /// Convolution, batch norm and ReLU6.
    Layer(ConvNorm),
    /// The projecting 1x1 convolution.
    Conv(Conv2d),
    /// The batch norm after it.
    Norm(BatchNorm2d),
}

/// A 1x1 convolution that expands the channels, a depthwise convolution, and a 1x1 convolution that projects them, without a
/// final activation.
#[derive(Module, Debug)]
struct InvertedResidual {
    conv: Vec<Part>,
    /// True where the input is added to the output.
    has_skip: bool,
}

impl InvertedResidual {
    fn new([input, output]: [usize; 2], expansion: usize, stride: usize, init: &Init) -> Self {
        let width = expansion * input;
        let init = init.child("conv");
        let mut parts = Vec::new();
        let mut add = |part: &dyn Fn(&Init) -> Part| {
            let made = part(&init.child(&parts.len().to_string()));
            parts.push(made);
        };
        if expansion != 1 {
            add(&|init| Part::Layer(conv_norm([input, width], 1, 1, init)));
        }
        add(&|init| Part::Layer(depthwise_norm(width, 3, stride, init)));
        add(&|init| Part::Conv(conv([width, output], 1, 1, init)));
        add(&|init| Part::Norm(BatchNorm2d::new(output, init)));
        Self { conv: parts, has_skip: stride == 1 && input == output }
    }

    /// `[B, input, H, W]` → `[B, output, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let output = self.conv.iter().fold(input.clone().into(), |x: Features, part| match part {
            Part::Layer((conv, norm)) => norm.after(conv, x, Activation::Relu6, cx),
            Part::Conv(conv) => conv.forward(x, cx).into(),
            Part::Norm(norm) if self.has_skip => norm.forward_add(x.into_images(), input.clone(), cx).into(),
            Part::Norm(norm) => norm.forward(x.into_images(), cx).into(),
        });
        output.into_images()
    }
}

/// One entry of `features`.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "a few dozen values next to megabytes of weights")]
enum Feature {
    /// The stem or the last 1x1 convolution, each with batch norm and ReLU6.
    Layer(ConvNorm),
    Block(InvertedResidual),
}

/// MobileNetV2: a stem, seventeen inverted residuals, a 1x1 convolution, dropout and a linear layer.
#[derive(Module, Debug)]
pub struct MobileNetV2 {
    features: Vec<Feature>,
    classifier: (Dropout, Linear),
}

impl MobileNetV2 {
    /// Builds MobileNetV2 for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 32 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        super::require_side("mobilenet_v2_imagenet", spec)?;
        let of_features = init.child("features");
        let mut features = vec![Feature::Layer(conv_norm([spec.in_channels, 32], 3, 2, &of_features.child("0")))];
        let mut channels = 32;
        for (expansion, width, blocks, stride) in STAGES {
            for block in 0..blocks {
                let (init, stride) =
                    (of_features.child(&features.len().to_string()), if block == 0 { stride } else { 1 });
                let input = std::mem::replace(&mut channels, width);
                features.push(Feature::Block(InvertedResidual::new([input, width], expansion, stride, &init)));
            }
        }
        let last = of_features.child(&features.len().to_string());
        features.push(Feature::Layer(conv_norm([channels, 1280], 1, 1, &last)));
        let linear = Linear::new([1280, spec.num_classes], &init.child("classifier").child("1"));
        Ok(Self { features, classifier: (Dropout::new(DROPOUT), linear) })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shape in the comment is for 3x224x224.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.features.iter().fold(images, |x, feature| match feature {
            Feature::Layer((conv, norm)) => norm.after(conv, x, Activation::Relu6, cx).into_images(),
            Feature::Block(block) => block.forward(x, cx),
        }); // [B, 1280, 7, 7]
        let (dropout, linear) = &self.classifier;
        linear.forward(dropout.forward(global_avg_pool(x), cx), cx) // [B, classes]
    }
}
