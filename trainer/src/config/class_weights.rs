//! The value of `train.class_weights` and `data.sampler_weights`.

use toml::de::DeValue;

use super::key::{KeyValue, Range};
use super::suggest;
use super::value::{Mistake, RawValue};

/// Largest weight: anything above was mistyped.
const MOST: i32 = 1_000_000;

const WORDS: [&str; 2] = ["none", "balanced"];

/// A weight per class.
#[derive(Debug, Clone, PartialEq)]
pub enum ClassWeights {
    /// All classes alike.
    None,
    /// `images / (classes * images of the class)`, of the training set (scikit-learn's `compute_class_weight("balanced")`).
    Balanced,
    /// These, in the order of the classes. At least one is above 0.
    Given(Vec<f64>),
}

impl KeyValue for ClassWeights {
    const VALUES: &'static str = "array with a number per class, ";

    fn read(raw: &RawValue, _: &Range) -> Result<Self, Mistake> {
        if !matches!(raw.parsed, DeValue::Array(_)) {
            let Ok(word) = raw.string() else {
                return Err(raw.expected("\"balanced\" or an array of numbers"));
            };
            return match word.as_str() {
                "none" => Ok(Self::None),
                "balanced" => Ok(Self::Balanced),
                _ => {
                    let hint = suggest::hint("choices", &word, &suggest::plain(&WORDS));
                    Err(Mistake::new(format!("unknown value {word:?}")).hint(hint + ", or one number per class"))
                }
            };
        }
        let range = Range::new(0..=MOST);
        let weights = raw.elements("an array of numbers", |element| range.number(element))?;
        match weights.iter().any(|weight| *weight > 0.0) {
            true => Ok(Self::Given(weights)),
            false if weights.is_empty() => Err(Mistake::new("expected one number per class, found none")),
            false => {
                Err(Mistake::new("expected a weight above 0, found none").hint("a class of weight 0 counts nothing"))
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

    fn words() -> Vec<&'static str> {
        WORDS.to_vec()
    }
}

/// Weights that are left out of a plan where they are not set.
impl KeyValue for Option<ClassWeights> {
    const VALUES: &'static str = ClassWeights::VALUES;

    fn read(raw: &RawValue, range: &Range) -> Result<Self, Mistake> {
        ClassWeights::read(raw, range).map(|weights| Some(weights).filter(|weights| *weights != ClassWeights::None))
    }

    fn write(&self) -> Option<toml::Value> {
        self.as_ref().and_then(ClassWeights::write)
    }

    fn words() -> Vec<&'static str> {
        ClassWeights::words()
    }
}
