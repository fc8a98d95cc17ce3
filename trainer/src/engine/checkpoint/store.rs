//! Writes checkpoints, keeps the newest ones and the best one, and deletes the others.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use folder::Folder;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::{EMA, LinkUpdate, MANIFEST, MODEL, Manifest, ManifestFile, OPTIMIZER, STATE, StateFile, VERSION};
use super::{read, sha256, write_error};
use crate::console;
use crate::files::FileError;
use crate::snapshot::{DatasetRecord, RunProgress, Snapshot};
use crate::state_file::{self, NamedTensor};

/// The prefix of folders that are being written or deleted.
const TEMPORARY_PREFIX: &str = ".tmp-";
/// The prefix of a checkpoint that a new one of the same name is replacing ([`replace_in_two_steps`]).
pub(super) const REPLACED_PREFIX: &str = ".old-";

/// The `checkpoints` folder of a run. Only rank 0 has one.
#[derive(Debug)]
pub struct CheckpointFolder {
    folder: PathBuf,
    keep_last: usize,
    seed: u64,
    dataset: Option<DatasetRecord>,
}

impl CheckpointFolder {
    /// Opens an existing folder, and removes incomplete checkpoints of a killed process. If the process was killed while it
    /// replaced a checkpoint, renames the old checkpoint back.
    ///
    /// # Errors
    /// The folder cannot be read or cleaned.
    pub fn open(folder: &Path, keep_last: usize, seed: u64) -> Result<Self, FileError> {
        let entries = fs::read_dir(folder).map_err(|error| write_error(folder, error))?;
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            match name.to_string_lossy().strip_prefix(REPLACED_PREFIX) {
                Some(name) if !folder.join(name).exists() => {
                    fs::rename(&path, folder.join(name)).map_err(|error| write_error(&path, error))?;
                }
                Some(_) => remove(&path)?,
                None if name.to_string_lossy().starts_with(TEMPORARY_PREFIX) => remove(&path)?,
                None => {}
            }
        }
        Ok(Self { folder: folder.to_owned(), keep_last, seed, dataset: None })
    }

    /// Sets the data set that is recorded in later checkpoints.
    pub fn with_dataset(self, dataset: DatasetRecord) -> Self {
        Self { dataset: Some(dataset), ..self }
    }

    /// Writes checkpoint `name`, lets `links` point to it, and returns its folder. Deletes the oldest checkpoints beyond
    /// `keep_last`, but never the best one.
    ///
    /// # Errors
    /// The disk is full or the folder is not writable. Earlier checkpoints are not affected.
    pub fn save(
        &self,
        name: &str,
        snapshot: Snapshot,
        progress: &RunProgress,
        links: LinkUpdate,
    ) -> Result<PathBuf, FileError> {
        let temporary = self.folder.join(format!("{TEMPORARY_PREFIX}{name}"));
        let target = self.folder.join(name);
        remove(&temporary)?;
        let written =
            self.write_files(&temporary, snapshot, progress).and_then(|()| rename_or_exchange(&temporary, &target));
        if let Err(error) = written {
            // Free the space. An error here is ignored, since the first error must be reported.
            let _ = fs::remove_dir_all(&temporary);
            return Err(error);
        }
        sync_folder(&self.folder)?;
        self.set_link("last", name)?;
        if links == LinkUpdate::LastAndBest {
            self.set_link("best", name)?;
        }
        // Before `prune`: after a loss of power, no link may point to a checkpoint that was deleted.
        sync_folder(&self.folder)?;
        self.prune(name)?;
        Ok(target)
    }

    /// Returns the path of the folder.
    pub(super) fn path(&self) -> &Path {
        &self.folder
    }

    /// Removes the link `best`, for a run that has better weights now and does not keep its best checkpoint.
    ///
    /// # Errors
    /// The folder is not writable.
    pub fn remove_best_link(&self) -> Result<(), FileError> {
        remove(&self.folder.join("best"))
    }

    /// Loads the checkpoint that `best` points to. Returns `None` if there is no such link.
    ///
    /// # Errors
    /// A file of the checkpoint is missing, truncated or altered.
    pub fn best(&self) -> Result<Option<(Snapshot, RunProgress)>, FileError> {
        let path = self.folder.join("best");
        if !path.exists() {
            return Ok(None);
        }
        let loaded = read::load(&path)?;
        Ok(Some((loaded.snapshot, loaded.progress)))
    }

    fn write_files(&self, folder: &Path, snapshot: Snapshot, progress: &RunProgress) -> Result<(), FileError> {
        let open = Folder::of_file(folder).and_then(|all| all.create_folder(folder.file_name().unwrap_or_default()));
        let files = open.map_err(|error| write_error(folder, error))?;
        let state = StateFile {
            progress: progress.clone(),
            optimizer_steps: snapshot.optimizer_steps,
            seed: self.seed,
            dataset: self.dataset.clone(),
        };
        let mut manifest = Manifest { version: VERSION, files: Vec::new() };
        let mut write = |name: &str, bytes: &[u8]| {
            manifest.files.push(ManifestFile { name: name.into(), bytes: bytes.len() as u64, sha256: sha256(bytes) });
            write_synced(&files, name, bytes).map_err(|error| write_error(folder.join(name), error))
        };
        let tensors = |name: &str, tensors: &[NamedTensor]| {
            state_file::encode(tensors).map_err(|error| write_error(folder.join(name), error))
        };
        write(MODEL, &tensors(MODEL, &state_file::named_tensors(snapshot.model))?)?;
        write(OPTIMIZER, &tensors(OPTIMIZER, &snapshot.optimizer)?)?;
        if let Some(ema) = snapshot.ema {
            write(EMA, &tensors(EMA, &state_file::named_tensors(ema))?)?;
        }
        write(STATE, &json(&folder.join(STATE), &state)?)?;
        let path = folder.join(MANIFEST);
        write_synced(&files, MANIFEST, &json(&path, &manifest)?).map_err(|error| write_error(&path, error))?;
        files.sync().map_err(|error| write_error(folder, error))
    }

    /// Replaces the relative link `link` atomically by a link to `name`. A copying tool that follows links (`cp -rL`) turns the
    /// link into a folder. This folder is then renamed.
    pub(super) fn set_link(&self, link: &str, name: &str) -> Result<(), FileError> {
        let (temporary, link) = (self.folder.join(format!("{TEMPORARY_PREFIX}{link}")), self.folder.join(link));
        remove(&temporary)?;
        if fs::symlink_metadata(&link).is_ok_and(|found| found.is_dir()) {
            let moved = move_away(&link).map_err(|error| write_error(&link, error))?;
            let [link, moved] = [link.display(), moved.display()];
            console::eprint(format_args!("warning: {link} was a folder, not a link; it is now {moved}"));
        }
        std::os::unix::fs::symlink(name, &temporary)
            .and_then(|()| fs::rename(&temporary, &link))
            .map_err(|error| write_error(&link, error))
    }

    /// Deletes the oldest checkpoints beyond `keep_last`, except the checkpoint that `best` points to and the one just `saved`.
    /// A damaged checkpoint may count as newer than `saved`.
    fn prune(&self, saved: &str) -> Result<(), FileError> {
        let best = fs::read_link(self.folder.join("best")).ok();
        let is_best = |name: &str| best.as_deref() == Some(Path::new(name));
        let mut kept = usize::from(!is_best(saved));
        for path in read::newest_first(&self.folder)? {
            let name = path.file_name().unwrap_or_default().to_owned();
            if name == saved || is_best(&name.to_string_lossy()) {
                continue;
            }
            kept += 1;
            if kept > self.keep_last {
                let hidden = self.folder.join(format!("{TEMPORARY_PREFIX}{}", name.to_string_lossy()));
                fs::rename(&path, &hidden).map_err(|error| write_error(&path, error))?;
                remove(&hidden)?;
            }
        }
        Ok(())
    }
}

