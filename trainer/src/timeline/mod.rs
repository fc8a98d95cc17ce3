//! Writes `timeline.json`: a Chrome trace of each rank's activity (opens in <https://ui.perfetto.dev> and `chrome://tracing`).
//!
//! In the trace, a process is a rank, and a thread is a [`Track`] of the rank. Spans are recorded where the work is done, at
//! the cost of two clock reads and a push. At the end, rank 0 merges all ranks' spans on its own clock and writes the file.
//! Format: the "Trace Event Format" document of the Chromium project, complete events (`ph: "X"`).

#[cfg(feature = "cuda")]
pub mod launches;

use std::{borrow::Cow, collections::BTreeSet, path::Path, sync::Arc, time::Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::system::uname;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

#[cfg(feature = "cuda")]
use crate::device::launches_block;
use crate::files::{FileError, write_atomic};
use comm::host;
#[cfg(feature = "cuda")]
use launches::KernelProfiler;

/// Maximum number of spans per rank: 15 MB of JSON, enough for the first thousands of steps of a run.
const MAX_SPANS: usize = 100_000;
/// Maximum number of kernels per rank. Each kernel holds two device events until the end.
#[cfg(feature = "cuda")]
const MAX_LAUNCHES: usize = 20_000;
/// Number of exchanges for the estimate of the difference between two hosts' clocks.
const CLOCK_EXCHANGES: usize = 16;

/// A row of a rank's spans in the trace. Spans of one row follow each other or are nested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Track {
    /// The training loop: the step, and within the step data, forward, backward, waiting, optimizer.
    Step,
    /// Reductions of gradient buckets.
    Communication,
    /// The work of one of several devices of this process.
    Device(usize),
    /// The kernels of a GPU's stream, on the device's clock. Each thread that launches kernels has a stream.
    Kernels(usize),
}

impl Track {
    fn thread(self) -> usize {
        match self {
            Self::Step => 0,
            Self::Communication => 1,
            Self::Device(index) => 2 + index,
            Self::Kernels(index) => 1000 + index,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Step => "training loop".into(),
            Self::Communication => "buckets".into(),
            Self::Device(index) => format!("device {index}"),
            Self::Kernels(index) => format!("GPU stream {index}"),
        }
    }
}

/// The reduction of one bucket of gradients.
#[derive(Debug, Clone, Copy)]
pub struct BucketSpan {
    /// Optimizer step.
    pub step: u64,
    /// Position of the bucket in the order of reduction, from 0.
    pub bucket: usize,
    /// Size of the bucket in the wire format: the bytes that this rank contributes.
    pub bytes: usize,
    /// Time when the bucket was launched. An earlier bucket may have delayed the launch.
    pub queued: Instant,
    /// Time when the reduction began.
    pub started: Instant,
    /// Time when the sum was ready. On a GPU: when the reduction was enqueued.
    pub finished: Instant,
}

