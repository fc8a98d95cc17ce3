//! The order of an epoch's samples and their division among ranks. Equal to PyTorch's `DistributedSampler`, element for
//! element.
//!
//! # Epochs
//! The whole program counts epochs from [`FIRST_EPOCH`] = 1. Epoch `e` has the order of PyTorch's sampler after
//! `set_epoch(e)`. A run's first epoch therefore equals `set_epoch(1)`. There is no conversion: the epoch on the screen, in
//! files and in checkpoints is the epoch that the sampler adds to its seed.

use rand_mt::Mt;

use crate::DataError;

/// The number of the first epoch of a run, and the argument of PyTorch's `set_epoch` for the same order.
pub const FIRST_EPOCH: usize = 1;

/// Arguments for which there is no sampler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SamplerError {
    /// The world has no rank.
    #[error("the world size is 0")]
    EmptyWorld,
    /// The rank is not below the world size.
    #[error("rank {rank} is outside a world of {world_size}")]
    RankOutsideWorld {
        /// The rank asked for.
        rank: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// Sample ids are 32-bit integers.
    #[error("{len} samples are too many: at most {} can be numbered", u32::MAX)]
    TooManySamples {
        /// Samples in the data set.
        len: usize,
    },
}

impl SamplerError {
    /// Returns what the user can do.
    pub fn hint(&self) -> String {
        match self {
            Self::EmptyWorld => "the world size is the number of workers, at least 1".into(),
            Self::RankOutsideWorld { world_size, .. } => {
                format!("ranks count from 0: use 0 to {}, or raise the world size", world_size - 1)
            }
            Self::TooManySamples { .. } => "split the data set".into(),
        }
    }
}

impl From<SamplerError> for DataError {
    fn from(error: SamplerError) -> Self {
        Self::new("", error.to_string(), error.hint()).at("sampler")
    }
}

/// Divides a data set among the ranks of a world, as `torch.utils.data.DistributedSampler` does. For tests and comparisons with
/// PyTorch: the [`Loader`](crate::loader::Loader) shards each global batch instead.
///
/// The data set is permuted with the seed `seed + epoch`. The order is padded with samples from its front (or truncated)
/// to a multiple of the world size. Rank `r` takes the positions `r`, `r + world_size`, `r + 2 world_size`, …
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DistributedSampler {
    len: u32,
    rank: usize,
    world_size: usize,
    shuffle: bool,
    seed: u64,
    drop_last: bool,
}

impl DistributedSampler {
    /// Makes the sampler of `rank` for `len` samples. `drop_last` truncates the order to a multiple of the world size;
    /// otherwise samples from the front are repeated.
    ///
    /// # Errors
    /// Those of [`check_shard`].
    pub fn new(
        len: usize,
        rank: usize,
        world_size: usize,
        shuffle: bool,
        seed: u64,
        drop_last: bool,
    ) -> Result<Self, SamplerError> {
        Ok(Self { len: check_shard(len, rank, world_size)?, rank, world_size, shuffle, seed, drop_last })
    }

    /// Returns the number of samples of one rank in an epoch, the same on every rank.
    pub fn samples_per_rank(&self) -> usize {
        let len = self.len as usize;
        if self.drop_last { len / self.world_size } else { len.div_ceil(self.world_size) }
    }

    /// Returns the number of samples of all ranks in an epoch, repeated ones included: `samples_per_rank * world_size`.
    pub fn total_size(&self) -> usize {
        self.samples_per_rank() * self.world_size
    }

    /// Returns the order of all ranks' samples after `set_epoch(epoch)`, `[total_size]`, padded or truncated.
    pub fn global_order(&self, epoch: usize) -> Vec<u32> {
        let mut order = epoch_order(self.len, self.shuffle, self.seed, epoch);
        resize_repeating(&mut order, self.total_size());
        order
    }

    /// Returns this rank's samples after `set_epoch(epoch)`, in order, `[samples_per_rank]`.
    pub fn indices(&self, epoch: usize) -> Vec<u32> {
        self.global_order(epoch).into_iter().skip(self.rank).step_by(self.world_size).collect()
    }
}

