use std::fs;

use models::state::StateTensor;

use super::*;
use crate::snapshot::{EvalRecord, Evaluated, PartialEpoch, RunProgress, Snapshot};
use crate::state_file::NamedTensor;

pub(super) fn snapshot(value: f32) -> Snapshot {
    Snapshot {
        model: vec![StateTensor::new("conv1.weight", vec![2, 1], vec![value, -value])],
        optimizer: vec![NamedTensor {
            name: "momentum.conv1.weight".into(),
            shape: vec![2, 1],
            values: vec![0.1, 0.2],
        }],
        optimizer_steps: 7,
        ema: Some(vec![StateTensor::new("conv1.weight", vec![2, 1], vec![1e-30, f32::MAX])]),
    }
}

pub(super) fn progress(epoch: usize, step: u64) -> RunProgress {
    let partial =
        PartialEpoch { loss_sum: 0.1 + 0.2, weight: Some(0.7 + 0.1), correct: 3, samples: 9, seconds: 1.0 / 3.0 };
    let eval = EvalRecord {
        loss: 0.1,
        top1: 100.0 / 3.0,
        top5: 99.9,
        correct: 3,
        total: 9,
        balanced_accuracy: None,
        tta_top1: None,
        mean_average_precision: None,
    };
    let best = Some(Evaluated { epoch: 1, eval });
    RunProgress {
        batch: 5,
        step,
        steps_per_epoch: Some(9),
        batches_per_epoch: Some(9),
        images: Some(70),
        global_batch: Some(8),
        partial,
        best,
        best_by: Some("accuracy".to_owned()),
        eval_crc: Some(7),
        last_step: None,
        elapsed_s: 2.5,
        epoch,
        last: None,
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_checkpoint_is_loaded_as_it_was_saved_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointFolder::open(folder.path(), 2, 42).unwrap();
    store.save("epoch-1", snapshot(1.5), &progress(2, 10), LinkUpdate::LastAndBest).unwrap();
    let (loaded, damaged) = load_newest(folder.path()).unwrap();
    assert!(damaged.is_empty());
    assert_eq!(loaded.progress, progress(2, 10));
    assert_eq!(loaded.seed, 42);
    assert_eq!(loaded.snapshot, snapshot(1.5));
}

#[test]
fn the_newest_checkpoints_and_the_best_one_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointFolder::open(folder.path(), 2, 0).unwrap();
    for epoch in 1..=5 {
        store
            .save(
                &format!("epoch-{epoch}"),
                snapshot(epoch as f32),
                &progress(epoch + 1, 10 * epoch as u64),
                if epoch == 2 { LinkUpdate::LastAndBest } else { LinkUpdate::Last },
            )
            .unwrap();
    }
    assert_eq!(names(folder.path()), ["best", "epoch-2", "epoch-4", "epoch-5", "last"]);
    assert_eq!(fs::read_link(folder.path().join("best")).unwrap(), Path::new("epoch-2"));
    assert_eq!(fs::read_link(folder.path().join("last")).unwrap(), Path::new("epoch-5"));
    let best = load(&folder.path().join("best")).unwrap();
    assert_eq!(best.snapshot.model[0].values[0], 2.0);

    // A better checkpoint that the run does not keep.
    store.remove_best_link().unwrap();
    store.save("epoch-6", snapshot(6.0), &progress(7, 60), LinkUpdate::Last).unwrap();
    assert_eq!(names(folder.path()), ["epoch-5", "epoch-6", "last"]);
    assert!(store.best().unwrap().is_none());
}

#[test]
fn saving_the_same_name_again_replaces_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointFolder::open(folder.path(), 2, 0).unwrap();
    store.save("epoch-1", snapshot(1.0), &progress(2, 10), LinkUpdate::LastAndBest).unwrap();
    store.save("epoch-1", snapshot(2.0), &progress(2, 10), LinkUpdate::LastAndBest).unwrap();
    assert_eq!(load_newest(folder.path()).unwrap().0.snapshot.model[0].values[0], 2.0);
    assert_eq!(names(folder.path()), ["best", "epoch-1", "last"]);
}

