//! A key of the TOML: its type, default, range and documentation, declared once by [`sections!`].

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::path::PathBuf;

use super::value::{RawValue, ValueError};

/// A key as it is declared.
pub(super) struct Key<T> {
    /// The section, such as `train`.
    pub(super) section: &'static str,
    /// The key, such as `epochs`.
    pub(super) name: &'static str,
    /// Its documentation. The first sentence is the hint where the value is wrong.
    pub(super) doc: &'static str,
    pub(super) default: T,
    /// The defaults for words of the section's `kind`, where they differ.
    pub(super) kind_defaults: Vec<(&'static str, T)>,
    /// Which numbers are allowed.
    pub(super) range: Range,
    /// Meaning of 0, false, "none", [] or a missing value: "off", "all", "the data set's".
    pub(super) unset_meaning: Option<&'static str>,
    /// The values of the section's `kind` that use the key. If the list is empty, all values use the key.
    pub(super) only_kinds: Vec<&'static str>,
    /// Names of the key in other trainers.
    pub(super) aliases: &'static [&'static str],
}

impl<T: KeyValue> Key<T> {
    /// Returns whether the key has a meaning in a section of that `kind`; `None`: the kind is not known.
    pub(super) fn is_used_by(&self, kind: Option<&str>) -> bool {
        self.only_kinds.is_empty() || kind.is_none_or(|kind| self.only_kinds.contains(&kind))
    }

    /// Returns the default in a section of that `kind`.
    pub(super) fn default_for(&self, kind: Option<&str>) -> T {
        let of_kind = self.kind_defaults.iter().find(|(word, _)| kind == Some(word));
        of_kind.map_or(&self.default, |(_, default)| default).clone()
    }

    /// Returns the hint for a wrong value: meaning, choices and default.
    pub(super) fn hint(&self, kind: Option<&str>) -> String {
        let sentence = self.doc.split_once(". ").map_or(self.doc, |(first, _)| first);
        let mut hint = uncapitalized(sentence.trim_end_matches('.'));
        if let (Some(zero), Some(meaning)) = (T::UNSET_VALUE, self.unset_meaning) {
            hint.push_str(&format!(", {zero} = {meaning}"));
        }
        if !T::choices().is_empty() {
            hint.push_str(&format!(": {}", T::choices().join(", ")));
        }
        match (self.default_for(kind).write(), self.unset_meaning) {
            (Some(default), _) => hint + "; default " + &unquoted(&default),
            (None, Some(meaning)) => hint + "; default " + meaning,
            (None, None) => hint,
        }
    }
}

/// Lowercases the first letter, to continue another sentence: "Samples" becomes "samples", `TensorBoard` stays.
fn uncapitalized(sentence: &str) -> String {
    let mut symbols = sentence.chars();
    match (symbols.next(), symbols.clone().next()) {
        (Some(first), Some(second)) if second.is_lowercase() || second == ' ' => {
            first.to_lowercase().chain(symbols).collect()
        }
        _ => sentence.to_owned(),
    }
}

/// Returns a value as a message or a table shows it: words without quotes, whole numbers without a point.
pub(super) fn unquoted(value: &toml::Value) -> String {
    match value {
        toml::Value::String(word) => word.clone(),
        toml::Value::Float(number) => number.to_string(),
        other => other.to_string(),
    }
}

/// Visits every key of a plan in turn, for example to read, write or document the key.
pub(super) trait KeyVisitor {
    /// Visits one key; `value` is its value in the plan.
    fn key<T: KeyValue>(&mut self, key: &Key<T>, value: &mut T);
}

/// A type that a key can have.
pub(super) trait KeyValue: Clone {
    /// The type in words: integer, two numbers.
    const TYPE: &'static str;
    /// The value whose meaning is [`Key::unset_meaning`], as it is written in the TOML. `None`: hints do not show the value.
    const UNSET_VALUE: Option<&'static str> = None;
    /// Whether an empty array of this type is written too.
    const WRITES_EMPTY: bool = false;

    /// Reads a value as it was written.
    ///
    /// # Errors
    /// The value has another type, or is out of `range`.
    fn read(raw: &RawValue, range: &Range) -> Result<Self, ValueError>;

    /// Returns the value in TOML; `None` where the key is left out.
    fn write(&self) -> Option<toml::Value>;

