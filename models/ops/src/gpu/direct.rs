//! Grouped convolutions without tensor cores: custom kernels for depthwise ones and narrow groups, burn's convolution of each group
//! for wide ones.
//!
//! burn's grouped kernels sum in the element type of the images. For bf16, a long sum then loses the digits beyond its
//! 8 bits.

use burn::backend::Cube;
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::{FloatTensorOps, ModuleOps};
use burn::tensor::{Shape, Slice};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::conv::{NARROW, burn_options};
use super::deferred::Deferred;
use super::direct_kernels::{ImagesLaunch, PIXELS, depthwise, grouped};
use super::implicit_gemm::NormFactors;
use super::rows::{Rows, THREADS_PER_BLOCK, aligned, all, arg};
use super::weight_kernels::{NormOnLoad, Taps};
use crate::extension::ConvOptions;

impl Taps {
    /// Makes the taps of a convolution with `weight`.
    pub(super) fn of(weight: &CubeTensor, options: &ConvOptions) -> Self {
        let [_, _, height, width]: [usize; 4] = weight.shape().dims();
        let ConvOptions { stride, padding, dilation, .. } = *options;
        Self { kernel: [height, width], stride, padding, dilation }
    }

    /// Number of windows along an axis.
    fn windows(&self, axis: usize, extent: usize) -> usize {
        let window = self.dilation[axis] * (self.kernel[axis] - 1) + 1;
        (extent + 2 * self.padding[axis] - window) / self.stride[axis] + 1
    }

    /// Shape `[B, C, H, W]` of the output of a convolution of `images`.
    pub(super) fn output_of(&self, images: &Rows, channels: usize) -> [usize; 4] {
        let [batch, height, width, _] = images.dims();
        [batch, channels, self.windows(0, height), self.windows(1, width)]
    }
}

/// Source of a depthwise convolution.
#[derive(Clone, Copy)]
pub(super) enum ConvSource<'a> {
    /// Images, or the gradient of the convolution's output, read as they are.
    Plain,
    /// The output of a deferred batch norm, computed from its input.
    Normalised(&'a Deferred),
    /// The gradient of the convolution's output, computed from the gradient of the normalised values of the batch norm that
    /// follows.
    NormGradient(&'a NormFactors),
}

impl<'a> ConvSource<'a> {
    pub(super) fn images(norm: Option<&'a Deferred>) -> Self {
        norm.map_or(Self::Plain, Self::Normalised)
    }

    pub(super) fn gradient(norm: Option<&'a NormFactors>) -> Self {
        norm.map_or(Self::Plain, Self::NormGradient)
    }

    pub(super) fn norm_on_load(self) -> NormOnLoad {
        match self {
            Self::Plain => NormOnLoad::Nothing,
            Self::Normalised(norm) => NormOnLoad::Normalise(norm.activation),
            Self::NormGradient(_) => NormOnLoad::NormGradient,
        }
    }

    /// The batch norm's input, if it is read beside the gradient.
    pub(super) fn norm_input(self) -> Option<&'a Rows> {
        if let Self::NormGradient(norm) = self { Some(&norm.input) } else { None }
    }

    /// The factors of each channel.
    pub(super) fn factors(self) -> Option<&'a CubeTensor> {
        match self {
            Self::Plain => None,
            Self::Normalised(norm) => Some(norm.statistics()),
            Self::NormGradient(norm) => Some(&norm.factors),
        }
    }
}

/// Returns true if there are several groups, each with one channel on both sides.
pub(super) fn is_depthwise([outputs, inputs, ..]: [usize; 4], options: &ConvOptions) -> bool {
    options.groups > 1 && inputs == 1 && outputs == options.groups
}

/// Returns a depthwise weight as `[taps, 1, channels, 1]`: its order in memory, see [`mod@crate::parameter`].
pub(super) fn taps_first(weight: CubeTensor) -> CubeTensor {
    let [channels, _, height, width]: [usize; 4] = weight.shape().dims();
    Cube::float_reshape(Cube::float_permute(weight, &[2, 3, 1, 0]), Shape::from([height * width, 1, channels, 1]))
}

