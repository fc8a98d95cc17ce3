//! One launch that makes a batch of images: a thread for each pixel of the result.
//!
//! Checked by `gpu_check --ops` (`benches/gpu_check/batches.rs`).

use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::tensor::{DType, Int, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::Device;
use cubecl::prelude::*;

use super::rows::{THREADS_PER_BLOCK, all, untracked_arg};
use super::storage::{storage_of, tensor_of_storage};

/// Looks up the pixel's channels. `lines` are those of `GatherLines`, `count` is the number of pixels of the batch.
#[cube(launch_unchecked)]
fn gather(
    pixels: &[u8],
    table: &[f32],
    lines: &[i32],
    out: &mut [f32],
    count: usize,
    height: usize,
    width: usize,
    channels: usize,
) {
    let at = CUBE_POS_X as usize * THREADS_PER_BLOCK + UNIT_POS as usize;
    if at >= count {
        terminate!();
    }
    let plane = height * width;
    let image = at / plane * (1 + height + width);
    let row = lines[image + 1 + at % plane / width];
    let column = lines[image + 1 + height + at % width];
    let cut = row & column & 1 == 1;
    let shown = row >= 0 && column >= 0;
    let mut from = 0usize;
    if shown {
        from = lines[image] as usize + (row >> 1) as usize * width + (column >> 1) as usize;
    }
    let mut channel = 0usize;
    while channel < channels {
        let mut key = 0usize;
        if !cut {
            key = 1 + 256 * channel;
            if shown {
                key += pixels[from + channel * plane] as usize;
            }
        }
        out[at * channels + channel] = table[key];
        channel += 1;
    }
}

/// Returns the storage of integers of a type on an NVIDIA GPU.
fn integers(tensor: &Tensor<1, Int>, dtype: DType) -> Option<CubeTensor> {
    match tensor.clone().into_dispatch().kind {
        DispatchTensorKind::Cube(BackendTensor::Int(tensor))
            if matches!(tensor.device, Device::Cuda(_)) && tensor.dtype == dtype =>
        {
            Some(tensor)
        }
        _ => None,
    }
}

/// See [`gather_images`](crate::gather_images). The result is channels-last in memory, as convolutions read images.
pub(crate) fn gather_images(
    pixels: &Tensor<1, Int>,
    table: &Tensor<1>,
    lines: &Tensor<1, Int>,
    [batch, channels, height, width]: [usize; 4],
) -> Option<Tensor<4>> {
    let (source, table, count) = (integers(pixels, DType::U8)?, storage_of(table)?, batch * height * width);
    assert_eq!(lines.dims(), [batch * (1 + height + width)], "each image has its lines");
    let lines = integers(lines, DType::I32)?;
    // Allocate a single axis: CubeCL would pad the rows of several axes.
    let shape = Shape::from([count * channels]);
    let out = empty_device_dtype(source.client.clone(), source.device.clone(), shape, DType::F32);
    if count > 0 {
        // SAFETY: every image has its lines, the lines name pixels of the data set, and the table has all channels' values.
        unsafe {
            gather::launch_unchecked(
                &source.client,
                CubeCount::Static(count.div_ceil(THREADS_PER_BLOCK) as u32, 1, 1),
                CubeDim::new_1d(THREADS_PER_BLOCK as u32),
                // Only the batch's pixels are read.
                untracked_arg(&source, source.meta.num_elements()),
                all(&table),
                all(&lines),
                all(&out),
                count,
                height,
                width,
                channels,
            );
        }
    }
    Some(tensor_of_storage(out).reshape([batch, height, width, channels]).permute([0, 3, 1, 2]))
}
