//! Renders the table for a screen and for a README.

use super::AccuracyRow;
use crate::text::{align_left, align_right, width};

const COLUMNS: usize = 10;
const TITLES: [&str; COLUMNS] =
    ["model", "data", "published", "reached", "with tta", "epochs", "device", "minutes", "commit", "run"];
/// Whether each column contains numbers, which are aligned to the right.
const NUMBERS: [bool; COLUMNS] = [false, false, true, true, true, true, false, true, false, false];
/// The column of test-time augmentation. The table omits this column if no run used test-time augmentation.
const TTA: usize = 4;

/// Returns the indices of the columns to show.
fn shown(rows: &[AccuracyRow]) -> Vec<usize> {
    let tta = rows.iter().any(|row| row.tta_top1.is_some());
    (0..COLUMNS).filter(|&column| tta || column != TTA).collect()
}

/// Returns the text of each cell, in the order of the titles.
fn cells(row: &AccuracyRow) -> [String; COLUMNS] {
    let none = || "–".to_owned();
    let published = row.published_top1.map_or_else(none, |top1| format!("{top1:.2}"));
    let Some(top1) = row.top1 else {
        let [model, data] = [row.model.clone(), row.dataset.clone()];
        return [model, data, published, "no run".to_owned(), none(), none(), none(), none(), none(), none()];
    };
    let reached = match row.deviation {
        Some(deviation) => format!("{top1:.2} ± {deviation:.2} (n={})", row.runs),
        None => format!("{top1:.2}"),
    };
    let epochs = match (row.epochs, row.planned_epochs) {
        (Some(done), Some(planned)) if done != planned => format!("{done} of {planned}"),
        (done, _) => done.map_or_else(none, |done| done.to_string()),
    };
    let epochs = if row.weights.is_some() { format!("{epochs} from weights") } else { epochs };
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
        row.tta_top1.map_or_else(none, |top1| format!("{top1:.2}")),
        epochs,
        row.device.clone().unwrap_or_else(none),
        row.minutes.map_or_else(none, |minutes| format!("{minutes:.1}")),
        several(&row.commits, 9),
        several(&row.folders, usize::MAX),
    ]
}

/// Formats the rows as aligned columns. The text ends with a newline.
pub fn text(rows: &[AccuracyRow]) -> String {
    let lines: Vec<_> = std::iter::once(TITLES.map(str::to_owned)).chain(rows.iter().map(cells)).collect();
    let shown = shown(rows);
    let widths: Vec<_> = (0..COLUMNS).map(|i| lines.iter().map(|line| width(&line[i])).max().unwrap_or(0)).collect();
    let line = |cells: &[String; COLUMNS]| {
        let padded: Vec<_> = shown
            .iter()
            .map(|&i| if NUMBERS[i] { align_right(&cells[i], widths[i]) } else { align_left(&cells[i], widths[i]) })
            .collect();
        format!("{}\n", padded.join("  ").trim_end())
    };
    lines.iter().map(line).collect()
}

/// Formats the rows as a GitHub table. The text ends with a newline.
pub fn markdown(rows: &[AccuracyRow]) -> String {
    let shown = shown(rows);
    let line = |cells: &[String; COLUMNS]| {
        let escaped: Vec<_> = shown.iter().map(|&i| cells[i].replace('|', "\\|")).collect();
        format!("| {} |\n", escaped.join(" | "))
    };
    let rule = NUMBERS.map(|number| if number { "---:" } else { "---" }.to_owned());
    let lines = [line(&TITLES.map(str::to_owned)), line(&rule)];
    lines.into_iter().chain(rows.iter().map(|row| line(&cells(row)))).collect()
}
