//! The run folder, `runs/<YYYYMMDD-HHMMSS>-<model>-<mode>x<N>/`: all files of one run.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use super::run_lock::{LockAttempt, RunLock, locked_error};
use crate::console;
use crate::files::{FileError, USAGE};
use time::{OffsetDateTime, macros::format_description};

/// The nodes whose folders are searched for the newest run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SearchedNodes {
    /// Node 0. Its folder is the run's own.
    Node0,
    /// All nodes.
    All,
}

/// A run's folder and the names of the files in it.
#[derive(Debug, Clone)]
pub struct RunFolder {
    path: PathBuf,
    /// Held as long as a clone of this value lives.
    lock: Option<RunLock>,
}

/// The prefix of the node's number in the last part of a folder's name. Folders of node 0 do not have this part.
const NODE: &str = "node";

impl RunFolder {
    /// Creates a new folder below `root`, and `root` itself if it is missing, and locks it for this process.
    ///
    /// The time in the name is UTC, so that names sort by age across time zones and clock changes. A second run in the
    /// same second gets the suffix `-2`, a third `-3`.
    ///
    /// # Errors
    /// When `root` or the folder cannot be created.
    pub fn create(root: &Path, model: &str, mode: &str, workers: usize) -> Result<Self, FileError> {
        let name = format!("{}-{}x{workers}", file_name(model), file_name(mode));
        Self::create_at(root, &name, OffsetDateTime::now_utc())
    }

    /// Creates a folder for node `node` of a job of `workers` processes on several machines. Node 0's folder is the run's own. The
    /// folders of the other nodes have only the logs of their workers. Their names have the number of the node, because on a shared
    /// file system all these folders are side by side.
    ///
    /// # Errors
    /// See [`create`](Self::create).
    pub fn create_for_node(root: &Path, model: &str, workers: usize, node: usize) -> Result<Self, FileError> {
        let of_node = if node == 0 { String::new() } else { format!("-{NODE}{node}") };
        Self::create_at(root, &format!("{}-ddpx{workers}{of_node}", file_name(model)), OffsetDateTime::now_utc())
    }

    fn create_at(root: &Path, name: &str, now: OffsetDateTime) -> Result<Self, FileError> {
        let failed =
            |path: &Path, error| FileError::io(path, "create the folder", &error).with_folder_flag("--run-dir");
        fs::create_dir_all(root).map_err(|error| failed(root, error))?;
        let stamp = now
            .format(format_description!("[year][month][day]-[hour][minute][second]"))
            .expect("a date of this millennium has all components of the format");
        let name = format!("{stamp}-{name}");
        let mut path = root.join(&name);
        for attempt in 2u32.. {
            // `create_dir` fails if the folder exists, so only one of two processes gets the name.
            match fs::create_dir(&path) {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => path = root.join(format!("{name}-{attempt}")),
                Err(error) => return Err(failed(&path, error)),
            }
        }
        for folder in ["checkpoints", "logs"] {
            let folder = path.join(folder);
            fs::create_dir(&folder).map_err(|error| failed(&folder, error))?;
        }
        let mut folder = Self { path, lock: None };
        folder.lock(None)?;
        Ok(folder)
    }

    /// Locks the folder for this process, until the last clone of this value is dropped. `job` names a job on several machines.
    /// If the machines share the folder, the other processes of the job may write to it too.
    ///
    /// # Errors
    /// Another program writes the run, or the folder cannot be written.
    pub fn lock(&mut self, job: Option<&str>) -> Result<(), FileError> {
        for name in ["checkpoints", "logs"] {
            let path = self.path.join(name);
            if path.is_symlink() {
                return Err(FileError::input(
                    path,
                    "is a symbolic link, and a run writes in its own folder only",
                    "move the folder back; to have a run on another disk, use --run-dir or a link to the whole run folder",
                ));
            }
        }
        match RunLock::take(&self.path, job)? {
            LockAttempt::Acquired(lock) => self.lock = lock,
            LockAttempt::HeldBy(holder)
                if job.is_some() && holder.as_ref().is_some_and(|h| h.job.as_deref() == job) => {}
            LockAttempt::HeldBy(holder) => return Err(locked_error(&self.path, holder.as_ref())),
        }
        Ok(())
    }

    /// Checks that no other program writes the run. `job` as in [`lock`](Self::lock).
    ///
    /// # Errors
    /// Another program writes the run.
    pub fn check_not_locked(&self, job: Option<&str>) -> Result<(), FileError> {
        RunLock::other_holder(&self.path, job).map_or(Ok(()), |holder| Err(locked_error(&self.path, holder.as_ref())))
    }

