//! The search of `parallel.autotune`: chooses the settings for the next steps, and at the end the settings that the run keeps.
//!
//! The design follows Horovod's autotuner (docs/autotune.rst): warm-up steps, then a sample of steps for each candidate. All
//! ranks switch at the same step, and the run keeps the best candidate. Horovod fits a Gaussian process. Here there are few
//! candidates, so the settings are tried one after the other, each with the best values of the settings before it.
//!
//! After a sample all ranks have the medians of all ranks ([`super::Ddp`] gathers them), and a candidate's time is the slowest
//! rank's median. So all ranks compute the same search without announcing the next candidate.

use std::collections::VecDeque;
use std::env;

use super::MIB;
use super::buckets::compute_bucket_assignment;
#[cfg(any(feature = "cuda", test))]
use crate::config::ParallelConfig;
use crate::config::{Compression, Keyword, Tunable};
use crate::strategy::{StepSettings, Trial, TuningReport};

/// Steps before the first sample. They allocate memory and fill caches.
const FIRST_WARMUP_STEPS: usize = 10;
/// Steps before each later sample. They allocate the arrays of the new buckets.
const WARMUP_STEPS: usize = 2;
/// Steps in a sample, as Horovod's `--autotune-steps-per-sample`.
const STEPS_PER_SAMPLE: usize = 10;
/// A candidate replaces the plan's settings only if it takes at most this part of their time. A smaller gain may be noise.
const MAX_TIME_RATIO: f64 = 0.97;
/// Candidates for `bucket_mb`.
const BUCKET_MB_CANDIDATES: [f64; 5] = [0.25, 1.0, 4.0, 16.0, 64.0];
/// Candidates for `first_bucket_mb`, in addition to the size of the other buckets.
const FIRST_BUCKET_MB_CANDIDATES: [f64; 3] = [0.125, 0.5, 2.0];
/// Environment variable for tests, whose results must not depend on the clock. With `steps=3 bucket_mb=4` a sample has 3 steps, and
/// artificial times replace the measured ones: a candidate with more of the listed values counts as faster.
const FAKE_TIMES: &str = "TRAINER_AUTOTUNE_TEST";

/// Returns the largest bucket that a run may use, in MiB. GPUs reserve memory for this size.
#[cfg(any(feature = "cuda", test))]
pub(super) fn largest_bucket_mb(parallel: &ParallelConfig) -> f64 {
    let tried = |tunable| parallel.autotune.contains(&tunable);
    let buckets = BUCKET_MB_CANDIDATES.into_iter().filter(|_| tried(Tunable::BucketMb));
    let first = FIRST_BUCKET_MB_CANDIDATES.into_iter().filter(|_| tried(Tunable::FirstBucketMb));
    buckets.chain(first).fold(parallel.bucket_mb.max(parallel.first_bucket_mb), f64::max)
}

/// The decision after a sample.
#[derive(Debug, PartialEq)]
pub(super) enum SearchDecision {
    /// Take the next steps with these settings.
    Try(StepSettings),
    /// The search is over.
    Done(TuningReport),
}

/// The part of the search that is next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SearchStage {
    Bucket,
    FirstBucket,
    Compression,
    Threads,
    /// Measure the plan's settings and the best settings again, one after the other, since the load of the machine may have
    /// changed.
    Confirm,
    Over,
}

impl SearchStage {
    /// Returns the next stage. Returns `None` if the search is over.
    fn following(self) -> Option<Self> {
        match self {
            Self::Bucket => Some(Self::FirstBucket),
            Self::FirstBucket => Some(Self::Compression),
            Self::Compression => Some(Self::Threads),
            Self::Threads => Some(Self::Confirm),
            Self::Confirm => Some(Self::Over),
            Self::Over => None,
        }
    }
}

/// The search, on one rank.
#[derive(Debug)]
pub(super) struct Autotuner {
    allowed: Vec<Tunable>,
    /// Default number of threads of a worker (without `parallel.threads`), the smallest of all ranks.
    default_threads: usize,
    current: StepSettings,
    /// Steps to take before the sample.
    warmup_steps_left: usize,
    /// Seconds of the sample's steps so far.
    times: Vec<f64>,
    steps: u64,
    remaining_candidates: VecDeque<StepSettings>,
    stage: SearchStage,
    trials: Vec<Trial>,
    fake_times: FakeTimes,
}

