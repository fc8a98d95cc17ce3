//! Fits a file's tensors to a network. If they do not fit, finds the model or data set that they do fit.

use std::collections::{HashMap, HashSet};

use data::formats;
use models::{
    LoadError, Network, Spec, StateTensor,
    state::{self, ShapeMismatch},
};

use super::{WeightDType, WeightFile, bad, damaged, names};
use crate::files::FileError;

/// The network that the weights are for.
#[derive(Debug, Clone, Copy)]
pub struct WeightTarget<'a> {
    /// The registry's name of the network.
    pub model: &'a str,
    /// The spec that the network was built for.
    pub spec: Spec,
    /// The data set that the network was built for.
    pub data: &'a str,
    /// What the network is for.
    pub purpose: Purpose,
}

/// What a network with weights from a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Every weight must be in the file.
    Evaluation,
    /// The classifier of a file with another number of classes is left out: the network keeps its own.
    Training,
}

/// A network with weights from a file.
#[derive(Debug)]
pub struct LoadedWeights {
    /// The network.
    pub network: Network,
    /// Where in the file the weights are, for the screen.
    pub origin: String,
    /// The classifier that keeps its initial weights. Only with [`Purpose::Training`].
    pub new_head: Option<NewHead>,
}

/// A classifier that keeps its initial weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewHead {
    /// Its name in the state dict, such as `fc`.
    pub name: String,
    /// Number of classes in the file.
    pub file_classes: usize,
}

/// Name and shape of each tensor of a network, in the network's order.
type Shapes = Vec<(String, Vec<usize>)>;

/// The tensors of a file that match the network's tensors.
struct TensorMatch {
    /// Index in the file of each of the network's tensors, in the network's order.
    file_indices: Vec<usize>,
    /// Prefix of the tensors' names in the file.
    prefix: String,
}

/// Loads all tensors of a file into `network`, or none. [`Purpose`] says whether the classifier may keep its initial weights.
///
/// Skips the names of wrappers (`net`, `state_dict`, `module.`, `_orig_mod.`, …). Ignores `num_batches_tracked` and
/// everything in the file beside the weights, such as an optimizer's state.
///
/// # Errors
/// When the file is damaged, or a tensor is missing, unexpected, of another shape or not of a float type. The error names
/// the tensors. The hint names a model or data set that the weights fit, if there is one.
pub fn load(network: Network, target: &WeightTarget, file: &WeightFile) -> Result<LoadedWeights, FileError> {
    let shapes = shapes(&network);
    let paths = file.paths();
    let (matched, error) = fit(&shapes, file, &paths);
    let new_head = target.purpose.new_head(&error, &state::head(&network));
    if new_head.is_none() && !error.is_empty() {
        return Err(bad(&file.path, &error, hint(target, file, &paths, &shapes, &error)));
    }
    let mut state = Vec::with_capacity(shapes.len());
    for (own, index) in models::state_dict(&network).into_iter().zip(matched.file_indices) {
        if new_head.as_ref().is_some_and(|head| state::is_within(&own.name, &head.name)) {
            state.push(own);
            continue;
        }
        let (tensor, StateTensor { name, shape, .. }) = (&file.tensors[index], own);
        if let WeightDType::Other(kind) = tensor.dtype {
            let cause = format!("tensor `{}` is of type {kind}, weights are floats", tensor.name);
            return Err(bad(&file.path, cause, "save the weights as float32, float16, bfloat16 or float64"));
        }
        let values = tensor.values().map_err(|cause| damaged(&file.path, cause))?;
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            let cause = format!("tensor `{}` has the value {value}", tensor.name);
            return Err(bad(&file.path, cause, "the training that wrote it diverged: take an earlier checkpoint"));
        }
        state.push(StateTensor::new(name, shape, values));
    }
    let network = models::load_state_dict(network, &state).map_err(|error| damaged(&file.path, error))?;
    let origin = match matched.prefix.trim_end_matches('.') {
        "" => file.path.display().to_string(),
        key => format!("{}, its `{key}`", file.path.display()),
    };
    Ok(LoadedWeights { network, origin, new_head })
}

impl Purpose {
    /// Returns the classifier, `head`, with its initial weights, if `error` is about the classifier only.
    fn new_head(self, error: &LoadError, head: &str) -> Option<NewHead> {
        let file_classes = error.other_classes().filter(|_| self == Self::Training)?;
        let of_head = error.mismatched.iter().all(|tensor| state::is_within(&tensor.name, head));
        of_head.then(|| NewHead { name: head.to_owned(), file_classes })
    }
}

impl WeightFile {
    /// Returns the tensors' paths without the segments that wrappers add.
    fn paths(&self) -> Vec<String> {
        self.tensors.iter().map(|tensor| names::strip_wrappers(&tensor.name)).collect()
    }
}

fn shapes(network: &Network) -> Shapes {
    models::state_dict(network).into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
}

/// Returns whether a name is a counter that PyTorch keeps beside weights. No network here has such counters.
fn is_counter(name: &str) -> bool {
    matches!(name.rsplit('.').next(), Some("num_batches_tracked" | "n_averaged"))
}

