//! Quotes words for a POSIX shell.

/// Returns `word` in single quotes, which a shell reads as one word.
pub fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Returns `word`, in single quotes if a shell would otherwise change or split it.
pub fn quoted_if_needed(word: &str) -> String {
    let plain = |symbol: char| symbol.is_ascii_alphanumeric() || "_-./:=@%+,".contains(symbol);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => quoted(word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_words_with_special_characters_need_quotes() {
        let words = ["runs/a-1", "", "my runs", "it's"].map(quoted_if_needed);
        assert_eq!(words, ["runs/a-1", "''", "'my runs'", r"'it'\''s'"]);
        assert_eq!(quoted("a"), "'a'");
    }
}
