//! Shapes of a two-dimensional convolution.

/// Everything about a convolution that is known before its numbers are.
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
    /// # Panics
    ///
    /// Where the kernel does not fit into the padded image, or channels do not divide by groups: errors of whoever
    /// built the layer.
    pub(crate) fn new(input: [usize; 4], weight: [usize; 4], options: &super::super::ConvOptions) -> Self {
        let [batch, in_channels, height, width] = input;
        let [out_channels, group_channels, kh, kw] = weight;
        let &super::super::ConvOptions { stride, padding, dilation, groups } = options;
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

    /// Weights of one filter for one channel.
    pub(crate) fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Input and output channels of one group.
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

    /// Offsets from an output pixel times the stride to the input pixels below the kernel, row by row.
    pub(crate) fn offsets(&self) -> Vec<[isize; 2]> {
        let along = |i: usize, k: usize| (k * self.dilation[i]) as isize - self.padding[i] as isize;
        (0..self.taps()).map(|tap| [along(0, tap / self.kernel[1]), along(1, tap % self.kernel[1])]).collect()
    }
}

/// A pooling over windows.
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
    /// # Panics
    ///
    /// Where PyTorch refuses too: windows larger than the padded image, and padding of more than half a window, which
    /// leaves windows without a pixel.
    pub(crate) fn new([batch, channels, height, width]: [usize; 4], options: &super::super::PoolOptions) -> Self {
        let &super::super::PoolOptions { kernel, stride, padding } = options;
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
