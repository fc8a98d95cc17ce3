//! Which samples a rank sees, and in which order: PyTorch's `DistributedSampler`, element for element.

use rand_mt::Mt;

use crate::DataError;

/// A sampler that cannot exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SamplerError {
    /// A world of no rank at all.
    #[error("the world size is 0")]
    EmptyWorld,
    /// The rank is not one of the world's.
    #[error("rank {rank} is outside a world of {world}")]
    RankOutsideWorld {
        /// The rank asked for.
        rank: usize,
        /// The number of ranks there are.
        world: usize,
    },
    /// Sample ids are kept as 32-bit integers.
    #[error("{len} samples are more than the {} that can be numbered", u32::MAX)]
    TooManySamples {
        /// Samples in the set.
        len: usize,
    },
}

impl SamplerError {
    /// What the user can do.
    pub fn hint(&self) -> String {
        match self {
            Self::EmptyWorld => "the world size is the number of workers, at least 1".into(),
            Self::RankOutsideWorld { world, .. } => {
                format!("ranks count from 0: use 0 to {}, or raise the world size", world - 1)
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

/// Shards a set of samples over the ranks of a world, as `torch.utils.data.DistributedSampler` does.
///
/// The whole set is permuted with a seed of `seed + epoch`, padded by repeating it from the front (or truncated) to
/// a multiple of the world size, and rank `r` takes the positions `r`, `r + world`, `r + 2 world`, …
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DistributedSampler {
    len: u32,
    rank: usize,
    world: usize,
    shuffle: bool,
    seed: u64,
    drop_last: bool,
}

impl DistributedSampler {
    /// A sampler over `len` samples for `rank` of `world`. `drop_last` truncates the set to a multiple of the world
    /// size, where the default repeats samples from the front.
    ///
    /// # Errors
    /// A world of 0, a rank outside the world, or more samples than a `u32` can number.
    pub fn new(
        len: usize,
        rank: usize,
        world: usize,
        shuffle: bool,
        seed: u64,
        drop_last: bool,
    ) -> Result<Self, SamplerError> {
        if world == 0 {
            return Err(SamplerError::EmptyWorld);
        }
        if rank >= world {
            return Err(SamplerError::RankOutsideWorld { rank, world });
        }
        let len = u32::try_from(len).map_err(|_| SamplerError::TooManySamples { len })?;
        Ok(Self { len, rank, world, shuffle, seed, drop_last })
    }

    /// Samples a rank gets in an epoch, the same number on every rank.
    pub fn samples_per_rank(&self) -> usize {
        let len = self.len as usize;
        if self.drop_last { len / self.world } else { len.div_ceil(self.world) }
    }

    /// Samples all ranks get together in an epoch, repeats counted: `samples_per_rank * world`.
    pub fn total_size(&self) -> usize {
        self.samples_per_rank() * self.world
    }

    /// The epoch's order of all ranks together, `[total_size]`, padded or truncated.
    pub fn global_order(&self, epoch: usize) -> Vec<u32> {
        let mut order = epoch_order(self.len, self.shuffle, self.seed, epoch);
        resize_repeating(&mut order, self.total_size());
        order
    }

    /// This rank's samples of the epoch, in order, `[samples_per_rank]`.
    pub fn indices(&self, epoch: usize) -> Vec<u32> {
        self.global_order(epoch).into_iter().skip(self.rank).step_by(self.world).collect()
    }
}

/// The samples of one rank when none may be counted twice, as evaluation needs: `rank`, `rank + world`, … below
/// `len`. Ranks may differ by one in how many they get. Empty for a rank outside the world.
pub fn exact_shard(len: usize, rank: usize, world: usize) -> Vec<u32> {
    if rank >= world {
        return Vec::new();
    }
    (rank..len).step_by(world).map(|sample| sample as u32).collect()
}

/// The order of a whole epoch before any padding: a permutation seeded by `seed + epoch`, or the set as it stands.
pub(crate) fn epoch_order(len: u32, shuffle: bool, seed: u64, epoch: usize) -> Vec<u32> {
    if shuffle { permutation(len, seed.wrapping_add(epoch as u64)) } else { (0..len).collect() }
}

/// Truncates `order` to `total`, or repeats it from the front (more than once where needed) until it has `total`.
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

/// Sets at least this long are shuffled by PyTorch with 64-bit draws, lest the remainder favour small numbers.
const WIDE: u32 = u32::MAX / 20;

/// `torch.randperm(len, generator=torch.Generator().manual_seed(seed))` on the CPU, element for element: MT19937
/// seeded by the low 32 bits of `seed`, and a Fisher-Yates shuffle (`randperm_cpu`, ATen `TensorFactories.cpp`).
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