/// Truncates, alters or deletes each file of the newest checkpoint.
#[test]
fn a_damaged_file_is_named_and_the_previous_checkpoint_is_used() {
    type Damage = fn(&Path);
    let truncate: Damage = |file| fs::write(file, &fs::read(file).unwrap()[..10]).unwrap();
    let alter: Damage = |file| {
        let mut bytes = fs::read(file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    let delete: Damage = |file| fs::remove_file(file).unwrap();
    for file in [MODEL, OPTIMIZER, EMA, STATE, MANIFEST] {
        for (what, damage) in [("truncate", truncate), ("alter", alter), ("delete", delete)] {
            let folder = tempfile::tempdir().unwrap();
            let store = CheckpointFolder::open(folder.path(), 3, 0).unwrap();
            store.save("epoch-1", snapshot(1.0), &progress(2, 10), LinkUpdate::Last).unwrap();
            store.save("epoch-2", snapshot(2.0), &progress(3, 20), LinkUpdate::Last).unwrap();
            damage(&folder.path().join("epoch-2").join(file));
            let (loaded, damaged) = load_newest(folder.path()).unwrap();
            // An altered bit in the manifest's white space may leave the manifest readable and right.
            if loaded.path.ends_with("epoch-2") {
                assert_eq!((file, what), (MANIFEST, "alter"));
                continue;
            }
            assert!(loaded.path.ends_with("epoch-1"), "{what} {file}");
            assert_eq!(damaged.len(), 1, "{what} {file}");
            assert!(damaged[0].path.starts_with(folder.path().join("epoch-2")), "{what} {file}: {}", damaged[0]);
        }
    }
}

#[test]
fn a_damaged_checkpoint_keeps_its_position_in_the_order() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointFolder::open(folder.path(), 9, 0).unwrap();
    let save = |name: &str, epoch: usize, batch: usize, step: u64| {
        let progress = RunProgress { batch, ..progress(epoch, step) };
        store.save(name, snapshot(1.0), &progress, LinkUpdate::Last).unwrap();
    };
    let order = || -> Vec<String> {
        let paths = super::read::newest_first(folder.path()).unwrap().into_iter();
        paths.map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
    };
    save("epoch-1", 2, 0, 10);
    save("step-14", 2, 4, 14);
    save("epoch-2", 3, 0, 20);
    save("step-23", 3, 3, 23);
    save("epoch-3", 4, 0, 30);
    let newest_first = ["epoch-3", "step-23", "epoch-2", "step-14", "epoch-1"];
    assert_eq!(order(), newest_first);
    for damaged in ["epoch-1", "epoch-2", "step-23", "epoch-3"] {
        let state = folder.path().join(damaged).join(STATE);
        let bytes = fs::read(&state).unwrap();
        fs::write(&state, "cut").unwrap();
        assert_eq!(order(), newest_first, "{damaged}");
        fs::write(&state, bytes).unwrap();
    }
    // Without any state file that can be read, the numbers of the names are all that is left.
    for name in newest_first {
        fs::write(folder.path().join(name).join(STATE), "cut").unwrap();
    }
    assert_eq!(order(), ["step-23", "step-14", "epoch-3", "epoch-2", "epoch-1"]);
}

#[test]
fn an_old_damaged_checkpoint_is_deleted_first_and_a_resumed_run_does_not_try_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointFolder::open(folder.path(), 2, 0).unwrap();
    let save = |epoch: usize| {
        let progress = RunProgress { batch: 0, ..progress(epoch + 1, 10 * epoch as u64) };
        store.save(&format!("epoch-{epoch}"), snapshot(epoch as f32), &progress, LinkUpdate::Last).unwrap();
    };
    save(1);
    save(2);
    fs::write(folder.path().join("epoch-1").join(STATE), "cut").unwrap();
    let (loaded, damaged) = load_newest(folder.path()).unwrap();
    assert!(loaded.path.ends_with("epoch-2") && damaged.is_empty(), "{damaged:?}");
    save(3);
    assert_eq!(names(folder.path()), ["epoch-2", "epoch-3", "last"]);
}

/// The reader would wait forever for a pipe, and a device would fill the reader's memory.
#[test]
fn a_checkpoint_with_a_pipe_or_a_device_is_damaged() {
    for name in [MODEL, OPTIMIZER, STATE, MANIFEST] {
        for target in ["../../pipe", "/dev/zero"] {
            let folder = tempfile::tempdir().unwrap();
            let checkpoints = folder.path().join("checkpoints");
            fs::create_dir(&checkpoints).unwrap();
            let (kind, pipe) = (rustix::fs::FileType::Fifo, folder.path().join("pipe"));
            rustix::fs::mknodat(rustix::fs::CWD, pipe, kind, 0o600.into(), 0).unwrap();
            let store = CheckpointFolder::open(&checkpoints, 5, 0).unwrap();
            store.save("epoch-1", snapshot(1.0), &progress(2, 10), LinkUpdate::Last).unwrap();
            store.save("epoch-2", snapshot(2.0), &progress(3, 20), LinkUpdate::Last).unwrap();
            let file = checkpoints.join("epoch-2").join(name);
            fs::remove_file(&file).unwrap();
            std::os::unix::fs::symlink(target, &file).unwrap();
            let (loaded, damaged) = load_newest(&checkpoints).unwrap();
            assert!(loaded.path.ends_with("epoch-1"), "{name}");
            assert!(damaged[0].cause.starts_with("it is a "), "{name}: {}", damaged[0]);
        }
    }
}

