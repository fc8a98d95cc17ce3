//! One value of the TOML, and its conversion to Rust types.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeString, DeValue};

/// Values longer than this are not repeated in a message; the excerpt shows them anyway.
const LONGEST_FOUND: usize = 40;

/// The reason why a value cannot be used. The location of the mistake is the whole value, or the part `span`.
pub(super) struct ValueError {
    pub(super) cause: String,
    /// Replaces the key's own hint.
    pub(super) hint: Option<String>,
    /// Bytes of the offending element of an array.
    pub(super) span: Option<Range<usize>>,
}

impl ValueError {
    /// Makes a mistake of the whole value.
    pub(super) fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), hint: None, span: None }
    }

    /// Sets the hint, in place of the key's own hint.
    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// A value and its text.
pub(super) struct RawValue<'a> {
    /// The value as the TOML parser returned it.
    pub(super) parsed: &'a DeValue<'a>,
    /// The value's own text.
    pub(super) text: &'a str,
    /// The whole text that contains `text`: the file, or a flag's value.
    source: &'a str,
    /// Whether the value comes from a flag. There `--set data.name=1` means the string "1", because the shell removes quotes.
    bare: bool,
}

impl<'a> RawValue<'a> {
    /// Takes a value and the text `source` that contains it. `bare` tells whether the value comes from a flag.
    pub(super) fn new(value: &'a Spanned<DeValue<'a>>, source: &'a str, bare: bool) -> Self {
        Self { parsed: value.get_ref(), text: source.get(value.span()).unwrap_or_default(), source, bare }
    }

    /// Reads an integer that TOML can hold.
    pub(super) fn integer(&self) -> Result<i64, ValueError> {
        match self.parsed {
            DeValue::Integer(digits) => i64::from_str_radix(digits.as_str(), digits.radix()).map_err(|_| {
                ValueError::new(format!("expected an integer up to {}, found {}", i64::MAX, self.shown()))
            }),
            _ => Err(self.expected("an integer")),
        }
    }

    /// Reads a finite number; integers are numbers.
    pub(super) fn number(&self) -> Result<f64, ValueError> {
        let number = match self.parsed {
            DeValue::Integer(digits) => i64::from_str_radix(digits.as_str(), digits.radix()).ok().map(|n| n as f64),
            DeValue::Float(digits) => digits.as_str().parse().ok(),
            _ => return Err(self.expected("a number")),
        };
        let refused = || ValueError::new(format!("expected a finite number, found {}", self.shown()));
        number.filter(|number: &f64| number.is_finite()).ok_or_else(refused)
    }

    /// Reads a truth value.
    pub(super) fn boolean(&self) -> Result<bool, ValueError> {
        self.parsed.as_bool().ok_or_else(|| self.expected("true or false"))
    }

    /// Reads a string.
    pub(super) fn string(&self) -> Result<String, ValueError> {
        match self.parsed {
            DeValue::String(text) => Ok(text.clone().into_owned()),
            DeValue::Array(_) | DeValue::Table(_) => Err(self.expected("a string")),
            _ if self.bare => Ok(self.text.to_owned()),
            _ => Err(self.expected("a string")),
        }
    }

    /// Reads each element of an array. The mistake is that of the first element that is wrong.
    pub(super) fn elements<T>(
        &self,
        wanted: &str,
        read: impl Fn(&RawValue) -> Result<T, ValueError>,
    ) -> Result<Vec<T>, ValueError> {
        let DeValue::Array(array) = self.parsed else {
            let mistake = self.expected(wanted);
            return Err(match (self.parsed, self.brief()) {
                (DeValue::String(list), Some(_)) => {
                    let quoted =
                        |word: &str| if wanted.contains("string") { format!("{word:?}") } else { word.to_owned() };
                    let words: Vec<String> = list.split(',').map(|word| quoted(word.trim())).collect();
                    mistake.hint(format!("put it in brackets: [{}]", words.join(", ")))
                }
                (DeValue::Integer(_) | DeValue::Float(_), Some(text)) => {
                    mistake.hint(format!("put it in brackets: [{text}]"))
                }
                _ => mistake,
            });
        };
        array.iter().map(|element| self.part(element, &read)).collect()
    }

    /// Reads each value of a table, with its key. The mistake is that of the first value that is wrong.
    pub(super) fn entries<T>(
        &self,
        wanted: &str,
        read: impl Fn(&RawValue) -> Result<T, ValueError>,
    ) -> Result<Vec<(String, T)>, ValueError> {
        let DeValue::Table(table) = self.parsed else { return Err(self.expected(wanted)) };
        let read_one = |(key, value): (&Spanned<DeString<'_>>, _)| match self.part(value, &read) {
            Ok(value) => Ok((key.get_ref().to_string(), value)),
            Err(mistake) => Err(ValueError { cause: format!("`{}`: {}", key.get_ref(), mistake.cause), ..mistake }),
        };
        table.iter().map(read_one).collect()
    }

    /// Reads an element of an array or a value of a table.
    fn part<T>(
        &self,
        value: &Spanned<DeValue<'_>>,
        read: impl Fn(&RawValue) -> Result<T, ValueError>,
    ) -> Result<T, ValueError> {
        let span = Some(value.span());
        read(&RawValue::new(value, self.source, false)).map_err(|mistake| ValueError { span, ..mistake })
    }

    /// Returns the text if it is short enough for a message.
    fn brief(&self) -> Option<&str> {
        let text = self.text;
        let fits = text.chars().count() <= LONGEST_FOUND && !text.is_empty() && !text.contains(char::is_control);
        fits.then_some(text)
    }

    /// Returns the text, or words that replace it if it is too long for a message.
    fn shown(&self) -> &str {
        self.brief().unwrap_or("one that is too long to repeat")
    }

    /// Makes the error "expected …, found …", with a hint if the correction is obvious.
    pub(super) fn expected(&self, wanted: &str) -> ValueError {
        let found = match (self.parsed, self.brief()) {
            // The text of a table is only its header; that of an array may fill a page.
            (DeValue::Table(_) | DeValue::Array(_), _) | (_, None) => {
                let name = self.parsed.type_str();
                format!("{} {name}", if name.starts_with(['a', 'i']) { "an" } else { "a" })
            }
            (_, Some(text)) => format!("{} {text}", self.parsed.type_str()),
        };
        let mistake = ValueError::new(format!("expected {wanted}, found {found}"));
        match self.parsed {
            DeValue::String(inner)
                if wanted.contains("number") && inner.parse::<f64>().is_ok()
                    || wanted.contains("integer") && inner.parse::<i64>().is_ok()
                    || wanted.contains("true") && inner.parse::<bool>().is_ok() =>
            {
                mistake.hint(format!("write it without quotes: {inner}"))
            }
            DeValue::String(inner) if wanted == "a number" && inner.replacen(',', ".", 1).parse::<f64>().is_ok() => {
                mistake.hint(format!("write it with a decimal point: {}", inner.replacen(',', ".", 1)))
            }
            DeValue::Float(digits) if wanted.contains("integer") => match digits.as_str().split_once('.') {
                Some((whole, "0")) => mistake.hint(format!("write it without the point: {whole}")),
                _ => mistake,
            },
            DeValue::Boolean(_) | DeValue::Integer(_) | DeValue::Float(_) if wanted == "a string" => {
                mistake.hint(format!("put it in quotes: \"{}\"", self.text))
            }
            _ => mistake,
        }
    }
}