    /// Returns the words to choose from.
    fn choices() -> Vec<&'static str> {
        Vec::new()
    }

    /// Returns the possible values for the table of keys: the type, or the words to choose from.
    fn values() -> String {
        match Self::choices().as_slice() {
            [] => Self::TYPE.to_owned(),
            words => words.iter().map(|word| format!("`{word:?}`")).collect::<Vec<_>>().join(", "),
        }
    }

    /// Returns whether the value means that the key is not set.
    fn means_unset(&self) -> bool {
        false
    }
}

/// A value that may be left out.
impl<T: KeyValue> KeyValue for Option<T> {
    const TYPE: &'static str = T::TYPE;

    fn read(raw: &RawValue, range: &Range) -> Result<Self, ValueError> {
        T::read(raw, range).map(|value| Some(value).filter(|value| !value.means_unset()))
    }

    fn write(&self) -> Option<toml::Value> {
        self.as_ref().and_then(T::write)
    }

    fn choices() -> Vec<&'static str> {
        T::choices()
    }

    fn values() -> String {
        T::values()
    }
}

impl<T: KeyValue> KeyValue for Vec<T> {
    const TYPE: &'static str = "array";

    fn read(raw: &RawValue, range: &Range) -> Result<Self, ValueError> {
        raw.elements(&format!("an array of {}s", T::TYPE), |element| T::read(element, range))
    }

    fn write(&self) -> Option<toml::Value> {
        let elements: Vec<_> = self.iter().filter_map(T::write).collect();
        (T::WRITES_EMPTY || !self.is_empty()).then_some(elements.into())
    }

    fn choices() -> Vec<&'static str> {
        T::choices()
    }

    fn values() -> String {
        format!("array of {}{}", T::values(), if T::choices().is_empty() { "s" } else { "" })
    }
}

impl KeyValue for bool {
    const TYPE: &'static str = "`true`, `false`";

    fn read(raw: &RawValue, _: &Range) -> Result<Self, ValueError> {
        raw.boolean()
    }

    fn write(&self) -> Option<toml::Value> {
        Some((*self).into())
    }
}

impl KeyValue for f64 {
    const TYPE: &'static str = "number";
    const UNSET_VALUE: Option<&'static str> = Some("0");

    fn read(raw: &RawValue, range: &Range) -> Result<Self, ValueError> {
        range.number(raw)
    }

    fn write(&self) -> Option<toml::Value> {
        Some((*self).into())
    }
}

/// Mean or standard deviation of a channel, for pixels in 0..1.
impl KeyValue for f32 {
    const TYPE: &'static str = f64::TYPE;

    fn read(raw: &RawValue, range: &Range) -> Result<Self, ValueError> {
        range.number(raw).map(|number| number as f32).map_err(|mistake| match raw.number() {
            Ok(number) if number > 1.0 => mistake.hint("pixels are scaled to 0..1 first: divide by 255"),
            _ => mistake,
        })
    }

    fn write(&self) -> Option<toml::Value> {
        // The shortest decimal number that reads as the same f32: 0.4914 and not 0.4914000034332275.
        Some(self.to_string().parse().unwrap_or(f64::from(*self)).into())
    }
}

/// Implements [`KeyValue`] for counts, which TOML holds as 64-bit integers.
macro_rules! count {
    ($($type:ty)+) => {
        $(impl KeyValue for $type {
            const TYPE: &'static str = "integer";
            const UNSET_VALUE: Option<&'static str> = Some("0");

            fn read(raw: &RawValue, range: &Range) -> Result<Self, ValueError> {
                range.integer(raw)
            }

            fn write(&self) -> Option<toml::Value> {
                // Larger values were never read from a TOML.
                Some(i64::try_from(*self).unwrap_or(i64::MAX).into())
            }
        })+
    };
}

count!(usize u64);

impl KeyValue for [f64; 2] {
    const TYPE: &'static str = "two numbers";

    fn read(raw: &RawValue, range: &Range) -> Result<Self, ValueError> {
        let list = Vec::read(raw, range)?;
        Self::try_from(list).map_err(|list| ValueError::new(format!("expected two numbers, found {}", list.len())))
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.to_vec().into())
    }
}

impl KeyValue for String {
    const TYPE: &'static str = "string";

    fn read(raw: &RawValue, _: &Range) -> Result<Self, ValueError> {
        raw.string()
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.as_str().into())
    }
}

impl KeyValue for PathBuf {
    const TYPE: &'static str = String::TYPE;

