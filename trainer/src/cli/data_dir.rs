//! The folder of the data sets: the flag, and the variable that replaces it.

use std::ffi::OsString;
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};

use super::{BenchCommand, Cli, Command, DataCommand, TrainArgs};

impl Cli {
    /// Sets `--data-dir` to `variable`, the value of [`DATA_DIR`], if the command has this flag and the user has given neither the
    /// flag nor `--set data.dir`. An empty variable counts as unset.
    pub fn with_data_dir(mut self, variable: Option<OsString>) -> Self {
        // A resumed run or sweep uses the folder with which it began.
        let flag = match &mut self.command {
            None => of_run(&mut self.train),
            Some(Command::Train(arguments)) => of_run(arguments),
            Some(Command::Eval(arguments)) => Some(&mut arguments.data_dir),
            Some(Command::Compare(arguments)) => unless_set(&mut arguments.runs.data_dir, &arguments.runs.set),
            Some(Command::Bench(BenchCommand::Scaling(arguments))) => {
                unless_set(&mut arguments.runs.data_dir, &arguments.runs.set)
            }
            Some(Command::Sweep(arguments)) => {
                unless_set(&mut arguments.data_dir, &arguments.set).filter(|_| arguments.resume.is_none())
            }
            Some(Command::Data(DataCommand::Fetch { data_dir, .. } | DataCommand::Verify { data_dir, .. })) => {
                Some(data_dir)
            }
            _ => None,
        };
        if let (Some(flag @ None), Some(dir)) = (flag, variable.filter(|dir| !dir.is_empty())) {
            *flag = Some(DataDir { path: dir.into(), by: NamedBy::Variable });
        }
        self
    }
}

/// The environment variable with the folder of the data sets.
pub const DATA_DIR: &str = "TRAINER_DATA_DIR";

/// The folder of the data sets, and whether the flag or the variable named this folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataDir {
    /// The folder.
    pub path: PathBuf,
    /// The source of the name.
    pub by: NamedBy,
}

/// The source of the data folder's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedBy {
    /// The flag `--data-dir`.
    Flag,
    /// The environment variable [`DATA_DIR`].
    Variable,
}

impl DataDir {
    /// Returns the folder, if one is named.
    pub fn path(dir: &Option<Self>) -> Option<&Path> {
        dir.as_ref().map(|dir| dir.path.as_path())
    }
}

impl<T: Into<OsString>> From<T> for DataDir {
    fn from(path: T) -> Self {
        Self { path: PathBuf::from(path.into()), by: NamedBy::Flag }
    }
}

impl Display for DataDir {
    /// Writes the flag or the variable with its value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.by {
            NamedBy::Flag => write!(f, "--data-dir {}", self.path.display()),
            NamedBy::Variable => write!(f, "{DATA_DIR}={}", self.path.display()),
        }
    }
}

/// Returns the flag of a run, for the caller to set. Returns `None` if `--set` names the folder or the run is resumed.
fn of_run(arguments: &mut TrainArgs) -> Option<&mut Option<DataDir>> {
    unless_set(&mut arguments.data_dir, &arguments.set).filter(|_| arguments.resume.is_none())
}

/// Returns the flag, for the caller to set. Returns `None` if one of the settings `set` names the folder.
fn unless_set<'a>(flag: &'a mut Option<DataDir>, set: &[String]) -> Option<&'a mut Option<DataDir>> {
    let names_folder = |setting: &String| setting.split_once('=').is_some_and(|(key, _)| key.trim() == "data.dir");
    (!set.iter().any(names_folder)).then_some(flag)
}
