use std::fs;

use super::links::BestPolicy;
use super::tests::{progress, snapshot};
use super::*;
use crate::config::BestBy;
use crate::snapshot::{EvalRecord, Evaluated};

const POLICY: BestPolicy =
    BestPolicy { keep: true, by: BestBy::Accuracy, eval_images: 100, eval_crc: 7, old_eval_crc: None };

/// A folder with one checkpoint per epoch, each saved after an evaluation with this accuracy. The best one is linked.
fn run(accuracies: &[f64]) -> (tempfile::TempDir, CheckpointFolder, RunProgress) {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointFolder::open(folder.path(), 9, 0).unwrap();
    let mut state = RunProgress { best: None, batch: 0, ..progress(1, 0) };
    for (index, &top1) in accuracies.iter().enumerate() {
        let epoch = index + 1;
        let evaluated =
            Evaluated { epoch, eval: EvalRecord { top1, loss: top1 / 10.0, total: 100, ..EvalRecord::default() } };
        let is_best = state.best.is_none_or(|best| top1 > best.eval.top1);
        (state.last, state.epoch, state.step) = (Some(evaluated), epoch + 1, 10 * epoch as u64);
        let links = if is_best { LinkUpdate::LastAndBest } else { LinkUpdate::Last };
        if is_best {
            state.best = Some(evaluated);
        }
        store.save(&format!("epoch-{epoch}"), snapshot(epoch as f32), &state, links).unwrap();
    }
    (folder, store, state)
}

fn link(folder: &Path, name: &str) -> Option<String> {
    fs::read_link(folder.join(name)).ok().map(|target| target.to_string_lossy().into_owned())
}

fn set_link(folder: &Path, name: &str, target: &str) {
    fs::remove_file(folder.join(name)).unwrap();
    std::os::unix::fs::symlink(target, folder.join(name)).unwrap();
}

/// Restores the links of a run that continues from its newest checkpoint, and returns the warning.
fn restore(folder: &Path, store: &CheckpointFolder, state: &mut RunProgress) -> Option<String> {
    let newest = load_newest(folder).unwrap().0;
    store.restore_links(&newest.path, state, POLICY).unwrap()
}

#[test]
fn the_links_are_set_after_a_process_was_killed_before_it_set_them() {
    let (folder, store, mut state) = run(&[50.0, 40.0, 60.0]);
    set_link(folder.path(), "last", "epoch-2");
    set_link(folder.path(), "best", "epoch-1");
    assert_eq!(restore(folder.path(), &store, &mut state), None);
    assert_eq!(link(folder.path(), "last").unwrap(), "epoch-3");
    assert_eq!(link(folder.path(), "best").unwrap(), "epoch-3");
    assert_eq!(state.best.unwrap().epoch, 3);
}

#[test]
fn a_folder_copied_without_links_keeps_its_best_checkpoint() {
    let (folder, store, mut state) = run(&[50.0, 70.0, 60.0]);
    for name in ["last", "best"] {
        fs::remove_file(folder.path().join(name)).unwrap();
    }
    assert_eq!(restore(folder.path(), &store, &mut state), None);
    assert_eq!(link(folder.path(), "best").unwrap(), "epoch-2");
    // The next checkpoint does not delete it.
    let store = CheckpointFolder::open(folder.path(), 1, 0).unwrap();
    store.save("epoch-4", snapshot(4.0), &RunProgress { epoch: 5, step: 40, ..state }, LinkUpdate::Last).unwrap();
    assert!(folder.path().join("epoch-2").exists() && !folder.path().join("epoch-3").exists());
}

/// The user has deleted the newest checkpoint, which was the best one. The progress of the checkpoint before names an older best
/// one.
#[test]
fn a_run_that_lost_its_newest_checkpoint_links_the_best_one_before_it() {
    let (folder, store, _) = run(&[50.0, 40.0, 60.0]);
    fs::remove_dir_all(folder.path().join("epoch-3")).unwrap();
    let mut state = load_newest(folder.path()).unwrap().0.progress;
    assert_eq!(restore(folder.path(), &store, &mut state), None);
    assert_eq!(link(folder.path(), "best").unwrap(), "epoch-1");
}

#[test]
fn a_lost_best_checkpoint_is_replaced_by_the_best_one_that_is_left() {
    for damage in [false, true] {
        let (folder, store, mut state) = run(&[50.0, 40.0, 70.0, 50.0, 45.0]);
        let best = folder.path().join("epoch-3");
        if damage {
            fs::write(best.join(MODEL), "cut").unwrap();
        } else {
            fs::remove_dir_all(&best).unwrap();
        }
        let warning = restore(folder.path(), &store, &mut state).unwrap();
        assert!(warning.contains("the best checkpoint so far, of epoch 3, is lost"), "{warning}");
        assert!(warning.contains("the best one that is left is epoch-1"), "{warning}");
        assert_eq!(warning.contains("3 bytes"), damage, "{warning}");
        assert_eq!((link(folder.path(), "best").unwrap().as_str(), state.best.unwrap().epoch), ("epoch-1", 1));
    }
}