/// Matches the network's tensors with the file's tensors. `file_indices` has an entry for each of the network's tensors, unless the
/// error names missing tensors.
fn fit(shapes: &Shapes, file: &WeightFile, paths: &[String]) -> (TensorMatch, LoadError) {
    let expected: HashSet<&str> = shapes.iter().map(|(name, _)| name.as_str()).collect();
    let prefix = names::find_wrapper_prefix(&expected, paths);
    let mut error = LoadError::default();
    let mut given: HashMap<&str, usize> = HashMap::new();
    for (index, path) in paths.iter().enumerate() {
        let Some(name) = path.strip_prefix(&prefix).filter(|name| !is_counter(name)) else { continue };
        if !expected.contains(name) || given.insert(name, index).is_some() {
            error.unexpected.push(name.to_owned());
        }
    }
    let mut file_indices = Vec::with_capacity(shapes.len());
    for (name, shape) in shapes {
        match given.get(name.as_str()) {
            None => error.missing.push(name.clone()),
            Some(&index) => {
                let found = &file.tensors[index].shape;
                if found != shape {
                    let (name, expected, found) = (name.clone(), shape.clone(), found.clone());
                    let values = found.iter().fold(1usize, |product, &side| product.saturating_mul(side));
                    error.mismatched.push(ShapeMismatch { name, expected, found, values });
                }
                file_indices.push(index);
            }
        }
    }
    (TensorMatch { file_indices, prefix }, error)
}

/// A spec and the names of the data sets that need this spec.
type SpecDatasets = (Spec, Vec<&'static str>);

/// Returns the spec of each known data set. Data sets with the same spec share an entry.
fn known_specs() -> Vec<SpecDatasets> {
    let mut sets: Vec<SpecDatasets> = Vec::new();
    for info in formats::dataset_names().filter_map(formats::dataset_info) {
        let (Some(in_channels), Some(height), Some(width), Some(num_classes)) =
            (info.channels, info.height, info.width, info.classes)
        else {
            continue;
        };
        let spec = Spec { num_classes, in_channels, image_size: [height, width] };
        match sets.iter_mut().find(|(known, _)| *known == spec) {
            Some((_, names)) => names.push(info.name),
            None => sets.push((spec, vec![info.name])),
        }
    }
    sets
}

/// Returns a hint for weights that do not fit: another model, another data set, or another file.
fn hint(target: &WeightTarget, file: &WeightFile, paths: &[String], shapes: &Shapes, error: &LoadError) -> String {
    // `Some(false)`: the weights may fit another data set. Either all names match and only shapes differ, or the images
    // are too small for the model.
    let fits = |model: &str, spec: &Spec| -> Option<bool> {
        let Ok(network) = models::skip_init(model, spec) else { return Some(false) };
        let (_, error) = fit(&self::shapes(&network), file, paths);
        match error.is_empty() || target.purpose.new_head(&error, &state::head(&network)).is_some() {
            true => Some(true),
            false => (error.missing.is_empty() && error.unexpected.is_empty()).then_some(false),
        }
    };
    let evaluation = target.purpose == Purpose::Evaluation;
    // First try: the weights fit another model for this data set.
    let mut alike = Vec::new();
    for entry in models::entries() {
        match fits(entry.name, &target.spec) {
            Some(true) if evaluation => return format!("they are weights of {0}: give --model {0}", entry.name),
            Some(true) => return format!("they are weights of {0}: set `model.name = \"{0}\"`", entry.name),
            Some(false) if entry.name == target.model => alike.insert(0, entry.name),
            Some(false) => alike.push(entry.name),
            None => {}
        }
    }
    // Second try: the weights fit this model or another one, for another data set.
    let described = |spec: &Spec, names: &[&str]| {
        let ([height, width], channels) = (spec.image_size, spec.in_channels);
        format!("{} classes and images {channels}x{height}x{width}, as in {}", spec.num_classes, names.join(", "))
    };
    for name in alike {
        for (spec, names) in known_specs().iter().filter(|(spec, _)| *spec != target.spec) {
            if fits(name, spec) == Some(true) {
                let model = if name == target.model { String::new() } else { format!("--model {name} and ") };
                if !evaluation {
                    let ([height, width], channels, names) = (spec.image_size, spec.in_channels, names.join(", "));
                    return format!(
                        "they are weights of {name} for images {channels}x{height}x{width}, as in {names}: train on such images"
                    );
                }
                let what = described(spec, names);
                return format!("they are weights of {name} for {what}: give {model}--data {}", names[0]);
            }
        }
    }
    if let Some(classes) = error.other_classes().filter(|_| evaluation) {
        let have = target.spec.num_classes;
        return format!(
            "they were trained on {classes} classes, {} has {have}: name their own data set with --data",
            target.data
        );
    }
    match (error.missing.len(), error.unexpected.is_empty() && error.mismatched.is_empty()) {
        (1.., true) => format!(
            "the file holds {} of the network's {} tensors: save the whole of it, model.state_dict()",
            shapes.len() - error.missing.len(),
            shapes.len()
        ),
        _ => "no model of `trainer models` has exactly these tensors; compare the names above with the model's code"
            .to_owned(),
    }
}
