//! The value of `optimizer.lr_factors`.

use std::collections::BTreeMap;

use super::key::{KeyValue, Range};
use super::value::{RawValue, ValueError};

/// Factors of the learning rate. The keys are names or prefixes of layers.
impl KeyValue for BTreeMap<String, f64> {
    const TYPE: &'static str = "table of numbers";

    fn read(raw: &RawValue, range: &Range) -> Result<Self, ValueError> {
        let number = |element: &RawValue| match range.number(element) {
            Err(mistake) if element.number().is_ok_and(|number| number == 0.0) => {
                Err(mistake.hint("a layer that is not trained belongs into `model.freeze`"))
            }
            read => read,
        };
        raw.entries("a table of numbers, { layer1 = 0.1 }", number).map(Self::from_iter)
    }

    fn write(&self) -> Option<toml::Value> {
        let entries = self.iter().map(|(name, factor)| (name.clone(), (*factor).into()));
        (!self.is_empty()).then(|| entries.collect::<toml::Table>().into())
    }
}
