//! The folder of the data sets: the flag, and the variable that replaces it.

use std::ffi::OsString;
use std::fmt::{self, Display};
use std::path::PathBuf;

use super::{BenchCommand, Cli, Command, DataCommand, ShortRunArgs, SweepArgs, TrainArgs};

impl Cli {
    /// Sets `--data-dir` to `variable`, the value of [`DATA_DIR`], for a command that has the flag but was given neither the flag
    /// nor `--set data.dir`. An empty variable counts as unset.
    pub fn with_data_dir(mut self, variable: Option<OsString>) -> Self {
        let flag = match &mut self.command {
            // A run or a sweep that continues has the folder that it began with.
            None => self.train.unnamed_data_dir(),
            Some(Command::Train(arguments)) => arguments.unnamed_data_dir(),
            Some(Command::Eval(arguments)) => Some(&mut arguments.data_dir),
            Some(Command::Compare(arguments)) => arguments.runs.unnamed_data_dir(),
            Some(Command::Bench(BenchCommand::Scaling(arguments))) => arguments.runs.unnamed_data_dir(),
            Some(Command::Sweep(arguments)) => arguments.unnamed_data_dir(),
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

/// The folder of the data sets, and who named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataDir {
    /// The folder.
    pub path: PathBuf,
    /// Who named it.
    pub by: NamedBy,
}

/// Who named a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedBy {
    /// The flag `--data-dir`.
    Flag,
    /// The environment variable [`DATA_DIR`].
    Variable,
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

/// Returns whether a `--set` names the folder of the data sets.
fn sets_data_dir(set: &[String]) -> bool {
    set.iter().any(|setting| setting.split_once('=').is_some_and(|(key, _)| key.trim() == "data.dir"))
}

impl TrainArgs {
    /// Returns the folder of the data sets, to be set, unless `--set` names it or the run continues.
    fn unnamed_data_dir(&mut self) -> Option<&mut Option<DataDir>> {
        (self.resume.is_none() && !sets_data_dir(&self.set)).then_some(&mut self.data_dir)
    }
}

impl ShortRunArgs {
    /// Returns the folder of the data sets, to be set, unless `--set` names it.
    fn unnamed_data_dir(&mut self) -> Option<&mut Option<DataDir>> {
        (!sets_data_dir(&self.set)).then_some(&mut self.data_dir)
    }
}

impl SweepArgs {
    /// Returns the folder of the data sets, to be set, unless `--set` names it or the sweep continues.
    fn unnamed_data_dir(&mut self) -> Option<&mut Option<DataDir>> {
        (self.resume.is_none() && !sets_data_dir(&self.set)).then_some(&mut self.data_dir)
    }
}
