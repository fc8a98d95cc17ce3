//! A worker's means to say what it is doing, and to leave word when it fails.

use std::fmt;
use std::panic::PanicHookInfo;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use super::failure_report::{FailureReport, Kind};
use super::status_page::{Stage, StatusPage};
use comm::{CommError, ErrorKind};

/// The process's own, for the panic hook.
static PROCESS_STATUS: OnceLock<WorkerStatus> = OnceLock::new();

#[derive(Debug)]
struct Inner {
    rank: usize,
    page: StatusPage,
    stage: AtomicU8,
    account: Option<PathBuf>,
    accounted: AtomicBool,
}

/// Says what this worker is doing. Cheap to clone, and to call: one system call, no allocation.
#[derive(Debug, Clone)]
pub struct WorkerStatus(Arc<Inner>);

impl WorkerStatus {
    /// `account` is where `error.json` goes, if anywhere.
    pub(super) fn new(rank: usize, page: StatusPage, account: Option<PathBuf>) -> Self {
        let stage = AtomicU8::new(Stage::Starting as u8);
        Self(Arc::new(Inner { rank, page, stage, account, accounted: AtomicBool::new(false) }))
    }

    /// One that nobody listens to: a rank without a launcher, as in tests.
    ///
    /// # Errors
    /// No memory can be had that processes share.
    pub fn detached() -> std::io::Result<Self> {
        Ok(Self::new(0, StatusPage::create()?, None))
    }

    /// What the worker does from now on: `status.set_status(format_args!("all_reduce #{n}, bucket {b}"))`. It is what the
    /// launcher shows when this process dies, however suddenly. Cut after some 220 bytes.
    pub fn set_status(&self, what: fmt::Arguments<'_>) {
        let stage =
            if self.0.stage.load(Ordering::Relaxed) == Stage::Joined as u8 { Stage::Joined } else { Stage::Starting };
        self.0.page.set_status(stage, what);
    }

    pub(super) fn joined(&self) {
        self.0.stage.store(Stage::Joined as u8, Ordering::Relaxed);
        self.set_status(format_args!("after rendezvous"));
    }

    pub(super) fn beat(&self) {
        self.0.page.beat();
    }

    /// Leaves `error.json` for the launcher, which shows the message when this process exits. Only the first failure of a
    /// process is kept. `consequence`: another rank's failure is the cause.
    pub fn record_error(&self, message: &str, hint: &str, consequence: bool) {
        self.leave(Account { consequence, ..Account::error(message, hint) });
    }

    /// [`WorkerStatus::record_error`] with an error of the collectives: one that tells of another rank's end is a consequence.
    pub fn record_comm_error(&self, error: &CommError) {
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
        let file = FailureReport {
            rank: self.0.rank,
            kind,
            message,
            hint,
            location,
            culprit,
            thread: std::thread::current().name().map(str::to_owned),
            doing: self.0.page.status().text,
            consequence,
            at_ms: FailureReport::now_ms(),
        };
        if let Err(error) = file.write(path) {
            // stderr is in the logs too
            eprintln!("{}: cannot write: {error}", path.display());
        }
    }

    /// Has panics of any thread leave `error.json`, before what the hook did until now.
    pub(super) fn hook_panics(&self) {
        if PROCESS_STATUS.set(self.clone()).is_err() {
            return;
        }
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if let Some(status) = PROCESS_STATUS.get() {
                let location = info.location().map(ToString::to_string);
                status.leave(Account { kind: Kind::Panic, location, ..Account::error(message(info), "") });
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
        let status = WorkerStatus::new(3, StatusPage::create().unwrap(), Some(path.clone()));
        status.set_status(format_args!("step {}", 7));
        status.record_comm_error(&comm(ErrorKind::PeerLost, Some(1)));
        status.record_error("later", "", false);
        let file = FailureReport::read(&path).unwrap();
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
            WorkerStatus::new(0, StatusPage::create().unwrap(), Some(path.clone()))
                .record_comm_error(&comm(kind, culprit));
            assert_eq!(FailureReport::read(&path).unwrap().consequence, consequence, "{kind:?} {culprit:?}");
        }
    }
}
