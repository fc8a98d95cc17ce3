//! The comparison as a page of text.

use super::{Comparison, ModeStats};
use crate::text::{aligned, loss, speed};

impl Comparison {
    /// Formats the page: speed and the parts of a step, then memory, traffic and losses, then errors. The text ends with
    /// a newline.
    pub fn render(&self) -> String {
        let Self { model, data, batch_size, steps, warmup, rounds, machine, .. } = self;
        let rounds = if *rounds == 1 { "one round".to_owned() } else { format!("median of {rounds} rounds") };
        let mut page = format!(
            "{model} on {data}, batch {batch_size}: {} steps after {warmup} of warm-up, {rounds}\n{machine}\n\n",
            steps.saturating_sub(*warmup)
        );
        let first = self.modes.iter().find_map(|mode| mode.figures.as_ref()).map(|figures| figures.images_per_s);
        let done = || self.modes.iter().filter_map(|mode| Some((mode, mode.figures.as_ref()?)));
        let mut speeds = vec![row(&[
            "mode",
            "workers",
            "images/s",
            "",
            "step ms",
            "data",
            "forward",
            "backward",
            "communication",
            "(hidden)",
            "optimizer",
            "other",
        ])];
        let mut others = vec![row(&["mode", "peak memory", "imbalance", "bytes/step", "loss", "loss diff"])];
        for (mode, figures) in done() {
            let parts = figures.parts_ms;
            let mut cells = vec![
                mode.mode.clone(),
                mode.workers.to_string(),
                speed(figures.images_per_s),
                first.map_or(String::new(), |first| format!("{:.2}x", figures.images_per_s / first)),
                milliseconds(figures.step_ms),
            ];
            let times = [parts.data, parts.forward, parts.backward, parts.communication, parts.communication_hidden];
            cells.extend(times.into_iter().chain([parts.optimizer, parts.other]).map(milliseconds));
            speeds.push(cells);
            others.push(vec![
                mode.mode.clone(),
                memory(figures),
                format!("{:.2}", figures.imbalance),
                bytes(figures.bytes_moved),
                loss(figures.loss),
                figures.loss_difference.map_or("–".into(), |d| if d == 0.0 { "0".into() } else { format!("{d:.1e}") }),
            ]);
        }
        if speeds.len() > 1 {
            page += &aligned(&speeds);
            page += "times in ms of rank 0; hidden communication runs under backward and is part of it\n\n";
            page += &aligned(&others);
            page += &format!(
                "loss after {} steps; the largest relative difference of a step's loss to that of single\n",
                done().map(|(_, figures)| figures.steps).max().unwrap_or(0)
            );
            page += "imbalance: the largest memory of a device over the mean of all; of a process, if each device has its own\n";
            if done().any(|(_, figures)| !figures.device_bytes.is_empty()) {
                page +=
                    "devices: the memory that each GPU has reserved; in dp on the CPU, the tensors of each device\n";
            }
        }
        for mode in &self.modes {
            if let Some(error) = &mode.error {
                page += &format!("\n{} failed:\n", mode.mode);
                error.lines().for_each(|line| page += &format!("  {line}\n"));
            }
        }
        page
    }
}

fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|&cell| cell.to_owned()).collect()
}

/// Lists the peak memory of each process. Equal values are not merged into one, because the column must show each
/// process.
fn memory(figures: &ModeStats) -> String {
    let list = |all: &[u64]| all.iter().map(|&one| bytes(one)).collect::<Vec<_>>().join(" + ");
    match figures.device_bytes.is_empty() {
        true => list(&figures.peak_bytes),
        false => format!("{} (devices {})", list(&figures.peak_bytes), list(&figures.device_bytes)),
    }
}

fn milliseconds(value: f64) -> String {
    match value {
        v if v < 0.005 => "0".into(),
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// Formats a byte count in powers of ten: `0`, `368 kB`, `89.5 MB`, `1.24 GB`.
pub(super) fn bytes(count: u64) -> String {
    match count as f64 {
        0.0 => "0".into(),
        b if b < 1e3 => format!("{count} B"),
        b if b < 1e6 => format!("{:.0} kB", b / 1e3),
        b if b < 1e8 => format!("{:.1} MB", b / 1e6),
        b if b < 1e9 => format!("{:.0} MB", b / 1e6),
        b => format!("{:.2} GB", b / 1e9),
    }
}
