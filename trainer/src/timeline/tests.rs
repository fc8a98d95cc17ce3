//! The record, the clocks and the file.

use std::{convert::Infallible, fs, sync::mpsc, thread, time::Duration};

use super::*;

fn after(start: Instant, micros: u64) -> Instant {
    start + Duration::from_micros(micros)
}

#[test]
fn a_step_with_its_bucket_becomes_a_trace() {
    let timeline = Timeline::on();
    let start = Instant::now();
    timeline.span(Track::Step, "backward", after(start, 10), after(start, 90), &[]);
    timeline.bucket(BucketSpan {
        step: 7,
        bucket: 0,
        bytes: 4096,
        queued: after(start, 20),
        started: after(start, 25),
        finished: after(start, 60),
    });
    timeline.span(Track::Step, "step", start, after(start, 100), &[("step", 7)]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.json");
    assert_eq!(write(&path, &[timeline.part(0), timeline.part(1)]).unwrap(), 0);
    let trace: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let span = |rank: u64, name: &str| {
        events
            .iter()
            .find(|e| e["ph"] == "X" && e["pid"] == rank && e["name"] == name)
            .unwrap_or_else(|| panic!("{name}"))
    };
    for rank in [0, 1] {
        assert_eq!(span(rank, "step")["ts"], 0.0);
        assert_eq!(span(rank, "step")["dur"], 100.0);
        assert_eq!(span(rank, "step")["args"]["step"], 7);
        assert_eq!(span(rank, "backward")["ts"], 10.0);
        let bucket = span(rank, "bucket 0");
        assert_eq!((&bucket["ts"], &bucket["dur"]), (&json!(25.0), &json!(35.0)));
        assert_eq!(bucket["args"], json!({"step": 7, "bucket": 0, "bytes": 4096, "queued_us": 20.0}));
        assert_ne!(bucket["tid"], span(rank, "step")["tid"]);
    }
}

#[test]
fn off_records_nothing_and_more_than_the_limit_is_counted() {
    let off = Timeline::off();
    let now = Instant::now();
    off.span(Track::Step, "step", now, now, &[]);
    assert!(!off.is_on() && off.part(0).is_empty());
    let full = Timeline::on();
    (0..MAX_SPANS + 3).for_each(|_| full.span(Track::Step, "s", now, now, &[]));
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(write(&folder.path().join("t.json"), &[full.part(0)]).unwrap(), 3);
    let error = write(&folder.path().join("t.json"), &[Vec::new()]).unwrap_err();
    assert!(error.cause.contains("cannot be read"), "{error}");
}

#[test]
fn the_recorders_clock_is_the_machines() {
    let timeline = Timeline::on();
    let recorded = timeline.0.as_ref().unwrap();
    let (before, at, later) = (monotonic(), recorded.clock(Instant::now()), monotonic());
    // Both are CLOCK_MONOTONIC on Linux. The pair was taken within microseconds, or milliseconds on a loaded machine.
    assert!(before - 50_000_000 <= at && at <= later + 50_000_000, "{before} {at} {later}");
}

#[test]
fn clocks_of_two_hosts_are_brought_together() {
    // Rank 1's clock is 5 s behind. Messages to it take 1 ms, and messages from it 2 ms.
    let mut bounds = OffsetBounds::default();
    bounds.add_received(10_000_000_000, 5_001_000_000);
    bounds.add_sent(5_010_000_000, 10_012_000_000);
    let error = bounds.midpoint() - 5_000_000_000;
    assert!(error.abs() <= 1_500_000, "{error}");
    bounds.add_received(11_000_000_000, 6_000_100_000);
    bounds.add_sent(6_010_000_000, 11_010_100_000);
    assert!((bounds.midpoint() - 5_000_000_000).abs() <= 100_000);
}

/// Runs two threads that exchange their bytes.
#[test]
fn ranks_of_one_host_need_no_offset() {
    let (to_b, at_b) = mpsc::channel::<Vec<u8>>();
    let (to_a, at_a) = mpsc::channel::<Vec<u8>>();
    let (a, b) = (Timeline::on(), Timeline::on());
    thread::scope(|scope| {
        let a = &a;
        scope.spawn(move || {
            a.estimate_clock_offset(0, |mine| {
                to_b.send(mine.to_vec()).unwrap();
                Ok::<_, Infallible>(vec![mine.to_vec(), at_a.recv().unwrap()])
            })
        });
        b.estimate_clock_offset(1, |mine| {
            to_a.send(mine.to_vec()).unwrap();
            Ok::<_, Infallible>(vec![at_b.recv().unwrap(), mine.to_vec()])
        })
        .unwrap();
    });
    assert_eq!(b.0.unwrap().state().offset, 0);
}
