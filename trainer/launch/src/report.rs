//! What the launcher says about a job that failed: the root cause first, then what came of it.

use std::fmt::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::failure_report::Kind;
use super::process::{End, Process, how};
use super::signals;
use super::status_page::Status;

/// Who failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Who {
    /// A worker of this node.
    Rank(usize),
    /// Another node's launcher, or workers.
    Node(usize),
}

/// One failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorkerFailure {
    pub(super) who: Who,
    /// Completes `rank 1 …`.
    pub(super) what: String,
    /// Somebody else's failure is the cause.
    pub(super) consequence: bool,
    /// Milliseconds since 1970, to find the earliest.
    pub(super) at_ms: u64,
    /// The rank that this one complains about.
    pub(super) culprit: Option<usize>,
    /// Exit code 2: the input is wrong, and would be again.
    pub(super) usage: bool,
    pub(super) hint: Option<String>,
    pub(super) details: Option<Details>,
}

/// What is known of a process of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Details {
    pub(super) pid: i32,
    pub(super) ran: Duration,
    pub(super) doing: Status,
    /// Name of a stream, and its last lines.
    pub(super) last: (&'static str, Vec<String>),
    pub(super) folder: PathBuf,
}

impl WorkerFailure {
    /// A worker that has ended badly.
    pub(super) fn ended(process: &Process, end: &End) -> Self {
        let who = Who::Rank(process.rank);
        let details = details(process, end.doing.clone());
        let at_ms = millis(end.at);
        let base = Self {
            who,
            what: how(end.status),
            consequence: false,
            at_ms,
            culprit: None,
            usage: end.status.code() == Some(2),
            hint: end.status.signal().and_then(signals::hint).map(str::to_owned),
            details: Some(details),
        };
        // killed while it wrote its account: the signal is the news
        let Some(account) = end.account.as_ref().filter(|_| end.status.signal().is_none()) else { return base };
        let code = end.status.code().unwrap_or_default();
        let verb = match account.kind {
            Kind::Panic => "panicked",
            Kind::Error => "failed",
        };
        let mut what = format!("{verb} (exit code {code}): {}", account.message);
        if let Some(location) = &account.location {
            let thread = account.thread.as_deref().filter(|name| *name != "main");
            let thread = thread.map_or_else(String::new, |name| format!(" in thread `{name}`"));
            // infallible: it is a String
            let _ = write!(what, ", at {location}{thread}");
        }
        let hint = Some(account.hint.clone()).filter(|hint| !hint.is_empty());
        let at_ms = at_ms.min(account.at_ms);
        let consequence = account.consequence && account.kind == Kind::Error;
        Self { what, consequence, at_ms, culprit: account.culprit, hint: hint.or(base.hint.clone()), ..base }
    }

    /// A worker that runs and gives no sign of life.
    pub(super) fn silent(process: &Process, silent: Duration) -> Self {
        let seconds = format!("{:.1} s", silent.as_secs_f64());
        let (what, hint) = match process.state() {
            Some('T') => (
                format!("has been stopped for {seconds} (SIGSTOP or SIGTSTP)"),
                Some("somebody stopped it: `kill -CONT` in time lets it go on".to_owned()),
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
            who: Who::Rank(process.rank),
            what,
            consequence: false,
            at_ms: millis(SystemTime::now()).saturating_sub(silent.as_millis() as u64),
            culprit: None,
            usage: false,
            hint,
            details: Some(details(process, process.page.status())),
        }
    }

    /// A worker that runs, and that `complaint` of another rank is about.
    pub(super) fn awaited(process: &Process, complaint: &WorkerFailure) -> Self {
        Self {
            what: "kept others waiting".to_owned(),
            hint: Some("it runs, but has not come to where the others are: its last lines may say why".to_owned()),
            at_ms: complaint.at_ms,
            ..Self::silent(process, Duration::ZERO)
        }
    }

    /// Another node's failure, in its launcher's words.
    pub(super) fn elsewhere(node: usize, what: String) -> Self {
        let at_ms = millis(SystemTime::now());
        Self {
            who: Who::Node(node),
            what,
            consequence: false,
            at_ms,
            culprit: None,
            usage: false,
            hint: None,
            details: None,
        }
    }

    /// `rank 1 was killed by SIGKILL`.
    pub(super) fn headline(&self) -> String {
        match self.who {
            Who::Rank(rank) => format!("rank {rank} {}", self.what),
            Who::Node(node) => format!("node {node}: {}", self.what),
        }
    }
}

fn details(process: &Process, doing: Status) -> Details {
    Details {
        pid: process.pid.as_raw_nonzero().get(),
        ran: process.ran(),
        doing,
        last: process.output.last_lines(),
        folder: process.folder.clone(),
    }
}

fn millis(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Puts the root cause first: causes before consequences, then the earliest.
pub(super) fn sort(failures: &mut [WorkerFailure]) {
    failures.sort_by_key(|failure| (failure.consequence, failure.at_ms));
}

/// The report, of failures in [`sort`]'s order and of `alive`, the ranks that the launcher is about to end. `node` is this
/// node's index in a job of several.
pub(super) fn render(failures: &[WorkerFailure], alive: &[usize], node: Option<usize>) -> String {
    let Some(root) = failures.first() else { return String::new() };
    let mut text = String::from("error: ");
    let on =
        node.filter(|_| matches!(root.who, Who::Rank(_))).map_or_else(String::new, |node| format!("node {node}: "));
    text += &on;
    text += &root.headline().replace('\n', "\n  ");
    text.push('\n');
    if let Some(details) = &root.details {
        text += &format!("  it was doing: {}", details.doing.text);
        if details.doing.age >= Duration::from_secs(1) {
            text += &format!(" (for {:.0} s)", details.doing.age.as_secs_f64());
        }
        text += &format!(
            "\n  process {}, ran {:.1} s, logs in {}\n",
            details.pid,
            details.ran.as_secs_f64(),
            details.folder.display()
        );
        let (stream, lines) = &details.last;
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

/// A line for each of the other failures, ranks with the same words together: on a mismatch all of them complain alike.
fn consequences(failures: &[WorkerFailure]) -> Vec<(String, String)> {
    let mut lines: Vec<(String, String)> = Vec::new();
    for failure in failures {
        let Who::Rank(rank) = failure.who else {
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
    use super::super::status_page::Stage;
    use super::*;

    fn failure(rank: usize, what: &str, consequence: bool, at_ms: u64) -> WorkerFailure {
        let doing =
            Status { stage: Stage::Joined, text: "all_reduce #17, bucket 3".into(), age: Duration::from_secs(4) };
        let last = ("stderr", vec!["one".to_owned(), "two".to_owned()]);
        let folder = PathBuf::from("runs/x/logs/rank-1");
        let details = Details { pid: 42, ran: Duration::from_millis(12_340), doing, last, folder };
        WorkerFailure {
            who: Who::Rank(rank),
            what: what.into(),
            consequence,
            at_ms,
            culprit: None,
            usage: false,
            hint: Some("look".into()),
            details: Some(details),
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
        assert_eq!(
            render(&[WorkerFailure::elsewhere(1, "rank 5 was killed".into())], &[0], Some(0)),
            "error: node 1: rank 5 was killed\n  rank 0 is being ended\n"
        );
    }
}
