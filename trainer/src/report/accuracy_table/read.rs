//! Reads run folders and committed summaries, which are run folders without checkpoints.

use std::{
    collections::HashMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use data::open_regular;
use serde::Deserialize;

use crate::files::FileError;
use crate::report::run_folder::is_sweep;
use crate::report::summary_csv::read_summary;
use crate::report::{RunFolder, VALIDATION};

/// The values of a run that the table uses.
#[derive(Debug, Clone)]
pub struct RunRecord {
    /// The folder's name.
    pub name: String,
    /// The folder.
    pub folder: RunFolder,
    /// The registry's name of the model.
    pub model: String,
    /// Data set; with `, part` if only some of its images were used, and with `, exact match` for multi-label images. Then an
    /// image counts as correct only if all its classes are right.
    pub dataset: String,
    /// Best test accuracy in percent.
    pub top1: f64,
    /// Test accuracy of the last evaluation in percent; `None` if it was of a validation split.
    pub last_top1: Option<f64>,
    /// Test accuracy with test-time augmentation in percent, of the evaluation of `top1`.
    pub tta_top1: Option<f64>,
    /// Number of complete epochs.
    pub epochs: usize,
    /// Number of planned epochs.
    pub planned_epochs: usize,
    /// Name of the run or file whose weights the run started from (`model.weights`).
    pub weights: Option<String>,
    /// Device and strategy, as readable text.
    pub device: String,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Commit of the checkout that started the run.
    pub commit: Option<String>,
    /// The configuration, without the settings that may differ between repetitions, such as the seed.
    recipe: toml::Table,
}

impl RunRecord {
    /// Returns whether two runs are repetitions of one experiment: the same recipe, device and number of epochs.
    pub(super) fn repeats(&self, other: &Self) -> bool {
        let key = |run: &Self| (run.model.clone(), run.dataset.clone(), run.epochs, run.device.clone());
        key(self) == key(other) && self.recipe == other.recipe
    }
}

/// Runs, and the run folders that have no result.
#[derive(Debug, Clone, Default)]
pub struct FoundRuns {
    /// The runs, each once.
    pub runs: Vec<RunRecord>,
    /// Folders of runs that are unfinished or were never evaluated, or only on a validation split.
    pub unfinished: Vec<PathBuf>,
}

/// Reads each path: a run folder, a folder of run folders (`runs`, `results`), or the folder of a sweep. A run found twice, as run
/// folder and as committed summary, counts once. Two runs of the same name count twice.
///
/// # Errors
/// When a path is neither a run folder nor a folder of run folders, or a file is damaged. The error names the path.
pub fn read_runs(paths: &[PathBuf]) -> Result<FoundRuns, FileError> {
    let mut found = FoundRuns::default();
    let mut seen: HashMap<String, Vec<RunIdentity>> = HashMap::new();
    for path in paths {
        let folders = match RunFolder::open(path) {
            Ok(run) => vec![run],
            Err(error) => match runs_in(path)? {
                runs if runs.is_empty() => return Err(error),
                runs => runs,
            },
        };
        for folder in folders {
            let name = name_of(folder.path());
            let identity = RunIdentity::read(&folder.summary_csv(), &folder.env())?;
            let of_this_name = seen.entry(name.clone()).or_default();
            if of_this_name.iter().any(|seen| seen.is_same(&identity)) {
                continue;
            }
            of_this_name.push(identity);
            match read(name, folder.clone())? {
                Some(run) => found.runs.push(run),
                None => found.unfinished.push(folder.path().to_owned()),
            }
        }
    }
    Ok(found)
}

/// What stays the same when a run continues.
pub(super) struct RunIdentity {
    /// The lines of summary.csv. The first line has the names of the columns.
    lines: Vec<Vec<u8>>,
    /// Time and command of the first start, without the folders of the command. `None` if env.json cannot be read.
    first_start: Option<(String, Vec<String>)>,
}

impl RunIdentity {
    /// Reads the identity from the files of a run folder or of a saved summary.
    pub(super) fn read(summary_csv: &Path, env: &Path) -> Result<Self, FileError> {
        let text = bytes(summary_csv)?.unwrap_or_default();
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect();
        let env = bytes(env)?.and_then(|env| serde_json::from_slice::<EnvFields>(&env).ok());
        let first_start = env.and_then(|EnvFields { started, command, .. }| {
            Some((started?, command.iter().map(|word| without_folders(word)).collect()))
        });
        Ok(Self { lines, first_start })
    }

    /// Returns whether the run has no summary.csv, or an empty one.
    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Returns whether both belong to the same run. The run may have continued after one of them was written. Other runs have
    /// different rows, since rows contain times. A run that ended inside an epoch writes its last row again when it continues. If
    /// this row is the only one, the first start decides.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let (a, b) = (&self.lines, &other.lines);
        let equal = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let fewest = a.len().min(b.len());
        let one_row = || equal == 1 && fewest == 2 && self.first_start.is_some();
        a == b || (equal > 1 && equal + 1 >= fewest) || (one_row() && self.first_start == other.first_start)
    }
}