/// Convolves `[B, in, H, W]` with `[out, in / groups, kh, kw]`.
pub(super) fn forward(
    input: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    options: &ConvOptions,
) -> CubeTensor {
    let [outputs, inputs, height, width]: [usize; 4] = weight.shape().dims();
    if inputs > NARROW {
        let parts = (0..options.groups).map(|group| {
            let bias = bias.clone().map(|bias| part(bias, 0, group, options.groups));
            let weight = part(weight.clone(), 0, group, options.groups);
            Cube::conv2d(group_channels(input.clone(), group, options.groups), weight, bias, ungrouped(options))
        });
        return concat_channels(parts.collect());
    }
    let images = Rows::new(input);
    if is_depthwise(weight.shape().dims(), options) {
        return depthwise_forward(&images, ConvSource::Plain, weight, bias, options);
    }
    let taps = Taps::of(&weight, options);
    let target = taps.output_of(&images, outputs);
    // [groups, out, in, taps] -> [taps, in, groups, out]
    let split = Shape::from([options.groups, outputs / options.groups, inputs, height * width]);
    let weight = Cube::float_permute(Cube::float_reshape(weight, split), &[3, 2, 0, 1]);
    launch(images, ConvSource::Plain, weight, bias, target, options.groups, taps, false)
}

/// Computes the gradient of an input of `shape`.
pub(super) fn data_gradient(
    shape: [usize; 4],
    weight: CubeTensor,
    grad: CubeTensor,
    options: &ConvOptions,
) -> CubeTensor {
    let [outputs, inputs, height, width]: [usize; 4] = weight.shape().dims();
    if inputs > NARROW {
        let [batch, _, in_height, in_width] = shape;
        let one = Shape::from([batch, inputs, in_height, in_width]);
        let parts = (0..options.groups).map(|group| {
            let weight = part(weight.clone(), 0, group, options.groups);
            let grad = group_channels(grad.clone(), group, options.groups);
            // burn uses only the input's shape.
            let input = Cube::float_empty(one.clone(), &weight.device, weight.dtype.into());
            Cube::conv2d_x_backward(input, weight, grad, ungrouped(options))
        });
        return concat_channels(parts.collect());
    }
    let grad = Rows::new(grad);
    if is_depthwise(weight.shape().dims(), options) {
        return depthwise_data_gradient(shape, &grad, ConvSource::Plain, weight, options);
    }
    let taps = Taps::of(&weight, options);
    // [groups, out, in, taps] -> [taps, out, groups, in]
    let split = Shape::from([options.groups, outputs / options.groups, inputs, height * width]);
    let weight = Cube::float_permute(Cube::float_reshape(weight, split), &[3, 1, 0, 2]);
    launch(grad, ConvSource::Plain, weight, None, shape, options.groups, taps, true)
}

/// Convolves images with the weight `[channels, 1, kh, kw]` of a depthwise convolution.
pub(super) fn depthwise_forward(
    images: &Rows,
    from: ConvSource<'_>,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    options: &ConvOptions,
) -> CubeTensor {
    let taps = Taps::of(&weight, options);
    let target = taps.output_of(images, options.groups);
    launch(images.clone(), from, taps_first(weight), bias, target, options.groups, taps, false)
}

/// Computes the gradient of the images of a depthwise convolution. `shape`: that of the images, `[B, C, H, W]`.
pub(super) fn depthwise_data_gradient(
    shape: [usize; 4],
    grad: &Rows,
    from: ConvSource<'_>,
    weight: CubeTensor,
    options: &ConvOptions,
) -> CubeTensor {
    let taps = Taps::of(&weight, options);
    launch(grad.clone(), from, taps_first(weight), None, shape, options.groups, taps, true)
}

