//! The evaluations of a run.

use data::loader::Loader;

use super::{Engine, WorkKind};
use crate::console;
use crate::failure::Failure;
use crate::snapshot::EvalRecord;
use crate::strategy::{EvalCounts, Evaluation, Scores, divergence_failure};

impl Engine<'_> {
    /// Evaluates all images of [`Loaders::eval`].
    pub(super) fn evaluate(&mut self) -> Result<Evaluation, Failure> {
        let _reports = self.report_kernel_compiles(WorkKind::Evaluation);
        let mut reporter = self.output.as_mut().map(|output| &mut *output.reporter);
        if let Some(reporter) = &mut reporter {
            reporter.evaluating(self.loaders.eval.batches_per_epoch());
        }
        let replaced = &mut self.replaced;
        let mut batches = self.loaders.eval.epoch(self.progress.epoch, 0).inspect(|batch| {
            replaced.add(batch);
            if let Some(reporter) = &mut reporter {
                reporter.evaluated();
            }
        });
        let evaluation = self.strategy.evaluate(&mut batches, &self.stop)?;
        if let Evaluation::Done(counts) = &evaluation
            && !counts.loss().is_finite()
        {
            let epoch = self.progress.epoch;
            return Err(divergence_failure(format!("epoch {epoch}: the loss of the evaluation is {}", counts.loss())));
        }
        Ok(evaluation)
    }

    /// Evaluates after training steps. If that fails, saves a checkpoint first: the steps are not lost, and a resumed run evaluates
    /// again. All ranks call this method together.
    pub(super) fn evaluate_or_save(&mut self) -> Result<Evaluation, Failure> {
        let evaluated = self.evaluate();
        if evaluated.as_ref().is_err_and(|failure| !failure.is_permanent) {
            self.save_or_warn();
            // The other ranks wait for rank 0's checkpoint: the launcher ends the job a few seconds after the first rank has ended.
            // If the failure is that a rank is gone, this call fails at once.
            let _ = self.strategy.all_gather(&[]);
        }
        evaluated
    }

    /// Evaluates the images of `loader` with the final weights ([`Self::load_final_weights`]), and also returns the epoch of these
    /// weights.
    pub(super) fn evaluate_test_split(&mut self, loader: Loader) -> Result<(usize, Evaluation), Failure> {
        let epoch = self.load_final_weights().map_err(hint_at_resume)?;
        self.loaders.eval = loader;
        let evaluation = self.evaluate().map_err(hint_at_resume)?;
        Ok((epoch, evaluation))
    }

    /// Loads the best checkpoint on all ranks, if the run keeps one, and returns the epoch of the weights.
    fn load_final_weights(&mut self) -> Result<usize, Failure> {
        let best = match &self.output {
            Some(output) if self.plan.checkpoint.keep_best => output.checkpoints.best()?,
            _ => None,
        };
        self.warn_of_lost_best(best.is_none());
        // Only rank 0 reads checkpoints, so the other ranks must learn from rank 0 whether there is a best checkpoint.
        let found = self.strategy.all_gather(&[u8::from(best.is_some())])?;
        if found[0] == [1] {
            let averages = self.plan.train.ema > 0.0;
            let best = best.map(|(snapshot, progress)| (snapshot.for_evaluation(averages), progress));
            let saved = self.strategy.load_checkpoint(best)?;
            return Ok(saved.last.map_or(saved.epoch, |last| last.epoch));
        }
        Ok(self.progress.last.map_or(self.progress.epoch, |last| last.epoch))
    }

    /// Warns if the checkpoint of the best epoch `is_lost`, so that the test split is evaluated with the weights of another epoch.
    fn warn_of_lost_best(&self, is_lost: bool) {
        let (Some(best), Some(last), Some(_)) = (self.progress.best, self.progress.last, &self.output) else { return };
        if is_lost && self.plan.checkpoint.keep_best && !best.is_same(&last) {
            console::eprint_above_bar(format_args!(
                "warning: checkpoints/best: there is no checkpoint of the best epoch, {}: the test images are evaluated with \
                 the last weights, of epoch {}",
                best.epoch, last.epoch
            ));
        }
    }
}

/// Adds to the hint of a failure after training that a resumed run only evaluates. If the best checkpoint is damaged, the resumed
/// run chooses another one.
fn hint_at_resume(mut failure: Failure) -> Failure {
    let again = "the training is complete: --resume evaluates the test images again, and writes the summary";
    failure.hint = Some(failure.hint.map_or_else(|| again.to_owned(), |hint| format!("{hint}; {again}")));
    failure
}

/// Converts counts to the record that is reported.
pub fn eval_record(counts: &EvalCounts) -> EvalRecord {
    let multi_label = counts.scores.is_some();
    EvalRecord {
        loss: counts.loss(),
        top1: counts.top1_percent(),
        top5: if multi_label { f64::NAN } else { counts.top5_percent() },
        correct: counts.top1,
        total: counts.samples,
        balanced_accuracy: (!multi_label).then(|| counts.balanced_percent()),
        tta_top1: counts.tta_top1_percent(),
        mean_average_precision: counts.scores.as_ref().map(Scores::mean_percent),
    }
}
