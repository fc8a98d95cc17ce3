//! DPN: "Dual Path Networks", Chen, Li, Xiao, Jin, Yan & Feng, 2017, <https://arxiv.org/abs/1707.01629>.
//!
//! pytorch-cifar's variant: a 3x3 stem of stride 1 without pooling.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{Shortcut, apply_shortcut, classify, conv, conv_norm, grouped, sequence};
use crate::layers::{BatchNorm2d, Conv2d, Linear};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, join_paths};

/// Smallest image side in pixels: the last stage has more than one pixel.
const MIN_SIDE: usize = 9;
/// Groups of the 3x3 convolutions.
const GROUPS: usize = 32;

/// Depth in layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DpnDepth {
    /// 2-2-2-2 blocks, a depth of pytorch-cifar.
    Dpn26,
    /// 3-4-20-3 blocks.
    Dpn92,
}

impl DpnDepth {
    /// Returns the name in the registry.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dpn26 => "dpn26",
            Self::Dpn92 => "dpn92",
        }
    }

    /// Returns the number of blocks in each of the four stages.
    fn blocks(self) -> [usize; 4] {
        match self {
            Self::Dpn26 => [2, 2, 2, 2],
            Self::Dpn92 => [3, 4, 20, 3],
        }
    }
}

/// For each stage: inner channels of a block, channels of the residual path, channels that a block adds to the dense path.
const STAGES: [(usize, usize, usize); 4] = [(96, 256, 16), (192, 512, 32), (384, 1024, 24), (768, 2048, 128)];

/// A grouped bottleneck. Its first channels are added to the input's first channels, as in ResNet. Its other channels are
/// concatenated with the input's other channels, as in DenseNet.
#[derive(Module, Debug)]
struct DualPath {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    conv3: Conv2d,
    bn3: BatchNorm2d,
    shortcut: Shortcut,
    /// Channels of the residual path.
    residual: usize,
}

impl DualPath {
    fn new(input: usize, stage: usize, stride: usize, first: bool, init: &Init) -> Self {
        let (width, residual, dense) = STAGES[stage];
        let output = residual + dense;
        Self {
            conv1: conv([input, width], 1, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(width, &init.child("bn1")),
            conv2: grouped([width, width], 3, stride, GROUPS, &init.child("conv2")),
            bn2: BatchNorm2d::new(width, &init.child("bn2")),
            conv3: conv([width, output], 1, 1, &init.child("conv3")),
            bn3: BatchNorm2d::new(output, &init.child("bn3")),
            shortcut: first.then(|| conv_norm([input, output], 1, stride, &init.child("shortcut"))),
            residual,
        }
    }

    /// `[B, residual + d, H, W]` → `[B, residual + d + dense, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let x = self.bn1.after(&self.conv1, input.clone(), Activation::Relu, cx);
        let x = self.bn2.after(&self.conv2, x, Activation::Relu, cx);
        let x = self.bn3.after(&self.conv3, x, Activation::Identity, cx).into_images();
        let skip = apply_shortcut(self.shortcut.as_ref(), input, cx).into_images();
        cx.count_activations(join_paths(skip, x, self.residual))
    }
}

/// A stem, four stages of dual-path blocks and a linear layer.
#[derive(Module, Debug)]
pub struct Dpn {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    layer1: Vec<DualPath>,
    layer2: Vec<DualPath>,
    layer3: Vec<DualPath>,
    layer4: Vec<DualPath>,
    linear: Linear,
}

impl Dpn {
    /// Builds the DPN of this depth for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 9 pixels.
    pub fn new(depth: DpnDepth, spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side(depth.name(), MIN_SIDE, 32)?;
        let mut features = 64;
        let mut stage = |index: usize, stride: usize| {
            let (_, residual, dense) = STAGES[index];
            sequence(&init.child(&format!("layer{}", index + 1)), depth.blocks()[index], |block, init| {
                let input = std::mem::replace(&mut features, residual + (block + 2) * dense);
                let stride = if block == 0 { stride } else { 1 };
                DualPath::new(input, index, stride, block == 0, init)
            })
        };
        let (layer1, layer2, layer3, layer4) = (stage(0, 1), stage(1, 2), stage(2, 2), stage(3, 2));
        Ok(Self {
            conv1: conv([spec.in_channels, 64], 3, 1, &init.child("conv1")),
            bn1: BatchNorm2d::new(64, &init.child("bn1")),
            layer1,
            layer2,
            layer3,
            layer4,
            linear: Linear::new([features, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32 and DPN-92.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let stage = |x, blocks: &[DualPath]| blocks.iter().fold(x, |x, block| block.forward(x, cx));
        let x = self.bn1.after(&self.conv1, images, Activation::Relu, cx).into_images(); // [B, 64, 32, 32]
        let x = stage(x, &self.layer1); // [B, 320, 32, 32]
        let x = stage(x, &self.layer2); // [B, 672, 16, 16]
        let x = stage(x, &self.layer3); // [B, 1528, 8, 8]
        let x = stage(x, &self.layer4); // [B, 2560, 4, 4]
        classify(x, &self.linear, cx) // [B, classes]
    }
}
