//! Loading a state, all or nothing.

use std::collections::{HashMap, HashSet};

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};

use super::{ParameterInfo, StateTensor, map_state, visit};

/// A tensor whose shape is not the network's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misshapen {
    /// PyTorch's name.
    pub name: String,
    /// The network's shape.
    pub expected: Vec<usize>,
    /// The given shape.
    pub found: Vec<usize>,
    /// Number of values given; a damaged file may hold another number than its shape says.
    pub values: usize,
}

/// Why a state does not fit a network. `Display` names the tensors, [`LoadError::hint`] says what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError {
    /// Tensors of the network that the state lacks, in the network's order.
    pub missing: Vec<String>,
    /// Tensors of the state that the network lacks, or that come twice.
    pub unexpected: Vec<String>,
    /// Tensors of both that differ in shape.
    pub misshapen: Vec<Misshapen>,
}

/// Names shown before `and N more`.
const SHOWN: usize = 4;

fn list(items: impl ExactSizeIterator<Item = String>) -> String {
    let more = items.len().saturating_sub(SHOWN);
    let mut text = items.take(SHOWN).collect::<Vec<_>>().join(", ");
    if more > 0 {
        text += &format!(" and {more} more");
    }
    text
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = Vec::new();
        if !self.missing.is_empty() {
            parts.push(format!("missing {}", list(self.missing.iter().cloned())));
        }
        if !self.unexpected.is_empty() {
            parts.push(format!("unexpected {}", list(self.unexpected.iter().cloned())));
        }
        if !self.misshapen.is_empty() {
            let shapes = self.misshapen.iter().map(|m| {
                if m.expected == m.found {
                    return format!("{} holds {} values for shape {:?}", m.name, m.values, m.found);
                }
                format!("{} is {:?}, the network's is {:?}", m.name, m.found, m.expected)
            });
            parts.push(format!("wrong shape: {}", list(shapes)));
        }
        write!(f, "the weights are not this network's: {}", parts.join("; "))
    }
}

impl std::error::Error for LoadError {}

impl LoadError {
    /// What the user can do.
    pub fn hint(&self) -> String {
        if self.misshapen.iter().any(|m| m.expected == m.found) {
            return "the file is damaged or was cut short: take another copy".to_owned();
        }
        if let Some(classes) = self.other_classes() {
            format!("they were trained on {classes} classes: set `model.num_classes = {classes}`")
        } else if !self.unexpected.is_empty() && self.unexpected.iter().all(|name| name.starts_with("module.")) {
            "the names start with `module.`, as PyTorch's DataParallel saves them: save `model.module.state_dict()`"
                .to_owned()
        } else {
            "check that model.name and the data set are those that the weights were trained with".to_owned()
        }
    }

    /// The number of classes in the file, where only the last layer's weight and bias differ, and only in that.
    fn other_classes(&self) -> Option<usize> {
        let classes = *self.misshapen.first()?.found.first()?;
        let head = self.misshapen.len() <= 2
            && self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.misshapen.iter().all(|m| m.found.first() == Some(&classes) && m.found[1..] == m.expected[1..]);
        head.then_some(classes)
    }
}

/// Loads `state`, in any order, into `module`: every tensor or none.
///
/// Entries called `*.num_batches_tracked` are ignored, as no layer has them; each [`StateTensor::kind`] is as well, the
/// network knows its own. Ids and whether parameters require gradients stay as they are.
///
/// # Errors
///
/// A [`LoadError`] that names everything missing, unexpected and of another shape.
pub fn load_state_dict<M: Module>(module: M, state: &[StateTensor]) -> Result<M, LoadError> {
    let mut expected = Vec::new();
    visit(&module, |info, _, _| expected.push(info));
    let names: HashSet<&str> = expected.iter().map(|info| info.name.as_str()).collect();

    let mut error = LoadError { missing: Vec::new(), unexpected: Vec::new(), misshapen: Vec::new() };
    let mut given: HashMap<&str, &StateTensor> = HashMap::with_capacity(state.len());
    for tensor in state.iter().filter(|tensor| !tensor.name.ends_with(".num_batches_tracked")) {
        if !names.contains(tensor.name.as_str()) || given.insert(&tensor.name, tensor).is_some() {
            error.unexpected.push(tensor.name.clone());
        }
    }
    for info in &expected {
        match given.get(info.name.as_str()) {
            None => error.missing.push(info.name.clone()),
            Some(tensor) if tensor.shape != info.shape || tensor.values.len() != info.len() => {
                error.misshapen.push(Misshapen {
                    name: info.name.clone(),
                    expected: info.shape.clone(),
                    found: tensor.shape.clone(),
                    values: tensor.values.len(),
                });
            }
            Some(_) => {}
        }
    }
    if !(error.missing.is_empty() && error.unexpected.is_empty() && error.misshapen.is_empty()) {
        return Err(error);
    }

    Ok(map_state(module, |info: &ParameterInfo, _, old: Tensor<1>| {
        let tensor = given[info.name.as_str()];
        Tensor::from_data(TensorData::new(tensor.values.clone(), [info.len()]), &old.device())
    }))
}