#[test]
fn a_folder_without_a_complete_checkpoint_is_an_error_that_lists_the_damaged_ones() {
    let folder = tempfile::tempdir().unwrap();
    let error = load_newest(folder.path()).unwrap_err();
    assert!(error.to_string().ends_with("holds no checkpoint"), "{error}");
    fs::create_dir(folder.path().join("epoch-4")).unwrap();
    let error = load_newest(folder.path()).unwrap_err();
    assert!(error.to_string().contains("epoch-4/manifest.json"), "{error}");
}

/// For file systems that cannot exchange two names.
#[test]
fn a_checkpoint_that_is_replaced_in_two_steps_survives_a_kill_between_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let make = |name: &str, text: &str| {
        fs::create_dir(path(name)).unwrap();
        fs::write(path(name).join("content"), text).unwrap();
    };
    let read = |name: &str| fs::read_to_string(path(name).join("content")).unwrap();
    make("step-4", "old");
    make(".tmp-step-4", "new");
    super::store::replace_in_two_steps(&path(".tmp-step-4"), &path("step-4")).unwrap();
    assert_eq!((read("step-4").as_str(), names(folder.path()).len()), ("new", 1));
    // Killed between the two steps, and after them.
    make(".old-step-6", "old");
    make(".tmp-step-6", "half");
    make(".old-step-4", "old");
    let found: Vec<_> = super::read::newest_first(folder.path()).unwrap();
    assert_eq!(found, [path(".old-step-6"), path("step-4")], "a resumed run loads before it cleans the folder");
    CheckpointFolder::open(folder.path(), 2, 0).unwrap();
    assert_eq!((read("step-6").as_str(), read("step-4").as_str()), ("old", "new"));
    assert_eq!(names(folder.path()), ["step-4", "step-6"]);
}

#[test]
fn half_written_folders_are_ignored_and_cleaned() {
    let folder = tempfile::tempdir().unwrap();
    CheckpointFolder::open(folder.path(), 2, 0)
        .unwrap()
        .save("epoch-1", snapshot(1.0), &progress(2, 10), LinkUpdate::Last)
        .unwrap();
    fs::create_dir(folder.path().join(".tmp-epoch-2")).unwrap();
    fs::write(folder.path().join(".tmp-epoch-2/model.safetensors"), b"half").unwrap();
    assert!(load_newest(folder.path()).unwrap().0.path.ends_with("epoch-1"));
    CheckpointFolder::open(folder.path(), 2, 0).unwrap();
    assert_eq!(names(folder.path()), ["epoch-1", "last"]);
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_that_names_it() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("checkpoints");
    fs::create_dir(&folder).unwrap();
    let store = CheckpointFolder::open(&folder, 2, 0).unwrap();
    store.save("epoch-1", snapshot(1.0), &progress(2, 10), LinkUpdate::Last).unwrap();
    // A file is where the folder was. Unlike permissions, this works for root too.
    fs::rename(&folder, root.path().join("moved")).unwrap();
    fs::write(&folder, b"in the way").unwrap();
    let error = store.save("epoch-2", snapshot(2.0), &progress(3, 20), LinkUpdate::Last).unwrap_err();
    assert!(error.to_string().contains("cannot write the checkpoint"), "{error}");
    assert!(load_newest(&root.path().join("moved")).is_ok());
}

/// `cp -rL` makes such folders.
#[test]
fn a_folder_under_the_name_of_a_link_is_renamed_and_the_link_set() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointFolder::open(folder.path(), 2, 0).unwrap();
    for (epoch, moved) in [(1, "last.old"), (2, "last.old-2")] {
        let last = folder.path().join("last");
        let _ = fs::remove_file(&last);
        fs::create_dir(&last).unwrap();
        fs::write(last.join("model.safetensors"), [epoch]).unwrap();
        let name = format!("epoch-{epoch}");
        store.save(&name, snapshot(1.0), &progress(2, 10 * u64::from(epoch)), LinkUpdate::Last).unwrap();
        assert_eq!(fs::read_link(&last).unwrap(), Path::new(&name));
        assert_eq!(fs::read(folder.path().join(moved).join("model.safetensors")).unwrap(), [epoch]);
    }
}

/// Somebody has put a link under the name of the temporary folder of a checkpoint.
#[test]
fn a_checkpoint_is_not_written_through_a_link() {
    let root = tempfile::tempdir().unwrap();
    let [folder, victim] = ["checkpoints", "victim"].map(|name| root.path().join(name));
    fs::create_dir(&folder).unwrap();
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join(MODEL), "precious").unwrap();
    let store = CheckpointFolder::open(&folder, 2, 0).unwrap();
    std::os::unix::fs::symlink(&victim, folder.join(".tmp-epoch-1")).unwrap();
    store.save("epoch-1", snapshot(1.0), &progress(2, 10), LinkUpdate::Last).unwrap();
    assert_eq!(names(&victim), [MODEL]);
    assert_eq!(fs::read_to_string(victim.join(MODEL)).unwrap(), "precious");
}
