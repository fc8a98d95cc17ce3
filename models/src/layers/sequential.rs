//! Lists of layers, `torch.nn.Sequential`.

use burn::module::Module;
use burn::tensor::Tensor;

use super::{BatchNorm2d, Conv2d, MaxPool2d, Relu};
use crate::Context;

/// One entry of an `nn.Sequential`. Its index in the list is part of its parameters' names.
#[derive(Module, Debug)]
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

/// Applies `layers` in order to features `[B, C, H, W]`. A batch norm and the ReLU after it are one operation.
pub fn forward_sequential(layers: &[Layer], mut x: Tensor<4>, cx: &Context) -> Tensor<4> {
    let mut rest = layers;
    while let Some((layer, next)) = rest.split_first() {
        rest = next;
        x = match (layer, next) {
            (Layer::Norm(norm), [Layer::Relu(_), next @ ..]) => {
                rest = next;
                norm.forward_relu(x, cx)
            }
            (Layer::Norm(norm), _) => norm.forward(x, cx),
            (Layer::Conv(conv), _) => conv.forward(x, cx),
            (Layer::Relu(relu), _) => cx.count_activations(relu.forward(x)),
            (Layer::Pool(pool), _) => cx.count_activations(pool.forward(x)),
        };
    }
    x
}