impl Autotuner {
    /// Starts with the plan's settings. `default_threads` is a worker's number of threads without `parallel.threads`.
    pub(super) fn new(allowed: Vec<Tunable>, plan: StepSettings, default_threads: usize) -> Self {
        Self {
            allowed,
            default_threads,
            current: plan,
            warmup_steps_left: FIRST_WARMUP_STEPS,
            times: Vec::new(),
            steps: 0,
            remaining_candidates: VecDeque::new(),
            stage: SearchStage::Bucket,
            trials: Vec::new(),
            fake_times: FakeTimes::parse(&env::var(FAKE_TIMES).unwrap_or_default()),
        }
    }

    /// Records a step of this rank. Returns the median of the sample once the sample is complete.
    pub(super) fn record(&mut self, seconds: f64) -> Option<f64> {
        self.steps += 1;
        if self.warmup_steps_left > 0 {
            self.warmup_steps_left -= 1;
            return None;
        }
        self.times.push(seconds);
        if self.times.len() < self.fake_times.steps.unwrap_or(STEPS_PER_SAMPLE) {
            return None;
        }
        self.times.sort_by(f64::total_cmp);
        let median = self.times[self.times.len() / 2];
        Some(self.fake_times.seconds(&self.current).unwrap_or(median))
    }

    /// Ends a sample with the slowest rank's median. `order` and `lengths` describe the gradients, as for
    /// [`compute_bucket_assignment`].
    pub(super) fn next(&mut self, slowest: f64, order: &[usize], lengths: &[usize]) -> SearchDecision {
        let bucket_sizes = |settings: &StepSettings| -> Vec<usize> {
            let [first, limit] = [settings.first_bucket_mb, settings.bucket_mb].map(|mib| (mib * MIB) as usize);
            compute_bucket_assignment(order, lengths, first, limit).iter().map(|bucket| bucket.elements).collect()
        };
        self.record_trial(slowest, bucket_sizes);
        loop {
            if let Some(settings) = self.remaining_candidates.pop_front() {
                self.current = settings;
                self.warmup_steps_left = WARMUP_STEPS;
                self.times.clear();
                return SearchDecision::Try(settings);
            }
            let Some(following) = self.stage.following() else { return SearchDecision::Done(self.report()) };
            self.fill_candidates(bucket_sizes);
            self.stage = following;
        }
    }

    /// Records the time of the current settings. If they were measured before, the smaller time counts.
    fn record_trial(&mut self, seconds: f64, bucket_sizes: impl Fn(&StepSettings) -> Vec<usize>) {
        match self.trials.iter_mut().find(|trial| trial.settings == self.current) {
            Some(trial) => trial.seconds = trial.seconds.min(seconds),
            None => {
                let buckets = bucket_sizes(&self.current).len();
                self.trials.push(Trial { settings: self.current, buckets, seconds });
            }
        }
    }

    /// Queues the candidates of this stage. Skips candidates that produce the same buckets as an earlier one, except in the stage
    /// that measures again.
    fn fill_candidates(&mut self, bucket_sizes: impl Fn(&StepSettings) -> Vec<usize>) {
        let best = self.best().settings;
        if self.stage == SearchStage::Confirm {
            if best != self.trials[0].settings {
                self.remaining_candidates.extend([self.trials[0].settings, best]);
            }
            return;
        }
        let key = |settings: &StepSettings| (bucket_sizes(settings), settings.compression, settings.threads);
        let mut seen: Vec<_> = self.trials.iter().map(|trial| key(&trial.settings)).collect();
        for candidate in self.candidates(best) {
            let key = key(&candidate);
            if !seen.contains(&key) {
                seen.push(key);
                self.remaining_candidates.push_back(candidate);
            }
        }
    }

