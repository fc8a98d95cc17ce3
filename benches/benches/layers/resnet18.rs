//! The distinct layers of ResNet-18 on images of 3x32x32, and how often each occurs.

use serde::Serialize;

/// A layer. `peers/layers.py` takes the same numbers as arguments.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// `[in, out, kernel, stride, side of the input]`, without bias, with a padding of half the kernel.
    Conv([usize; 5]),
    /// `[channels, side, followed by ReLU, residual added]`: batch norm in training mode.
    Norm([usize; 4]),
    /// `[channels, side]`: mean over all pixels.
    Mean([usize; 2]),
    /// `[in, out]`, with bias.
    Linear([usize; 2]),
}

impl Kind {
    /// Returns the multiply-adds per image in forward. Each gradient of a convolution or linear layer needs as many.
    pub fn macs(self) -> usize {
        match self {
            Self::Conv([input, output, kernel, stride, side]) => {
                input * output * kernel * kernel * side.div_ceil(stride).pow(2)
            }
            Self::Linear([input, output]) => input * output,
            Self::Norm(_) | Self::Mean(_) => 0,
        }
    }

    pub fn name(self) -> String {
        match self {
            Self::Conv([input, output, kernel, stride, side]) => {
                let stride = if stride == 1 { String::new() } else { format!(" /{stride}") };
                format!("conv {kernel}x{kernel}{stride} {input}→{output}, {side}x{side}")
            }
            Self::Norm([channels, side, relu, add]) => {
                let (add, relu) = (if add == 1 { " + add" } else { "" }, if relu == 1 { " + ReLU" } else { "" });
                format!("norm{add}{relu} {channels}, {side}x{side}")
            }
            Self::Mean([channels, side]) => format!("mean {channels}, {side}x{side}"),
            Self::Linear([input, output]) => format!("linear {input}→{output}"),
        }
    }
}

/// A layer and the number of its occurrences.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    pub kind: Kind,
    pub count: usize,
    /// Whether training needs the gradient of the input: not where the input is the image.
    pub data: bool,
}

/// Returns the layers in the order of the network.
pub fn layers() -> Vec<Layer> {
    let one = |kind, count| Layer { kind, count, data: true };
    let mut layers = vec![
        Layer { kind: Kind::Conv([3, 64, 3, 1, 32]), count: 1, data: false },
        one(Kind::Conv([64, 64, 3, 1, 32]), 4),
        // The stem's batch norm, and the first one of each of the two blocks.
        one(Kind::Norm([64, 32, 1, 0]), 3),
        one(Kind::Norm([64, 32, 1, 1]), 2),
    ];
    for (stage, width) in [128, 256, 512].into_iter().enumerate() {
        let (side, half) = (32 >> stage, 16 >> stage);
        layers.extend([
            one(Kind::Conv([width / 2, width, 3, 2, side]), 1),
            one(Kind::Conv([width, width, 3, 1, half]), 3),
            one(Kind::Conv([width / 2, width, 1, 2, side]), 1),
            one(Kind::Norm([width, half, 1, 0]), 2),
            one(Kind::Norm([width, half, 1, 1]), 2),
            one(Kind::Norm([width, half, 0, 0]), 1),
        ]);
    }
    layers.extend([one(Kind::Mean([512, 4]), 1), one(Kind::Linear([512, 10]), 1)]);
    layers
}
