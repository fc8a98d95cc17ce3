//! Shapes of convolutions and poolings.

/// Geometry of a two-dimensional convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConvShape {
    pub(crate) batch: usize,
    /// Input and output channels, over all groups.
    pub(crate) channels: [usize; 2],
    /// Input `[height, width]`.
    pub(crate) input: [usize; 2],
    /// Output `[height, width]`.
    pub(crate) output: [usize; 2],
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) padding: [usize; 2],
    pub(crate) dilation: [usize; 2],
    pub(crate) groups: usize,
}

impl ConvShape {
    /// Makes the shape of a convolution of `input` `[B, C, H, W]` with `weight` `[out, in / groups, kh, kw]`.
    ///
    /// # Panics
    ///
    /// When the kernel exceeds the padded image, or the groups do not divide the channels.
    pub(crate) fn new(input: [usize; 4], weight: [usize; 4], options: &crate::extension::ConvOptions) -> Self {
        let [batch, in_channels, height, width] = input;
        let [out_channels, group_channels, kh, kw] = weight;
        let &crate::extension::ConvOptions { stride, padding, dilation, groups, .. } = options;
        assert!(
            in_channels == group_channels * groups && out_channels.is_multiple_of(groups),
            "convolution of {input:?} with weights {weight:?} in {groups} groups: channels do not fit"
        );
        let size = |image: usize, kernel: usize, i: usize| {
            let (room, reach) = (image + 2 * padding[i], dilation[i] * (kernel - 1) + 1);
            assert!(
                room >= reach,
                "convolution of {input:?} with weights {weight:?}: the kernel is larger than the image"
            );
            (room - reach) / stride[i] + 1
        };
        Self {
            batch,
            channels: [in_channels, out_channels],
            input: [height, width],
            output: [size(height, kh, 0), size(width, kw, 1)],
            kernel: [kh, kw],
            stride,
            padding,
            dilation,
            groups,
        }
    }

    /// Returns the number of taps, the weights of a filter for one channel.
    pub(crate) fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Returns the input and output channels of one group.
    pub(crate) fn group_channels(&self) -> [usize; 2] {
        self.channels.map(|c| c / self.groups)
    }

    pub(crate) fn input_len(&self) -> usize {
        self.batch * self.channels[0] * self.input[0] * self.input[1]
    }

    pub(crate) fn output_len(&self) -> usize {
        self.batch * self.channels[1] * self.output[0] * self.output[1]
    }

    pub(crate) fn weight_len(&self) -> usize {
        self.channels[1] * self.group_channels()[0] * self.taps()
    }

    /// Returns the offset of each tap, row by row: output pixel `o` reads the input at `o · stride + offset`.
    pub(crate) fn offsets(&self) -> Vec<[isize; 2]> {
        let along = |i: usize, k: usize| (k * self.dilation[i]) as isize - self.padding[i] as isize;
        (0..self.taps()).map(|tap| [along(0, tap / self.kernel[1]), along(1, tap % self.kernel[1])]).collect()
    }
}

/// Geometry of a pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolShape {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    /// Input `[height, width]`.
    pub(crate) input: [usize; 2],
    /// Output `[height, width]`.
    pub(crate) output: [usize; 2],
    pub(crate) kernel: [usize; 2],
    pub(crate) stride: [usize; 2],
    pub(crate) padding: [usize; 2],
}

impl PoolShape {
    /// Makes the shape of a pooling of `[B, C, H, W]`.
    ///
    /// # Panics
    ///
    /// When a window exceeds the padded image, or the padding exceeds half a window, so that a window could have no pixel.
    /// PyTorch raises an error in these cases too. Also when a window has more than 256 pixels.
    pub(crate) fn new([batch, channels, height, width]: [usize; 4], options: &crate::extension::PoolOptions) -> Self {
        let &crate::extension::PoolOptions { kernel, stride, padding } = options;
        assert!(
            kernel[0] * kernel[1] <= 256 && (0..2).all(|i| 2 * padding[i] <= kernel[i]),
            "max pooling takes windows of at most 256 pixels, padded by at most half a window: got {options:?}"
        );
        let input = [height, width];
        let output = [0, 1].map(|i| {
            let room = (input[i] + 2 * padding[i]).checked_sub(kernel[i]);
            room.map_or(0, |room| room / stride[i] + 1)
        });
        assert!(output[0] * output[1] > 0, "max pooling of {height}x{width} pixels with {options:?} leaves no pixel");
        Self { batch, channels, input, output, kernel, stride, padding }
    }
}
