//! Convolutions on a GPU: burn's, except in groups.
//!
//! For the weight's gradient burn's kernels know no groups. It convolves group by group, some six launches each, which makes
//! thousands in a RegNet's step; in a depthwise convolution a handful of threads adds up all pixels of the batch.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::{FloatTensorOps, ModuleOps};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::Shape;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::{numeric::empty_device_contiguous_dtype, permute_nchw_to_nhwc, permute_nhwc_to_nchw};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::extension::{Activation, ConvGrads, ConvOptions};
use super::rows::{Rows, UNITS, arg, whole};
use super::weight_kernels::{SizesLaunch, Taps, add_pieces, depthwise_pieces, grouped_pieces};
use super::{activation, direct};

/// Input channels of a group up to which a thread for each output channel is the better way; beyond, burn's matrix products.
pub(super) const NARROW: usize = 32;
/// Taps whose sums fit into a thread's registers.
const MOST_TAPS: usize = 25;

/// What a convolution keeps for its backward pass.
#[derive(Debug, Clone)]
pub struct KeptConv {
    input: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    options: ConvOptions,
    /// The output, where a ReLU is part of the operation.
    output: Option<CubeTensor>,
}

pub(super) fn plain(options: &ConvOptions) -> burn::tensor::ops::ConvOptions<2> {
    let ConvOptions { stride, padding, dilation, groups } = *options;
    burn::tensor::ops::ConvOptions::new(stride, padding, dilation, groups)
}

pub(super) fn forward(
    input: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
    options: ConvOptions,
    relu: bool,
) -> (CubeTensor, KeptConv) {
    let (x, b) = (input.clone(), bias.clone());
    let (output, weight) = if options.groups == 1 {
        // in the order that burn reads it: once for both passes
        let weight = permute_nhwc_to_nchw(into_contiguous(permute_nchw_to_nhwc(weight)));
        (Cube::conv2d(x, weight.clone(), b, plain(&options)), weight)
    } else {
        (direct::forward(x, weight.clone(), b, &options), weight)
    };
    let output = if relu { activation::forward(output, Activation::Relu) } else { output };
    let kept = KeptConv { input, weight, bias, options, output: relu.then(|| output.clone()) };
    (output, kept)
}

pub(super) fn backward(kept: KeptConv, grad: CubeTensor, wanted: [bool; 3]) -> ConvGrads<Cube> {
    let KeptConv { input, weight, bias, options, output } = kept;
    let grad = match output {
        Some(output) => activation::backward(output, grad, Activation::Relu),
        None => grad,
    };
    // the data's gradient first: what hangs on it comes next in the backward pass
    let data = wanted[0].then(|| {
        let (x, w, dy) = (input.clone(), weight.clone(), grad.clone());
        if options.groups == 1 {
            Cube::conv2d_x_backward(x, w, dy, plain(&options))
        } else {
            direct::data_gradient(x.shape().dims(), w, dy, &options)
        }
    });
    let of_bias = bias.filter(|_| wanted[2]).map(|bias| Cube::conv2d_bias_backward(input.clone(), bias, grad.clone()));
    let of_weight = wanted[1].then(|| weight_gradient(input, weight, grad, &options));
    ConvGrads { input: data, weight: of_weight, bias: of_bias }
}

fn weight_gradient(input: CubeTensor, weight: CubeTensor, grad: CubeTensor, options: &ConvOptions) -> CubeTensor {
    let [_, each, height, width]: [usize; 4] = weight.shape().dims();
    if options.groups == 1 || each > NARROW || height * width > MOST_TAPS {
        return Cube::conv2d_weight_backward(input, weight, grad, plain(options));
    }
    in_groups(&Rows::of(input), &weight, &Rows::of(grad), options)
}

/// `[out, in / groups, height, width]`, channels-last in memory.
fn in_groups(x: &Rows, weight: &CubeTensor, dy: &Rows, options: &ConvOptions) -> CubeTensor {
    let [outputs, inputs, kernel_height, kernel_width]: [usize; 4] = weight.shape().dims();
    let ([_, height, width, _], [batch, out_height, out_width, _]) = (x.dims(), dy.dims());
    let depthwise = inputs == 1 && outputs == options.groups;
    // of the channels that a thread takes together
    let vector = if depthwise { x.vector(&[dy], &[]) } else { x.vector_of(inputs) };
    let (columns, vectors) = if depthwise { (outputs / vector, 1) } else { (outputs, inputs / vector) };
    let lanes = columns.next_power_of_two().min(32);
    let (tiles, deep) = (columns.div_ceil(lanes), UNITS / lanes);
    let (pixels, taps) = (batch * out_height * out_width, kernel_height * kernel_width);
    /// Blocks that keep a large GPU busy.
    const BLOCKS: usize = 1024;
    let piece = pixels.div_ceil((BLOCKS / (tiles * vectors)).clamp(1, 128)).next_multiple_of(deep).max(deep * 4);
    let pieces = pixels.div_ceil(piece);
    let client = x.client();
    let length = outputs * taps * inputs;
    let new = |shape: [usize; 4], dtype| {
        empty_device_contiguous_dtype(client.clone(), weight.device.clone(), Shape::from(shape), dtype)
    };
    let scratch = new([pieces, 1, 1, length], burn::tensor::DType::F32);
    let count = CubeCount::Static(tiles as u32, pieces as u32, vectors as u32);
    let dim = CubeDim::new_2d(lanes as u32, deep as u32);
    let dtype = dtype_to_storage_type(x.dtype());
    let sizes = SizesLaunch::new(
        pixels,
        out_height,
        out_width,
        height,
        width,
        x.pitch(vector),
        if depthwise { dy.pitch(vector) } else { dy.pitch(1) },
        piece,
    );
    let windows = Taps::of(weight, options);
    // SAFETY: the kernels stay within the sizes that they are given, which are those of the tensors.
    unsafe {
        if depthwise {
            depthwise_pieces::launch_unchecked(
                client,
                count,
                dim,
                vector,
                x.arg(),
                dy.arg(),
                arg(&scratch, pieces * length),
                columns,
                sizes,
                windows,
                dtype,
            );
        } else {
            let each = outputs / options.groups;
            grouped_pieces::launch_unchecked(
                client,
                count,
                dim,
                vector,
                x.arg(),
                dy.arg(),
                arg(&scratch, pieces * length),
                outputs,
                each,
                sizes,
                vectors,
                windows,
                dtype,
            );
        }
    }
    let vector = if length.is_multiple_of(4) { 4 } else { 1 };
    let (count, dim) = whole(length / vector);
    // a depthwise one has its taps first
    let shape = if depthwise {
        [1, kernel_height, kernel_width, outputs]
    } else {
        [outputs, kernel_height, kernel_width, inputs]
    };
    let sum = new(shape, weight.dtype);
    // SAFETY: as above.
    unsafe {
        add_pieces::launch_unchecked(
            client,
            count,
            dim,
            vector,
            arg(&scratch, pieces * length),
            arg(&sum, length),
            length / vector,
            pieces,
            dtype_to_storage_type(weight.dtype),
        );
    }
    let sum = if depthwise { Cube::float_swap_dims(sum, 0, 3) } else { sum };
    permute_nhwc_to_nchw(sum)
}