/// The checkpoint of an epoch without an evaluation repeats the last evaluation.
#[test]
fn weights_that_were_trained_after_the_best_evaluation_are_not_the_best() {
    let (folder, store, mut state) = run(&[70.0]);
    (state.epoch, state.step) = (3, 20);
    store.save("epoch-2", snapshot(2.0), &state, LinkUpdate::Last).unwrap();
    (state.batch, state.step) = (4, 24);
    store.save("step-24", snapshot(3.0), &state, LinkUpdate::Last).unwrap();
    fs::remove_file(folder.path().join("best")).unwrap();
    assert_eq!(restore(folder.path(), &store, &mut state), None);
    assert_eq!(link(folder.path(), "best").unwrap(), "epoch-1");
    fs::remove_dir_all(folder.path().join("epoch-1")).unwrap();
    let warning = restore(folder.path(), &store, &mut state).unwrap();
    assert!(warning.contains("the next evaluation counts as the best"), "{warning}");
    assert_eq!((link(folder.path(), "best"), state.best), (None, None));
}

/// The loss of these checkpoints rises with the accuracy.
#[test]
fn another_measure_chooses_the_best_checkpoint_again() {
    for keep in [true, false] {
        let (folder, store, mut state) = run(&[50.0, 70.0, 40.0, 60.0]);
        state.best_by = Some("accuracy".to_owned());
        let newest = folder.path().join("epoch-4");
        let mut restore = |by| store.restore_links(&newest, &mut state, BestPolicy { keep, by, ..POLICY }).unwrap();
        assert_eq!(restore(BestBy::Accuracy), None);
        let warning = restore(BestBy::Loss).unwrap();
        assert!(warning.contains("`checkpoint.best` is \"loss\" now, and was \"accuracy\""), "{warning}");
        assert!(warning.contains("the best of the checkpoints is that of epoch 3"), "{warning}");
        assert_eq!(restore(BestBy::Loss), None, "only once");
        assert_eq!(link(folder.path(), "best"), keep.then(|| "epoch-3".to_owned()));
        assert_eq!(state.best.unwrap().epoch, 3);
    }
}

#[test]
fn an_evaluation_of_other_images_does_not_count() {
    let (folder, store, mut state) = run(&[50.0, 70.0]);
    let newest = folder.path().join("epoch-2");
    let warning = store.restore_links(&newest, &mut state, BestPolicy { eval_images: 10_000, ..POLICY }).unwrap();
    let expected = "evaluations have 10,000 images now, and had 100: the next evaluation counts as the best";
    assert_eq!(warning.unwrap(), expected);
    assert_eq!((link(folder.path(), "best"), state.best), (None, None));
}

/// The same number of other images, or the same images of another size.
#[test]
fn an_evaluation_with_another_checksum_does_not_count() {
    let (folder, store, mut state) = run(&[70.0]);
    state.eval_crc = Some(3);
    (state.epoch, state.step) = (3, 20);
    state.last = state.last.map(|last| Evaluated { epoch: 2, ..last });
    state.best = state.last;
    store.save("epoch-2", snapshot(2.0), &state, LinkUpdate::LastAndBest).unwrap();
    let newest = folder.path().join("epoch-2");
    let of_older_version = BestPolicy { old_eval_crc: Some(3), ..POLICY };
    assert_eq!(store.restore_links(&newest, &mut state.clone(), of_older_version).unwrap(), None);
    let warning = store.restore_links(&newest, &mut state, POLICY).unwrap().unwrap();
    assert!(warning.starts_with("evaluations have other images now, or another image size"), "{warning}");
    assert!(warning.contains("the best of the checkpoints is that of epoch 1"), "{warning}");
    assert_eq!(store.restore_links(&newest, &mut state, POLICY).unwrap(), None, "only once");
    assert_eq!(link(folder.path(), "best").unwrap(), "epoch-1");
}

/// A run that was evaluated inside an epoch, and went on in that epoch.
#[test]
fn a_later_checkpoint_of_the_epoch_of_an_evaluation_is_not_evaluated() {
    let (folder, store, mut state) = run(&[70.0]);
    (state.epoch, state.batch, state.step, state.last_step) = (2, 4, 14, Some(14));
    state.last = state.last.map(|last| Evaluated { epoch: 2, ..last });
    (state.batch, state.step) = (5, 15);
    store.save("step-15", snapshot(3.0), &state, LinkUpdate::Last).unwrap();
    state.best = state.last;
    let warning = restore(folder.path(), &store, &mut state).unwrap();
    assert!(warning.contains("the best one that is left is epoch-1"), "{warning}");
}

#[test]
fn without_keep_best_a_link_to_another_checkpoint_than_the_best_is_removed() {
    let (folder, store, mut state) = run(&[50.0, 70.0, 60.0]);
    let newest = folder.path().join("epoch-3");
    let mut restore = || store.restore_links(&newest, &mut state, BestPolicy { keep: false, ..POLICY }).unwrap();
    assert_eq!(restore(), None);
    assert_eq!(link(folder.path(), "best").unwrap(), "epoch-2");
    set_link(folder.path(), "best", "epoch-1");
    assert_eq!(restore(), None);
    assert_eq!(link(folder.path(), "best"), None);
    assert_eq!(state.best.unwrap().epoch, 2);
}
