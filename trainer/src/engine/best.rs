//! The best evaluation of a run, by `checkpoint.best`, and early stopping.

use super::{Engine, RunOutput, checkpoint::LinkUpdate, eval_record};
use crate::console;
use crate::failure::Failure;
use crate::snapshot::{EvalRecord, Evaluated, RunProgress};
use crate::strategy::EvalCounts;
use crate::text::counted;

impl Engine<'_> {
    /// Records an evaluation as the run's last evaluation. Returns whether it is the best one so far.
    pub(super) fn record_evaluation(&mut self, epoch: usize, eval: EvalRecord) -> bool {
        let is_best = self.is_best(&eval);
        let evaluated = Evaluated { epoch, eval };
        self.progress.last = Some(evaluated);
        self.progress.last_step = Some(self.progress.step);
        if is_best {
            self.progress.best = Some(evaluated);
        }
        is_best
    }

    /// Records the evaluation of a complete run that is only evaluated again. If the weights were evaluated before, the best
    /// checkpoint stays the best one and nothing is saved: the evaluation may have other settings than those of the training,
    /// such as another `train.ema` or `train.tta`.
    pub(super) fn record_evaluation_again(&mut self, eval: EvalRecord) -> Result<(), Failure> {
        let RunProgress { epoch, batch, step, best, last, last_step, .. } = self.progress;
        let epoch = epoch - usize::from(batch == 0);
        // Without a best one, earlier evaluations do not count any more, for example because they used other images.
        if best.is_none() || last_step.is_some_and(|last| last != step) {
            let is_best = self.record_evaluation(epoch, eval);
            return self.save_evaluated(&self.checkpoint_name(), is_best);
        }
        let evaluated = Evaluated { epoch: last.map_or(epoch, |last| last.epoch), eval };
        self.progress.last = Some(evaluated);
        if best.is_some_and(|best| best.is_same(&evaluated)) {
            // The accuracy with test-time augmentation may be new.
            self.progress.best = Some(evaluated);
        }
        Ok(())
    }

    /// Saves a checkpoint of evaluated weights. If they are the best ones and the run does not keep its best checkpoint
    /// (`checkpoint.keep_best = false`), removes the link `best`, which points to older weights.
    pub(super) fn save_evaluated(&mut self, name: &str, is_best: bool) -> Result<(), Failure> {
        let keep_best = is_best && self.plan.checkpoint.keep_best;
        if let Some(RunOutput { checkpoints, .. }) = self.output.as_ref().filter(|_| is_best && !keep_best) {
            checkpoints.remove_best_link()?;
        }
        self.save(name, if keep_best { LinkUpdate::LastAndBest } else { LinkUpdate::Last })
    }

    /// Returns whether an evaluation is better than the best one so far.
    fn is_best(&self, eval: &EvalRecord) -> bool {
        self.progress.best.is_none_or(|best| eval.is_better(&best.eval, self.plan.best_by()))
    }

    /// Returns the best epoch if the run must stop early: this evaluation is not better, and the best one is at least
    /// `train.patience` epochs old.
    pub(super) fn early_stop(&self, counts: &EvalCounts) -> Option<usize> {
        let best = self.best_epoch_out_of_patience(self.progress.epoch)?;
        (!self.is_best(&eval_record(counts))).then_some(best)
    }

    /// Returns the last epoch and the best epoch if the resumed run had already stopped early: the current `train.patience` ends
    /// the run at its last evaluation, and the run took no step after this evaluation.
    pub(super) fn had_stopped_early(&self) -> Option<[usize; 2]> {
        let last = self.progress.last?.epoch;
        let at_its_end = self.progress.epoch == last + 1 && self.progress.batch == 0;
        self.best_epoch_out_of_patience(last).filter(|_| at_its_end).map(|best| [last, best])
    }

    /// Prints that a resumed run has nothing left to train, and which setting makes the run longer.
    pub(super) fn note_complete_run(&self, early_stop: Option<[usize; 2]>) {
        if self.output.is_none() {
            return;
        }
        let done = counted(self.progress.step, "step");
        let more = match early_stop {
            Some(_) => "train.patience has ended it; --set train.patience=0",
            None if self.ended_by_max_steps() => "--set train.max_steps=N with a larger N",
            None => "--epochs N with a larger N",
        };
        console::eprint(format_args!(
            "note: the run is complete after {done}: it is only evaluated again; {more} trains it further"
        ));
    }

    /// Returns whether `train.max_steps` has ended the run, not the number of epochs.
    fn ended_by_max_steps(&self) -> bool {
        let limit = self.plan.train.max_steps as u64;
        limit > 0 && self.progress.step >= limit
    }

    /// Returns the best epoch if it is at least `train.patience` epochs before `epoch`.
    fn best_epoch_out_of_patience(&self, epoch: usize) -> Option<usize> {
        let (best, patience) = (self.progress.best?.epoch, self.plan.train.patience);
        (patience > 0 && epoch >= best + patience).then_some(best)
    }
}
