//! Plans the launches of a collective: the algorithm, the chunks and the blocks. All ranks compute the same plan.

use super::layout::{MAX_BLOCKS, PACK, THREADS, WireType};
use super::protocol::{FINGERPRINT_BITS, Kernel};
use crate::fnv;

/// A collective, as all ranks call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCall {
    /// The kernel.
    pub kernel: Kernel,
    /// Type of the elements on the wire.
    pub wire: WireType,
    /// Elements of the whole array; for reduce-scatter and all-gather, of one rank's part.
    pub elements: u64,
    /// The root of a broadcast.
    pub root: usize,
}

impl DeviceCall {
    /// Returns a hash of [`FINGERPRINT_BITS`] bits, by which ranks notice that they make different calls.
    pub fn fingerprint(&self) -> u32 {
        let words = [self.kernel as u64, self.wire as u64, self.elements, self.root as u64];
        let hash = fnv::hash(words.into_iter().flat_map(u64::to_le_bytes));
        // Combine all bits of the hash.
        ((hash >> 40 ^ hash >> 20 ^ hash) & ((1 << FINGERPRINT_BITS) - 1)) as u32
    }
}

/// The part of a call that one launch handles. A chunk fits into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// First element, of the array or of each part.
    pub first: u64,
    /// Number of elements.
    pub count: u32,
    /// Number of packs that hold these elements.
    pub packs: u32,
    /// Packs that one rank reduces (two-shot). The last rank takes the rest, which may be empty.
    pub packs_per_rank: u32,
    /// Blocks of the launch.
    pub blocks: u32,
}

/// Bytes up to which one-shot is faster than two-shot, by world size. One-shot reads more data, two-shot waits for the peers
/// twice.
const ONE_SHOT: [(usize, usize); 2] = [(4, 512 << 10), (8, 256 << 10)];

/// Returns the all-reduce kernel for `elements` elements. Both kernels produce the same bits.
///
/// With two ranks one-shot is always faster: with both kernels a rank reads as much data, and one-shot waits once. For more
/// ranks, the limits are those that vLLM and TensorRT-LLM measured on machines with eight GPUs. This project has not measured
/// them.
pub fn all_reduce(elements: u64, wire: WireType, world_size: usize) -> Kernel {
    let bytes = elements as usize * wire.size();
    let limit = ONE_SHOT.iter().find(|(most, _)| world_size <= *most).map_or(0, |(_, limit)| *limit);
    if world_size <= 2 || bytes <= limit { Kernel::OneShot } else { Kernel::TwoShot }
}

/// Cuts a call into chunks for slots of `slot` bytes. All chunks but the last fill their slot.
pub fn chunks(call: &DeviceCall, world_size: usize, slot: usize) -> Vec<Chunk> {
    let values = call.wire.values() as u64;
    let parts = if call.kernel == Kernel::ReduceScatter { world_size } else { 1 };
    let most = (slot / PACK / parts) as u64 * values;
    let most = most.min(u64::from(u32::MAX) / values * values).max(values);
    let mut chunks = Vec::new();
    let mut first = 0;
    while first < call.elements {
        let count = most.min(call.elements - first);
        let packs = count.div_ceil(values) as u32;
        let packs_per_rank = packs.div_ceil(world_size as u32);
        let longest = if call.kernel == Kernel::TwoShot { packs_per_rank } else { packs };
        let blocks = longest.div_ceil(THREADS).clamp(1, MAX_BLOCKS);
        chunks.push(Chunk { first, count: count as u32, packs, packs_per_rank, blocks });
        first += count;
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_array_once_and_fit_a_slot() {
        for world_size in [2usize, 3, 4, 7, 8] {
            for wire in WireType::ALL {
                for kernel in Kernel::ALL {
                    for elements in [0u64, 1, 3, 4, 5, 1023, 1024, 65_537] {
                        let slot = 4096;
                        let call = DeviceCall { kernel, wire, elements, root: 0 };
                        let chunks = chunks(&call, world_size, slot);
                        let mut next = 0;
                        for chunk in &chunks {
                            assert_eq!(chunk.first, next);
                            assert!(chunk.count > 0 && chunk.first.is_multiple_of(wire.values() as u64));
                            let parts = if kernel == Kernel::ReduceScatter { world_size } else { 1 };
                            assert!(chunk.packs as usize * PACK * parts <= slot, "{chunk:?}");
                            assert!(chunk.packs as usize * wire.values() >= chunk.count as usize);
                            assert!(chunk.packs_per_rank as usize * world_size >= chunk.packs as usize);
                            assert!((1..=MAX_BLOCKS).contains(&chunk.blocks));
                            next += u64::from(chunk.count);
                        }
                        assert_eq!(next, elements);
                    }
                }
            }
        }
    }

    #[test]
    fn small_arrays_and_pairs_take_one_shot() {
        assert_eq!(all_reduce(1 << 30, WireType::F32, 2), Kernel::OneShot);
        assert_eq!(all_reduce(128 << 10, WireType::F32, 4), Kernel::OneShot);
        assert_eq!(all_reduce((128 << 10) + 1, WireType::F32, 4), Kernel::TwoShot);
        assert_eq!(all_reduce(128 << 10, WireType::Bf16, 8), Kernel::OneShot);
        assert_eq!(all_reduce(128 << 10, WireType::F32, 8), Kernel::TwoShot);
    }

    #[test]
    fn calls_that_differ_have_other_fingerprints() {
        let call = DeviceCall { kernel: Kernel::OneShot, wire: WireType::F32, elements: 1000, root: 0 };
        let others = [
            DeviceCall { kernel: Kernel::TwoShot, ..call },
            DeviceCall { wire: WireType::Bf16, ..call },
            DeviceCall { elements: 1001, ..call },
            DeviceCall { root: 1, ..call },
        ];
        assert!(others.iter().all(|other| other.fingerprint() != call.fingerprint()));
        assert!(call.fingerprint() < 1 << FINGERPRINT_BITS);
    }
}
