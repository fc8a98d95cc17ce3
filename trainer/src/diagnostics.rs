//! Diagnostics for `--log-level` and `TRAINER_LOG`: events of `tracing`, off by default.
//!
//! | process | where the events go |
//! |---|---|
//! | worker of this program's launcher | `logs/rank-N/diagnostics.log` of the run folder |
//! | launcher; `single` and `dp` | `logs/diagnostics.log` of the run folder |
//! | worker of another launcher; commands without a run folder | stderr |
//!
//! Events before the run folder exists are kept in memory. They become the first lines of the file, or go to stderr if the
//! program ends without a run folder. A disabled event costs one load of an atomic.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use folder::Folder;
use parking_lot::Mutex;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::{Cli, Command};
use crate::console;
use crate::failure::Failure;

/// Name of the diagnostics file.
pub const FILE_NAME: &str = "diagnostics.log";

/// The destination of the events.
enum Sink {
    Memory(Vec<u8>),
    File(File),
    Stderr,
}

static SINK: Mutex<Sink> = Mutex::new(Sink::Memory(Vec::new()));

impl Sink {
    /// Sends all events to `next`, including the events in memory.
    fn switch_to(&mut self, mut next: Self) -> io::Result<()> {
        if let Self::Memory(bytes) = self {
            next.write(bytes)?;
        }
        *self = next;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Memory(memory) => memory.write_all(bytes),
            Self::File(file) => file.write_all(bytes),
            Self::Stderr => {
                if !bytes.is_empty() {
                    console::eprint(String::from_utf8_lossy(bytes));
                }
                Ok(())
            }
        }
    }
}

/// Writes each event to the sink. Each event arrives in one call.
struct SinkWriter;

impl Write for SinkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        SINK.lock().write(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Turns on the events that the command line or the environment requests.
///
/// # Errors
/// The level is unknown, or a worker's file cannot be written.
pub fn start(cli: &Cli) -> Result<(), Failure> {
    let Some(filter) = cli.log_level.as_deref().map(str::trim).filter(|text| !text.is_empty()) else { return Ok(()) };
    let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(|| SinkWriter);
    // A second call, as in tests, keeps the first subscriber
    let _ = tracing_subscriber::registry().with(targets(filter)?).with(layer).try_init();
    // A worker's logs are beside its error.json
    let report = std::env::var_os(launch::worker::FAILURE_FILE);
    let folder = report.as_deref().and_then(|path| Path::new(path).parent());
    match (&cli.command, folder) {
        (None | Some(Command::Train(_)), Some(folder)) => write_to(folder),
        (None | Some(Command::Train(_)), None) => Ok(()),
        (Some(_), _) => {
            write_to_stderr();
            Ok(())
        }
    }
}

/// Sends events to a file in `folder` from now on, if events are on.
///
/// # Errors
/// The file cannot be written.
pub fn write_to(folder: &Path) -> Result<(), Failure> {
    if LevelFilter::current() == LevelFilter::OFF {
        return Ok(());
    }
    let path = folder.join(FILE_NAME);
    let open = || Folder::of_file(folder)?.ensure_folder(folder.file_name().unwrap_or_default())?.append(FILE_NAME);
    open().and_then(|file| SINK.lock().switch_to(Sink::File(file))).map_err(|error| {
        let cause = format!("{}: cannot write diagnostics: {error}", path.display());
        Failure::run(cause, "make the folder writable, free some space, or leave --log-level and TRAINER_LOG out")
    })
}

/// Sends events to stderr from now on. At the end of the program, this prints the events that are still in memory.
pub fn write_to_stderr() {
    let mut sink = SINK.lock();
    if matches!(*sink, Sink::Memory(_)) {
        // The switch to stderr does not fail
        let _ = sink.switch_to(Sink::Stderr);
    }
}

/// Parses `LEVEL` or `LEVEL,TARGET=LEVEL,…`. A target is a module, such as `launch` or `trainer::strategy`, with its
/// submodules.
fn targets(filter: &str) -> Result<Targets, Failure> {
    let level = |text: &str| {
        // `LevelFilter` also parses numbers, which are not documented here.
        let known = ["off", "error", "warn", "info", "debug", "trace"].contains(&text);
        text.parse::<LevelFilter>().ok().filter(|_| known).ok_or_else(|| {
            Failure::usage(
                format!("--log-level {filter}: there is no level `{text}`"),
                "off, error, warn, info, debug or trace; for single modules: --log-level info,launch=debug (TRAINER_LOG has the \
                 same form)",
            )
        })
    };
    let mut targets = Targets::new();
    for part in filter.split(',').map(str::trim) {
        targets = match part.split_once('=') {
            Some((target, text)) => targets.with_target(target.trim(), level(text.trim())?),
            None => targets.with_default(level(part)?),
        };
    }
    Ok(targets)
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn a_filter_has_a_level_and_levels_of_modules() {
        let found = targets("info, launch=debug,comm=off").unwrap();
        for (target, level, enabled) in [
            ("trainer::engine", Level::INFO, true),
            ("trainer::engine", Level::DEBUG, false),
            ("launch::supervisor", Level::DEBUG, true),
            ("launch::supervisor", Level::TRACE, false),
            ("comm::store", Level::ERROR, false),
        ] {
            assert_eq!(found.would_enable(target, &level), enabled, "{target} {level}");
        }
        assert!(!targets("off").unwrap().would_enable("launch", &Level::ERROR));
    }

    #[test]
    fn an_unknown_level_is_refused() {
        for (filter, level) in [("loud", "loud"), ("info,comm=3", "3"), ("info,", ""), ("launch", "launch")] {
            let failure = targets(filter).unwrap_err();
            assert_eq!(failure.code, 2);
            assert_eq!(failure.message, format!("--log-level {filter}: there is no level `{level}`"));
            assert!(failure.hint.unwrap().contains("trace"));
        }
    }

    #[test]
    fn events_before_the_file_become_its_first_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let mut sink = Sink::Memory(Vec::new());
        sink.write(b"one\n").unwrap();
        sink.switch_to(Sink::File(File::create(&path).unwrap())).unwrap();
        sink.write(b"two\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
    }
}
