//! Reads the times of one worker's step from the timeline and the metrics of a run with several workers.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::report::StepRecord;

/// One worker's step: medians of rank 0.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Profile {
    /// Number of images per step on this worker.
    pub images: usize,
    /// Milliseconds of the forward pass.
    pub forward_ms: f64,
    /// Milliseconds of the backward pass.
    pub backward_ms: f64,
    /// The rest of the step without communication: data, optimizer, the loop.
    pub other_ms: f64,
    /// The buckets, in the order in which they are reduced.
    pub buckets: Vec<BucketProfile>,
}

/// A bucket of gradients.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BucketProfile {
    /// Milliseconds from the start of the backward pass until the bucket is full.
    pub ready_ms: f64,
    /// Bytes of the bucket on the wire.
    pub bytes: u64,
}

/// Reads the profile of a worker with `images` images per step from the content of a run's `timeline.json`. Uses only the
/// timeline's spans of `steps`. Returns `None` if the steps have no buckets.
pub fn profile(timeline: &Value, steps: &[StepRecord], images: usize) -> Option<Profile> {
    let spans: Vec<&Value> =
        timeline["traceEvents"].as_array()?.iter().filter(|event| event["ph"] == "X" && event["pid"] == 0).collect();
    let start = |span: &Value| span["ts"].as_f64().unwrap_or_default();
    let end = |span: &Value| start(span) + span["dur"].as_f64().unwrap_or_default();
    let mut backward: Vec<f64> =
        spans.iter().filter(|span| span["name"] == "backward").map(|span| start(span)).collect();
    backward.sort_by(f64::total_cmp);
    // For each bucket: the number of bytes, and the time in each step at which the bucket was ready
    let mut buckets: BTreeMap<u64, (u64, Vec<f64>)> = BTreeMap::new();
    for span in &spans {
        let args = &span["args"];
        let (Some(bucket), Some(step)) = (args["bucket"].as_u64(), args["step"].as_u64()) else { continue };
        let (Some(bytes), Some(queued)) = (args["bytes"].as_u64(), args["queued_us"].as_f64()) else { continue };
        if !steps.iter().any(|record| record.step == step) {
            continue;
        }
        // The backward pass of this bucket is the last one that began before the all-reduce ended
        let pass = backward.iter().rev().find(|start| **start <= end(span))?;
        let (_, ready) = buckets.entry(bucket).or_insert((bytes, Vec::new()));
        ready.push((queued - pass) / 1e3);
    }
    let middle = |value: fn(&StepRecord) -> f64| median(steps.iter().map(value).collect());
    let (forward_ms, backward_ms) = (middle(|step| step.forward_ms)?, middle(|step| step.backward_ms)?);
    let other = |step: &StepRecord| step.step_ms - step.forward_ms - step.backward_ms - step.communication_ms;
    let buckets: Vec<_> = buckets
        .into_values()
        .filter_map(|(bytes, ready)| Some(BucketProfile { ready_ms: median(ready)?, bytes }))
        .collect();
    let other_ms = middle(other)?.max(0.0);
    (!buckets.is_empty()).then_some(Profile { images, forward_ms, backward_ms, other_ms, buckets })
}

/// Returns the median. With an even number of values, returns the larger of the two in the middle.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn span(name: &str, ts: f64, dur: f64, args: Value) -> Value {
        json!({"ph": "X", "pid": 0, "name": name, "ts": ts, "dur": dur, "args": args})
    }

    fn bucket(step: u64, bucket: u64, queued: f64, ts: f64, dur: f64) -> Value {
        span(
            "bucket",
            ts,
            dur,
            json!({"step": step, "bucket": bucket, "bytes": 1000 * (bucket + 1), "queued_us": queued}),
        )
    }

    #[test]
    fn a_bucket_is_ready_relative_to_its_own_pass() {
        let mut other = bucket(1, 0, 0.0, 0.0, 1.0);
        other["pid"] = json!(1);
        let timeline = json!({"traceEvents": [
            {"ph": "M", "pid": 0, "name": "process_name"},
            span("backward", 1000.0, 5000.0, json!({})),
            // The first step's buckets wait for the end of backward, and are left out
            bucket(0, 0, 6000.0, 6000.0, 100.0),
            span("backward", 11_000.0, 5000.0, json!({})),
            bucket(1, 0, 12_000.0, 12_000.0, 500.0),
            bucket(1, 1, 16_000.0, 16_100.0, 500.0),
            other,
        ]});
        let record = StepRecord {
            step: 1,
            forward_ms: 3.0,
            backward_ms: 5.0,
            communication_ms: 0.6,
            step_ms: 10.0,
            ..StepRecord::default()
        };
        let found = profile(&timeline, std::slice::from_ref(&record), 8).unwrap();
        let ready: Vec<_> = found.buckets.iter().map(|bucket| (bucket.ready_ms, bucket.bytes)).collect();
        assert_eq!(ready, [(1.0, 1000), (5.0, 2000)]);
        assert!((found.other_ms - 1.4).abs() < 1e-9 && found.forward_ms == 3.0 && found.images == 8);
        assert_eq!(profile(&json!({"traceEvents": []}), &[record], 8), None);
        assert_eq!(profile(&json!({}), &[], 8), None);
    }
}
