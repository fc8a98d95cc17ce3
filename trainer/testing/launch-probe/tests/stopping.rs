//! Signals to the launcher, and directly to workers.

mod support;

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use support::{LIMIT, PROBE, Run, probe, read, wait_for_states};

fn long(faults: &[&str]) -> Run {
    let mut arguments = vec!["--workers", "3", "--steps", "1000000", "--step-ms", "20"];
    arguments.extend(faults);
    let mut run = Run::start(&arguments);
    run.wait_for("stdout", "step 1\n");
    run
}

#[test]
fn each_signal_stops_all_ranks_at_one_step() {
    for (signal, number, name) in [
        (Signal::INT, 2, "SIGINT"),
        (Signal::TERM, 15, "SIGTERM"),
        (Signal::HUP, 1, "SIGHUP"),
        (Signal::QUIT, 3, "SIGQUIT"),
    ] {
        let run = long(&[]);
        run.signal(signal);
        let ended = run.end();
        ended.said(
            128 + number,
            &[&format!("{name}: workers save a checkpoint and stop"), &format!("stopped by {name}")],
        );
        assert!(!ended.stderr.contains("error:"), "{}", ended.stderr);
        let saved: Vec<String> = (0..3).map(|rank| ended.log(&format!("saved-{rank}"))).collect();
        assert!(!saved[0].is_empty() && saved.iter().all(|step| *step == saved[0]), "{saved:?}");
    }
}

#[test]
fn a_second_ctrl_c_ends_all_at_once() {
    let mut run = long(&["--do", "never-stop@0", "--do", "never-stop@1", "--do", "never-stop@2"]);
    run.signal(Signal::INT);
    run.wait_for("stderr", "once more ends them at once");
    let before = read(&run.folder.path().join("stdout"));
    run.wait_for("stdout", &format!("step {}", before.lines().count() + 5));
    run.signal(Signal::INT);
    let ended = run.end();
    ended.said(130, &["SIGINT: ending all workers at once"]);
    assert!(!ended.stderr.contains("error:"), "{}", ended.stderr);
}

/// A terminal that closes sends SIGHUP twice: through the shell, and from the kernel.
#[test]
fn a_repeated_hangup_does_not_end_the_workers_before_they_have_saved() {
    let mut run = long(&["--do", "never-stop@0", "--do", "never-stop@1", "--do", "never-stop@2"]);
    let steps = |run: &Run| read(&run.folder.path().join("stdout")).lines().count();
    for text in ["SIGHUP: workers save a checkpoint", ""] {
        run.signal(Signal::HUP);
        run.wait_for("stderr", text);
        let next = format!("step {}", steps(&run) + 10);
        run.wait_for("stdout", &next);
    }
    run.signal(Signal::INT);
    run.end().said(129, &["SIGHUP: workers save", "SIGINT: ending all workers at once", "stopped by SIGHUP"]);
}

#[test]
fn ctrl_c_goes_to_the_launcher_alone() {
    // The terminal signals the foreground group. Workers in this group could die before they catch the signal.
    let mut command = probe(&["--workers", "3", "--steps", "1000000"]);
    command.process_group(0);
    let mut run = Run::of(command);
    run.wait_for("stdout", "step 1\n");
    kill_process_group(run.pid(), Signal::INT).unwrap();
    let ended = run.end();
    ended.said(130, &["SIGINT: workers save a checkpoint"]);
    assert!(ended.folder.path().join("saved-2").exists());
}

#[test]
fn a_job_that_has_not_begun_stops_at_once() {
    let mut run = Run::start(&["--workers", "3", "--do", "sleep-before@0"]);
    run.wait_for("stdout", "asleep");
    run.signal(Signal::TERM);
    let ended = run.end();
    ended.said(143, &["SIGTERM: the job has not begun: ending all workers", "stopped by SIGTERM"]);
    assert!(!ended.stderr.contains("error: rank"), "{}", ended.stderr);
}

#[test]
fn workers_that_do_not_stop_in_time_are_named_and_ended() {
    let mut run = long(&["--do", "hang@1", "--stop-timeout", "2"]);
    run.wait_for("rank-1/stdout.log", "step 3");
    run.signal(Signal::TERM);
    run.end().said(3, &["SIGTERM: workers save", "error: rank", "did not stop within 2 s after SIGTERM"]);
}

/// The other workers lose their connection to it. The launcher must not report this as a failure.
#[test]
fn a_worker_that_the_signal_ends_at_once_is_not_a_failure() {
    let run = long(&["--do", "no-handlers@1", "--do", "never-stop@0", "--do", "never-stop@2"]);
    run.signal(Signal::TERM);
    let ended = run.end();
    ended.said(143, &["SIGTERM: workers save", "stopped by SIGTERM"]);
    assert!(!ended.stderr.contains("error: rank 1 was"), "{}", ended.stderr);
}

