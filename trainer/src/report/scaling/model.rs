//! The time of a step of many workers, computed from one worker's step and a model of the network.
//!
//! The backward pass completes each bucket at its time in the profile. The buckets are reduced one after the other: a bucket's
//! all-reduce starts when the bucket is complete and the bucket before it is reduced (`DistributedDataParallel`;
//! `strategy/ddp/reducer.rs`). Reduction time after the end of backward is exposed: no computation hides it.
//!
//! A message of `s` bytes takes `latency + s / bandwidth`, and the costs of an all-reduce of `s` bytes among `n` ranks are those
//! of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH" (2005):
//!
//! - ring: `2 (n - 1)` messages of `s / n` bytes;
//! - halving-doubling (Rabenseifner): `2 ceil(log2 n)` rounds that move `2 s (n - 1) / n` bytes;
//! - two-level: a ring within each host, and rings across the hosts that share the host's link.
//!
//! The model ignores the time of the additions, other traffic, late ranks, and the processor time that communication takes from
//! computation.

use std::fmt;

use serde::Serialize;

use super::{Computed, Profile, Scaling};

/// A network link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// Seconds from sending to receiving an empty message.
    pub latency_s: f64,
    /// Bytes per second in each direction.
    pub bytes_per_s: f64,
}

impl Link {
    /// Parses `100us,10Gbit`: the latency in us or ms, the bandwidth in Mbit or Gbit per second.
    pub fn parse(text: &str) -> Option<Self> {
        let (latency, bandwidth) = text.split_once(',')?;
        let scaled = |text: &str, units: [(&str, f64); 2]| {
            units.into_iter().find_map(|(unit, factor)| {
                let number: f64 = text.trim().strip_suffix(unit)?.trim().parse().ok()?;
                (number.is_finite() && number >= 0.0).then_some(number * factor)
            })
        };
        let latency_s = scaled(latency, [("us", 1e-6), ("ms", 1e-3)])?;
        let bytes_per_s = scaled(bandwidth, [("Mbit", 1e6 / 8.0), ("Gbit", 1e9 / 8.0)])?;
        (bytes_per_s > 0.0).then_some(Self { latency_s, bytes_per_s })
    }

    fn ring(self, ranks: usize, bytes: f64) -> f64 {
        let n = ranks as f64;
        2.0 * (n - 1.0) * (self.latency_s + bytes / n / self.bytes_per_s)
    }

    fn halving_doubling(self, ranks: usize, bytes: f64) -> f64 {
        let n = ranks as f64;
        2.0 * n.log2().ceil() * self.latency_s + 2.0 * (n - 1.0) / n * bytes / self.bytes_per_s
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Rounded, because 50 us are 49.99999999999999 after the conversion to seconds and back.
        let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
        write!(f, "{} us, {} Gbit/s", rounded(self.latency_s * 1e6), rounded(self.bytes_per_s * 8e-9))
    }
}

/// The network between workers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interconnect {
    /// The link between hosts.
    pub link: Link,
    /// The link within a host.
    pub local: Link,
    /// Number of workers per host, for the two-level algorithm.
    pub per_host: usize,
}

impl fmt::Display for Interconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a link of {}; two-level: {} workers on a host, {} between them",
            self.link, self.per_host, self.local
        )
    }
}

/// The all-reduce algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// One ring over all ranks, as the transport `tcp` uses.
    Ring,
    /// Rabenseifner's algorithm.
    HalvingDoubling,
    /// A ring on each host, and rings across hosts.
    TwoLevel,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 3] = [Self::Ring, Self::HalvingDoubling, Self::TwoLevel];

    /// Returns the name in JSON and in the page.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::HalvingDoubling => "halving-doubling",
            Self::TwoLevel => "two-level",
        }
    }

    /// Returns the seconds of an all-reduce of `bytes` among `ranks`.
    pub fn seconds(self, ranks: usize, bytes: u64, network: &Interconnect) -> f64 {
        let bytes = bytes as f64;
        match self {
            Self::Ring => network.link.ring(ranks, bytes),
            Self::HalvingDoubling => network.link.halving_doubling(ranks, bytes),
            Self::TwoLevel => {
                let local = network.per_host.min(ranks);
                let hosts = ranks.div_ceil(local);
                network.local.ring(local, bytes) + network.link.ring(hosts, bytes)
            }
        }
    }
}