/// Shortens a path in a word of a command line to the path's last part: `configs/a.toml` to `a.toml`. In `KEY=PATH`, shortens only
/// the path. A word without a slash stays as it is.
pub(super) fn without_folders(word: &str) -> String {
    let last_part = |path: &str| path.rsplit('/').find(|part| !part.is_empty()).unwrap_or(path).to_owned();
    match word.split_once('=').filter(|(key, _)| !key.contains('/')) {
        Some((key, value)) => format!("{key}={}", last_part(value)),
        None => last_part(word),
    }
}

/// Returns the folder's name, also if the path ends in `.`.
fn name_of(path: &Path) -> String {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    real.file_name().unwrap_or(real.as_os_str()).to_string_lossy().into_owned()
}

/// Returns the folders below `path` that have a `config.toml`, sorted by name. In a sweep, these folders are one level deeper:
/// `runs/NUMBER/FOLDER`.
fn runs_in(path: &Path) -> Result<Vec<RunFolder>, FileError> {
    let folders = match is_sweep(path) {
        true => entries(&path.join("runs"))?.iter().map(|run| entries(run)).collect::<Result<Vec<_>, _>>()?.concat(),
        false => entries(path)?,
    };
    Ok(folders.iter().filter_map(|folder| RunFolder::open(folder).ok()).collect())
}

/// Returns the entries of a folder, sorted by name. A path that is not a folder has no entries.
fn entries(path: &Path) -> Result<Vec<PathBuf>, FileError> {
    if !path.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(path).map_err(|error| FileError::io(path, "read the folder", &error))?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}

/// The fields of `summary.json` that the table needs.
#[derive(Debug, Deserialize)]
struct SummaryFields {
    model: String,
    dataset: String,
    device: String,
    epochs: usize,
    planned_epochs: usize,
    best: Option<EvaluationFields>,
    last: Option<EvaluationFields>,
    /// See [`RunSummary::evaluated`](crate::report::RunSummary::evaluated). Absent in summaries of older versions.
    evaluated: Option<String>,
    /// Present only if the data set has a validation split.
    test: Option<EvaluationFields>,
    seconds: f64,
}

#[derive(Debug, Deserialize)]
struct EvaluationFields {
    top1: f64,
    tta_top1: Option<f64>,
}

/// The fields of `env.json` that the table needs.
#[derive(Debug, Deserialize)]
struct EnvFields {
    git_commit: Option<String>,
    started: Option<String>,
    #[serde(default)]
    command: Vec<String>,
}

