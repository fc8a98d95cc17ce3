//! Input of a convolution: images, or the output of a batch norm that the convolution computes while it reads.

#[cfg(feature = "cuda")]
use burn::backend::Dispatch;
use burn::tensor::Tensor;

#[cfg(feature = "cuda")]
use crate::deferred::{ApplyOptions, ConvNormOptions, DeferredNorm, DeferredOps};
use crate::extension::{Activation, ConvOptions, RunningStats};
use crate::functional::{activate, conv2d_unrecorded, start_affine};
use crate::shape::ConvShape;
use crate::trace::Operation;

/// Images `[B, C, H, W]` that one operation reads. They are in memory, or they are the output of a batch norm and an activation that
/// is computed later (deferred). On a GPU, the next convolution then applies the batch norm while it loads its input. Global pooling
/// computes the output and its mean in one pass, also with a residual.
///
/// The type has no `Clone`: the output would be computed for each reader. If several operations read the images, compute them once
/// with [`Self::into_images`].
#[derive(Debug)]
pub struct Features(Inner);

#[derive(Debug)]
enum Inner {
    Images(Tensor<4>),
    /// The batch norm's input. In the backward pass, the gradient of this tensor is that of the normalised values.
    #[cfg(feature = "cuda")]
    Deferred(Tensor<4>, Box<DeferredNorm>),
    /// The sum of a batch norm's output and a residual: the batch norm's input, and the residual or the input of its batch norm.
    #[cfg(feature = "cuda")]
    Sum(Box<([Tensor<4>; 2], ApplyOptions)>),
}

impl From<Tensor<4>> for Features {
    fn from(images: Tensor<4>) -> Self {
        Self(Inner::Images(images))
    }
}

impl Features {
    /// Returns a tensor of the same shape, element type and device, which precedes the images in the graph.
    pub fn source(&self) -> &Tensor<4> {
        match &self.0 {
            Inner::Images(images) => images,
            #[cfg(feature = "cuda")]
            Inner::Deferred(input, _) => input,
            #[cfg(feature = "cuda")]
            Inner::Sum(sum) => &sum.0[0],
        }
    }

    /// Applies `change` to images that are in memory.
    #[must_use]
    pub fn map_images(self, change: impl FnOnce(Tensor<4>) -> Tensor<4>) -> Self {
        match self.0 {
            Inner::Images(images) => change(images).into(),
            #[cfg(feature = "cuda")]
            deferred @ (Inner::Deferred(..) | Inner::Sum(..)) => Self(deferred),
        }
    }

    /// Returns the images. Computes a batch norm's output, in one pass.
    pub fn into_images(self) -> Tensor<4> {
        match self.0 {
            Inner::Images(images) => images,
            #[cfg(feature = "cuda")]
            deferred => deferred.compute(false),
        }
    }

    /// Computes the mean over all pixels, `[B, C]` in f32, if the images are deferred. Otherwise returns the images as `Err`.
    #[expect(clippy::result_large_err, reason = "not an error: the images go back to the caller")]
    pub(crate) fn into_means(self) -> Result<Tensor<2>, Tensor<4>> {
        match self.0 {
            Inner::Images(images) => Err(images),
            #[cfg(feature = "cuda")]
            deferred => Ok(deferred.compute(true)),
        }
    }

    /// Adds a residual and applies an activation. A batch norm without activation, the sum and ReLU run in one pass, also if the
    /// residual is a deferred batch norm. The result is deferred too.
    #[must_use]
    pub fn add(self, residual: Self, activation: Activation) -> Self {
        match self.0 {
            #[cfg(feature = "cuda")]
            Inner::Deferred(input, mut norm) if norm.activation == Activation::Identity => {
                // ReLU's derivative follows from its output. The input of another activation would have to be kept.
                let fuses = activation == Activation::Relu;
                norm.activation = if fuses { activation } else { Activation::Identity };
                let (residual, residual_norm) = match residual.0 {
                    Inner::Deferred(images, norm)
                        if norm.activation == Activation::Identity && images.dtype() == input.dtype() =>
                    {
                        (images, Some(*norm))
                    }
                    other => (Self(other).into_images(), None),
                };
                let residual = crate::dispatch::cast_like(residual, &input);
                let options = ApplyOptions { norm: *norm, residual: residual_norm, pooled: false };
                let sum = Self(Inner::Sum(Box::new(([input, residual], options))));
                if fuses || activation == Activation::Identity {
                    return sum;
                }
                activate(sum.into_images(), activation).into()
            }
            other => activate(crate::add(Self(other).into_images(), residual.into_images()), activation).into(),
        }
    }
}

#[cfg(feature = "cuda")]
impl Inner {
    /// Computes images that are not in memory or, if `pooled`, their mean over all pixels, in one pass.
    fn compute<const D: usize>(self, pooled: bool) -> Tensor<D> {
        Tensor::from_dispatch(match self {
            Self::Images(_) => unreachable!("the images are in memory"),
            Self::Deferred(input, norm) => {
                let options = ApplyOptions { norm: *norm, residual: None, pooled };
                Dispatch::apply_norm(input.into_dispatch(), options)
            }
            Self::Sum(sum) => {
                let ([input, residual], options) = *sum;
                let options = ApplyOptions { pooled, ..options };
                Dispatch::apply_norm_add(input.into_dispatch(), residual.into_dispatch(), options)
            }
        })
    }
}

