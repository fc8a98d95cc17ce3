//! Tests `timeline.json` of real runs: complete JSON, nested spans, every rank and every step.

use std::path::Path;

use crate::common::{Bench, CONFIG};
use serde_json::Value;

/// One span. Times are in nanoseconds, so that comparisons are exact.
#[derive(Debug, Clone)]
struct Span {
    rank: u64,
    thread: u64,
    name: String,
    start: i64,
    end: i64,
    args: Value,
}

fn spans(run: &Path) -> Vec<Span> {
    let trace: Value = serde_json::from_slice(&std::fs::read(run.join("timeline.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap().clone();
    let nanos = |micros: &Value| (micros.as_f64().unwrap() * 1e3).round() as i64;
    let span = |event: &Value| Span {
        rank: event["pid"].as_u64().unwrap(),
        thread: event["tid"].as_u64().unwrap(),
        name: event["name"].as_str().unwrap().to_owned(),
        start: nanos(&event["ts"]),
        end: nanos(&event["ts"]) + nanos(&event["dur"]),
        args: event["args"].clone(),
    };
    events.iter().filter(|event| event["ph"] == "X").map(span).collect()
}

/// Checks that two spans of one row are disjoint or nested.
#[track_caller]
fn assert_nested(spans: &[Span]) {
    let mut rows: Vec<_> = spans.iter().collect();
    rows.sort_by_key(|span| (span.rank, span.thread, span.start, -span.end));
    let mut open: Vec<&Span> = Vec::new();
    for span in rows {
        open.retain(|outer| (outer.rank, outer.thread) == (span.rank, span.thread) && outer.end > span.start);
        if let Some(outer) = open.last() {
            assert!(span.end <= outer.end, "{span:?} reaches out of {outer:?}");
        }
        assert!(span.start <= span.end);
        open.push(span);
    }
}

fn train(mode: &[&str]) -> Vec<Span> {
    let bench = Bench::new(CONFIG);
    let common = ["--config", "config.toml", "--set", "log.timeline=true", "--set", "train.max_steps=6"];
    bench.run(&[&common, mode].concat()).expect(0);
    spans(&bench.only_run("runs"))
}

fn named<'a>(spans: &'a [Span], rank: u64, name: &str) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.rank == rank && span.name == name).collect()
}

/// Checks that each of six steps of each rank has its parts in their order.
#[track_caller]
fn assert_steps(spans: &[Span], ranks: u64) {
    assert_nested(spans);
    for rank in 0..ranks {
        for step in 0..6 {
            let [whole] = named(spans, rank, &format!("step {step}"))[..] else { panic!("step {step} of rank {rank}") };
            let mut last = whole.start;
            for part in ["data", "forward", "backward", "optimizer"] {
                let inside: Vec<_> = named(spans, rank, part)
                    .into_iter()
                    .filter(|span| span.thread == 0 && whole.start <= span.start && span.end <= whole.end)
                    .collect();
                assert_eq!(inside.len(), 1, "{part} of step {step} of rank {rank}");
                assert!(last <= inside[0].start, "{part} of step {step} of rank {rank}");
                last = inside[0].end;
            }
        }
    }
    assert!(spans.iter().all(|span| span.rank < ranks));
}

#[test]
fn one_process_shows_every_step_and_its_parts() {
    let spans = train(&[]);
    assert_steps(&spans, 1);
    assert_eq!(named(&spans, 0, "forward")[0].args["samples"], 16);
}

/// Checks that ranks share a clock. No optimizer runs before all ranks have begun the step, because each waits for all
/// gradients.
#[test]
fn rank_0_writes_all_ranks_on_one_clock() {
    let spans = train(&["--cpus", "3"]);
    assert_steps(&spans, 3);
    for step in 0..6 {
        for (one, other) in [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)] {
            let begun = named(&spans, one, &format!("step {step}"))[0].start;
            let stepped = named(&spans, other, "optimizer")[step].start;
            assert!(begun < stepped, "step {step}: rank {one} began at {begun}, rank {other} stepped at {stepped}");
        }
    }
}

#[test]
fn without_log_timeline_there_is_no_file() {
    let bench = Bench::new(CONFIG);
    bench.run(&["--config", "config.toml", "--set", "train.max_steps=2"]).expect(0);
    assert!(!bench.only_run("runs").join("timeline.json").exists());
}