    /// Opens the folder of an existing run, to resume or evaluate the run.
    ///
    /// # Errors
    /// When the folder does not exist or has no `config.toml`.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let hint = "name the run's own folder, such as runs/20260131-093000-lenet-singlex1";
        match fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(FileError::new(path, "no such run folder", hint));
            }
            Err(error) => return Err(FileError::io(path, "open the run folder", &error)),
            Ok(found) if !found.is_dir() => {
                return Err(FileError::new(path, "is a file, not a run folder", hint));
            }
            Ok(_) => {}
        }
        if is_sweep(path) {
            let hint = format!("trainer sweep --resume {}; its runs are below {}/runs", path.display(), path.display());
            return Err(FileError::new(path, "is the folder of a sweep, not of a run", hint));
        }
        let folder = Self { path: path.to_owned(), lock: None };
        if folder.config().is_file() {
            return Ok(folder);
        }
        let inside = runs_below(path).ok().and_then(|runs| runs.into_iter().next_back());
        Err(FileError::new(
            path,
            "is not a run folder: it has no config.toml",
            match inside {
                Some(run) => format!("it holds run folders; the newest is {}", run.display()),
                None => hint.to_owned(),
            },
        ))
    }

    /// Returns the newest run below `root`: the latest time in the name, then the highest `-2`, `-3`.
    ///
    /// Skips folders with other names, folders without `config.toml` (runs that failed during startup), and folders of nodes other
    /// than node 0.
    ///
    /// # Errors
    /// When there is no run, or `root` cannot be read.
    pub fn newest(root: &Path) -> Result<Self, FileError> {
        Self::newest_usable(root, SearchedNodes::Node0, |_| Ok(()))
    }

    /// Returns the newest run of `nodes` below `root` that `usable` accepts. Skips the runs that `usable` refuses as wrong input,
    /// and names them on stderr. Otherwise works like [`newest`](Self::newest).
    ///
    /// # Errors
    /// When there is no run, `root` cannot be read, `usable` fails for another reason, or refuses all runs.
    pub fn newest_usable(
        root: &Path,
        nodes: SearchedNodes,
        mut usable: impl FnMut(&mut Self) -> Result<(), FileError>,
    ) -> Result<Self, FileError> {
        let mut refused = None;
        for path in runs_below(root)?.into_iter().rev() {
            let mut folder = Self { path, lock: None };
            if nodes == SearchedNodes::Node0 && is_of_other_node(&folder.name()) {
                continue;
            }
            match usable(&mut folder) {
                Ok(()) => return Ok(folder),
                Err(error) if error.code == USAGE => {
                    console::eprint(format_args!("note: skipped {error}"));
                    refused.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(refused.unwrap_or_else(|| {
            FileError::input(
                root,
                "holds no run folder",
                "name the run to resume (--resume RUN), or the folder that holds the runs (--run-dir DIR)",
            )
        }))
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder's name.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy().into_owned()
    }

    /// Returns the path of `config.toml`: every setting, defaults included.
    pub fn config(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// Returns the path of `split.json`: the training images that the run does not train on.
    pub fn split(&self) -> PathBuf {
        self.path.join("split.json")
    }

    /// Returns the path of `autotune.json`: the measurements and the choices of autotuning.
    pub fn autotune(&self) -> PathBuf {
        self.path.join("autotune.json")
    }

    /// Returns the path of `env.json`: program, machine, command line.
    pub fn env(&self) -> PathBuf {
        self.path.join("env.json")
    }

    /// Returns the path of `metrics.jsonl`: one line per step.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// Returns the path of `summary.csv`: one line per epoch.
    pub fn summary_csv(&self) -> PathBuf {
        self.path.join("summary.csv")
    }

    /// Returns the path of `summary.json`: the result of the run.
    pub fn summary_json(&self) -> PathBuf {
        self.path.join("summary.json")
    }

    /// Returns the path of `curves.svg`: loss and accuracy over epochs.
    pub fn curves(&self) -> PathBuf {
        self.path.join("curves.svg")
    }

    /// Returns the path of `timeline.json`: a Chrome trace of the steps.
    pub fn timeline(&self) -> PathBuf {
        self.path.join("timeline.json")
    }

    /// Returns the path of `checkpoints/`.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// Returns the path of `checkpoints/best`.
    pub fn best_checkpoint(&self) -> PathBuf {
        self.checkpoints().join("best")
    }
}

/// Returns whether a folder is that of `trainer sweep`, which has a configuration too.
pub fn is_sweep(folder: &Path) -> bool {
    folder.join("sweep.json").is_file()
}

/// Returns the run folders below `root`, oldest first.
fn runs_below(root: &Path) -> Result<Vec<PathBuf>, FileError> {
    let entries = fs::read_dir(root).map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            FileError::input(root, "no such folder", "name the folder of the runs with --run-dir DIR")
        }
        _ => FileError::io(root, "read the folder", &error),
    })?;
    let mut runs = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| FileError::io(root, "read the folder", &error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some((stamp, attempt)) = sort_key(&name)
            && entry.path().join("config.toml").is_file()
            && !is_sweep(&entry.path())
        {
            runs.push((stamp, attempt, name, entry.path()));
        }
    }
    runs.sort();
    Ok(runs.into_iter().map(|(.., path)| path).collect())
}

