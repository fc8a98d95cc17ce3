//! Batch normalisation, `torch.nn.BatchNorm2d` (<https://arxiv.org/abs/1502.03167>).

use burn::module::Module;
use burn::tensor::Tensor;

use super::{Buffer, Conv2d, Weight};
use crate::{Context, Init};
use ops::{
    Activation, ConvNormOutput, Epilogue, Features, FollowingNorm, RunningStats, batch_norm_eval, batch_norm_train,
};

/// Added to the variance before the square root; PyTorch's default `eps`.
const EPSILON: f64 = 1e-5;
/// Weight of the current batch in the running statistics; PyTorch's default `momentum`.
const MOMENTUM: f64 = 0.1;

/// Normalises each channel of `[B, C, H, W]`, then scales and shifts it.
///
/// The [`Context`] alone selects batch statistics or running statistics. As in PyTorch, the batch is normalised with its
/// *biased* variance, and the running variance averages the *unbiased* variance (burn's layer averages the biased one).
///
/// A layer whose scale and shift are both frozen is in evaluation mode in training too: it normalises with its running statistics
/// and does not change them. Otherwise the statistics would adapt to the new images, and the scale and the shift could not
/// follow. timm's `freeze` and torchvision's `FrozenBatchNorm2d` do the same.
#[derive(Module, Debug)]
pub struct BatchNorm2d {
    /// Scale, `[C]`.
    pub weight: Weight<1>,
    /// Shift, `[C]`.
    pub bias: Weight<1>,
    /// Exponential moving average of the batches' means, `[C]`.
    pub running_mean: Buffer,
    /// Exponential moving average of the batches' unbiased variances, `[C]`.
    pub running_var: Buffer,
}

impl BatchNorm2d {
    /// Builds a layer with scale 1, shift 0, running mean 0 and running variance 1.
    pub fn new(channels: usize, init: &Init) -> Self {
        let (weight, bias) = (init.constant("weight", channels, 1.0), init.constant("bias", channels, 0.0));
        let [running_mean, running_var] = running_statistics(channels, weight.is_frozen() && bias.is_frozen(), init);
        Self { weight, bias, running_mean, running_var }
    }

    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input and output `[B, C, H, W]`
    ///
    /// # Panics
    ///
    /// In training mode when a channel has a single value and therefore no variance (PyTorch raises `ValueError`). A network
    /// from [`build`](crate::build) never panics here with images of its own size, at
    /// least [`Network::smallest_batch`](crate::Network::smallest_batch) of them.
    pub fn forward(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        self.run(input, Epilogue::default(), cx)
    }

    /// Applies [`Self::forward`] and ReLU in one pass over the output.
    pub fn forward_relu(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        self.run(input, Epilogue { residual: None, activation: Activation::Relu }, cx)
    }

    /// Applies [`Self::forward`] and adds `residual`, in one pass over the output.
    pub fn forward_add(&self, input: Tensor<4>, residual: Tensor<4>, cx: &Context) -> Tensor<4> {
        self.run(input, Epilogue { residual: Some(residual), activation: Activation::Identity }, cx)
    }

    /// Applies [`Self::forward`], adds `residual` and applies ReLU: the end of a residual block in one pass over the output.
    pub fn forward_add_relu(&self, input: Tensor<4>, residual: Tensor<4>, cx: &Context) -> Tensor<4> {
        self.run(input, Epilogue { residual: Some(residual), activation: Activation::Relu }, cx)
    }

    /// Applies `conv`, this layer and `activation`. On a GPU in training, the result may be the output of `conv` alone: the next
    /// convolution then applies this layer and `activation` to the values that it reads, see [`Features`].
    pub fn after(&self, conv: &Conv2d, input: impl Into<Features>, activation: Activation, cx: &Context) -> Features {
        match self.fused(conv, input.into(), activation, cx) {
            Ok(output) => output,
            Err(input) => self.run(conv.forward(input, cx), Epilogue { residual: None, activation }, cx).into(),
        }
    }

    /// Applies `conv` and this layer, adds a residual and applies `activation`: the end of a residual block. `residual` is called
    /// after the convolution.
    pub fn after_add(
        &self,
        conv: &Conv2d,
        input: impl Into<Features>,
        residual: impl FnOnce() -> Features,
        activation: Activation,
        cx: &Context,
    ) -> Features {
        match self.fused(conv, input.into(), Activation::Identity, cx) {
            Ok(output) => output.add(residual(), activation),
            Err(input) => {
                let output = conv.forward(input, cx);
                self.run(output, Epilogue { residual: Some(residual().into_images()), activation }, cx).into()
            }
        }
    }

