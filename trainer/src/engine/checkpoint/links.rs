//! Restores the links `last` and `best` of a resumed run. A process may have been killed after it saved a checkpoint and before it
//! set the links. A user may have copied the folder without the links, or may have deleted a checkpoint.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::store::CheckpointFolder;
use super::{StateFile, read};
use crate::config::BestBy;
use crate::files::FileError;
use crate::snapshot::{Evaluated, RunProgress};
use crate::text::{counted, thousands};

/// How a run chooses its best checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct BestPolicy {
    /// `checkpoint.keep_best`.
    pub keep: bool,
    /// `checkpoint.best`.
    pub by: BestBy,
    /// Images of an evaluation. Evaluations of other images are not comparable.
    pub eval_images: u64,
    /// Their checksum, see [`RunProgress::eval_crc`].
    pub eval_crc: u32,
    /// The checksum of the same images in checkpoints of older versions, if it differs.
    pub old_eval_crc: Option<u32>,
}

impl BestPolicy {
    /// Returns whether `eval_crc` is the checksum of evaluations on other images, or with another image size or normalisation.
    fn is_of_other_images(&self, eval_crc: Option<u32>) -> bool {
        eval_crc.is_some_and(|crc| crc != self.eval_crc && Some(crc) != self.old_eval_crc)
    }
}

/// A checkpoint that was saved directly after an evaluation.
struct EvaluatedCheckpoint {
    path: PathBuf,
    step: u64,
    evaluated: Evaluated,
    eval_crc: Option<u32>,
}

impl CheckpointFolder {
    /// Restores the links of a run that continues from the checkpoint `loaded`:
    ///
    /// - `last` points to `loaded`.
    /// - `best` points to the checkpoint of the best evaluation in `progress`. If that checkpoint is missing or damaged, or was chosen
    ///   by another metric or on other images, the best of the other checkpoints replaces it, in `progress` too.
    /// - Without `policy.keep`, a `best` that points to another checkpoint is removed, and no `best` is set.
    ///
    /// Returns a warning if another checkpoint is the best one now.
    ///
    /// # Errors
    /// The folder cannot be read or written.
    pub fn restore_links(
        &self,
        loaded: &Path,
        progress: &mut RunProgress,
        policy: BestPolicy,
    ) -> Result<Option<String>, FileError> {
        let name = name_of(loaded);
        if !self.points_to("last", &name) {
            self.set_link("last", &name)?;
        }
        let mut others = self.evaluated_checkpoints(progress.step)?;
        others.retain(|one| one.evaluated.eval.total == policy.eval_images && !policy.is_of_other_images(one.eval_crc));
        let changed = reselect_best(progress, &others, policy);
        let of_best = |one: &EvaluatedCheckpoint| progress.best.is_some_and(|best| one.evaluated.is_same(&best));
        // A later checkpoint may repeat the evaluation, with weights that were trained further.
        let best = (0..others.len()).filter(|&at| of_best(&others[at])).min_by_key(|&at| others[at].step);
        let best = best.map(|at| others.remove(at));
        let is_linked = |one: &EvaluatedCheckpoint| self.points_to("best", &name_of(&one.path));
        let (Some(evaluation), true) = (progress.best, policy.keep) else {
            if !best.is_some_and(|best| is_linked(&best)) {
                self.remove_best_link()?;
            }
            return Ok(changed);
        };
        // The checkpoint from which the run continues was read completely.
        let check = |path: &Path| if path == loaded { Ok(()) } else { read::load(path).map(drop) };
        let cause = match best.map(|best| (check(&best.path), best)) {
            Some((Ok(_), best)) if is_linked(&best) => return Ok(changed),
            Some((Ok(_), best)) => return self.set_link("best", &name_of(&best.path)).map(|()| changed),
            Some((Err(error), _)) => error.to_string(),
            None => format!("{}: no checkpoint of epoch {}", self.path().display(), evaluation.epoch),
        };
        others.retain(|other| !other.evaluated.is_same(&evaluation));
        let left = best_of(&others, policy.by, |path| check(path).is_ok());
        progress.best = left.map(|left| left.evaluated);
        let instead = match left {
            Some(left) => {
                let name = name_of(&left.path);
                self.set_link("best", &name)?;
                format!("the best one that is left is {name}")
            }
            None => {
                self.remove_best_link()?;
                "no other evaluated one is left, so the next evaluation counts as the best".to_owned()
            }
        };
        Ok(Some(format!("the best checkpoint so far, of epoch {}, is lost: {cause}; {instead}", evaluation.epoch)))
    }