/// Checks that `len` samples can be divided among `world_size` ranks for `rank`. Returns `len` as a sample number.
///
/// # Errors
/// A world of 0, a rank outside the world, or more samples than a `u32` can number.
pub fn check_shard(len: usize, rank: usize, world_size: usize) -> Result<u32, SamplerError> {
    if world_size == 0 {
        return Err(SamplerError::EmptyWorld);
    }
    if rank >= world_size {
        return Err(SamplerError::RankOutsideWorld { rank, world_size });
    }
    u32::try_from(len).map_err(|_| SamplerError::TooManySamples { len })
}

/// Returns the order of an epoch before padding, `[len]`: a permutation seeded by `seed + epoch`, or the data set's own order.
pub(crate) fn epoch_order(len: u32, shuffle: bool, seed: u64, epoch: usize) -> Vec<u32> {
    if shuffle { permutation(len, seed.wrapping_add(epoch as u64)) } else { (0..len).collect() }
}

/// Returns `count` samples drawn with replacement, `[count]`: sample `i` with probability `weights[i] / sum(weights)`. Equal to
/// `torch.multinomial(weights, count, replacement=True, generator=torch.Generator().manual_seed(seed))` on the CPU with `weights`
/// in float64, element for element (`multinomial_with_replacement_apply`, ATen `MultinomialKernel.cpp`), and so to
/// `WeightedRandomSampler(weights, count, generator=…)`. Only for `count` 1 PyTorch has another algorithm.
///
/// The weights are finite and not negative, and at least one is above 0.
pub fn weighted_draws(weights: &[f64], count: usize, seed: u64) -> Vec<u32> {
    let mut random = Mt::new(seed as u32);
    let mut sum = 0.0;
    let mut cumulative: Vec<f64> = weights
        .iter()
        .map(|weight| {
            sum += weight;
            sum
        })
        .collect();
    cumulative.iter_mut().for_each(|bound| *bound /= sum);
    if let Some(last) = cumulative.last_mut() {
        *last = 1.0;
    }
    let mut draw = || {
        // PyTorch draws the high half first, and keeps 53 bits.
        let bits = (u64::from(random.next_u32()) << 32) | u64::from(random.next_u32());
        let uniform = (bits & ((1 << 53) - 1)) as f64 / (1u64 << 53) as f64;
        cumulative.partition_point(|&bound| bound < uniform) as u32
    };
    (0..count).map(|_| draw()).collect()
}

/// Counts for each element of `order` how often the same sample came earlier in `order`. Sample numbers are below `len`.
pub(crate) fn repetitions(order: &[u32], len: usize) -> Vec<u32> {
    let mut seen = vec![0; len];
    let count = |&id: &u32| {
        let before = seen[id as usize];
        seen[id as usize] += 1;
        before
    };
    order.iter().map(count).collect()
}

/// Truncates `order` to `total` elements, or repeats it from the front, several times if needed, up to `total` elements.
pub(crate) fn resize_repeating(order: &mut Vec<u32>, total: usize) {
    let len = order.len();
    order.truncate(total);
    if len > 0 {
        order.reserve_exact(total - order.len());
        while order.len() < total {
            let more = len.min(total - order.len());
            order.extend_from_within(..more);
        }
    }
}

/// From this length on PyTorch shuffles with 64-bit draws: the remainder of a 32-bit draw would favour small numbers.
const WIDE: u32 = u32::MAX / 20;

/// Returns a permutation of `0..len`, `[len]`. Equal to `torch.randperm(len, generator=torch.Generator().manual_seed(seed))`
/// on the CPU, element for element: MT19937 seeded with the low 32 bits of `seed`, and a Fisher-Yates shuffle
/// (`randperm_cpu`, ATen `TensorFactories.cpp`).
pub fn permutation(len: u32, seed: u64) -> Vec<u32> {
    let mut random = Mt::new(seed as u32);
    let mut order: Vec<u32> = (0..len).collect();
    if len < WIDE {
        for i in 0..len.saturating_sub(1) {
            let other = i + random.next_u32() % (len - i);
            order.swap(i as usize, other as usize);
        }
    } else {
        for i in 0..len {
            // PyTorch draws the high half first.
            let draw = (u64::from(random.next_u32()) << 32) | u64::from(random.next_u32());
            order.swap(i as usize, (draw % (u64::from(i) + 1)) as usize);
        }
    }
    order
}
