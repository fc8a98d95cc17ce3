//! Text that is safe to show on a terminal.

use std::borrow::Cow;

/// Escapes control characters, except newlines and tabs. File names, class names and files may contain text of others. On the
/// screen such text must not set the terminal's title, erase lines or reverse the direction of text.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |symbol| matches!(symbol, '\n' | '\t'))
}

/// Does what [`printable`] does, and also escapes newlines and tabs, so the text stays on its line.
pub fn printable_line(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

fn escaped(text: &str, keep: impl Fn(char) -> bool) -> Cow<'_, str> {
    let acts = |symbol: char| acts_on_terminals(symbol) && !keep(symbol);
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for symbol in text.chars() {
        match acts(symbol) {
            true => shown.extend(symbol.escape_debug()),
            false => shown.push(symbol),
        }
    }
    Cow::Owned(shown)
}

/// Returns whether a terminal interprets the character instead of showing it: control characters, line separators, and marks that
/// change the direction of the following text.
fn acts_on_terminals(symbol: char) -> bool {
    symbol.is_control() || matches!(symbol, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        for (text, shown) in [
            ("\x1b]0;owned\x07cat", r"\u{1b}]0;owned\u{7}cat"),
            ("\u{9b}2Jcat\r\x08\x7f", r"\u{9b}2Jcat\r\u{8}\u{7f}"),
            ("\u{202e}gpj.tac\u{2066}", r"\u{202e}gpj.tac\u{2066}"),
            ("a\tb\nc \\ 飛行機 é ━╸", "a\tb\nc \\ 飛行機 é ━╸"),
        ] {
            assert_eq!(printable(text), shown);
        }
        assert_eq!(printable_line("a\tb\nc"), r"a\tb\nc");
        assert!(matches!(printable("plain\n"), Cow::Borrowed(_)));
    }
}
