//! Reports a worker's status to its launcher, and writes its failure report.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use super::failure_report::{FailureKind, FailureReport, unix_ms};
use super::screen::Screen;
use super::status_page::{Stage, StatusPage};
use comm::{CommError, ErrorKind};

/// The status of this process, for the panic hook.
static OF_PROCESS: OnceLock<WorkerStatus> = OnceLock::new();

/// Set by [`explain_panics`].
static EXPLAIN_PANIC: OnceLock<ExplainPanic> = OnceLock::new();

/// Converts the text of a panic to a message and a hint, if the text is an error for the user. Returns `None` for a defect of the
/// program.
pub type ExplainPanic = fn(&str) -> Option<(String, String)>;

/// Sets the function that distinguishes errors for the user from defects, where a library panics with both. The failure report of
/// such a panic is then an error with a hint, and not a panic with a location. Further calls do nothing.
pub fn explain_panics(explain: ExplainPanic) {
    let _ = EXPLAIN_PANIC.set(explain);
}

/// Reports this worker's status to the launcher. An update costs one system call and no allocation, and clones are cheap.
#[derive(Debug, Clone)]
pub struct WorkerStatus(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    rank: usize,
    page: StatusPage,
    stage: AtomicU8,
    /// Path of `error.json`.
    report: Option<PathBuf>,
    reported: AtomicBool,
}

impl WorkerStatus {
    /// Makes the status of rank `rank`. `report` is the path of `error.json`, if the worker writes this file.
    pub(super) fn new(rank: usize, page: StatusPage, report: Option<PathBuf>) -> Self {
        let stage = AtomicU8::new(Stage::Starting as u8);
        Self(Arc::new(Inner { rank, page, stage, report, reported: AtomicBool::new(false) }))
    }

    /// Returns a status that no launcher reads, for a rank that was started without this program's launcher, and for tests.
    ///
    /// # Errors
    /// The kernel cannot make an anonymous memory file.
    pub fn detached() -> std::io::Result<Self> {
        Ok(Self::new(0, StatusPage::create()?, None))
    }

    /// Sets the current activity: `status.set_status(format_args!("all_reduce #{n}, bucket {b}"))`. The launcher shows the text
    /// when this process dies, even by SIGKILL. Text after about 220 bytes is cut off.
    pub fn set_status(&self, text: fmt::Arguments<'_>) {
        self.0.page.set_status(Stage::from(self.0.stage.load(Ordering::Relaxed)), text);
        tracing::trace!(target: "launch::status", "{text}");
    }

    pub(super) fn set_joined(&self) {
        self.set_stage(Stage::Joined, format_args!("after rendezvous"));
    }

    /// Reports that training starts. From now on the launcher forwards a signal to this worker, and expects that the ranks agree on
    /// a step after which they save a checkpoint and exit. Before, the launcher ends the workers of all nodes.
    pub fn set_training(&self) {
        self.set_stage(Stage::Training, format_args!("before the first step"));
    }

    fn set_stage(&self, stage: Stage, text: fmt::Arguments<'_>) {
        self.0.stage.store(stage as u8, Ordering::Relaxed);
        self.set_status(text);
    }

    pub(super) fn send_heartbeat(&self) {
        self.0.page.send_heartbeat();
    }

    /// Writes `error.json` for the launcher, which shows the message when this process exits. If the file cannot be written, for
    /// example on a full disk, writes the message to stderr. Only the first failure of a process is kept. Set `permanent` if the
    /// same job would fail in the same way again: the launcher then does not restart it. Use [`WorkerStatus::record_comm_error`]
    /// for an error that another rank may have caused.
    pub fn record_error(&self, message: &str, hint: &str, permanent: bool) {
        self.write(FailureReport { permanent, ..self.report(message, hint) });
    }

    /// Does what [`WorkerStatus::record_error`] does, for an error of a collective. An error that another rank has caused
    /// counts as a consequence, unless ranks disagree.
    pub fn record_comm_error(&self, error: &CommError) {
        let consequence = match error.kind {
            ErrorKind::PeerLost | ErrorKind::NoAnswer | ErrorKind::Reset | ErrorKind::Aborted | ErrorKind::Timeout => {
                error.culprit != Some(self.0.rank)
            }
            ErrorKind::Usage | ErrorKind::Setup | ErrorKind::System => {
                error.culprit.is_some_and(|rank| rank != self.0.rank)
            }
            ErrorKind::Mismatch => false,
        };
        self.write(FailureReport { consequence, culprit: error.culprit, ..self.report(&error.message, &error.hint) });
    }

