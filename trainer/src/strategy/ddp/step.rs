//! The step of one rank among several: forward and backward of its share, reduce, then the optimizer.

use std::time::Instant;

use burn::tensor::Tensor;
use data::loader::Batch;

use super::Ddp;
use crate::{
    comm::{Communicator, ReduceOp},
    failure::Failure,
    optim::FlatGradients,
    strategy::{StepOutcome, diverged},
};

pub(super) fn train_step(
    ddp: &mut Ddp,
    batches: Vec<Batch>,
    lr: f64,
    stop: Option<i32>,
) -> Result<StepOutcome, Failure> {
    // the whole step's samples, over all ranks: the weight of each sample is the same wherever it is
    let samples = batches.iter().map(|batch| batch.global_len).sum();
    let mut outcome = StepOutcome { stop, ..StepOutcome::default() };

    let (step, says) = (ddp.steps, ddp.reporter.clone());
    says.doing(format_args!("step {step}: forward and backward"));
    let gradients = ddp.learner.replica.accumulate(batches, samples, &mut outcome);
    let start = Instant::now();
    says.doing(format_args!("step {step}: comparing losses"));
    agree(&mut outcome, &ddp.comm)?;
    if !outcome.loss_sum.is_finite() {
        return Err(diverged(outcome.loss_sum, lr));
    }
    let Some(gradients) = gradients else { return Ok(outcome) };
    let gradients = reduce(gradients, ddp)?;
    outcome.seconds.communication = start.elapsed().as_secs_f64();
    says.doing(format_args!("step {step}: optimizer"));
    ddp.steps += 1;
    ddp.learner.apply(gradients, lr, &mut outcome);
    Ok(outcome)
}

/// Sums the counts and the loss over ranks; the stop is that of any rank.
fn agree(outcome: &mut StepOutcome, comm: &Communicator) -> Result<(), Failure> {
    let mut sums = [outcome.loss_sum, outcome.correct as f64, outcome.samples as f64];
    comm.all_reduce(&mut sums, ReduceOp::Sum)?;
    let mut signal = [i64::from(outcome.stop.unwrap_or(0))];
    comm.all_reduce(&mut signal, ReduceOp::Max)?;
    (outcome.loss_sum, outcome.correct, outcome.samples) = (sums[0], sums[1] as u64, sums[2] as u64);
    outcome.stop = (signal[0] != 0).then_some(signal[0] as i32);
    Ok(())
}

/// Sums each bucket over all ranks. A parameter without a gradient on this rank adds nothing, and has one afterwards: the
/// other ranks may have used it.
fn reduce(gradients: FlatGradients, ddp: &Ddp) -> Result<FlatGradients, Failure> {
    let (device, count) = (ddp.learner.replica.inner_device(), ddp.buckets.len());
    let mut gradients = gradients.into_inner();
    for (index, bucket) in ddp.buckets.iter().enumerate() {
        ddp.reporter.doing(format_args!("step {}: reducing bucket {} of {count}", ddp.steps, index + 1));
        let mut packed = Vec::with_capacity(bucket.elements);
        for (gradient, &length) in gradients[bucket.parameters.clone()].iter_mut().zip(&bucket.lengths) {
            match gradient.take() {
                Some(gradient) => packed.extend(values(gradient)),
                None => packed.resize(packed.len() + length, 0.0),
            }
        }
        ddp.comm.all_reduce(&mut packed, ReduceOp::Sum)?;
        let mut rest = packed.as_slice();
        for (gradient, &length) in gradients[bucket.parameters.clone()].iter_mut().zip(&bucket.lengths) {
            let (own, others) = rest.split_at(length);
            *gradient = Some(Tensor::from_floats(own, &device));
            rest = others;
        }
    }
    Ok(FlatGradients::from_tensors(gradients))
}

fn values(gradient: Tensor<1>) -> Vec<f32> {
    gradient.try_into_vec_as::<f32>().expect("a device that computed the gradient can copy it back")
}
