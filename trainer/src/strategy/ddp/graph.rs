//! The step of one rank as a CUDA graph, with the sums of gradients in it.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use models::Context;
use ops::StatisticsReduce;

use super::{
    DeviceReduction,
    reducer::{ReducedGradients, Reducer},
    statistics::StatisticsGroup,
    step::{self, StepCounts},
    verify::UnusedParameterWarning,
};
use crate::{
    config::{BatchNormPolicy, RunPlan},
    failure::Failure,
    strategy::{
        Replica, StepGraph, StepOutcome,
        graph_capture::{ForwardBackwardResults, ForwardResults, GraphStepParts},
    },
};
use comm::{Communicator, ReduceOp};

/// Prepares to capture steps, if the sums of gradients can be part of a graph.
pub(super) fn step_graph(plan: &RunPlan, device: &Device, reduction: Option<&DeviceReduction>) -> StepGraph {
    let policy = plan.parallel.batch_norm;
    let reason = match reduction {
        None => Some("gradients are summed on the host".to_owned()),
        Some(reduction) if !reduction.collectives.lock().runs_on_side_stream() => Some(
            "gradients are summed by NCCL, or the sums wait for the host; only the custom all-reduce kernels (one machine, one GPU \
             per rank) can be part of a graph"
                .to_owned(),
        ),
        Some(_) if matches!(policy, BatchNormPolicy::Broadcast | BatchNormPolicy::Reduce) => Some(format!(
            "parallel.batch_norm = \"{policy}\" puts the running statistics in other memory before each evaluation"
        )),
        Some(_) => None,
    };
    StepGraph::new(plan, device).disable_if(reason.as_deref())
}

/// The parts of [`Ddp`](super::Ddp) with which a rank captures and counts its steps.
pub(super) struct DdpGraphStep<'a> {
    pub(super) reducer: &'a Reducer,
    pub(super) statistics: Option<&'a Arc<StatisticsGroup>>,
    pub(super) unused: &'a mut UnusedParameterWarning,
    pub(super) comm: &'a Communicator,
    /// Number of the step.
    pub(super) step: u64,
}

impl GraphStepParts for DdpGraphStep<'_> {
    fn context(&mut self, last: bool) -> Context {
        self.reducer.prepare_for_backward(self.step, last);
        let statistics = self.statistics.cloned().map(|shared| shared as Arc<dyn StatisticsReduce>);
        Context::train_with(statistics, Some(self.reducer.sink()))
    }

    fn backward(&mut self, _replica: &Replica, loss: Tensor<1>, sum: Option<Tensor<1>>) -> Result<(), Failure> {
        if let Some(sum) = sum {
            // If the loss of one rank is not finite, the optimizers of all ranks leave the weights as they are.
            self.reducer.sum_loss(sum);
        }
        drop(ops::backward(loss));
        self.statistics.map_or(Ok(()), |statistics| statistics.check())?;
        Ok(())
    }

    fn finalize_backward(
        &mut self,
        replica: &Replica,
        forwards: ForwardResults,
    ) -> Result<ForwardBackwardResults, Failure> {
        let ForwardResults { logits, host_data, .. } = forwards;
        let ReducedGradients { mut gradients, loss, used, .. } =
            self.reducer.finalize_backward(&replica.inner_device())?;
        if self.any_rank(used.contains(&false))? {
            let unused =
                step::globally_unused_parameters(&used, self.unused, &replica.parameters, self.step, self.comm)?;
            gradients.set_none(&unused);
        }
        let loss = loss.expect("the last bucket has summed the loss");
        Ok(ForwardBackwardResults { logits, loss, gradients, host_data })
    }

    fn any_rank(&self, own: bool) -> Result<bool, Failure> {
        let mut all = [i64::from(own)];
        self.comm.all_reduce(&mut all, ReduceOp::Max)?;
        Ok(all[0] != 0)
    }

    fn min_over_ranks(&self, own: usize) -> Result<usize, Failure> {
        let mut all = [own as i64];
        self.comm.all_reduce(&mut all, ReduceOp::Min)?;
        Ok(all[0] as usize)
    }

    fn check(&self) -> Result<(), Failure> {
        self.reducer.check()
    }

    fn sum_outcomes(&mut self, outcomes: &mut [&mut StepOutcome]) -> Result<(), Failure> {
        let own: Vec<_> = outcomes.iter().map(|outcome| StepCounts::of_rank(outcome, 0)).collect();
        let bytes_moved = self.reducer.bytes_moved();
        for (outcome, sums) in outcomes.iter_mut().zip(step::sum_counts(&own, self.comm)?) {
            sums.write(outcome);
            outcome.bytes_moved = bytes_moved;
        }
        Ok(())
    }
}
