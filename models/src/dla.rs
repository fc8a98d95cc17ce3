//! DLA: "Deep Layer Aggregation", Yu, Wang, Shelhamer & Darrell, 2017, <https://arxiv.org/abs/1707.06484>.
//!
//! pytorch-cifar's two variants: DLA follows the paper. In SimpleDLA every root aggregates exactly two subtrees.

use burn::module::Module;
use burn::tensor::Tensor;

use crate::blocks::{BasicBlock, ConvNorm, classify, conv, conv_norm, conv_norm_relu};
use crate::layers::{BatchNorm2d, Conv2d, Linear};
use crate::{BuildError, Context, Init, Spec};
use ops::{Activation, concat};

/// Smallest image side in pixels: the last stage has more than one pixel.
const MIN_SIDE: usize = 9;

/// Aggregation node: a 1x1 convolution over concatenated features.
#[derive(Module, Debug)]
struct Root {
    conv: Conv2d,
    bn: BatchNorm2d,
}

impl Root {
    fn new(parts: usize, width: usize, init: &Init) -> Self {
        let init = init.child("root");
        Self {
            conv: conv([parts * width, width], 1, 1, &init.child("conv")),
            bn: BatchNorm2d::new(width, &init.child("bn")),
        }
    }

    /// `parts` of `[B, width, H, W]` → `[B, width, H, W]`.
    fn forward(&self, parts: Vec<Tensor<4>>, cx: &Context) -> Tensor<4> {
        let parts = cx.count_activations(concat(parts));
        self.bn.after(&self.conv, parts, Activation::Relu, cx).into_images()
    }
}

/// DLA's tree of one level: two blocks and a root that aggregates their outputs.
#[derive(Module, Debug)]
struct Tree {
    root: Root,
    left_node: BasicBlock,
    right_node: BasicBlock,
}

impl Tree {
    fn new([input, width]: [usize; 2], stride: usize, init: &Init) -> Self {
        Self {
            root: Root::new(2, width, init),
            left_node: BasicBlock::new([input, width], stride, &init.child("left_node")),
            right_node: BasicBlock::new([width, width], 1, &init.child("right_node")),
        }
    }

    /// `[B, input, H, W]` → `[B, width, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let left = self.left_node.forward(input, cx).into_images();
        let right = self.right_node.forward(left.clone(), cx).into_images();
        self.root.forward(vec![left, right], cx)
    }
}

/// DLA's tree of two levels: a tree of one level followed by two blocks, a block parallel to the three, and a root that
/// aggregates all four outputs.
#[derive(Module, Debug)]
struct DeepTree {
    root: Root,
    level_1: Tree,
    prev_root: BasicBlock,
    left_node: BasicBlock,
    right_node: BasicBlock,
}

impl DeepTree {
    fn new([input, width]: [usize; 2], stride: usize, init: &Init) -> Self {
        Self {
            root: Root::new(4, width, init),
            level_1: Tree::new([input, width], stride, &init.child("level_1")),
            prev_root: BasicBlock::new([input, width], stride, &init.child("prev_root")),
            left_node: BasicBlock::new([width, width], 1, &init.child("left_node")),
            right_node: BasicBlock::new([width, width], 1, &init.child("right_node")),
        }
    }

    /// `[B, input, H, W]` → `[B, width, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let previous = self.prev_root.forward(input.clone(), cx).into_images();
        let tree = self.level_1.forward(input, cx);
        let left = self.left_node.forward(tree.clone(), cx).into_images();
        let right = self.right_node.forward(left.clone(), cx).into_images();
        self.root.forward(vec![previous, tree, left, right], cx)
    }
}

/// DLA: three convolutions, four trees (of one, two, two and one level) and a linear layer.
#[derive(Module, Debug)]
pub struct Dla {
    base: ConvNorm,
    layer1: ConvNorm,
    layer2: ConvNorm,
    layer3: Tree,
    layer4: DeepTree,
    layer5: DeepTree,
    layer6: Tree,
    linear: Linear,
}