/// Reads one run; `None` if it has no result yet.
fn read(name: String, folder: RunFolder) -> Result<Option<RunRecord>, FileError> {
    let Some(summary) = file(&folder.summary_json())? else { return Ok(None) };
    let summary: SummaryFields = json(&folder.summary_json(), &summary)?;
    let (Some(best), Some(last)) = (&summary.best, &summary.last) else { return Ok(None) };
    if summary.test.is_none() && summary.evaluated.as_deref() == Some(VALIDATION) {
        // An interrupted run: the table has test accuracies only.
        return Ok(None);
    }
    let commit = match file(&folder.env())? {
        Some(env) => json::<EnvFields>(&folder.env(), &env)?.git_commit,
        None => None,
    };
    let config = file(&folder.config())?.unwrap_or_default();
    let mut recipe: toml::Table =
        toml::from_str(&config).map_err(|error| damaged(&folder.config(), &error.to_string()))?;
    let data = |key: &str| recipe.get("data").and_then(|data| data.get(key));
    // `data.validation` holds out a part of the training images.
    let part =
        ["limit_train", "limit_test"].iter().any(|key| data(key).and_then(toml::Value::as_integer).unwrap_or(0) > 0)
            || data("fraction").and_then(toml::Value::as_float).is_some_and(|fraction| fraction < 1.0)
            || data("validation").is_some();
    let has = |section: &str, key: &str| recipe.get(section).is_some_and(|section| section.get(key).is_some());
    let several_classes = has("data", "label_delim");
    let weights = recipe.get("model").and_then(|model| model.get("weights")).and_then(toml::Value::as_str);
    let weights = weights.map(|path| weights_name(Path::new(path)).display().to_string());
    remove_nondeterministic_settings(&mut recipe, summary.test.is_some());
    if let (Some(model), Some(weights)) = (recipe.get_mut("model").and_then(toml::Value::as_table_mut), &weights) {
        model.insert("weights".to_owned(), weights.clone().into());
    }
    // `summary.json` counts a run that `train.max_steps` ended as complete.
    let evaluated = read_summary(&folder.summary_csv())?.last().map_or(summary.epochs, |row| row.epoch);
    Ok(Some(RunRecord {
        name,
        model: summary.model,
        // Multi-label accuracy (exact match) is not comparable with top-1, so the two must not share a row.
        dataset: [Some(&*summary.dataset), part.then_some("part"), several_classes.then_some("exact match")]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(", "),
        // `best` is an evaluation of the validation split if there is one.
        top1: summary.test.as_ref().unwrap_or(best).top1,
        tta_top1: summary.test.as_ref().unwrap_or(best).tta_top1,
        last_top1: summary.test.is_none().then_some(last.top1),
        epochs: summary.epochs.min(evaluated),
        planned_epochs: summary.planned_epochs,
        weights,
        device: summary.device,
        seconds: summary.seconds,
        commit,
        recipe,
        folder,
    }))
}

/// Returns the end of a path of weights: the file name, or `RUN/checkpoints/NAME` of a run's checkpoint.
pub fn weights_name(path: &Path) -> PathBuf {
    let parent = path.parent().and_then(Path::file_name);
    let kept = if parent.is_some_and(|name| name == "checkpoints") { 3 } else { 1 };
    path.iter().skip(path.iter().count().saturating_sub(kept)).collect()
}

/// Removes the settings that may differ between repetitions of a run: the seed, the data folder, the data workers, the devices (the
/// record's device has their number), the settings that autotuning chooses without an effect on the result, and the settings of
/// checkpoints and logs. Keeps `checkpoint.best`, because the accuracy depends on the choice of the best epoch. For a run that was
/// `tested` after training, also keeps `checkpoint.keep_best`, because it selects the tested weights.
fn remove_nondeterministic_settings(recipe: &mut toml::Table, tested: bool) {
    let checkpoint = recipe.remove("checkpoint");
    for key in ["best", "keep_best"].into_iter().filter(|key| *key == "best" || tested) {
        if let Some(value) = checkpoint.as_ref().and_then(|checkpoint| checkpoint.get(key)) {
            recipe.insert(key.to_owned(), value.clone());
        }
    }
    recipe.remove("log");
    let tuned = ["bucket_mb", "first_bucket_mb", "threads", "autotune", "devices"].map(|key| ("parallel", key));
    for (section, key) in [("train", "seed"), ("data", "dir"), ("data", "workers")].into_iter().chain(tuned) {
        if let Some(section) = recipe.get_mut(section).and_then(toml::Value::as_table_mut) {
            section.remove(key);
        }
    }
}

/// Returns the bytes of a regular file; `None` if there is no file.
pub(super) fn bytes(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    let mut bytes = Vec::new();
    match open_regular(path).and_then(|(mut file, _)| file.read_to_end(&mut bytes)) {
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::io(path, "read", &error)),
    }
}

fn file(path: &Path) -> Result<Option<String>, FileError> {
    let Some(bytes) = bytes(path)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(|error| damaged(path, &error.to_string()))
}

fn json<T: for<'a> Deserialize<'a>>(path: &Path, text: &str) -> Result<T, FileError> {
    serde_json::from_str(text).map_err(|error| damaged(path, &error.to_string()))
}

fn damaged(path: &Path, cause: &str) -> FileError {
    FileError::new(
        path,
        format!("not what a run writes: {}", cause.trim_end()),
        "the file was damaged or edited; put it right, or name other runs",
    )
}
