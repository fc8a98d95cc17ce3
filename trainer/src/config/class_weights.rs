//! The value of `train.class_weights`, `train.pos_weight` and `data.sampler_weights`.

use super::key::{KeyValue, Range};
use super::suggest;
use super::value::{RawValue, ValueError};

/// Largest weight. A larger value is a typing mistake.
const MOST: i32 = 1_000_000;

const WORDS: [&str; 2] = ["none", "balanced"];

/// A weight per class.
#[derive(Debug, Clone, PartialEq)]
pub enum ClassWeights {
    /// The same weight for all classes.
    None,
    /// Computed from the training set: `images / (classes * images of the class)` (scikit-learn's
    /// `compute_class_weight("balanced")`). For `train.pos_weight`: images without the class / images with the class.
    Balanced,
    /// The given weights, in the order of the classes. At least one is above 0.
    Given(Vec<f64>),
}

impl KeyValue for ClassWeights {
    const TYPE: &'static str = "array with a number per class";

    fn read(raw: &RawValue, _: &Range) -> Result<Self, ValueError> {
        if !raw.parsed.is_array() {
            let word = raw.string().map_err(|_| raw.expected("\"balanced\" or an array of numbers"))?;
            return match word.as_str() {
                "none" => Ok(Self::None),
                "balanced" => Ok(Self::Balanced),
                _ => {
                    let hint = suggest::hint("choices", &word, &suggest::without_aliases(&WORDS));
                    Err(ValueError::new(format!("unknown value {word:?}")).hint(hint + ", or one number per class"))
                }
            };
        }
        let weights = Vec::read(raw, &Range::ANY.limited_to(0..=MOST))?;
        match weights.iter().any(|weight| *weight > 0.0) {
            true => Ok(Self::Given(weights)),
            false if weights.is_empty() => Err(ValueError::new("expected one number per class, found none")),
            false => {
                Err(ValueError::new("expected a weight above 0, found none").hint("a class of weight 0 counts nothing"))
            }
        }
    }

    fn write(&self) -> Option<toml::Value> {
        Some(match self {
            Self::None => "none".into(),
            Self::Balanced => "balanced".into(),
            Self::Given(weights) => weights.clone().into(),
        })
    }

    fn choices() -> Vec<&'static str> {
        WORDS.to_vec()
    }

    fn values() -> String {
        format!("{}, `\"none\"`, `\"balanced\"`", Self::TYPE)
    }

    fn means_unset(&self) -> bool {
        *self == Self::None
    }
}
