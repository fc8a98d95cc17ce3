//! A plan as a table for the start-up screen.

use super::RunPlan;
use super::choice::Mode;

/// Keys for which 0 or false is a setting, not "off".
const ZERO_MEANS_SOMETHING: &[&str] = &["seed", "epochs", "momentum", "every", "overlap", "keep_best", "tensorboard"];

/// A section's name and its keys with their values.
pub type Row = (String, Vec<(String, String)>);

impl RunPlan {
    /// Everything resolved, a row a section: `("train", [("epochs", "10"), …])`.
    ///
    /// What is switched off is gathered under the one key `off`, so that a row fits on a line or two; with one worker
    /// `[parallel]` is its mode alone.
    ///
    /// # Errors
    /// Those of [`RunPlan::to_toml`].
    pub fn table(&self) -> Result<Vec<Row>, toml::ser::Error> {
        let mut rows: Vec<Row> = Vec::new();
        for line in self.to_toml()?.lines() {
            if let Some(section) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                rows.push((section.to_owned(), Vec::new()));
            } else if let (Some((key, value)), Some((section, pairs))) = (line.split_once(" = "), rows.last_mut()) {
                let alone = section == "parallel" && self.parallel.mode == Mode::Single && key != "mode";
                if !alone {
                    pairs.push((key.to_owned(), plain(value)));
                }
            }
        }
        Ok(rows.into_iter().map(|(section, pairs)| (section, gather_off(pairs))).collect())
    }
}

/// A TOML value without its quotes: `["crop:4", "flip"]` is `crop:4 flip`.
fn plain(value: &str) -> String {
    let list = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let unquote = |word: &str| word.trim().trim_matches(['"', '\'']).to_owned();
    match list {
        Some(items) => items.split(',').map(unquote).collect::<Vec<_>>().join(" "),
        None => {
            let word = unquote(value);
            // 25.0 reads as 25 here; the file keeps the point.
            word.strip_suffix(".0").map(str::to_owned).unwrap_or(word)
        }
    }
}

/// Moves the keys that are switched off behind the others.
fn gather_off(pairs: Vec<(String, String)>) -> Vec<(String, String)> {
    let is_off = |(key, value): &(String, String)| {
        matches!(value.as_str(), "0" | "false" | "none" | "") && !ZERO_MEANS_SOMETHING.contains(&key.as_str())
    };
    let (off, mut on): (Vec<_>, Vec<_>) = pairs.into_iter().partition(is_off);
    if !off.is_empty() {
        let names: Vec<String> = off.into_iter().map(|(key, _)| key).collect();
        on.push(("off".to_owned(), names.join(" ")));
    }
    on
}
