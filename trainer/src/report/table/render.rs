//! Renders the table for a screen and for a README.

use super::Row;
use crate::text::{left, right, width};

const TITLES: [&str; 9] = ["model", "data", "published", "reached", "epochs", "device", "minutes", "commit", "run"];
/// Whether each column contains numbers, which are aligned to the right.
const NUMBERS: [bool; 9] = [false, false, true, true, true, false, true, false, false];

/// Returns the text of each cell, in the order of the titles.
fn cells(row: &Row) -> [String; 9] {
    let none = || "–".to_owned();
    let published = row.published_top1.map_or_else(none, |top1| format!("{top1:.2}"));
    let Some(top1) = row.top1 else {
        let [model, data] = [row.model.clone(), row.dataset.clone()];
        return [model, data, published, "no run".to_owned(), none(), none(), none(), none(), none()];
    };
    let reached = match row.deviation {
        Some(deviation) => format!("{top1:.2} ± {deviation:.2} (n={})", row.runs),
        None => format!("{top1:.2}"),
    };
    let epochs = match (row.epochs, row.planned_epochs) {
        (Some(done), Some(planned)) if done != planned => format!("{done} of {planned}"),
        (done, _) => done.map_or_else(none, |done| done.to_string()),
    };
    // Show the first name and the number of the others.
    let several = |names: &[String], length: usize| match names {
        [] => none(),
        [one] => one.chars().take(length).collect(),
        [first, more @ ..] => format!("{} +{}", first.chars().take(length).collect::<String>(), more.len()),
    };
    [
        row.model.clone(),
        row.dataset.clone(),
        published,
        reached,
        epochs,
        row.device.clone().unwrap_or_else(none),
        row.minutes.map_or_else(none, |minutes| format!("{minutes:.1}")),
        several(&row.commits, 9),
        several(&row.folders, usize::MAX),
    ]
}

/// Formats the rows as aligned columns. The text ends with a newline.
pub fn text(rows: &[Row]) -> String {
    let lines: Vec<_> = std::iter::once(TITLES.map(str::to_owned)).chain(rows.iter().map(cells)).collect();
    let widths: Vec<_> =
        (0..TITLES.len()).map(|i| lines.iter().map(|line| width(&line[i])).max().unwrap_or(0)).collect();
    let line = |cells: &[String; 9]| {
        let padded: Vec<_> = (0..cells.len())
            .map(|i| if NUMBERS[i] { right(&cells[i], widths[i]) } else { left(&cells[i], widths[i]) })
            .collect();
        format!("{}\n", padded.join("  ").trim_end())
    };
    lines.iter().map(line).collect()
}

/// Formats the rows as a GitHub table. The text ends with a newline.
pub fn markdown(rows: &[Row]) -> String {
    let line = |cells: &[String; 9]| {
        let escaped: Vec<_> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
        format!("| {} |\n", escaped.join(" | "))
    };
    let rule = NUMBERS.map(|number| if number { "---:" } else { "---" }.to_owned());
    let lines = [line(&TITLES.map(str::to_owned)), line(&rule)];
    lines.into_iter().chain(rows.iter().map(|row| line(&cells(row)))).collect()
}