    /// Returns the checkpoints of at most `step` steps that were saved directly after an evaluation, newest first.
    fn evaluated_checkpoints(&self, step: u64) -> Result<Vec<EvaluatedCheckpoint>, FileError> {
        let evaluated = |path: PathBuf| {
            let StateFile { progress, .. } = read::state(&path)?;
            let last = progress.last?;
            let is_at_its_step = progress.last_step.is_none_or(|step| step == progress.step);
            let is_direct = is_at_its_step
                && match progress.batch {
                    0 => progress.epoch == last.epoch + 1,
                    // An evaluation inside an epoch, after `train.max_steps` or `train.max_time_s`.
                    _ => progress.epoch == last.epoch,
                };
            let is_old = progress.step <= step;
            let (step, eval_crc) = (progress.step, progress.eval_crc);
            (is_direct && is_old).then_some(EvaluatedCheckpoint { path, step, evaluated: last, eval_crc })
        };
        Ok(read::newest_first(self.path())?.into_iter().filter_map(evaluated).collect())
    }

    /// Returns whether the link exists and points to the checkpoint `name`.
    fn points_to(&self, link: &str, name: &str) -> bool {
        fs::read_link(self.path().join(link)).is_ok_and(|target| target == Path::new(name))
    }
}

/// Chooses the best evaluation of `progress` again, among `evaluated`, if it was chosen by another measure or on other images.
/// Returns a warning that names the change.
fn reselect_best(progress: &mut RunProgress, evaluated: &[EvaluatedCheckpoint], policy: BestPolicy) -> Option<String> {
    let best = progress.best?;
    let by = policy.by.to_string();
    let cause = match &progress.best_by {
        _ if best.eval.total != policy.eval_images => {
            format!(
                "evaluations have {} now, and had {}",
                counted(policy.eval_images, "image"),
                thousands(best.eval.total)
            )
        }
        _ if policy.is_of_other_images(progress.eval_crc) => {
            "evaluations have other images now, or another image size or normalisation".to_owned()
        }
        Some(before) if *before != by => format!("`checkpoint.best` is \"{by}\" now, and was \"{before}\""),
        _ => return None,
    };
    progress.best = best_of(evaluated, policy.by, |_| true).map(|one| one.evaluated);
    progress.best_by = Some(by);
    progress.eval_crc = Some(policy.eval_crc);
    Some(match progress.best {
        Some(best) => format!("{cause}: the best of the checkpoints is that of epoch {}", best.epoch),
        None => format!("{cause}: the next evaluation counts as the best"),
    })
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the best of `checkpoints`, which are sorted from the newest to the oldest. Skips checkpoints that are not complete.
fn best_of(
    checkpoints: &[EvaluatedCheckpoint],
    best_by: BestBy,
    is_complete: impl Fn(&Path) -> bool,
) -> Option<&EvaluatedCheckpoint> {
    // Oldest first: of equally good checkpoints, the oldest counts as the best.
    checkpoints.iter().rev().fold(None, |best: Option<&EvaluatedCheckpoint>, one| {
        let is_better = best.is_none_or(|best| one.evaluated.eval.is_better(&best.evaluated.eval, best_by));
        if is_better && is_complete(&one.path) { Some(one) } else { best }
    })
}
