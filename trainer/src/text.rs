//! Numbers, durations and columns as readable text.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Returns the number of terminal columns of `text`.
pub fn width(text: &str) -> usize {
    text.width()
}

/// Returns the longest prefix of `text` with at most `columns`.
pub fn prefix(text: &str, columns: usize) -> &str {
    let mut used = 0;
    let end = text.char_indices().find(|(_, c)| {
        used += c.width().unwrap_or(0);
        used > columns
    });
    &text[..end.map_or(text.len(), |(at, _)| at)]
}

/// Truncates `text` to at most `columns`, with `…` in place of the omitted part.
pub fn truncated(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    columns.checked_sub(1).map_or_else(String::new, |columns| format!("{}…", prefix(text, columns)))
}

/// Escapes line ends and tabs, so that a name stays in its line of a table.
pub fn one_line(name: &str) -> String {
    name.replace('\n', "\\n").replace('\r', "\\r").replace('\t', "\\t")
}

/// Pads `text` with blanks on the right, up to `columns`.
pub fn align_left(text: &str, columns: usize) -> String {
    format!("{text}{}", " ".repeat(columns.saturating_sub(width(text))))
}

/// Pads `text` with blanks on the left, up to `columns`.
pub fn align_right(text: &str, columns: usize) -> String {
    format!("{}{text}", " ".repeat(columns.saturating_sub(width(text))))
}

/// Aligns columns, two blanks apart: the first to the left, the others to the right.
pub fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|c| rows.iter().filter_map(|row| row.get(c)).map(|cell| width(cell)).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(
                |(column, (cell, &width))| if column == 0 { align_left(cell, width) } else { align_right(cell, width) },
            )
            .collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// Formats a number with its noun: `1 step`, `1,200 steps`.
pub fn counted(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", thousands(count), if count == 1 { "" } else { "s" })
}

/// Formats a number with thousands separators: `11,173,962`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a loss: `1.2345`, `123.4`, `1.2e9`, `NaN`.
pub fn loss(value: f64) -> String {
    match value.abs() {
        v if !v.is_finite() => value.to_string(),
        v if v < 100.0 => format!("{value:.4}"),
        v if v < 100_000.0 => format!("{value:.1}"),
        _ => format!("{value:.1e}"),
    }
}

/// Formats a percentage: `93.02%`.
pub fn percent(value: f64) -> String {
    format!("{value:.2}%")
}

/// Formats a learning rate with three significant digits: `0.1`, `0.0981`, `1.23e-5`.
pub fn rate(value: f64) -> String {
    if !value.is_finite() || value == 0.0 {
        return value.to_string();
    }
    let rounded: f64 = format!("{value:.2e}").parse().unwrap_or(value);
    if rounded.abs() < 1e-4 { format!("{rounded:e}") } else { rounded.to_string() }
}

/// Formats images per second: `18.9`, `3,456`.
pub fn speed(value: f64) -> String {
    match value {
        v if !v.is_finite() || v < 0.0 => "–".to_owned(),
        v if v < 99.95 => format!("{v:.1}"),
        v => thousands(v.round() as u64),
    }
}

/// Formats a duration: `0.4s`, `41s`, `3m05s`, `1h02m`, `2d03h`.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "–".to_owned();
    }
    if seconds < 9.95 {
        return format!("{seconds:.1}s");
    }
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// Formats a byte count in powers of 1000, as download pages do: `512 B`, `29.4 MB`.
pub fn bytes(number: u64) -> String {
    let mut value = number as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if value < 999.5 {
            return if unit == "B" { format!("{value} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1000.0;
    }
    format!("{value:.1} TB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_separators_and_few_digits() {
        assert_eq!([0, 999, 1000, 11_173_962].map(thousands), ["0", "999", "1,000", "11,173,962"]);
        assert_eq!(
            [2.314_555, 123.456, 1.23e9, f64::NAN, f64::INFINITY].map(loss),
            ["2.3146", "123.5", "1.2e9", "NaN", "inf"]
        );
        assert_eq!([0.1, 0.098_123, 0.0, 1.234_5e-5, 1.0].map(rate), ["0.1", "0.0981", "0", "1.23e-5", "1"]);
        assert_eq!([18.94, 99.96, 3456.4, f64::INFINITY].map(speed), ["18.9", "100", "3,456", "–"]);
        assert_eq!(
            [0.42, 41.4, 59.6, 185.0, 3725.0, 183_600.0, f64::NAN].map(duration),
            ["0.4s", "41s", "1m00s", "3m05s", "1h02m", "2d03h", "–"]
        );
        assert_eq!([512, 29_400_000, 170_498_071].map(bytes), ["512 B", "29.4 MB", "170.5 MB"]);
    }

    #[test]
    fn widths_are_counted_in_terminal_columns() {
        assert_eq!(truncated("T-shirt/top", 7), "T-shir…");
        assert_eq!(truncated("T-shirt", 7), "T-shirt");
        assert_eq!(truncated("飛行機と船", 7), "飛行機…");
        assert_eq!(width(&align_left("飛行機", 8)), 8);
        assert_eq!(align_right("cat", 5), "  cat");
        assert_eq!(truncated("cat", 0), "");
    }
}
