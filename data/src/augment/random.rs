//! Counter-based random numbers: a draw is a hash of what it is for, so nothing depends on who draws it, or when.

/// The increment of SplitMix64: 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014): a
/// bijection in which every input bit changes every output bit with a probability near one half.
pub(crate) fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// What a stream of draws is for. Streams of different purposes share nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose {
    /// One sample's augmentation in one epoch.
    Sample = 1,
    /// One sample's orientation in even epochs.
    Orientation = 2,
    /// How one batch is mixed.
    Batch = 3,
}

/// A random stream named by numbers: draw `k` of it is `mix64(key + (k + 1) * GOLDEN)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    key: u64,
    next: u64,
}

impl Stream {
    /// The stream of `(seed, purpose, epoch, index)`. Each number is absorbed by one round of SplitMix64, so nearby
    /// names give unrelated streams.
    pub(crate) fn new(seed: u64, purpose: Purpose, epoch: u64, index: u64) -> Self {
        let absorb = |key: u64, number: u64| mix64(key ^ number.wrapping_add(1).wrapping_mul(GOLDEN));
        let key = [purpose as u64, epoch, index].into_iter().fold(mix64(seed.wrapping_add(GOLDEN)), absorb);
        Self { key, next: 0 }
    }

    /// Draw number `counter`, 64 uniform bits.
    pub(crate) fn at(&self, counter: u64) -> u64 {
        mix64(self.key.wrapping_add(counter.wrapping_add(1).wrapping_mul(GOLDEN)))
    }

    /// Draw number `counter` as an integer below `bound`: a multiplication and a shift, whose bias is below
    /// `bound / 2^32`.
    pub(crate) fn below(&self, counter: u64, bound: u32) -> u32 {
        (((self.at(counter) >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// The next draw as a number in (0, 1), 53 bits.
    pub(crate) fn next_unit(&mut self) -> f64 {
        let bits = self.at(self.next) >> 11;
        self.next += 1;
        (bits as f64 + 0.5) / (1u64 << 53) as f64
    }
}
