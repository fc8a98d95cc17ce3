//! Lists of layers, `torch.nn.Sequential`.

use burn::module::Module;
use burn::tensor::Tensor;

use super::{BatchNorm2d, Conv2d, MaxPool2d, Relu};
use crate::Context;

/// One entry of an `nn.Sequential`: its position in the list is part of its parameters' names.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "some dozens of them, beside megabytes of weights")]
pub enum Layer {
    /// Convolution.
    Conv(Conv2d),
    /// Batch norm.
    Norm(BatchNorm2d),
    /// ReLU.
    Relu(Relu),
    /// Max pooling.
    Pool(MaxPool2d),
}

/// Runs `layers` one after the other; a batch norm takes the ReLU behind it along.
pub fn run(layers: &[Layer], mut x: Tensor<4>, cx: &Context) -> Tensor<4> {
    let mut rest = layers;
    while let Some((layer, behind)) = rest.split_first() {
        rest = behind;
        x = match (layer, behind) {
            (Layer::Norm(norm), [Layer::Relu(_), behind @ ..]) => {
                rest = behind;
                norm.forward_relu(x, cx)
            }
            (Layer::Norm(norm), _) => norm.forward(x, cx),
            (Layer::Conv(conv), _) => conv.forward(x, cx),
            (Layer::Relu(relu), _) => cx.wrote(relu.forward(x)),
            (Layer::Pool(pool), _) => cx.wrote(pool.forward(x)),
        };
    }
    x
}
