//! The trainer with a network of your own: `model.name = "small_net"`. docs/library.md explains it.
//!
//!     cargo run --release --example own_model -- --config config.toml --cpus 2

use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::Tensor;
use models::layers::{BatchNorm2d, Conv2d, Conv2dConfig, Linear, global_avg_pool};
use models::{BuildError, Context, CustomNetwork, Init, Spec};

/// Two convolutions with batch norm, the second one with a residual, and a linear layer. Names and layouts are PyTorch's.
#[derive(Module, Debug)]
struct SmallNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    conv2: Conv2d,
    bn2: BatchNorm2d,
    fc: Linear,
}

impl CustomNetwork for SmallNet {
    fn build(spec: &Spec, init: &Init) -> Result<Self, BuildError> {
        spec.require_side("small_net", 4, 32)?;
        let conv = |input| Conv2dConfig::new([input, 32], 3).with_padding(1).without_bias();
        Ok(Self {
            conv1: conv(spec.in_channels).with_stride(2).init(&init.child("conv1")),
            bn1: BatchNorm2d::new(32, &init.child("bn1")),
            conv2: conv(32).init(&init.child("conv2")),
            bn2: BatchNorm2d::new(32, &init.child("bn2")),
            fc: Linear::new([32, spec.num_classes], &init.child("fc")),
        })
    }

    fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        let x = self.bn1.forward_relu(self.conv1.forward(images, cx), cx); // [B, 32, H / 2, W / 2]
        let x = self.bn2.forward_add_relu(self.conv2.forward(x.clone(), cx), x, cx); // [B, 32, H / 2, W / 2]
        self.fc.forward(global_avg_pool(x), cx) // [B, classes]
    }
}

fn main() -> ExitCode {
    models::register::<SmallNet>("small_net", Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] });
    trainer::main()
}
