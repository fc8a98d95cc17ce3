//! Progress of a download: a bar on a terminal, otherwise one line per tenth of the file.

use std::io::Write;

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::{Mutex, MutexGuard};

use crate::report::screen::Screen;
use crate::text;

/// Bytes between two lines if the length is unknown.
const STRIDE: u64 = 16_000_000;

/// Shows the progress of downloads, one at a time. All methods take `&self`, so a fetcher may report from any thread.
pub struct DownloadBar {
    state: Mutex<DownloadState>,
}

struct DownloadState {
    name: String,
    bar: Option<ProgressBar>,
    lines: Option<Box<dyn Write + Send>>,
    colour: bool,
    total: Option<u64>,
    done: u64,
    /// Number of tenths of the file, or of strides, that earlier lines have reported.
    reported: u64,
}

impl DownloadBar {
    /// Creates a bar on this process's screen ([`Screen::detect`]). `name` is the file's name for the user.
    pub fn new(name: &str) -> Self {
        Self::on(name, Screen::detect())
    }

    /// Creates a bar on the caller's screen.
    pub fn on(name: &str, screen: Screen) -> Self {
        let bar = screen.bar.map(|target| ProgressBar::with_draw_target(None, target));
        let (lines, colour) = (screen.lines, screen.colour);
        Self {
            state: Mutex::new(DownloadState {
                name: name.to_owned(),
                bar,
                lines,
                colour,
                total: None,
                done: 0,
                reported: 0,
            }),
        }
    }

    /// Sets the name of the next file.
    pub fn rename(&self, name: &str) {
        self.state().name = name.to_owned();
    }

    /// Starts a file of `total` bytes. `None`: the server does not send the length.
    pub fn start(&self, total: Option<u64>) {
        let mut state = self.state();
        (state.total, state.done, state.reported) = (total, 0, 0);
        if let Some(bar) = &state.bar {
            bar.reset();
            bar.set_style(style(total.is_some(), state.colour));
            match total {
                Some(total) => bar.set_length(total),
                None => bar.unset_length(),
            }
            bar.set_prefix(state.name.clone());
            return;
        }
        let size = total.map(|total| format!(", {}", text::bytes(total))).unwrap_or_default();
        let line = format!("downloading {}{size}", state.name);
        state.say(&line);
    }

    /// Adds `bytes` to the progress. A download that continues an earlier attempt first adds the bytes that are already on the
    /// disk.
    pub fn advance(&self, bytes: u64) {
        let mut state = self.state();
        state.done += bytes;
        if let Some(bar) = &state.bar {
            bar.inc(bytes);
            return;
        }
        let done = state.done;
        let (mark, line) = match state.total {
            Some(total) if total > 0 => {
                let tenths = (u128::from(done) * 10 / u128::from(total)).min(10) as u64;
                (tenths, format!("  {:>3}%  {} of {}", tenths * 10, text::bytes(done), text::bytes(total)))
            }
            _ => (done / STRIDE, format!("  {}", text::bytes(done))),
        };
        if mark > state.reported {
            state.reported = mark;
            state.say(&line);
        }
    }

    /// Removes the bar: the file is complete, or the download has failed.
    pub fn finish(&self) {
        if let Some(bar) = &self.state().bar {
            bar.finish_and_clear();
        }
    }

    fn state(&self) -> MutexGuard<'_, DownloadState> {
        self.state.lock()
    }
}

impl DownloadState {
    /// Writes one line. Ignores errors: a line of progress that cannot be written must not stop a download.
    fn say(&mut self, line: &str) {
        if let Some(lines) = &mut self.lines
            && writeln!(lines, "{line}").and_then(|()| lines.flush()).is_err()
        {
            self.lines = None;
        }
    }
}

fn style(length_known: bool, colour: bool) -> ProgressStyle {
    let bar = if colour { "{wide_bar:.cyan/dim}" } else { "{wide_bar}" };
    let known =
        format!("{{prefix}} {bar} {{decimal_bytes}}/{{decimal_total_bytes}} {{decimal_bytes_per_sec}} eta {{eta}}");
    let template = if length_known { &known } else { "{prefix} {spinner} {decimal_bytes} {decimal_bytes_per_sec}" };
    ProgressStyle::with_template(template).expect("the template is a constant and valid").progress_chars("━╸─")
}

#[cfg(test)]
mod tests {
    use indicatif::{InMemoryTerm, ProgressDrawTarget};

    use super::*;
    use crate::report::testing::TestOutput;

    #[test]
    fn without_a_terminal_there_is_a_line_per_tenth() {
        let output = TestOutput::default();
        let screen = Screen { lines: output.writer(), ..Screen::quiet() };
        let bar = DownloadBar::on("cifar-10-binary.tar.gz", screen);
        bar.start(Some(170_052_171));
        bar.advance(120_000_000); // From an earlier attempt
        (0..500).for_each(|_| bar.advance(100_104));
        bar.advance(171);
        bar.finish();
        bar.rename("unknown.gz");
        bar.start(None);
        (0..400).for_each(|_| bar.advance(100_000));
        bar.finish();
        insta::assert_snapshot!(output.text(), @r"
            downloading cifar-10-binary.tar.gz, 170.1 MB
               70%  120.0 MB of 170.1 MB
               80%  136.1 MB of 170.1 MB
               90%  153.1 MB of 170.1 MB
              100%  170.1 MB of 170.1 MB
            downloading unknown.gz
              16.0 MB
              32.0 MB
            ");
    }

    #[test]
    fn on_a_terminal_there_is_a_bar_that_finish_removes() {
        let term = InMemoryTerm::new(4, 90);
        let target = ProgressDrawTarget::term_like(Box::new(term.clone()));
        let bar = DownloadBar::on("train.gz", Screen { bar: Some(target), ..Screen::quiet() });
        for total in [Some(1000), None] {
            bar.start(total);
            bar.advance(500);
            bar.state().bar.as_ref().unwrap().force_draw();
            let shown = term.contents();
            assert!(shown.starts_with("train.gz ") && shown.contains("500 B"), "{shown}");
            assert_eq!(shown.contains("1.00 kB"), total.is_some(), "{shown}");
            bar.finish();
            assert_eq!(term.contents(), "");
        }
    }
}