    /// Makes a panic in any thread write `error.json` before the existing panic hook runs.
    pub(super) fn hook_panics(&self) {
        if OF_PROCESS.set(self.clone()).is_err() {
            return;
        }
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if let Some(status) = OF_PROCESS.get() {
                let message = info.payload_as_str().unwrap_or("a value that is not text");
                let location = info.location().map(ToString::to_string);
                let explained = EXPLAIN_PANIC.get().and_then(|explain| explain(message));
                status.write(status.panic_report(message, location, explained));
            }
            before(info);
        }));
    }

    /// Makes the report of an error that happens now in this thread, and that no other rank has caused.
    fn report(&self, message: &str, hint: &str) -> FailureReport {
        FailureReport {
            rank: self.0.rank,
            kind: FailureKind::Error,
            message: message.to_owned(),
            hint: hint.to_owned(),
            location: None,
            thread: std::thread::current().name().map(str::to_owned),
            status: self.0.page.status().text,
            consequence: false,
            permanent: false,
            culprit: None,
            at_ms: unix_ms(SystemTime::now()),
        }
    }

    /// Makes the report of a panic in this thread. `explained` is the message and the hint of [`explain_panics`].
    fn panic_report(
        &self,
        message: &str,
        location: Option<String>,
        explained: Option<(String, String)>,
    ) -> FailureReport {
        match explained {
            Some((message, hint)) => self.report(&message, &hint),
            None => FailureReport { kind: FailureKind::Panic, location, ..self.report(message, "") },
        }
    }

    fn write(&self, report: FailureReport) {
        tracing::debug!(message = report.message, consequence = report.consequence, "this worker fails");
        let Some(path) = &self.0.report else { return };
        if self.0.reported.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Err(error) = report.write(path) {
            // Without a report, the launcher shows the last lines of the worker's stderr.
            let FailureReport { message, hint, .. } = report;
            let hint = if hint.is_empty() { hint } else { format!("\nhint: {hint}") };
            Screen::default().say(&format!("{}: cannot write: {error}\nerror: {message}{hint}", path.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comm(kind: ErrorKind, culprit: Option<usize>) -> CommError {
        CommError { kind, culprit, message: "m".into(), hint: "h".into() }
    }

    #[test]
    fn only_the_first_failure_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        let status = WorkerStatus::new(3, StatusPage::create().unwrap(), Some(path.clone()));
        status.set_status(format_args!("step {}", 7));
        status.record_comm_error(&comm(ErrorKind::PeerLost, Some(1)));
        status.record_error("later", "", false);
        let file = FailureReport::read(&path).unwrap();
        assert_eq!((file.rank, file.message.as_str(), file.hint.as_str()), (3, "m", "h"));
        assert_eq!((file.status.as_str(), file.consequence), ("step 7", true));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    fn an_explained_panic_is_an_error_with_a_hint() {
        let status = WorkerStatus::new(0, StatusPage::create().unwrap(), None);
        let location = Some("a.rs:1:2".to_owned());
        let defect = status.panic_report("index out of bounds", location.clone(), None);
        assert_eq!((defect.kind, &defect.location), (FailureKind::Panic, &location));
        assert_eq!((defect.message.as_str(), defect.hint.as_str()), ("index out of bounds", ""));
        let error = status.panic_report("many lines", location, Some(("memory is used up".into(), "smaller".into())));
        assert_eq!((error.kind, error.location), (FailureKind::Error, None));
        assert_eq!((error.message.as_str(), error.hint.as_str()), ("memory is used up", "smaller"));
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
            (ErrorKind::Setup, Some(0), false),
            (ErrorKind::Setup, Some(1), true),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("error.json");
            let status = WorkerStatus::new(0, StatusPage::create().unwrap(), Some(path.clone()));
            status.record_comm_error(&comm(kind, culprit));
            assert_eq!(FailureReport::read(&path).unwrap().consequence, consequence, "{kind:?} {culprit:?}");
        }
    }
}
