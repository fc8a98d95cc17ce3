//! The outputs of a run: the terminal with its progress bar, and the writer of whole lines.

use std::io::{self, IsTerminal, Write};

use indicatif::ProgressDrawTarget;

use crate::console;

/// The outputs that show a run.
pub struct Screen {
    /// Draw target of the bar. `None` without a terminal.
    pub bar: Option<ProgressDrawTarget>,
    /// Writer of whole lines. `None` if nothing is to be shown.
    pub lines: Option<Box<dyn Write + Send>>,
    /// Whether to write lines for steps: true if there is no bar, or if the lines go to a file.
    pub step_lines: bool,
    /// Whether the bar may have colours.
    pub colour: bool,
}

impl Screen {
    /// Detects the screen of this process. There is a bar if stderr is a terminal that can move its cursor. There are
    /// step lines if stdout is not a terminal or there is no bar. There are colours unless `NO_COLOR` is set
    /// (<https://no-color.org>).
    pub fn detect() -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let bar = io::stderr().is_terminal() && !dumb;
        Self {
            bar: bar.then(ProgressDrawTarget::stderr),
            lines: Some(Box::new(console::Stdout)),
            step_lines: !bar || !io::stdout().is_terminal(),
            colour: !set("NO_COLOR"),
        }
    }

    /// Returns a screen that shows nothing.
    pub fn quiet() -> Self {
        Self { bar: None, lines: None, step_lines: false, colour: false }
    }
}