    /// Returns the candidates of this stage, which differ from `best` in one setting.
    fn candidates(&self, best: StepSettings) -> Vec<StepSettings> {
        let is_allowed = |tunable| self.allowed.contains(&tunable);
        match self.stage {
            SearchStage::Bucket if is_allowed(Tunable::BucketMb) => {
                BUCKET_MB_CANDIDATES.map(|bucket_mb| StepSettings { bucket_mb, ..best }).to_vec()
            }
            SearchStage::FirstBucket if is_allowed(Tunable::FirstBucketMb) => FIRST_BUCKET_MB_CANDIDATES
                .into_iter()
                .chain([best.bucket_mb])
                .map(|first_bucket_mb| StepSettings { first_bucket_mb, ..best })
                .collect(),
            SearchStage::Compression => [(Tunable::Fp16, Compression::Fp16), (Tunable::Bf16, Compression::Bf16)]
                .into_iter()
                .filter(|(tunable, _)| is_allowed(*tunable))
                .map(|(_, compression)| StepSettings { compression, ..best })
                .collect(),
            // One thread less leaves a core to the reducing thread. Half of the threads may be faster with hyper-threading.
            SearchStage::Threads if is_allowed(Tunable::Threads) => {
                let now = best.threads.unwrap_or(self.default_threads);
                let fewer = [now - 1, now / 2].into_iter().filter(|&threads| threads > 0);
                fewer.map(|threads| StepSettings { threads: Some(threads), ..best }).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the fastest trial, or the first of several equally fast trials.
    fn best(&self) -> &Trial {
        let faster = |one: &&Trial, other: &&Trial| one.seconds.total_cmp(&other.seconds);
        self.trials.iter().min_by(faster).expect("a sample has ended")
    }

    fn report(&self) -> TuningReport {
        let (plan, best) = (&self.trials[0], self.best());
        let chosen = if best.seconds <= MAX_TIME_RATIO * plan.seconds { best } else { plan };
        TuningReport { chosen: chosen.settings, steps: self.steps, trials: self.trials.clone() }
    }
}

/// The artificial times of a test; see [`FAKE_TIMES`].
#[derive(Debug, Default)]
struct FakeTimes {
    steps: Option<usize>,
    fastest: Vec<(String, String)>,
}

impl FakeTimes {
    fn parse(text: &str) -> Self {
        let mut fake_times = Self::default();
        for (key, value) in text.split_whitespace().filter_map(|word| word.split_once('=')) {
            match key {
                "steps" => fake_times.steps = value.parse().ok(),
                _ => fake_times.fastest.push((key.to_owned(), value.to_owned())),
            }
        }
        fake_times
    }

    /// Returns the artificial time of a step with `settings`. Returns `None` if steps are measured.
    fn seconds(&self, settings: &StepSettings) -> Option<f64> {
        let value = |key: &str| match key {
            "bucket_mb" => settings.bucket_mb.to_string(),
            "first_bucket_mb" => settings.first_bucket_mb.to_string(),
            "compression" => settings.compression.name().to_owned(),
            _ => settings.threads.unwrap_or_default().to_string(),
        };
        let right = self.fastest.iter().filter(|(key, wanted)| value(key) == *wanted).count();
        (!self.fastest.is_empty()).then(|| 1.0 / (1.0 + right as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: StepSettings =
        StepSettings { bucket_mb: 25.0, first_bucket_mb: 1.0, compression: Compression::None, threads: None };
    /// Eight tensors of 2 MiB, in the order in which they become ready.
    const ORDER: [usize; 8] = [7, 6, 5, 4, 3, 2, 1, 0];
    const LENGTHS: [usize; 8] = [1 << 19; 8];

    /// Runs a search in which settings take the time that `seconds` returns.
    fn search(allowed: &[Tunable], default_threads: usize, seconds: impl Fn(&StepSettings) -> f64) -> TuningReport {
        let mut tuner = Autotuner::new(allowed.to_vec(), PLAN, default_threads);
        let mut settings = PLAN;
        for _ in 0..10_000 {
            let Some(median) = tuner.record(seconds(&settings)) else { continue };
            match tuner.next(median, &ORDER, &LENGTHS) {
                SearchDecision::Try(next) => settings = next,
                SearchDecision::Done(report) => return report,
            }
        }
        panic!("the search does not end");
    }

    const ALL: [Tunable; 5] =
        [Tunable::BucketMb, Tunable::FirstBucketMb, Tunable::Threads, Tunable::Fp16, Tunable::Bf16];

    #[test]
    fn the_best_value_of_each_setting_is_found() {
        let wanted =
            StepSettings { bucket_mb: 4.0, first_bucket_mb: 4.0, compression: Compression::Bf16, threads: Some(3) };
        let report = search(&ALL, 4, |settings| {
            let buckets = (settings.bucket_mb - 4.0).abs() + (settings.first_bucket_mb - 4.0).abs();
            let narrow = f64::from(u8::from(settings.compression != Compression::Bf16));
            let threads = settings.threads.unwrap_or(4) as f64;
            10.0 + buckets + narrow + (threads - 3.0).abs()
        });
        assert_eq!(report.chosen, wanted);
        assert_eq!(report.trials[0].settings, PLAN);
        let samples = report.trials.len() + 2;
        assert_eq!(
            report.steps as usize,
            FIRST_WARMUP_STEPS + samples * STEPS_PER_SAMPLE + (samples - 1) * WARMUP_STEPS,
            "two samples more than trials: the confirmation"
        );
        assert!(report.trials.len() < 15, "{:#?}", report.trials);
    }

    #[test]
    fn settings_with_the_same_buckets_are_measured_once() {
        let report = search(&[Tunable::BucketMb, Tunable::FirstBucketMb], 1, |_| 1.0);
        // `bucket_mb`: 16, 25 and 64 make buckets of 2 and 14 MiB. 0.25 and 1 make a bucket for each tensor. 4 makes buckets of
        // 2, 4, 4, 4 and 2 MiB. `first_bucket_mb`: 0.125, 0.5 and 2 make the same buckets as 1. 25 makes one bucket.
        let sizes: Vec<_> = report.trials.iter().map(|trial| (trial.settings.bucket_mb, trial.buckets)).collect();
        assert_eq!(sizes, [(25.0, 2), (0.25, 8), (4.0, 5), (25.0, 1)]);
        assert_eq!(report.chosen, PLAN, "no candidate is faster");
    }

    #[test]
    fn settings_that_may_not_change_keep_their_values() {
        for (allowed, default_threads) in [(&[Tunable::Threads][..], 1), (&[Tunable::BucketMb], 8)] {
            // Compression, and the settings that may not change, would make a step faster.
            let report = search(allowed, default_threads, |settings| {
                let same = settings.compression == Compression::None && settings.threads.is_none();
                if same && settings.first_bucket_mb == 1.0 { 1.0 } else { 0.1 }
            });
            assert_eq!(report.chosen, PLAN);
        }
        let report = search(&[Tunable::Threads], 2, |settings| if settings.threads == Some(1) { 0.5 } else { 1.0 });
        assert_eq!(report.chosen.threads, Some(1));
    }

    #[test]
    fn a_gain_that_may_be_noise_changes_nothing() {
        let faster = |gain: f64| {
            search(&[Tunable::BucketMb], 1, |settings| if settings.bucket_mb == 4.0 { gain } else { 1.0 }).chosen
        };
        assert_eq!(faster(0.98), PLAN);
        assert_eq!(faster(0.96).bucket_mb, 4.0);
    }

    #[test]
    fn slow_steps_at_the_start_do_not_decide() {
        // The machine is slow during the first sample of the plan's settings, and not when they are measured again at the end.
        let steps = std::cell::Cell::new(0);
        let report = search(&[Tunable::BucketMb], 1, |_| {
            steps.set(steps.get() + 1);
            if steps.get() <= FIRST_WARMUP_STEPS + STEPS_PER_SAMPLE { 3.0 } else { 1.0 }
        });
        assert_eq!(report.chosen, PLAN);
    }

    #[test]
    fn device_memory_is_enough_for_every_candidate() {
        let mut parallel = ParallelConfig::default();
        assert_eq!(largest_bucket_mb(&parallel), 25.0);
        parallel.autotune = vec![Tunable::FirstBucketMb];
        assert_eq!(largest_bucket_mb(&parallel), 25.0);
        parallel.autotune = vec![Tunable::BucketMb];
        assert_eq!(largest_bucket_mb(&parallel), 64.0);
    }

    #[test]
    fn a_test_replaces_measured_times_by_artificial_ones() {
        let fake_times = FakeTimes::parse("steps=3 first_bucket_mb=0.125 threads=1");
        assert_eq!((fake_times.steps, fake_times.seconds(&PLAN)), (Some(3), Some(1.0)));
        let half = StepSettings { first_bucket_mb: 0.125, ..PLAN };
        assert_eq!(fake_times.seconds(&half), Some(0.5));
        assert_eq!(FakeTimes::parse("").seconds(&half), None, "steps are timed");
    }
}