/// Launches a kernel with `weight` `[taps, source channels of a group, groups, target channels of a group]`. Only depthwise kernels
/// apply a batch norm to the source.
fn launch(
    source: Rows,
    from: ConvSource<'_>,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    [batch, channels, height, width]: [usize; 4],
    groups: usize,
    taps: Taps,
    transposed: bool,
) -> CubeTensor {
    let [_, inputs, _, each]: [usize; 4] = weight.shape().dims();
    let is_depthwise = inputs == 1 && each == 1;
    let (weight, bias) = (into_contiguous(weight), bias.map(into_contiguous));
    let out = source.empty_images(batch, height, width, channels);
    // Vector of the target's channels. In a grouped convolution, a vector must be inside one group.
    let vector = match bias.as_ref().is_none_or(aligned) {
        true if is_depthwise => {
            source.vector_size(&[&out, from.norm_input().unwrap_or(&out)], from.factors().as_slice())
        }
        true => out.vector_of(channels / groups),
        false => 1,
    };
    let (columns, pixels) = (channels / vector, batch * height * width);
    let lanes = columns.next_power_of_two().min(32);
    let depth = THREADS_PER_BLOCK / lanes;
    let [_, source_height, source_width, _] = source.dims();
    let narrow = if is_depthwise { vector } else { source.vector_of(inputs) };
    let images = ImagesLaunch::new(
        pixels,
        height,
        width,
        source_height,
        source_width,
        columns,
        out.pitch(vector),
        source.pitch(narrow),
    );
    let blocks = pixels.div_ceil(depth * PIXELS);
    let count = CubeCount::Static(blocks as u32, columns.div_ceil(lanes) as u32, 1);
    let dim = CubeDim::new_2d(lanes as u32, depth as u32);
    let start = bias.as_ref().map_or_else(|| arg(&weight, 0), |bias| arg(bias, channels));
    let dtype = dtype_to_storage_type(source.dtype());
    let client = source.client().clone();
    // SAFETY: the kernels stay within their size arguments, which are those of the tensors.
    unsafe {
        if is_depthwise {
            depthwise::launch_unchecked(
                &client,
                count,
                dim,
                vector,
                source.arg(),
                from.norm_input().unwrap_or(&source).arg(),
                // The kernel reads the factors only if it applies a batch norm (`NormOnLoad`).
                all(from.factors().unwrap_or(&weight)),
                all(&weight),
                start,
                out.arg(),
                images,
                bias.is_some(),
                transposed,
                from.norm_on_load(),
                taps,
                dtype,
            );
        } else {
            grouped::launch_unchecked(
                &client,
                count,
                dim,
                vector,
                narrow,
                source.arg(),
                all(&weight),
                start,
                out.arg(),
                channels / groups / vector,
                inputs / narrow,
                images,
                bias.is_some(),
                transposed,
                taps,
                narrow,
                dtype,
            );
        }
    }
    out.into_tensor()
}

/// Returns burn's options for one group.
fn ungrouped(options: &ConvOptions) -> burn::tensor::ops::ConvOptions<2> {
    burn_options(&ConvOptions { groups: 1, ..*options })
}

/// Returns one of `parts` equal parts along an axis.
fn part(tensor: CubeTensor, axis: usize, index: usize, parts: usize) -> CubeTensor {
    let shape = tensor.shape();
    let size = shape[axis] / parts;
    let whole = |extent: usize| Slice::from(0..extent);
    let mut slices: Vec<Slice> = shape.iter().map(|&extent| whole(extent)).collect();
    slices[axis] = Slice::from(index * size..(index + 1) * size);
    Cube::float_slice(tensor, &slices)
}

/// Returns the channels of a group, channels-last in memory.
fn group_channels(image: CubeTensor, group: usize, groups: usize) -> CubeTensor {
    let rows = Cube::float_permute(image, &[0, 2, 3, 1]);
    Cube::float_permute(part(rows, 3, group, groups), &[0, 3, 1, 2])
}

/// Concatenates along the channels, channels-last in memory.
fn concat_channels(parts: Vec<CubeTensor>) -> CubeTensor {
    let rows = parts.into_iter().map(|part| Cube::float_permute(part, &[0, 2, 3, 1])).collect();
    Cube::float_permute(Cube::float_cat(rows, 3), &[0, 3, 1, 2])
}
