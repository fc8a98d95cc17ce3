//! The failures of a job, and the launcher's text about them: the root cause first, then its consequences.

use std::fmt::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::failure_report::{FailureKind, unix_ms};
use super::node_failure::NodeFailure;
use super::process::{WorkerExit, WorkerProcess, describe_exit};
use super::signals;
use super::status_page::Status;

/// Where a failure happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FailureOrigin {
    /// A worker of this node.
    Rank(usize),
    /// Another node: its launcher or one of its workers.
    Node(usize),
    /// The connection to another node.
    Connection,
}

/// One failure: of a worker, of another node, or of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorkerFailure {
    pub(super) origin: FailureOrigin,
    /// Completes `rank 1 …`.
    pub(super) what: String,
    /// Whether another failure caused this one.
    pub(super) consequence: bool,
    /// Milliseconds since 1970, to find the earliest failure.
    pub(super) at_ms: u64,
    /// The rank that the worker's report names as the cause.
    pub(super) culprit: Option<usize>,
    /// Whether the exit code is 2: the input is wrong.
    pub(super) usage: bool,
    /// Whether a restart would fail in the same way again.
    pub(super) permanent: bool,
    pub(super) hint: Option<String>,
    pub(super) process: Option<ProcessDetails>,
}

/// Details of a worker process of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProcessDetails {
    pub(super) pid: i32,
    pub(super) ran: Duration,
    /// The worker's last status. `None` for any program, which reports no status.
    pub(super) status: Option<Status>,
    /// Name of a stream, and its last lines.
    pub(super) output: (&'static str, Vec<String>),
    pub(super) folder: PathBuf,
}

impl WorkerFailure {
    /// Makes the failure of a worker that has ended.
    pub(super) fn exited(worker: &WorkerProcess, exit: &WorkerExit) -> Self {
        let at_ms = unix_ms(exit.at);
        // In any other program, exit code 2 may have another meaning.
        let usage = exit.status.code() == Some(2) && !worker.is_any_program();
        let base = Self {
            origin: FailureOrigin::Rank(worker.rank),
            what: describe_exit(exit.status),
            consequence: false,
            at_ms,
            culprit: None,
            usage,
            permanent: usage,
            hint: exit
                .status
                .signal()
                .and_then(|signal| signals::hint(signal, worker.is_any_program()))
                .map(str::to_owned),
            process: Some(details(worker, exit.last_status.clone())),
        };
        // If a signal has killed the worker, the signal is the cause. The worker may have been killed while it wrote a report.
        let Some(report) = exit.report.as_ref().filter(|_| exit.status.signal().is_none()) else { return base };
        let code = exit.status.code().unwrap_or_default();
        let verb = match report.kind {
            FailureKind::Panic => "panicked",
            FailureKind::Error => "failed",
        };
        let mut what = format!("{verb} (exit code {code}): {}", report.message);
        if let Some(location) = &report.location {
            let thread = report.thread.as_deref().filter(|name| *name != "main");
            let thread = thread.map_or_else(String::new, |name| format!(" in thread `{name}`"));
            // Writing to a String cannot fail
            let _ = write!(what, ", at {location}{thread}");
        }
        let hint = Some(report.hint.clone()).filter(|hint| !hint.is_empty());
        let at_ms = at_ms.min(report.at_ms);
        let consequence = report.consequence && report.kind == FailureKind::Error;
        let (permanent, culprit) = (base.permanent || report.permanent, report.culprit);
        Self { what, consequence, at_ms, permanent, culprit, hint: hint.or(base.hint.clone()), ..base }
    }

    /// Makes the failure of a worker that runs and sends no heartbeats.
    pub(super) fn stalled(worker: &WorkerProcess, silent: Duration) -> Self {
        let seconds = format!("{:.1} s", silent.as_secs_f64());
        let (what, hint) = match worker.state() {
            Some('T') => (
                format!("has been stopped for {seconds} (SIGSTOP or SIGTSTP)"),
                Some("a user or a program has stopped it; `kill -CONT` before the timeout continues it".to_owned()),
            ),
            Some('t') => (format!("has been held by a debugger for {seconds}"), None),
            Some('D') => (
                format!("has been waiting for a device for {seconds} and cannot even be interrupted"),
                Some("a disk or network file system does not answer: see `dmesg | tail`".to_owned()),
            ),
            _ => (
                format!("has given no sign of life for {seconds}"),
                Some("it hangs, or the machine is too busy for it; [parallel] timeout_s allows for more".to_owned()),
            ),
        };
        Self {
            origin: FailureOrigin::Rank(worker.rank),
            what,
            consequence: false,
            at_ms: unix_ms(SystemTime::now()).saturating_sub(silent.as_millis() as u64),
            culprit: None,
            usage: false,
            permanent: false,
            hint,
            process: Some(details(worker, worker.page.status())),
        }
    }