    /// Applies `conv`, this layer and `activation` as one operation, if the operation supports them; otherwise returns the input.
    #[expect(clippy::result_large_err, reason = "not an error: the input goes back to the caller")]
    fn fused(
        &self,
        conv: &Conv2d,
        input: Features,
        activation: Activation,
        cx: &Context,
    ) -> Result<Features, Features> {
        // With statistics of all ranks, the convolution's kernel cannot compute the factors that normalise.
        if !cx.training() || self.running_mean.is_frozen() || cx.statistics().is_some() {
            return Err(input);
        }
        let norm = |input: &Tensor<4>| FollowingNorm {
            affine: [cx.parameter(&self.weight, input), cx.parameter(&self.bias, input)],
            epsilon: EPSILON,
            running: RunningStats {
                mean: self.running_mean.take(),
                variance: self.running_var.take(),
                momentum: MOMENTUM,
            },
            activation,
        };
        let ConvNormOutput { output, mean, variance } = conv.forward_norm(input, activation, norm, cx)?;
        self.running_mean.set(mean);
        self.running_var.set(variance);
        Ok(output)
    }

    fn run(&self, input: Tensor<4>, epilogue: Epilogue, cx: &Context) -> Tensor<4> {
        let affine = [cx.parameter(&self.weight, &input), cx.parameter(&self.bias, &input)];
        let statistics =
            NormBase { running: [&self.running_mean, &self.running_var], epsilon: EPSILON, momentum: MOMENTUM };
        statistics.normalise(input, affine, epilogue, cx)
    }
}

/// A [`BatchNorm2d`] whose scale is not trained: `torch.nn.BatchNorm2d` with `weight.requires_grad = False`. The convolution
/// in front of it learns the scale of its filters, and the shift may then have a learning rate of its own.
#[derive(Module, Debug)]
pub struct FixedScaleNorm2d {
    /// Scale, `[C]`, frozen.
    pub weight: Buffer,
    /// Shift, `[C]`.
    pub bias: Weight<1>,
    /// Exponential moving average of the batches' means, `[C]`.
    pub running_mean: Buffer,
    /// Exponential moving average of the batches' unbiased variances, `[C]`.
    pub running_var: Buffer,
    epsilon: f64,
    momentum: f64,
}

impl FixedScaleNorm2d {
    /// Builds a layer with scale 1, shift 0, running mean 0 and running variance 1. `epsilon` and `momentum` are PyTorch's `eps`
    /// and `momentum`.
    pub fn new(channels: usize, epsilon: f64, momentum: f64, init: &Init) -> Self {
        let bias = init.constant("bias", channels, 0.0);
        let [running_mean, running_var] = running_statistics(channels, bias.is_frozen(), init);
        let weight = Buffer::frozen(Tensor::ones([channels], init.device()));
        Self { weight, bias, running_mean, running_var, epsilon, momentum }
    }

    /// Applies the layer and GELU in one pass over the output. `[B, C, H, W]` → `[B, C, H, W]`.
    ///
    /// # Panics
    ///
    /// As [`BatchNorm2d::forward`].
    pub fn forward_gelu(&self, input: Tensor<4>, cx: &Context) -> Tensor<4> {
        let affine = [self.weight.value(), cx.parameter(&self.bias, &input)];
        let running = [&self.running_mean, &self.running_var];
        let statistics = NormBase { running, epsilon: self.epsilon, momentum: self.momentum };
        statistics.normalise(input, affine, Epilogue { residual: None, activation: Activation::Gelu }, cx)
    }
}

/// Makes the running mean and variance, `[C]`, of a new layer.
fn running_statistics(channels: usize, frozen: bool, init: &Init) -> [Buffer; 2] {
    let values = [Tensor::zeros([channels], init.device()), Tensor::ones([channels], init.device())];
    values.map(if frozen { Buffer::frozen } else { Buffer::new })
}

/// The part of a batch norm that does not depend on how its scale and shift are trained.
struct NormBase<'a> {
    /// Running mean and variance.
    running: [&'a Buffer; 2],
    epsilon: f64,
    momentum: f64,
}

impl NormBase<'_> {
    /// Normalises `input` `[B, C, H, W]`, applies scale and shift (`affine`) and the epilogue.
    fn normalise(&self, input: Tensor<4>, affine: [Tensor<1>; 2], epilogue: Epilogue, cx: &Context) -> Tensor<4> {
        let [running_mean, running_var] = self.running;
        if !cx.training() || running_mean.is_frozen() {
            let running = [running_mean.value(), running_var.value()];
            let output = batch_norm_eval(input, affine, running, self.epsilon, epilogue);
            return cx.count_activations(cx.autocast(output));
        }
        let [batch, _, height, width] = input.dims();
        let process_group = cx.statistics().cloned();
        let alone = process_group.is_none();
        assert!(
            !alone || batch * height * width > 1,
            "batch norm in training mode needs more than one value per channel"
        );

        let [weight, bias] = affine;
        let running = RunningStats { mean: running_mean.take(), variance: running_var.take(), momentum: self.momentum };
        let batch = batch_norm_train(input, weight, bias, self.epsilon, epilogue, process_group, Some(running));
        running_mean.set(batch.mean);
        running_var.set(batch.variance);
        cx.autocast(batch.output)
    }
}