/// Returns a sort key from a run folder's name: time stamp and attempt. `None` for any other name.
fn sort_key(name: &str) -> Option<(String, u32)> {
    let stamp = name.get(..15)?;
    let fits = stamp.bytes().enumerate().all(|(i, byte)| if i == 8 { byte == b'-' } else { byte.is_ascii_digit() });
    if !fits || !name[15..].starts_with('-') {
        return None;
    }
    // `…-singlex1` is the first run of its second, `…-singlex1-2` the second run. Both names end with a digit. The last
    // part is an attempt only if it has digits alone.
    let attempt = name.rsplit_once('-').and_then(|(_, last)| last.parse().ok()).unwrap_or(1);
    Some((stamp.to_owned(), attempt))
}

/// Returns whether the name is of a folder that [`RunFolder::create_for_node`] has created for a node other than node 0.
fn is_of_other_node(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let of_first_run = match name.rsplit_once('-') {
        Some((before, attempt)) if is_number(attempt) => before,
        _ => name,
    };
    of_first_run.rsplit_once('-').and_then(|(_, last)| last.strip_prefix(NODE)).is_some_and(is_number)
}

/// Turns the name of a model or mode into a part of a file name, without separators and blanks.
fn file_name(name: &str) -> String {
    let plain = |c: char| if c.is_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '_' };
    name.chars().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-01-31 09:30:05 UTC);

    #[test]
    fn runs_that_start_in_the_same_second_have_different_names() {
        let root = tempfile::tempdir().unwrap();
        let below = root.path().join("a/runs");
        let names: Vec<_> =
            (0..11).map(|_| RunFolder::create_at(&below, "res_net_18-ddpx4", NOW).unwrap().name()).collect();
        assert_eq!(names[0], "20260131-093005-res_net_18-ddpx4");
        assert_eq!(names[1], "20260131-093005-res_net_18-ddpx4-2");
        assert_eq!(names[10], "20260131-093005-res_net_18-ddpx4-11");
        assert!(below.join(&names[2]).join("checkpoints").is_dir());
    }

    #[test]
    fn the_folders_of_other_nodes_are_not_the_newest_run() {
        let root = tempfile::tempdir().unwrap();
        let [first, second, third] =
            [0, 1, 1].map(|node| RunFolder::create_for_node(root.path(), "res/node2", 4, node).unwrap());
        assert!(first.name().ends_with("-res_node2-ddpx4"), "{}", first.name());
        assert!(second.name().ends_with("-res_node2-ddpx4-node1"), "{}", second.name());
        for folder in [&first, &second, &third] {
            fs::write(folder.config(), "").unwrap();
        }
        assert_eq!(RunFolder::newest(root.path()).unwrap().path(), first.path());
        let newest = RunFolder::newest_usable(root.path(), SearchedNodes::All, |_| Ok(())).unwrap();
        assert!(is_of_other_node(&newest.name()), "{}", newest.name());
        assert!(
            is_of_other_node("20260131-093005-lenet-ddpx4-node12-3")
                && !is_of_other_node("20260131-093005-lenet-node-3")
        );
    }

    #[test]
    fn the_newest_is_by_time_then_by_number_and_has_a_config() {
        let root = tempfile::tempdir().unwrap();
        let cause = RunFolder::newest(root.path()).unwrap_err();
        assert_eq!(cause.cause, "holds no run folder");
        let make = |second: u8| {
            let run = RunFolder::create_at(root.path(), "lenet-singlex1", NOW.replace_second(second).unwrap()).unwrap();
            fs::write(run.config(), "").unwrap();
            run
        };
        let runs: Vec<_> = (0..11).map(|_| make(7)).collect();
        make(6);
        fs::create_dir(root.path().join("99990101-old-notes")).unwrap();
        RunFolder::create_at(root.path(), "lenet-singlex1", NOW.replace_second(9).unwrap()).unwrap(); // No config.toml
        assert_eq!(RunFolder::newest(root.path()).unwrap().path(), runs[10].path());
        assert_eq!(RunFolder::open(runs[3].path()).unwrap().path(), runs[3].path());
    }

    #[test]
    fn a_path_that_is_not_a_run_folder_is_an_error_with_its_kind() {
        let root = tempfile::tempdir().unwrap();
        let cause = |path: &Path| RunFolder::open(path).unwrap_err().cause;
        assert_eq!(cause(&root.path().join("none")), "no such run folder");
        assert_eq!(cause(root.path()), "is not a run folder: it has no config.toml");
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(cause(&file), "is a file, not a run folder");
        let run = RunFolder::create_at(root.path(), "lenet-singlex1", NOW).unwrap();
        fs::write(run.config(), "").unwrap();
        let error = RunFolder::open(root.path()).unwrap_err();
        assert_eq!(error.hint, format!("it holds run folders; the newest is {}", run.path().display()));
    }

    #[test]
    fn a_file_in_place_of_the_folder_of_runs_is_named() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("runs");
        fs::write(&file, "").unwrap();
        let error = RunFolder::create(&file, "lenet", "single", 1).unwrap_err();
        assert_eq!(error.path, file);
        assert!(error.cause.starts_with("cannot create the folder: "), "{}", error.cause);
    }
}
