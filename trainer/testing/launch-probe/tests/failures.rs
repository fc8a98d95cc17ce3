//! Workers that die or stall: what the launcher reports, its exit code, and what is left.

mod support;

use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{LIMIT, Run, lives};

#[test]
fn a_job_that_works_leaves_logs_and_nothing_else() {
    let ended = Run::start(&["--workers", "3"]).end();
    ended.said(0, &["started by no launcher"]);
    for rank in 0..3 {
        let log = ended.log(&format!("rank-{rank}/stdout.log"));
        assert!(log.contains(&format!("hello from rank {rank} of 3")) && log.contains("step 5"), "{log}");
        assert!(!ended.folder.path().join(format!("rank-{rank}/error.json")).exists());
    }
    assert!(ended.stdout.contains("hello from rank 0 of 3"), "rank 0 is on the screen");
    assert!(!ended.stdout.contains("hello from rank 1"), "and no other");
}

#[test]
fn sigkill_before_rendezvous() {
    let ended = Run::start(&["--workers", "3", "--do", "kill-before@1"]).end();
    ended.said(
        3,
        &[
            "error: rank 1 was killed by SIGKILL (signal 9)",
            "it was doing: before rendezvous",
            "hint: ",
            "out of memory",
        ],
    );
    assert!(ended.stderr.contains("rank 0"), "the state of the other ranks is reported: {}", ended.stderr);
}

#[test]
fn sigkill_in_a_collective() {
    // Rank 1 waits in the barrier of step 3 for rank 2, which never comes.
    let ended = Run::start(&["--workers", "3", "--do", "kill-in@1", "--do", "hang@2"]).end();
    ended.said(
        3,
        &["error: rank 1 was killed by SIGKILL", "it was doing: all_reduce #3, bucket 0", "because of it: rank 0"],
    );
}

#[test]
fn sigkill_between_collectives() {
    let ended = Run::start(&["--workers", "4", "--do", "kill-between@2"]).end();
    ended.said(3, &["error: rank 2 was killed by SIGKILL", "it was doing: step 3, forward", "because of it: rank"]);
}

#[test]
fn sigkill_of_rank_0() {
    let ended = Run::start(&["--workers", "2", "--do", "kill-between@0"]).end();
    ended.said(3, &["error: rank 0 was killed by SIGKILL", "because of it: rank 1"]);
}

#[test]
fn a_crash_is_reported_with_the_last_lines_of_stderr() {
    let ended = Run::start(&["--workers", "2", "--do", "segv@1"]).end();
    ended.said(
        3,
        &[
            "error: rank 1 was killed by SIGSEGV (signal 11",
            "last lines of its stderr",
            "| about to access invalid memory",
        ],
    );
    assert!(ended.log("rank-1/stderr.log").contains("about to access"));
}

#[test]
fn exit_codes_are_reported() {
    let ended = Run::start(&["--workers", "2", "--do", "exit@1"]).end();
    ended.said(3, &["error: rank 1 exited with code 7", "| giving up"]);
    // 138 is 128 + SIGUSR1, which is not a request to stop.
    let ended = Run::start(&["--workers", "2", "--do", "exit-138@1"]).end();
    ended.said(3, &["error: rank 1 exited with code 138"]);
    let ended = Run::start(&["--workers", "2", "--do", "exit-before@0"]).end();
    ended.said(3, &["error: rank 0 exited with code 9", "it was doing: before rendezvous"]);
}

#[test]
fn panics_are_reported_with_message_and_location() {
    let ended = Run::start(&["--workers", "2", "--do", "panic@1"]).end();
    ended.said(
        3,
        &[
            "error: rank 1 panicked (exit code 101): the loss is NaN, at trainer/testing/launch-probe/src/main.rs:",
            "step 3, forward",
        ],
    );
    let json = ended.log("rank-1/error.json");
    for text in [
        "\"kind\": \"panic\"",
        "the loss is NaN",
        "launch-probe/src/main.rs:",
        "\"status\": \"step 3, forward\"",
        "\"rank\": 1",
    ] {
        assert!(json.contains(text), "{text}: {json}");
    }
    // The panic of the thread causes that of the main thread.
    let ended = Run::start(&["--workers", "2", "--do", "panic-thread@1"]).end();
    ended.said(3, &["error: rank 1 panicked (exit code 101): no more images, at", "in thread `loader`"]);
}

#[test]
fn a_panic_that_the_program_explains_is_reported_as_an_error_with_a_hint() {
    let ended = Run::start(&["--workers", "2", "--do", "panic-explained@1"]).end();
    ended.said(3, &["error: rank 1 failed (exit code 101): the memory is used up\n", "hint: a smaller batch"]);
    let json = ended.log("rank-1/error.json");
    assert!(json.contains("\"kind\": \"error\"") && json.contains("\"location\": null"), "{json}");
}

#[test]
fn an_error_is_reported_in_the_workers_words() {
    let ended = Run::start(&["--workers", "2", "--do", "error@1"]).end();
    ended.said(
        3,
        &[
            "error: rank 1 failed (exit code 1): cannot write checkpoint: disk full",
            "hint: free some space",
            "because of it",
        ],
    );
}

#[test]
fn an_error_is_reported_where_its_file_cannot_be_written() {
    let ended = Run::start(&["--workers", "2", "--do", "error-without-logs@1"]).end();
    ended.said(
        3,
        &[
            "error: rank 1 exited with code 1",
            "rank-1/error.json: cannot write: No such file or directory",
            "| error: cannot write checkpoint: disk full",
            "| hint: free some space",
        ],
    );
}