/// Computes a step of `workers` workers. `batch_size` is `train.batch_size`. Returns `None` if strong scaling leaves less than
/// one image for each worker.
pub fn computed(
    profile: &Profile,
    scaling: Scaling,
    algorithm: Algorithm,
    workers: usize,
    batch_size: usize,
    network: &Interconnect,
) -> Option<Computed> {
    let images = match scaling {
        Scaling::Weak => batch_size as f64,
        Scaling::Strong => batch_size as f64 / workers as f64,
    };
    if images < 1.0 {
        return None;
    }
    // Forward and backward time is proportional to the number of images, the optimizer's time is not
    let scale = images / profile.images as f64;
    let (forward, backward) = (profile.forward_ms * scale, profile.backward_ms * scale);
    let mut done = 0.0_f64;
    for bucket in &profile.buckets {
        let ready = (bucket.ready_ms * scale).min(backward);
        done = done.max(ready) + 1e3 * algorithm.seconds(workers, bucket.bytes, network);
    }
    // After the buckets, the ranks exchange losses and counts in a small all-gather, which costs half of an all-reduce.
    let outcome = if workers > 1 { 1e3 * algorithm.seconds(workers, 0, network) / 2.0 } else { 0.0 };
    let exposed_ms = if workers > 1 { (done - backward).max(0.0) + outcome } else { 0.0 };
    let step_ms = forward + backward + exposed_ms + profile.other_ms;
    let images_per_s = images * workers as f64 / step_ms * 1e3;
    let alone_ms = profile.forward_ms + profile.backward_ms + profile.other_ms;
    let alone = profile.images as f64 / alone_ms * 1e3;
    let efficiency = images_per_s / workers as f64 / alone;
    Some(Computed { scaling, algorithm, workers, images_per_s, efficiency, step_ms, exposed_ms })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::scaling::BucketProfile;

    const INTERCONNECT: Interconnect = Interconnect {
        link: Link { latency_s: 100e-6, bytes_per_s: 1e9 },
        local: Link { latency_s: 0.0, bytes_per_s: 10e9 },
        per_host: 4,
    };

    fn profile() -> Profile {
        let bucket = |ready_ms, bytes| BucketProfile { ready_ms, bytes };
        let buckets = vec![bucket(5.0, 1_000_000), bucket(20.0, 10_000_000)];
        Profile { images: 32, forward_ms: 10.0, backward_ms: 20.0, other_ms: 2.0, buckets }
    }

    fn step(scaling: Scaling, algorithm: Algorithm, workers: usize) -> Computed {
        computed(&profile(), scaling, algorithm, workers, 32, &INTERCONNECT).unwrap()
    }

    #[test]
    fn links_are_parsed() {
        let link = Link::parse("100us,10Gbit").unwrap();
        assert!((link.latency_s - 1e-4).abs() < 1e-12 && (link.bytes_per_s - 1.25e9).abs() < 1.0);
        assert_eq!(Link::parse("1.5 ms, 200 Mbit"), Some(Link { latency_s: 1.5e-3, bytes_per_s: 25e6 }));
        for wrong in
            ["", "100us", "10Gbit,100us", "100,10", "us,Gbit", "-1us,1Gbit", "1us,0Gbit", "1us,infGbit", "1us,1Gb"]
        {
            assert_eq!(Link::parse(wrong), None, "{wrong}");
        }
    }

    /// The formulas of Thakur et al., computed by hand.
    #[test]
    fn all_reduce_costs_what_the_paper_says() {
        let ms = |algorithm: Algorithm, ranks| 1e3 * algorithm.seconds(ranks, 8_000_000, &INTERCONNECT);
        let close = |one: f64, other: f64| assert!((one - other).abs() < 1e-9, "{one} {other}");
        close(ms(Algorithm::Ring, 8), 14.0 * 0.1 + 14.0);
        close(ms(Algorithm::HalvingDoubling, 8), 6.0 * 0.1 + 14.0);
        close(ms(Algorithm::HalvingDoubling, 5), 6.0 * 0.1 + 12.8);
        // Two hosts of four: 1.5 * 8 MB locally, 8 MB across
        close(ms(Algorithm::TwoLevel, 8), 1.2 + 2.0 * 0.1 + 8.0);
        close(ms(Algorithm::TwoLevel, 4), 1.2);
        close(ms(Algorithm::Ring, 1), 0.0);
    }

    #[test]
    fn a_bucket_that_is_ready_early_is_hidden() {
        let alone = step(Scaling::Weak, Algorithm::Ring, 1);
        assert_eq!((alone.step_ms, alone.exposed_ms, alone.efficiency), (32.0, 0.0, 1.0));
        // 1 MB takes 1.2 ms from 5 on; 10 MB 10.2 ms from 20, the end of backward, on; the losses 0.1 ms
        let two = step(Scaling::Weak, Algorithm::Ring, 2);
        assert!((two.exposed_ms - 10.3).abs() < 1e-9, "{two:?}");
        assert!((two.step_ms - 42.3).abs() < 1e-9 && (two.efficiency - 32.0 / 42.3).abs() < 1e-9);
        assert!((two.images_per_s - 64.0 / 0.0423).abs() < 1e-6);
    }

    #[test]
    fn a_slow_link_queues_the_buckets() {
        let slow = Interconnect { link: Link { latency_s: 0.0, bytes_per_s: 25e6 }, ..INTERCONNECT };
        let row = computed(&profile(), Scaling::Weak, Algorithm::Ring, 2, 32, &slow).unwrap();
        // 40 ms from 5 on, then 400 ms
        assert!((row.exposed_ms - (445.0 - 20.0)).abs() < 1e-9, "{row:?}");
    }

    #[test]
    fn strong_scaling_divides_the_images() {
        let two = step(Scaling::Strong, Algorithm::Ring, 2);
        // Half of forward and backward; the first bucket from 2.5 to 3.7, the second from 10 to 20.2
        assert!((two.step_ms - (5.0 + 10.0 + 10.2 + 0.1 + 2.0)).abs() < 1e-9, "{two:?}");
        assert_eq!(computed(&profile(), Scaling::Strong, Algorithm::Ring, 64, 32, &INTERCONNECT), None);
        let efficiency: Vec<f64> =
            [1, 2, 4, 8, 16, 32].map(|workers| step(Scaling::Strong, Algorithm::Ring, workers).efficiency).to_vec();
        assert!(efficiency.is_sorted_by(|one, other| one > other), "{efficiency:?}");
    }
}