#[test]
fn a_worker_that_fails_while_it_stops_is_reported() {
    let mut run = Run::start(&["--workers", "2", "--do", "hang@0", "--do", "hang@1"]);
    run.wait_for("stdout", "step 3");
    run.signal(Signal::INT);
    run.wait_for("stderr", "workers save a checkpoint");
    kill_process(run.workers()[0], Signal::KILL).unwrap();
    run.end().said(3, &["was killed by SIGKILL", "it was doing: step 3, forward"]);
}

#[test]
fn a_signal_to_the_workers_stops_the_job_as_well() {
    // A batch system may signal every process except the launcher.
    let run = long(&[]);
    // Rank 0's flag may stop other ranks before the loop reaches them.
    run.workers().into_iter().for_each(|pid| {
        let _ = kill_process(pid, Signal::TERM);
    });
    let ended = run.end();
    ended.said(143, &["stopped by SIGTERM"]);
    assert!(ended.folder.path().join("saved-0").exists());
}

/// A session manager sends SIGHUP after SIGTERM, to all processes of the job.
#[test]
fn workers_may_stop_with_another_signal_than_the_launchers() {
    let mut run = long(&[]);
    let workers = run.workers();
    // Both signals stay pending while the workers are stopped. After SIGCONT the handler of the lower number (SIGHUP) runs last.
    let to_all = |signal| workers.iter().for_each(|pid| kill_process(*pid, signal).unwrap());
    to_all(Signal::STOP);
    wait_for_states(&workers, &['T']);
    run.signal(Signal::TERM);
    run.wait_for("stderr", "SIGTERM: workers save a checkpoint");
    to_all(Signal::HUP);
    to_all(Signal::CONT);
    let ended = run.end();
    ended.said(143, &["stopped by SIGTERM"]);
    assert!(!ended.stderr.contains("error:"), "{}", ended.stderr);
}

#[test]
fn a_screen_that_cannot_be_written_is_reported_and_the_run_continues() {
    let mut command = Command::new("sh");
    command.args(["-c", r#"exec "$0" "$@" >/dev/full"#, PROBE, "--workers", "1"]);
    let ended = Run::of(command).end();
    ended.said(0, &["warning: stdout shows no more of this run: No space left on device", "hint: the run continues"]);
    assert!(ended.log("rank-0/stdout.log").contains("step 5"));
}

#[test]
fn a_screen_that_nobody_reads_does_not_keep_the_launcher_alive() {
    let (_unread, mut stderr) = std::io::pipe().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut command = probe(&["--workers", "2", "--steps", "1000000", "--logs"]);
    command.arg(folder.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr.try_clone().unwrap());
    let mut child = command.spawn().unwrap();
    let until = Instant::now() + LIMIT;
    while !read(&folder.path().join("rank-0/stdout.log")).contains("step 1\n") {
        assert!(Instant::now() < until && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(20));
    }
    rustix::io::ioctl_fionbio(&stderr, true).unwrap();
    for length in [4096, 1] {
        while stderr.write(&vec![b'x'; length]).is_ok() {}
    }
    // The launcher's end of the pipe has the same flag. Its write must block.
    rustix::io::ioctl_fionbio(&stderr, false).unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if Instant::now() >= until {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status.expect("the launcher ends").code(), Some(143));
    assert!(folder.path().join("saved-1").exists());
}

#[test]
fn nohup_is_respected() {
    let mut command = std::process::Command::new("nohup");
    command.args([PROBE, "--workers", "2", "--steps", "1000000"]);
    let mut run = Run::of(command);
    run.wait_for("stdout", "step 1\n");
    run.signal(Signal::HUP);
    let before = read(&run.folder.path().join("stdout"));
    run.wait_for("stdout", &format!("step {}", before.lines().count() + 20));
    run.signal(Signal::TERM);
    run.end().said(143, &["SIGTERM: workers save"]);
}

#[test]
fn ctrl_z_stops_the_workers_and_they_continue_together() {
    let mut run = long(&["--timeout", "3"]);
    let all: Vec<_> = run.workers().into_iter().chain([run.pid()]).collect();
    run.signal(Signal::TSTP);
    wait_for_states(&all, &['T']);
    // Longer than the stall timeout, which counts only time in which the launcher runs.
    std::thread::sleep(Duration::from_secs(4));
    let before = read(&run.folder.path().join("stdout"));
    run.signal(Signal::CONT);
    wait_for_states(&all, &['S', 'R']);
    run.wait_for("stdout", &format!("step {}", before.lines().count() + 5));
    run.signal(Signal::INT);
    let ended = run.end();
    assert!(!ended.stderr.contains("has been stopped"), "{}", ended.stderr);
    ended.said(130, &[]);
}