/// One span on this machine's monotonic clock, in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Span {
    track: Track,
    name: Cow<'static, str>,
    start: i64,
    end: i64,
    /// Numbers to show with the span.
    args: Vec<(Cow<'static, str>, i64)>,
    /// Times to show with the span, on the same clock.
    times: Vec<(Cow<'static, str>, i64)>,
}

/// A rank's spans on rank 0's clock.
#[derive(Debug, Serialize, Deserialize)]
struct RankSpans {
    rank: usize,
    host: String,
    dropped: u64,
    spans: Vec<Span>,
}

#[derive(Debug)]
struct Recorder {
    /// One moment, read on both clocks: `Instant` and `CLOCK_MONOTONIC`.
    origin: (Instant, i64),
    state: Mutex<RecordedSpans>,
    #[cfg(feature = "cuda")]
    kernels: Mutex<Option<KernelProfiler>>,
}

#[derive(Debug, Default)]
struct RecordedSpans {
    spans: Vec<Span>,
    dropped: u64,
    /// Offset to rank 0's clock: rank 0's clock minus this rank's.
    offset: i64,
}

/// Records spans. Clones share one recorder. [`Timeline::off`] records nothing and costs nothing.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Option<Arc<Recorder>>);

impl Timeline {
    /// Returns a timeline that records nothing.
    pub fn off() -> Self {
        Self(None)
    }

    /// Starts a timeline that records from now on.
    pub fn on() -> Self {
        // Take the closest of several pairs, because the scheduler may suspend the thread between the reads of the two clocks.
        let pair = || {
            let before = Instant::now();
            let clock = monotonic();
            (before.elapsed(), before, clock)
        };
        let (width, before, clock) = (0..8).map(|_| pair()).min_by_key(|pair| pair.0).unwrap_or_else(pair);
        let origin = (before + width / 2, clock);
        Self(Some(Arc::new(Recorder {
            origin,
            state: Mutex::default(),
            #[cfg(feature = "cuda")]
            kernels: Mutex::default(),
        })))
    }

    /// Also records the first `MAX_LAUNCHES` kernels that this process launches on GPUs from now on. If the timeline is on and
    /// `CUDA_LAUNCH_BLOCKING` is 1, records no kernels and returns a note: cubecl allows only one observer of kernels, and this
    /// observer must name the kernel in which a GPU fails.
    #[cfg(feature = "cuda")]
    pub fn profile_kernels(&self) -> Option<&'static str> {
        let recorded = self.0.as_ref()?;
        if launches_block() {
            return Some("note: log.timeline: kernels are left out, since CUDA_LAUNCH_BLOCKING=1 watches each kernel");
        }
        recorded.kernels().get_or_insert_with(|| KernelProfiler::start(MAX_LAUNCHES));
        None
    }

    /// Returns a timeline that is on or off.
    pub fn new(on: bool) -> Self {
        if on { Self::on() } else { Self::off() }
    }

    /// Returns whether spans are recorded.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Records one span, with numbers to show beside it.
    pub fn span(
        &self,
        track: Track,
        name: impl Into<Cow<'static, str>>,
        start: Instant,
        end: Instant,
        args: &[(&'static str, usize)],
    ) {
        let Some(recorded) = &self.0 else { return };
        #[cfg(feature = "cuda")]
        if let Some(watch) = &*recorded.kernels() {
            watch.stop_if_full();
        }
        let args = args.iter().map(|&(key, value)| (Cow::from(key), value as i64)).collect();
        let (start, end) = (recorded.clock(start), recorded.clock(end));
        recorded.push(Span { track, name: name.into(), start, end, args, times: Vec::new() });
    }

    /// Records the reduction of one bucket, on [`Track::Communication`].
    pub fn bucket(&self, span: BucketSpan) {
        let Some(recorded) = &self.0 else { return };
        let args = [("step", span.step as i64), ("bucket", span.bucket as i64), ("bytes", span.bytes as i64)];
        recorded.push(Span {
            track: Track::Communication,
            name: format!("bucket {}", span.bucket).into(),
            start: recorded.clock(span.started),
            end: recorded.clock(span.finished),
            args: args.map(|(key, value)| (key.into(), value)).to_vec(),
            times: vec![("queued_us".into(), recorded.clock(span.queued))],
        });
    }

    /// Determines the offset to rank 0's clock: zero if all ranks are on one host, otherwise an estimate from a few exchanges.
    /// `exchange` sends this rank's bytes and returns all ranks' bytes (an all-gather). All ranks call this function together.
    ///
    /// # Errors
    /// Those of `exchange`.
    pub fn estimate_clock_offset<E>(
        &self,
        rank: usize,
        mut exchange: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<(), E> {
        let Some(recorded) = &self.0 else { return Ok(()) };
        // If the kernel hides the boot id, ranks cannot detect that they share a host. Then every rank estimates the offset.
        let boot = host::boot_id();
        let boots = exchange(boot.as_bytes())?;
        if !boot.is_empty() && boots.iter().all(|other| *other == boots[0]) {
            return Ok(());
        }
        let mut bounds = OffsetBounds::default();
        let (mut sent, mut received) = (0_i64, 0_i64);
        for round in 0..CLOCK_EXCHANGES {
            let last = (sent, received);
            sent = monotonic();
            let message = [sent.to_le_bytes(), last.1.to_le_bytes()].concat();
            let all = exchange(&message)?;
            received = monotonic();
            let of_first =
                |at: usize| all[0].get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(i64::from_le_bytes);
            if let (Some(first_sent), Some(first_received)) = (of_first(0), of_first(8)) {
                bounds.add_received(first_sent, received);
                if round > 0 {
                    bounds.add_sent(last.0, first_received);
                }
            }
        }
        recorded.state().offset = if rank == 0 { 0 } else { bounds.midpoint() };
        Ok(())
    }

    /// Returns this rank's spans as JSON, for [`write()`] on rank 0. Empty if the timeline is off.
    pub fn part(&self, rank: usize) -> Vec<u8> {
        let Some(recorded) = &self.0 else { return Vec::new() };
        #[cfg(feature = "cuda")]
        recorded.read_kernels();
        let state = recorded.state();
        let mut spans = state.spans.clone();
        for span in &mut spans {
            let times = span.times.iter_mut().map(|(_, time)| time);
            for time in [&mut span.start, &mut span.end].into_iter().chain(times) {
                *time += state.offset;
            }
        }
        let host = uname().nodename().to_string_lossy().into_owned();
        serde_json::to_vec(&RankSpans { rank, host, dropped: state.dropped, spans })
            .expect("numbers and text become JSON")
    }
}

impl Recorder {
    /// Converts an instant to nanoseconds of the machine's clock.
    fn clock(&self, at: Instant) -> i64 {
        let (origin, clock) = self.origin;
        let after = at.saturating_duration_since(origin).as_nanos() as i64;
        clock + after - origin.saturating_duration_since(at).as_nanos() as i64
    }

    #[cfg(feature = "cuda")]
    fn kernels(&self) -> MutexGuard<'_, Option<KernelProfiler>> {
        self.kernels.lock()
    }

    /// Waits for the recorded kernels and converts them to spans.
    #[cfg(feature = "cuda")]
    fn read_kernels(&self) {
        let Some(watch) = self.kernels().take() else { return };
        let mut threads = Vec::new();
        for launch in watch.finish() {
            let index = threads.iter().position(|thread| *thread == launch.thread).unwrap_or_else(|| {
                threads.push(launch.thread);
                threads.len() - 1
            });
            self.push(Span {
                track: Track::Kernels(index),
                name: launch.short_name().into(),
                start: self.clock(launch.start),
                end: self.clock(launch.end),
                args: Vec::new(),
                times: vec![("launched_us".into(), self.clock(launch.issued))],
            });
        }
    }

    fn push(&self, span: Span) {
        let mut state = self.state();
        if state.spans.len() < MAX_SPANS {
            state.spans.push(span);
        } else {
            state.dropped += 1;
        }
    }

    fn state(&self) -> MutexGuard<'_, RecordedSpans> {
        self.state.lock()
    }
}

/// Bounds of the difference between two clocks. They follow from one rule: no message is received before it was sent.
#[derive(Debug)]
struct OffsetBounds {
    least: i64,
    most: i64,
}

impl Default for OffsetBounds {
    fn default() -> Self {
        Self { least: i64::MIN, most: i64::MAX }
    }
}

impl OffsetBounds {
    /// Adds a message from rank 0: `sent` is on rank 0's clock, `received` on this rank's.
    fn add_received(&mut self, sent: i64, received: i64) {
        self.least = self.least.max(sent - received);
    }

    /// Adds a message to rank 0: `sent` is on this rank's clock, `received` on rank 0's.
    fn add_sent(&mut self, sent: i64, received: i64) {
        self.most = self.most.min(received - sent);
    }

    /// Returns the estimate of rank 0's clock minus this rank's.
    fn midpoint(&self) -> i64 {
        (self.least / 2).saturating_add(self.most / 2)
    }
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds. All processes of a machine share this clock.
fn monotonic() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Writes the trace of all ranks' [`Timeline::part`]s. Returns the number of spans that were dropped.
///
/// # Errors
/// A part was not made by [`Timeline::part`], or the file cannot be written.
pub fn write(path: &Path, parts: &[Vec<u8>]) -> Result<u64, FileError> {
    let broken = |error: serde_json::Error| {
        FileError::new(path, format!("a rank's timeline cannot be read: {error}"), "all ranks must be one version")
    };
    let parts: Vec<RankSpans> =
        parts.iter().map(|part| serde_json::from_slice(part)).collect::<Result<_, _>>().map_err(broken)?;
    let dropped = parts.iter().map(|part| part.dropped).sum();
    let text = serde_json::to_vec(&trace(&parts)).map_err(broken)?;
    write_atomic(path, &text)?;
    Ok(dropped)
}

/// Returns the content of the file. Times are in microseconds since the first span.
fn trace(parts: &[RankSpans]) -> Value {
    let zero = parts.iter().flat_map(|part| part.spans.iter().map(|span| span.start)).min().unwrap_or(0);
    let micros = |time: i64| (time - zero) as f64 / 1e3;
    let mut events = Vec::new();
    for RankSpans { rank, host, spans, .. } in parts {
        let about = |name: &str, thread: usize, key: &str, value: Value| json!({"ph": "M", "pid": rank, "tid": thread, "name": name, "args": {key: value}});
        events.push(about("process_name", 0, "name", format!("rank {rank} on {host}").into()));
        events.push(about("process_sort_index", 0, "sort_index", (*rank).into()));
        for track in spans.iter().map(|span| span.track).collect::<BTreeSet<_>>() {
            events.push(about("thread_name", track.thread(), "name", track.name().into()));
            events.push(about("thread_sort_index", track.thread(), "sort_index", track.thread().into()));
        }
        for span in spans {
            let numbers = span.args.iter().map(|(key, value)| (key.to_string(), json!(value)));
            let times = span.times.iter().map(|(key, time)| (key.to_string(), json!(micros(*time))));
            let args: serde_json::Map<_, _> = numbers.chain(times).collect();
            events.push(json!({
                "ph": "X", "pid": rank, "tid": span.track.thread(), "name": span.name, "cat": "step",
                "ts": micros(span.start), "dur": (span.end - span.start).max(0) as f64 / 1e3, "args": args,
            }));
        }
    }
    let dropped: u64 = parts.iter().map(|part| part.dropped).sum();
    json!({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"spans_left_out": dropped}})
}

#[cfg(test)]
mod tests;