#[test]
fn a_stopped_worker_is_noticed_after_the_timeout() {
    let ended = Run::start(&["--workers", "3", "--do", "stop@1", "--timeout", "10"]).end();
    ended.said(
        3,
        &["error: rank 1 has been stopped for", "(SIGSTOP or SIGTSTP)", "it was doing: step 3, forward", "kill -CONT"],
    );
}

#[test]
fn a_worker_stopped_before_rendezvous_is_noticed_too() {
    let ended = Run::start(&["--workers", "2", "--do", "stop-before@1", "--timeout", "10"]).end();
    ended.said(3, &["error: rank 1 has been stopped for", "it was doing: before rendezvous"]);
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed() {
    // Rank 1 sleeps forever and catches SIGTERM. Rank 0's death must end it all the same.
    let ended = Run::start(&["--workers", "2", "--do", "hang@1", "--do", "kill-between@0"]).end();
    ended.said(3, &["error: rank 0 was killed by SIGKILL", "rank 1 is being ended"]);
}

#[test]
fn a_worker_that_keeps_others_waiting_is_named() {
    // Rank 1 runs and sends heartbeats, but never comes to the barrier. Rank 0 times out, and rank 1 is named.
    let ended = Run::start(&["--workers", "2", "--do", "hang@1", "--barrier-timeout", "10"]).end();
    ended.said(
        3,
        &[
            "error: rank 1 kept others waiting",
            "it was doing: step 3, forward",
            "because of it: rank 0 failed",
            "did not arrive",
        ],
    );
}

#[test]
fn processes_of_a_worker_end_with_it() {
    for fault in ["kill-between@1", "nothing@1"] {
        // `end` finds the grandchild by its environment.
        let ended = Run::start(&["--workers", "2", "--do", "child@1", "--do", fault]).end();
        ended.said(if fault == "nothing@1" { 0 } else { 3 }, &[]);
    }
}

#[test]
fn no_worker_survives_the_launchers_sigkill() {
    for faults in [&[][..], &["--do", "sleep-before@0", "--do", "stop-before@1"]] {
        let mut arguments = vec!["--workers", "3", "--steps", "1000000", "--step-ms", "50"];
        arguments.extend(faults);
        let mut run = Run::start(&arguments);
        run.wait_for("stdout", if faults.is_empty() { "step 2" } else { "asleep" });
        // Rank 0 may be asleep before the launcher has started rank 2
        let until = Instant::now() + LIMIT;
        let workers = loop {
            let workers = run.workers();
            if workers.len() == 3 {
                break workers;
            }
            assert!(Instant::now() < until, "workers: {workers:?}");
            std::thread::sleep(Duration::from_millis(20));
        };
        run.signal(Signal::KILL);
        assert_eq!(run.end().status.code(), None);
        assert!(!workers.into_iter().any(lives));
    }
}

#[test]
fn two_jobs_do_not_disturb_each_other() {
    let mut survivor = Run::start(&["--workers", "2", "--steps", "1000000", "--step-ms", "20"]);
    survivor.wait_for("stdout", "step 2");
    Run::start(&["--workers", "2", "--do", "kill-between@1"]).end().said(3, &["rank 1 was killed"]);
    let port = |text: &str| text.lines().find_map(|line| line.strip_prefix("joined at ").map(str::to_owned)).unwrap();
    let mut third = Run::start(&["--workers", "2", "--steps", "1000000"]);
    let third_port = port(&third.wait_for("stdout", "step 2"));
    let own_port = port(&survivor.wait_for("stdout", "step 20"));
    assert_ne!(own_port, third_port);
    third.signal(Signal::KILL);
    third.end();
    let steps = support::read(&survivor.folder.path().join("stdout")).lines().count();
    survivor.wait_for("stdout", &format!("step {}", steps + 10));
    survivor.signal(Signal::TERM);
    survivor.end().said(143, &[]);
}

#[test]
fn failures_restart_the_job_as_often_as_allowed() {
    let ended = Run::start(&["--workers", "2", "--do", "kill-first-attempt@1", "--max-restarts", "2"]).end();
    ended.said(0, &["error: rank 1 was killed by SIGKILL", "starting all workers again: attempt 2 of 3"]);
    // Each attempt has separate logs.
    assert!(ended.log("attempt-0/rank-1/stdout.log").contains("step 3"));
    assert!(!ended.log("attempt-0/rank-1/stdout.log").contains("step 4"));
    assert!(ended.log("rank-1/stdout.log").contains("step 5"));

    let ended = Run::start(&["--workers", "2", "--do", "kill-between@1", "--max-restarts", "1"]).end();
    ended.said(3, &["attempt 2 of 2", "error: rank 1 was killed"]);
    assert_eq!(ended.stderr.matches("starting all workers again").count(), 1);
    assert!(ended.folder.path().join("attempt-0/rank-0").is_dir());

    // Wrong input would be wrong again.
    let ended = Run::start(&["--workers", "2", "--do", "usage@1", "--max-restarts", "3"]).end();
    ended.said(3, &["error: rank 1 exited with code 2"]);
    assert!(!ended.stderr.contains("starting all workers again"), "{}", ended.stderr);
}
