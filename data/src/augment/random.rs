//! Counter-based random numbers. A draw is a hash of its purpose, so it does not depend on the thread, the rank or the time.

/// The increment of SplitMix64: 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Applies the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), a
/// bijection: every input bit changes every output bit with a probability near one half.
pub(crate) fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The purpose of a stream of draws. Streams of different purposes are independent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose {
    /// One sample's augmentation in one epoch.
    Sample = 1,
    /// One sample's orientation in even epochs.
    Orientation = 2,
    /// The mixing of one batch.
    Batch = 3,
    /// The operations on one sample in one epoch.
    Operations = 4,
    /// The erased rectangle of one sample in one epoch.
    Erasing = 5,
    /// The resampled rectangle of one sample in one epoch.
    ResizedCrop = 6,
    /// Whether one sample is mirrored upside down in one epoch.
    VerticalFlip = 7,
    /// The rotation of one sample in one epoch.
    Rotation = 8,
}

/// A random stream named by numbers. Draw `k` is `mix64(key + (k + 1) * GOLDEN)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CounterRng {
    key: u64,
    next: u64,
}

impl CounterRng {
    /// Makes the stream of `(seed, purpose, epoch, index)`. One round of SplitMix64 absorbs each number, so the streams of
    /// nearby names are unrelated.
    pub(crate) fn new(seed: u64, purpose: Purpose, epoch: u64, index: u64) -> Self {
        let absorb = |key: u64, number: u64| mix64(key ^ number.wrapping_add(1).wrapping_mul(GOLDEN));
        let key = [purpose as u64, epoch, index].into_iter().fold(mix64(seed.wrapping_add(GOLDEN)), absorb);
        Self { key, next: 0 }
    }

    /// Returns draw `counter`, 64 uniform bits.
    pub(crate) fn at(&self, counter: u64) -> u64 {
        mix64(self.key.wrapping_add(counter.wrapping_add(1).wrapping_mul(GOLDEN)))
    }

    /// Returns draw `counter` as an integer below `bound`. The bias of the multiplication and shift is below
    /// `bound / 2^32`.
    pub(crate) fn below(&self, counter: u64, bound: u32) -> u32 {
        (((self.at(counter) >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// Returns draw `counter` as a number in (0, 1), 53 bits.
    pub(crate) fn unit(&self, counter: u64) -> f64 {
        ((self.at(counter) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Returns the next draw as a number in (0, 1), 53 bits.
    pub(crate) fn next_unit(&mut self) -> f64 {
        self.next += 1;
        self.unit(self.next - 1)
    }
}
