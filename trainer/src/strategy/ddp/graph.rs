//! The step of one rank as a CUDA graph, with the sums of gradients in it.

use std::sync::Arc;

use burn::tensor::Device;
use data::loader::Batch;
use models::Context;
use ops::StatisticsReduce;

use super::{
    OnDevice,
    reducer::{ReducedGradients, Reducer},
    statistics::SharedStatistics,
    step,
    verify::UnusedParameters,
};
use crate::{
    config::{BatchNormPolicy, RunPlan},
    failure::Failure,
    strategy::{
        Learner, StepGraph, StepOutcome,
        graph_inputs::Inputs,
        graph_record::{GraphRanks, Passes, flat, plus},
    },
};
use comm::{Communicator, ReduceOp};

/// Prepares to record steps, if the sums of gradients can be part of a graph.
pub(super) fn step_graph(plan: &RunPlan, device: &Device, on_device: Option<&OnDevice>) -> StepGraph {
    let policy = plan.parallel.batch_norm;
    let reason = match on_device {
        None => Some("gradients are summed on the host".to_owned()),
        Some((_, group)) if !group.lock().forks() => Some(
            "the sums of gradients wait for the host or are NCCL's; the all-reduce kernels inside one machine, with one GPU per \
             rank, can be part of a graph"
                .to_owned(),
        ),
        Some(_) if matches!(policy, BatchNormPolicy::Broadcast | BatchNormPolicy::Reduce) => Some(format!(
            "parallel.batch_norm = \"{policy}\" puts the running statistics in other memory before each evaluation"
        )),
        Some(_) => None,
    };
    StepGraph::new(plan, device).unless(reason.as_deref())
}

/// The parts of [`Ddp`](super::Ddp) with which a rank records and counts its steps.
pub(super) struct Ranks<'a> {
    pub(super) reducer: &'a Reducer,
    pub(super) statistics: Option<&'a Arc<SharedStatistics>>,
    pub(super) unused: &'a mut UnusedParameters,
    pub(super) comm: &'a Communicator,
    /// Number of the step.
    pub(super) step: u64,
}

impl GraphRanks for Ranks<'_> {
    fn world(&self) -> usize {
        self.comm.world()
    }

    fn passes(
        &mut self,
        learner: &Learner,
        inputs: &Inputs,
        batches: &[Batch],
        weight: f64,
    ) -> Result<Passes, Failure> {
        let replica = &learner.replica;
        let (mut logits, mut loss, mut dropped) = (Vec::new(), None, false);
        for (index, (on_device, batch)) in inputs.batches.iter().zip(batches).enumerate() {
            let last = index + 1 == batches.len();
            self.reducer.prepare_for_backward(self.step, last);
            let statistics = self.statistics.cloned().map(|shared| shared as Arc<dyn StatisticsReduce>);
            let cx = Context::train_with(statistics, Some(self.reducer.sink()));
            let cx = replica.configured(cx).with_dropout(replica.dropout_keys(batch));
            let (of_batch, of_logits) = on_device.forward(replica, &cx, weight);
            dropped |= cx.has_dropped();
            logits.push(flat(of_logits));
            let sum = plus(loss, of_batch.clone().inner());
            if last {
                // If the loss of one rank is not finite, the optimizers of all ranks leave the weights as they are.
                self.reducer.sum_loss(sum.clone());
            }
            loss = Some(sum);
            drop(of_batch.backward());
            self.statistics.map_or(Ok(()), |statistics| statistics.check())?;
        }
        let ReducedGradients { mut gradients, loss, used, .. } =
            self.reducer.finalize_backward(&replica.inner_device())?;
        if self.any(used.contains(&false))? {
            let unused = step::unused_everywhere(&used, self.unused, &replica.parameters, self.step, self.comm)?;
            gradients.set_none(&unused);
        }
        let loss = loss.expect("the last bucket has summed the loss");
        Ok(Passes { logits, loss, gradients, dropped })
    }

    fn any(&self, own: bool) -> Result<bool, Failure> {
        let mut all = [i64::from(own)];
        self.comm.all_reduce(&mut all, ReduceOp::Max)?;
        Ok(all[0] != 0)
    }

    fn least(&self, own: usize) -> Result<usize, Failure> {
        let mut all = [own as i64];
        self.comm.all_reduce(&mut all, ReduceOp::Min)?;
        Ok(all[0] as usize)
    }

    fn check(&self) -> Result<(), Failure> {
        self.reducer.check()
    }

    fn sum(&mut self, outcomes: &mut [&mut StepOutcome]) -> Result<(), Failure> {
        let own: Vec<_> = outcomes.iter().map(|outcome| step::counts(outcome, 0)).collect();
        let bytes_moved = self.reducer.bytes_moved();
        for (outcome, sums) in outcomes.iter_mut().zip(step::sum_counts(&own, self.comm)?) {
            sums.write(outcome);
            outcome.bytes_moved = bytes_moved;
        }
        Ok(())
    }
}