/// Renames `temporary` to `target`. If `target` exists (a resumed run writes a checkpoint again), exchanges the two atomically.
/// On a file system that cannot exchange two names (NFS, Lustre), replaces `target` in two steps.
fn rename_or_exchange(temporary: &Path, target: &Path) -> Result<(), FileError> {
    let failed = |error: io::Error| write_error(target, error);
    if !target.exists() {
        return fs::rename(temporary, target).map_err(failed);
    }
    match renameat_with(CWD, temporary, CWD, target, RenameFlags::EXCHANGE) {
        Ok(()) => remove(temporary),
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => replace_in_two_steps(temporary, target),
        Err(error) => Err(failed(error.into())),
    }
}

/// Renames `target` to a hidden name, renames `temporary` to `target`, and deletes the hidden folder. If the process is killed
/// between the two renames, [`CheckpointFolder::open`] undoes the first one.
pub(super) fn replace_in_two_steps(temporary: &Path, target: &Path) -> Result<(), FileError> {
    let aside =
        target.with_file_name(format!("{REPLACED_PREFIX}{}", target.file_name().unwrap_or_default().to_string_lossy()));
    remove(&aside)?;
    fs::rename(target, &aside)
        .and_then(|()| fs::rename(temporary, target))
        .map_err(|error| write_error(target, error))?;
    remove(&aside)
}

/// Renames a folder to the first free name of `NAME.old`, `NAME.old-2`, …, and returns the new path.
fn move_away(folder: &Path) -> io::Result<PathBuf> {
    let mut to = folder.with_extension("old");
    for attempt in 2.. {
        if to.symlink_metadata().is_err() {
            break;
        }
        to = folder.with_extension(format!("old-{attempt}"));
    }
    fs::rename(folder, &to).map(|()| to)
}

fn json(path: &Path, value: &impl serde::Serialize) -> Result<Vec<u8>, FileError> {
    serde_json::to_vec_pretty(value).map_err(|error| write_error(path, error))
}

fn write_synced(folder: &Folder, name: &str, bytes: &[u8]) -> io::Result<()> {
    let mut file = folder.create_new(name)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn sync_folder(folder: &Path) -> Result<(), FileError> {
    fs::File::open(folder).and_then(|file| file.sync_all()).map_err(|error| write_error(folder, error))
}

/// Removes a folder, file or link, if it exists.
fn remove(path: &Path) -> Result<(), FileError> {
    let result = match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    result.map_err(|error| write_error(path, error))
}