/// Two-dimensional cross-correlation, `torch.nn.functional.conv2d`, followed by ReLU if `relu` is true.
///
/// The output has the input's element type. The kernels take f32 weights for all inputs, and round them to bf16 for a bf16 input.
///
/// # Shapes
///
/// - input `[B, in, H, W]`, weight `[out, in / groups, kh, kw]`, bias `[out]`
/// - output `[B, out, (H + 2·padding − dilation·(kh − 1) − 1) / stride + 1, …]`
///
/// # Panics
///
/// When the shapes do not match.
pub fn conv2d(
    input: impl Into<Features>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    options: ConvOptions,
    relu: bool,
) -> Tensor<4> {
    let input = input.into();
    #[cfg(feature = "cuda")]
    if let Inner::Deferred(raw, norm) = &input.0
        && bias.is_none()
        && !relu
        && crate::gpu::reads_deferred(raw, weight.dims(), &options)
    {
        crate::dispatch::check_gpu_convolution(raw.dims(), weight.dims(), &options);
        let (raw, norm) = (raw.clone().into_dispatch(), DeferredNorm::clone(norm));
        return Tensor::from_dispatch(Dispatch::conv_deferred(raw, weight.into_dispatch(), options, norm));
    }
    let input = input.into_images();
    let call = start_affine(Operation::Conv2d(options), [&input, &weight], bias.as_ref(), relu);
    call.end(conv2d_unrecorded(input, weight, bias, options, relu))
}

/// Results of [`conv_batch_norm`].
#[derive(Debug)]
pub struct ConvNormOutput {
    /// `[B, out, …]`.
    pub output: Features,
    /// The updated running mean, `[out]`.
    pub mean: Tensor<1>,
    /// The updated running variance, `[out]`.
    pub variance: Tensor<1>,
}

/// A batch norm in training mode after a convolution without bias.
#[derive(Debug, Clone)]
pub struct FollowingNorm {
    /// Weight and bias, `[out]`.
    pub affine: [Tensor<1>; 2],
    /// Added to the variance before the square root.
    pub epsilon: f64,
    /// Running statistics to update.
    pub running: RunningStats,
    /// Applied last.
    pub activation: Activation,
}

/// Returns true if [`conv_batch_norm`] supports the convolution: on a GPU of compute capability 8.0 or higher, a convolution on
/// tensor cores or a depthwise one of at most 25 taps, whose output has rows of channels that are multiples of 16 bytes, before an
/// activation whose derivative the kernels know.
pub fn fuses_batch_norm(input: &Features, weight: [usize; 4], options: &ConvOptions, activation: Activation) -> bool {
    #[cfg(feature = "cuda")]
    return crate::gpu::defers_norm(input.source(), weight, options, activation);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (input, weight, options, activation);
        false
    }
}

/// Applies [`conv2d`] and then [`batch_norm_train`](crate::batch_norm_train), as one operation whose output is not in memory. The
/// convolution computes the batch norm's statistics; the operation that reads the output normalises. In the backward pass of a 1x1
/// or depthwise convolution, the kernel of the gradients computes the gradient of the batch norm's input while it reads the
/// gradient of the output. Other convolutions read this gradient several times, so a separate pass computes it.
///
/// # Panics
///
/// Where [`fuses_batch_norm`] is false, and for one image whose output is one pixel.
pub fn conv_batch_norm(
    input: Features,
    weight: Tensor<4>,
    options: ConvOptions,
    norm: FollowingNorm,
) -> ConvNormOutput {
    assert!(fuses_batch_norm(&input, weight.dims(), &options, norm.activation), "`fuses_batch_norm` is false");
    let dims = input.source().dims();
    crate::dispatch::check_gpu_convolution(dims, weight.dims(), &options);
    let shape = ConvShape::new(dims, weight.dims(), &options);
    assert!(
        shape.output_len() > shape.channels[1],
        "batch norm in training mode needs more than one value per channel"
    );
    #[cfg(feature = "cuda")]
    {
        let FollowingNorm { affine: [weight_of_norm, bias], epsilon, running, activation } = norm;
        let affine = [&weight_of_norm, &bias].map(|vector| vector.clone().without_autodiff());
        let (input, input_norm) = match input.0 {
            Inner::Deferred(raw, norm) if crate::gpu::reads_deferred(&raw, weight.dims(), &options) => {
                (raw, Some(*norm))
            }
            other => (Features(other).into_images(), None),
        };
        let options = ConvNormOptions { conv: options, input: input_norm, epsilon, running };
        let (raw, statistics, mean, variance) = Dispatch::conv_norm(
            input.into_dispatch(),
            weight.into_dispatch(),
            weight_of_norm.into_dispatch(),
            bias.into_dispatch(),
            options,
        );
        let statistics = Tensor::<1>::from_dispatch(statistics).without_autodiff();
        let norm = DeferredNorm { statistics, affine, activation };
        ConvNormOutput {
            output: Features(Inner::Deferred(Tensor::from_dispatch(raw), Box::new(norm))),
            mean: Tensor::from_dispatch(mean),
            variance: Tensor::from_dispatch(variance),
        }
    }
    #[cfg(not(feature = "cuda"))]
    unreachable!("only GPUs fuse")
}