    /// Makes the failure of a worker that runs, and that another rank's `failure` names as the cause.
    pub(super) fn waited_for(worker: &WorkerProcess, failure: &WorkerFailure) -> Self {
        Self {
            what: "kept others waiting".to_owned(),
            hint: Some(
                "it runs, but has not reached the collective in which the others wait; its last lines may say why"
                    .to_owned(),
            ),
            at_ms: failure.at_ms,
            ..Self::stalled(worker, Duration::ZERO)
        }
    }

    /// Makes a failure from the report of another node's launcher, or from the end of the connection to that launcher.
    pub(super) fn on_other_node(failure: &NodeFailure) -> Self {
        let at_ms = unix_ms(SystemTime::now());
        let origin =
            if failure.broken.is_some() { FailureOrigin::Connection } else { FailureOrigin::Node(failure.node) };
        Self {
            origin,
            what: failure.what.clone(),
            consequence: false,
            at_ms,
            culprit: None,
            usage: false,
            permanent: false,
            hint: failure.hint().map(str::to_owned),
            process: None,
        }
    }

    /// Returns the failure as one sentence: `rank 1 was killed by SIGKILL`.
    pub(super) fn headline(&self) -> String {
        match self.origin {
            FailureOrigin::Rank(rank) => format!("rank {rank} {}", self.what),
            FailureOrigin::Node(node) => format!("node {node}: {}", self.what),
            FailureOrigin::Connection => self.what.clone(),
        }
    }
}

fn details(worker: &WorkerProcess, status: Status) -> ProcessDetails {
    ProcessDetails {
        pid: worker.pid.as_raw_nonzero().get(),
        ran: worker.ran(),
        status: Some(status).filter(|_| !worker.is_any_program()),
        output: worker.output.last_lines(),
        folder: worker.folder.clone(),
    }
}

/// Sorts failures: causes before consequences, and earlier before later. The root cause is then the first.
pub(super) fn sort(failures: &mut [WorkerFailure]) {
    failures.sort_by_key(|failure| (failure.consequence, failure.at_ms));
}

/// Returns the report's text. `failures` must be sorted by [`sort`]. `alive` are the ranks that the launcher is about to end.
/// `node` is the index of this node in a job of several nodes.
pub(super) fn render(failures: &[WorkerFailure], alive: &[usize], node: Option<usize>) -> String {
    let Some(root) = failures.first() else { return String::new() };
    let mut text = String::from("error: ");
    let on = node
        .filter(|_| matches!(root.origin, FailureOrigin::Rank(_)))
        .map_or_else(String::new, |node| format!("node {node}: "));
    text += &on;
    text += &root.headline().replace('\n', "\n  ");
    text.push('\n');
    if let Some(details) = &root.process {
        if let Some(status) = &details.status {
            text += &format!("  it was doing: {}", status.text);
            if status.age >= Duration::from_secs(1) {
                text += &format!(" (for {:.0} s)", status.age.as_secs_f64());
            }
            text.push('\n');
        }
        text += &format!(
            "  process {}, ran {:.1} s, logs in {}\n",
            details.pid,
            details.ran.as_secs_f64(),
            details.folder.display()
        );
        let (stream, lines) = &details.output;
        match lines.as_slice() {
            [] => text += "  it has written nothing\n",
            lines => {
                text += &format!("  last lines of its {stream}:\n");
                lines.iter().for_each(|line| text += &format!("    | {line}\n"));
            }
        }
    }
    if let Some(hint) = &root.hint {
        text += &format!("  hint: {}\n", hint.replace('\n', "\n  "));
    }
    for (line, who) in consequences(&failures[1..]) {
        let _ = writeln!(text, "  {line}{who}");
    }
    match alive {
        [] => {}
        [rank] => text += &format!("  rank {rank} is being ended\n"),
        ranks => {
            let list: Vec<_> = ranks.iter().map(usize::to_string).collect();
            text += &format!("  ranks {} are being ended\n", list.join(", "));
        }
    }
    text
}