impl Dla {
    /// Builds DLA for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 9 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("dla", MIN_SIDE, 32)?;
        Ok(Self {
            base: conv_norm([spec.in_channels, 16], 3, 1, &init.child("base")),
            layer1: conv_norm([16, 16], 3, 1, &init.child("layer1")),
            layer2: conv_norm([16, 32], 3, 1, &init.child("layer2")),
            layer3: Tree::new([32, 64], 1, &init.child("layer3")),
            layer4: DeepTree::new([64, 128], 2, &init.child("layer4")),
            layer5: DeepTree::new([128, 256], 2, &init.child("layer5")),
            layer6: Tree::new([256, 512], 2, &init.child("layer6")),
            linear: Linear::new([512, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The shapes in the comments are for 3x32x32.
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = conv_norm_relu(&self.base, images, cx); // [B, 16, 32, 32]
        let x = conv_norm_relu(&self.layer1, x, cx); // [B, 16, 32, 32]
        let x = conv_norm_relu(&self.layer2, x, cx).into_images(); // [B, 32, 32, 32]
        let x = self.layer3.forward(x, cx); // [B, 64, 32, 32]
        let x = self.layer4.forward(x, cx); // [B, 128, 16, 16]
        let x = self.layer5.forward(x, cx); // [B, 256, 8, 8]
        let x = self.layer6.forward(x, cx); // [B, 512, 4, 4]
        classify(x, &self.linear, cx) // [B, classes]
    }
}

/// SimpleDLA's tree of one level: two blocks and a root that aggregates their outputs.
#[derive(Module, Debug)]
struct SimpleTree {
    root: Root,
    left_tree: BasicBlock,
    right_tree: BasicBlock,
}

impl SimpleTree {
    fn new([input, width]: [usize; 2], stride: usize, init: &Init) -> Self {
        Self {
            root: Root::new(2, width, init),
            left_tree: BasicBlock::new([input, width], stride, &init.child("left_tree")),
            right_tree: BasicBlock::new([width, width], 1, &init.child("right_tree")),
        }
    }

    /// `[B, input, H, W]` → `[B, width, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let left = self.left_tree.forward(input, cx).into_images();
        let right = self.right_tree.forward(left.clone(), cx).into_images();
        self.root.forward(vec![left, right], cx)
    }
}

/// SimpleDLA's tree of two levels: two trees of one level and a root that aggregates their outputs.
#[derive(Module, Debug)]
struct SimpleDeepTree {
    root: Root,
    left_tree: SimpleTree,
    right_tree: SimpleTree,
}

impl SimpleDeepTree {
    fn new([input, width]: [usize; 2], stride: usize, init: &Init) -> Self {
        Self {
            root: Root::new(2, width, init),
            left_tree: SimpleTree::new([input, width], stride, &init.child("left_tree")),
            right_tree: SimpleTree::new([width, width], 1, &init.child("right_tree")),
        }
    }

    /// `[B, input, H, W]` → `[B, width, H / stride, W / stride]`.
    fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let left = self.left_tree.forward(input, cx);
        let right = self.right_tree.forward(left.clone(), cx);
        self.root.forward(vec![left, right], cx)
    }
}

/// SimpleDLA: three convolutions, four trees (of one, two, two and one level) and a linear layer.
#[derive(Module, Debug)]
pub struct SimpleDla {
    base: ConvNorm,
    layer1: ConvNorm,
    layer2: ConvNorm,
    layer3: SimpleTree,
    layer4: SimpleDeepTree,
    layer5: SimpleDeepTree,
    layer6: SimpleTree,
    linear: Linear,
}

impl SimpleDla {
    /// Builds SimpleDLA for `spec` with weights from `init`.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`] for an image side below 9 pixels.
    pub fn new(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("simple_dla", MIN_SIDE, 32)?;
        Ok(Self {
            base: conv_norm([spec.in_channels, 16], 3, 1, &init.child("base")),
            layer1: conv_norm([16, 16], 3, 1, &init.child("layer1")),
            layer2: conv_norm([16, 32], 3, 1, &init.child("layer2")),
            layer3: SimpleTree::new([32, 64], 1, &init.child("layer3")),
            layer4: SimpleDeepTree::new([64, 128], 2, &init.child("layer4")),
            layer5: SimpleDeepTree::new([128, 256], 2, &init.child("layer5")),
            layer6: SimpleTree::new([256, 512], 2, &init.child("layer6")),
            linear: Linear::new([512, spec.num_classes], &init.child("linear")),
        })
    }

    /// Maps images `[B, C, H, W]` to logits `[B, classes]`. The inner shapes are those of [`Dla::forward`].
    pub fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = conv_norm_relu(&self.base, images, cx);
        let x = conv_norm_relu(&self.layer1, x, cx);
        let x = conv_norm_relu(&self.layer2, x, cx).into_images();
        let x = self.layer3.forward(x, cx);
        let x = self.layer4.forward(x, cx);
        let x = self.layer5.forward(x, cx);
        let x = self.layer6.forward(x, cx);
        classify(x, &self.linear, cx)
    }
}