    fn read(raw: &RawValue, _: &Range) -> Result<Self, ValueError> {
        let text = raw.string()?;
        match text.is_empty() || text.contains(char::is_control) {
            true => Err(ValueError::new("expected a path, found none or one with control characters")),
            false => Ok(text.into()),
        }
    }

    fn write(&self) -> Option<toml::Value> {
        Some(self.to_string_lossy().into_owned().into())
    }
}

/// The numbers that a key allows; shown as `above 0 and at most 1000` or `from 1 to 10`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Range {
    low: Bound<f64>,
    high: Bound<f64>,
}

impl Range {
    /// Every finite number.
    pub(super) const ANY: Self = Self { low: Bound::Unbounded, high: Bound::Unbounded };

    /// Returns a range of integers or floats, in place of this one.
    pub(super) fn limited_to<N: Into<f64> + Copy>(self, range: impl RangeBounds<N>) -> Self {
        Self { low: range.start_bound().map(|low| (*low).into()), high: range.end_bound().map(|high| (*high).into()) }
    }

    /// Reads a number that is in the range.
    pub(super) fn number(&self, raw: &RawValue) -> Result<f64, ValueError> {
        let number = raw.number()?;
        self.check(number, "a number", raw).map(|()| number)
    }

    /// Reads an integer that is in the range and in the type `N`.
    fn integer<N: TryFrom<i64>>(&self, raw: &RawValue) -> Result<N, ValueError> {
        let integer = raw.integer()?;
        self.check(integer as f64, "an integer", raw)?;
        N::try_from(integer)
            .map_err(|_| ValueError::new(format!("expected an integer that fits the key's type, found {integer}")))
    }

    fn check(&self, number: f64, wanted: &str, raw: &RawValue) -> Result<(), ValueError> {
        match (self.low, self.high).contains(&number) {
            true => Ok(()),
            false => Err(ValueError::new(format!("expected {wanted} {self}, found {}", raw.text))),
        }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Bound::Included(low), Bound::Included(high)) = (self.low, self.high) {
            return write!(f, "from {low} to {high}");
        }
        let low = match self.low {
            Bound::Included(low) => Some(format!("of at least {low}")),
            Bound::Excluded(low) => Some(format!("above {low}")),
            Bound::Unbounded => None,
        };
        let high = match self.high {
            Bound::Included(high) => Some(format!("at most {high}")),
            Bound::Excluded(high) => Some(format!("below {high}")),
            Bound::Unbounded => None,
        };
        f.write_str(&low.into_iter().chain(high).collect::<Vec<_>>().join(" and "))
    }
}

/// Declares sections: for each a struct with a field per key, its defaults, and the visit of every key.
///
/// Optional parts follow a key's type and default, in this order: `for`, the default of a kind; `in`, the range; `unset`, the
/// meaning of 0, false or a missing value; `only`, the kinds that use the key; `also`, its names in other trainers.
macro_rules! sections {
    ($(
        $(#[doc = $title:literal])+
        $config:ident $section:literal {
            $(
                $(#[doc = $doc:literal])+
                $name:ident: $type:ty = $default:expr
                $(, for $kind:ident :: $word:ident = $other:expr)*
                $(, in $range:expr)?
                $(, unset $unset:literal)?
                $(, only $kinds:ident :: [$($user:ident),+])?
                $(, also [$($alias:literal),+])?;
            )+
        }
    )+) => {$(
        $(#[doc = $title])+
        #[derive(Debug, Clone, PartialEq)]
        pub struct $config {
            $($(#[doc = $doc])+ pub $name: $type,)+
        }

        impl Default for $config {
            fn default() -> Self {
                Self { $($name: $default,)+ }
            }
        }

        impl $config {
            /// Shows every key with its value to `visitor`, in the order of the file.
            pub(super) fn visit(&mut self, visitor: &mut impl KeyVisitor) {
                $(
                    let key = Key {
                        section: $section,
                        name: stringify!($name),
                        doc: concat!($($doc),+).trim(),
                        default: $default,
                        kind_defaults: vec![$(($kind::$word.name(), $other)),*],
                        range: Range::ANY$(.limited_to($range))?,
                        unset_meaning: None$(.or(Some($unset)))?,
                        only_kinds: vec![$($($kinds::$user.name()),+)?],
                        aliases: &[$($($alias),+)?],
                    };
                    visitor.key(&key, &mut self.$name);
                )+
            }
        }
    )+};
}

pub(super) use sections;