/// Returns one line per further failure. Ranks with the same message share a line, since after a mismatch all ranks report the
/// same error.
fn consequences(failures: &[WorkerFailure]) -> Vec<(String, String)> {
    let mut lines: Vec<(String, String)> = Vec::new();
    for failure in failures {
        let FailureOrigin::Rank(rank) = failure.origin else {
            lines.push((format!("and: {}", failure.headline()), String::new()));
            continue;
        };
        let what = failure.what.lines().next().unwrap_or_default();
        let start = if failure.consequence { "because of it: rank" } else { "and: rank" };
        let same = lines.iter_mut().find(|(line, _)| line.starts_with(start) && line.ends_with(&format!(" {what}")));
        match same {
            Some((_, others)) if others.is_empty() => *others = format!(" (rank {rank} too)"),
            Some((_, others)) => {
                others.truncate(others.len() - " too)".len());
                *others += &format!(", {rank} too)");
            }
            None => lines.push((format!("{start} {rank} {what}"), String::new())),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use comm::ErrorKind;

    use super::super::status_page::Stage;
    use super::*;

    fn failure(rank: usize, what: &str, consequence: bool, at_ms: u64) -> WorkerFailure {
        let status =
            Status { stage: Stage::Joined, text: "all_reduce #17, bucket 3".into(), age: Duration::from_secs(4) };
        let output = ("stderr", vec!["one".to_owned(), "two".to_owned()]);
        let folder = PathBuf::from("runs/x/logs/rank-1");
        let status = Some(status);
        let process = ProcessDetails { pid: 42, ran: Duration::from_millis(12_340), status, output, folder };
        WorkerFailure {
            origin: FailureOrigin::Rank(rank),
            what: what.into(),
            consequence,
            at_ms,
            culprit: None,
            usage: false,
            permanent: false,
            hint: Some("look".into()),
            process: Some(process),
        }
    }

    #[test]
    fn the_earliest_cause_comes_first() {
        let mut failures = [
            failure(0, "failed (exit code 1): rank 1 is gone\nhint: x", true, 1),
            failure(2, "was killed by SIGSEGV (signal 11)", false, 9),
            failure(1, "was killed by SIGKILL (signal 9)", false, 5),
            failure(5, "failed (exit code 1): rank 1 is gone", true, 3),
            failure(6, "failed (exit code 1): rank 1 is gone", true, 4),
        ];
        sort(&mut failures);
        let expected = "error: rank 1 was killed by SIGKILL (signal 9)
  it was doing: all_reduce #17, bucket 3 (for 4 s)
  process 42, ran 12.3 s, logs in runs/x/logs/rank-1
  last lines of its stderr:
    | one
    | two
  hint: look
  and: rank 2 was killed by SIGSEGV (signal 11)
  because of it: rank 0 failed (exit code 1): rank 1 is gone (rank 5, 6 too)
  ranks 3, 4 are being ended
";
        assert_eq!(render(&failures, &[3, 4], None), expected);
        assert!(render(&failures, &[], Some(2)).starts_with("error: node 2: rank 1 was killed"));
        let mut remote = NodeFailure {
            node: 1,
            what: "rank 5 was killed".into(),
            stopped_by: None,
            restartable: true,
            broken: None,
        };
        assert_eq!(
            render(&[WorkerFailure::on_other_node(&remote)], &[0], Some(0)),
            "error: node 1: rank 5 was killed\n  rank 0 is being ended\n"
        );
        for (kind, hint) in [
            (ErrorKind::NoAnswer, "the network"),
            (ErrorKind::Reset, "its launcher was killed"),
            (ErrorKind::PeerLost, "it has ended"),
        ] {
            remote.broken = Some(kind);
            let text = render(&[WorkerFailure::on_other_node(&remote)], &[0], Some(0));
            assert!(text.starts_with(&format!("error: rank 5 was killed\n  hint: {hint}")), "{text}");
        }
    }
}
