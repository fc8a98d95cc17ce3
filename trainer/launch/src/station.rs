//! A worker's means to say what it is doing, and to leave word when it fails.

use std::fmt;
use std::panic::PanicHookInfo;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use super::board::{Board, Stage};
use super::failure_file::{FailureFile, Kind};
use comm::{CommError, ErrorKind};

/// The process's own, for the panic hook.
static STATION: OnceLock<Reporter> = OnceLock::new();

#[derive(Debug)]
struct Station {
    rank: usize,
    board: Board,
    stage: AtomicU8,
    account: Option<PathBuf>,
    accounted: AtomicBool,
}

/// Says what this worker is doing. Cheap to clone, and to call: one system call, no allocation.
#[derive(Debug, Clone)]
pub struct Reporter(Arc<Station>);

impl Reporter {
    /// `account` is where `error.json` goes, if anywhere.
    pub(super) fn new(rank: usize, board: Board, account: Option<PathBuf>) -> Self {
        let stage = AtomicU8::new(Stage::Alone as u8);
        Self(Arc::new(Station { rank, board, stage, account, accounted: AtomicBool::new(false) }))
    }

    /// One that nobody listens to: a rank without a launcher, as in tests.
    ///
    /// # Errors
    /// No memory can be had that processes share.
    pub fn unheard() -> std::io::Result<Self> {
        Ok(Self::new(0, Board::create()?, None))
    }

    /// What the worker does from now on: `reporter.doing(format_args!("all_reduce #{n}, bucket {b}"))`. It is what the
    /// launcher shows when this process dies, however suddenly. Cut after some 220 bytes.
    pub fn doing(&self, what: fmt::Arguments<'_>) {
        let stage =
            if self.0.stage.load(Ordering::Relaxed) == Stage::Joined as u8 { Stage::Joined } else { Stage::Alone };
        self.0.board.report(stage, what);
    }

    pub(super) fn joined(&self) {
        self.0.stage.store(Stage::Joined as u8, Ordering::Relaxed);
        self.doing(format_args!("after rendezvous"));
    }

    pub(super) fn beat(&self) {
        self.0.board.beat();
    }

    /// Leaves `error.json` for the launcher, which shows the message when this process exits. Only the first failure of a
    /// process is kept. `consequence`: another rank's failure is the cause.
    pub fn failed(&self, message: &str, hint: &str, consequence: bool) {
        self.leave(Account { consequence, ..Account::error(message, hint) });
    }

    /// [`Reporter::failed`] with an error of the collectives: one that tells of another rank's end is a consequence.
    pub fn comm_failed(&self, error: &CommError) {
        let consequence = match error.kind {
            ErrorKind::PeerLost | ErrorKind::Aborted | ErrorKind::Timeout => error.culprit != Some(self.0.rank),
            ErrorKind::Mismatch | ErrorKind::Usage | ErrorKind::Setup | ErrorKind::System => false,
        };
        self.leave(Account { consequence, culprit: error.culprit, ..Account::error(&error.message, &error.hint) });
    }

    fn leave(&self, account: Account) {
        let Some(path) = &self.0.account else { return };
        if self.0.accounted.swap(true, Ordering::AcqRel) {
            return;
        }
        let Account { kind, message, hint, location, consequence, culprit } = account;
        let file = FailureFile {
            rank: self.0.rank,
            kind,
            message,
            hint,
            location,
            culprit,
            thread: std::thread::current().name().map(str::to_owned),
            doing: self.0.board.doing().text,
            consequence,
            at_ms: FailureFile::now_ms(),
        };
        if let Err(error) = file.write(path) {
            // stderr is in the logs too
            eprintln!("{}: cannot write: {error}", path.display());
        }
    }

    /// Has panics of any thread leave `error.json`, before what the hook did until now.
    pub(super) fn hook_panics(&self) {
        if STATION.set(self.clone()).is_err() {
            return;
        }
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if let Some(reporter) = STATION.get() {
                let location = info.location().map(ToString::to_string);
                reporter.leave(Account { kind: Kind::Panic, location, ..Account::error(message(info), "") });
            }
            before(info);
        }));
    }
}

/// What a worker knows of its failure.
struct Account {
    kind: Kind,
    message: String,
    hint: String,
    location: Option<String>,
    consequence: bool,
    culprit: Option<usize>,
}

impl Account {
    fn error(message: &str, hint: &str) -> Self {
        let (message, hint) = (message.to_owned(), hint.to_owned());
        Self { kind: Kind::Error, message, hint, location: None, consequence: false, culprit: None }
    }
}

fn message<'a>(info: &'a PanicHookInfo<'_>) -> &'a str {
    info.payload_as_str().unwrap_or("a value that is no text")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comm(kind: ErrorKind, culprit: Option<usize>) -> CommError {
        CommError { kind, culprit, message: "m".into(), hint: "h".into() }
    }

    #[test]
    fn the_first_failure_is_the_one_that_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        let reporter = Reporter::new(3, Board::create().unwrap(), Some(path.clone()));
        reporter.doing(format_args!("step {}", 7));
        reporter.comm_failed(&comm(ErrorKind::PeerLost, Some(1)));
        reporter.failed("later", "", false);
        let file = FailureFile::read(&path).unwrap();
        assert_eq!((file.rank, file.message.as_str(), file.hint.as_str()), (3, "m", "h"));
        assert_eq!((file.doing.as_str(), file.consequence), ("step 7", true));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    fn only_other_ranks_failures_are_consequences() {
        for (kind, culprit, consequence) in [
            (ErrorKind::PeerLost, Some(1), true),
            (ErrorKind::Aborted, None, true),
            (ErrorKind::Timeout, Some(1), true),
            (ErrorKind::Timeout, Some(0), false),
            (ErrorKind::Mismatch, Some(1), false),
            (ErrorKind::Usage, None, false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("error.json");
            Reporter::new(0, Board::create().unwrap(), Some(path.clone())).comm_failed(&comm(kind, culprit));
            assert_eq!(FailureFile::read(&path).unwrap().consequence, consequence, "{kind:?} {culprit:?}");
        }
    }
}
