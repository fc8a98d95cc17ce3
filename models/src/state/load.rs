//! Loading of a state dict: every tensor or none.

use std::collections::{HashMap, HashSet};

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};

use super::{ParameterInfo, StateTensor, map_state, visit};

/// A tensor whose shape differs from the network's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeMismatch {
    /// Name in PyTorch's state dict.
    pub name: String,
    /// Shape in the network.
    pub expected: Vec<usize>,
    /// Shape in the loaded state.
    pub found: Vec<usize>,
    /// Number of values in the loaded state. In a damaged file it may differ from the number that `found` implies.
    pub values: usize,
}

/// Error of a state dict that does not fit a network. `Display` names the tensors, [`LoadError::hint`] returns the remedy.
#[derive(Debug, Clone, Default, PartialEq, Eq, thiserror::Error)]
#[error("the weights are not this network's: {}", self.causes())]
pub struct LoadError {
    /// Tensors of the network that are missing in the state, in the network's order.
    pub missing: Vec<String>,
    /// Tensors of the state that the network does not have, or that occur twice.
    pub unexpected: Vec<String>,
    /// Tensors of both that differ in shape.
    pub mismatched: Vec<ShapeMismatch>,
}

/// Number of names that a message lists before `and N more`.
const SHOWN: usize = 4;

/// Joins the first [`SHOWN`] items with commas and counts the others.
fn list(items: impl ExactSizeIterator<Item = String>) -> String {
    let more = items.len().saturating_sub(SHOWN);
    let mut text = items.take(SHOWN).collect::<Vec<_>>().join(", ");
    if more > 0 {
        text += &format!(" and {more} more");
    }
    text
}

impl LoadError {
    /// Returns true if the state fits.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }

    fn causes(&self) -> String {
        let mut parts = Vec::new();
        if !self.missing.is_empty() {
            parts.push(format!("missing {}", list(self.missing.iter().cloned())));
        }
        if !self.unexpected.is_empty() {
            parts.push(format!("unexpected {}", list(self.unexpected.iter().cloned())));
        }
        if !self.mismatched.is_empty() {
            let shapes = self.mismatched.iter().map(|m| {
                if m.expected == m.found {
                    return format!("{} holds {} values for shape {:?}", m.name, m.values, m.found);
                }
                format!("{} is {:?}, the network's is {:?}", m.name, m.found, m.expected)
            });
            parts.push(format!("wrong shape: {}", list(shapes)));
        }
        parts.join("; ")
    }

    /// Returns what the user can do.
    pub fn hint(&self) -> String {
        if self.mismatched.iter().any(|m| m.expected == m.found) {
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

    /// Returns the number of classes in the loaded state, if it differs only in the first dimension of a weight and a bias.
    pub fn other_classes(&self) -> Option<usize> {
        let classes = *self.mismatched.first()?.found.first()?;
        let head = self.mismatched.len() <= 2
            && self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.mismatched.iter().all(|m| m.found.first() == Some(&classes) && m.found[1..] == m.expected[1..]);
        head.then_some(classes)
    }
}

/// Loads `state`, in any order, into `module`: every tensor or none. As PyTorch's `load_state_dict(strict=True)`.
///
/// Entries called `*.num_batches_tracked` are ignored, because no layer has them. [`StateTensor::kind`] is ignored too. Ids
/// and `requires_grad` are kept.
///
/// # Errors
///
/// A [`LoadError`] that names all missing and unexpected tensors and all shape mismatches.
pub fn load_state_dict<M: Module>(module: M, state: &[StateTensor]) -> Result<M, LoadError> {
    let mut expected = Vec::new();
    visit(&module, |info, _, _| expected.push(info));
    let names: HashSet<&str> = expected.iter().map(|info| info.name.as_str()).collect();

    let mut error = LoadError::default();
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
                error.mismatched.push(ShapeMismatch {
                    name: info.name.clone(),
                    expected: info.shape.clone(),
                    found: tensor.shape.clone(),
                    values: tensor.values.len(),
                });
            }
            Some(_) => {}
        }
    }
    if !error.is_empty() {
        return Err(error);
    }

    Ok(map_state(module, |info: &ParameterInfo, _, old: Tensor<1>| {
        let tensor = given[info.name.as_str()];
        let values = TensorData::new(tensor.values.clone(), [info.len()]);
        ops::parameter::from_row_major(Tensor::from_data(values, &old.device()), &info.shape)
    }))
}
