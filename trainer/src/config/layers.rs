//! The value of `optimizer.lr_factors`.

use std::collections::BTreeMap;

use super::key::{KeyValue, Range};
use super::value::{Mistake, RawValue};

/// Factors of the learning rate by the layers that they are for, names or prefixes in the state dict.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LrFactors(BTreeMap<String, f64>);

impl LrFactors {
    /// Returns the layers with their factors.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, factor)| (name.as_str(), *factor))
    }
}

impl<const N: usize> From<[(&str, f64); N]> for LrFactors {
    fn from(factors: [(&str, f64); N]) -> Self {
        Self(factors.into_iter().map(|(name, factor)| (name.to_owned(), factor)).collect())
    }
}

impl KeyValue for LrFactors {
    const TYPE: &'static str = "table of numbers";

    fn read(raw: &RawValue, range: &Range) -> Result<Self, Mistake> {
        let number = |element: &RawValue| match range.number(element) {
            Err(mistake) if element.number().is_ok_and(|number| number == 0.0) => {
                Err(mistake.hint("a layer that is not trained belongs into `model.freeze`"))
            }
            read => read,
        };
        raw.entries("a table of numbers, { layer1 = 0.1 }", number).map(|entries| Self(entries.into_iter().collect()))
    }

    fn write(&self) -> Option<toml::Value> {
        let entries = self.0.iter().map(|(name, factor)| (name.clone(), (*factor).into()));
        (!self.0.is_empty()).then(|| entries.collect::<toml::Table>().into())
    }
}
