//! Parses TOML, and explains the parser's messages in plainer words.

use toml::de::DeTable;

use super::error::ConfigError;
use super::source::ConfigSource;

/// Parses the document.
///
/// # Errors
/// The first place at which the text is not TOML.
pub(super) fn parse(source: &ConfigSource) -> Result<DeTable<'_>, ConfigError> {
    let (document, errors) = DeTable::parse_recoverable(&source.text);
    // The parser goes on after a mistake, and most later errors are its consequence: only the first is reported.
    let first = errors.iter().min_by_key(|error| error.span().map_or(usize::MAX, |span| span.start));
    let Some(error) = first else {
        return Ok(document.into_inner());
    };
    let span = error.span().unwrap_or(source.text.len()..source.text.len());
    let text = source.text.get(span.clone()).unwrap_or_default();
    let (cause, hint) = explain(error.message(), text);
    Err(ConfigError { cause, location: source.locate(span), hint })
}

/// Returns the cause and the hint for the parser's message about `text`.
pub(super) fn explain(message: &str, text: &str) -> (String, String) {
    let hint = if message.starts_with("string values must be quoted") {
        return (format!("not valid TOML: {text} is neither a number nor a quoted string"), quote(text));
    } else if message.starts_with("duplicate key") {
        return (
            format!("not valid TOML: `{text}` is set twice"),
            "keep one of the two; a section is opened once and holds all its keys".into(),
        );
    } else if message.starts_with("key with no value") || message.starts_with("invalid unquoted key") {
        "a key is set with an equals sign: lr = 0.1"
    } else if message.starts_with("unclosed table") {
        "a section is opened with its name in brackets: [optimizer]"
    } else if message.contains("recurs") {
        "nothing in a configuration is nested deeper than an array in a section"
    } else if message.starts_with("unclosed array") {
        "close the array with a bracket: [0.5, 0.75]"
    } else if message.contains("string") {
        "put a string in quotes, on one line: \"resnet18\""
    } else if message.contains("boolean") {
        "truth values are written true and false"
    } else if message.contains("mantissa") || message.contains("leading zero") || message.contains("digits") {
        "numbers are written 10, 0.1 or 5e-4"
    } else {
        "a line is `[section]`, `key = value` or `# comment`; strings are in quotes, arrays in brackets"
    };
    (format!("not valid TOML: {message}"), hint.into())
}

/// Returns the hint for a value without quotes.
fn quote(text: &str) -> String {
    match text {
        "yes" | "on" | "no" | "off" => "truth values are written true and false".into(),
        _ if text.starts_with(|first: char| first.is_ascii_digit()) => {
            "numbers are written 10, 0.1 or 5e-4; put anything else in quotes".into()
        }
        _ => format!("put it in quotes: \"{}\"", text.escape_default()),
    }
}
