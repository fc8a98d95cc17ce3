//! The layout of a rank's window in device memory, and the parameters of a launch.

use crate::DType;

/// Maximum number of ranks that share windows.
pub const MAX_WORLD: usize = 8;
/// Threads of a block.
pub const THREADS: u32 = 512;
/// Maximum number of blocks of a launch: enough to saturate the links, few enough to leave most of the device to the model.
pub const MAX_BLOCKS: u32 = 36;
/// Alignment in bytes of exported allocations, and of their sizes (CUDA IPC exports whole allocations of the driver).
pub const PAGE: usize = 2 << 20;
/// Bytes of a pack, the unit of memory accesses.
pub const PACK: usize = 16;

/// Position in a window, in bytes, of the flags [`FlagSet::Filled`](super::protocol::FlagSet::Filled): one word per block and
/// sender.
pub const FILLED: usize = 0;
/// Position of the flags [`FlagSet::Reduced`](super::protocol::FlagSet::Reduced).
pub const REDUCED: usize = FILLED + FLAGS;
/// Position of the number of the launch in which a wait of this rank has failed; zero until then.
pub const FAULTED_LAUNCH: usize = REDUCED + FLAGS;
/// Position of the number of this rank's launches so far. Kernels read and increment this number, so that launches of a recorded
/// CUDA graph have numbers too.
pub const LAUNCH_COUNT: usize = FAULTED_LAUNCH + 128;
/// Position of the number of blocks of the running launch that have ended.
pub const ENDED_BLOCKS: usize = LAUNCH_COUNT + 8;
/// Position of a word per writer, for the test of peer access.
pub const PROBE: usize = LAUNCH_COUNT + 128;
/// Position of the first slot.
pub const SLOTS_AT: usize = 64 << 10;

const FLAGS: usize = MAX_BLOCKS as usize * MAX_WORLD * 8;
const _: () = assert!(PROBE + MAX_WORLD * 8 <= SLOTS_AT && SLOTS_AT.is_multiple_of(128));

/// Bits of [`LaunchParams::phases`]: the steps of a launch. Usually one launch runs all steps. If ranks share a device, each
/// step is a separate launch, and the host processes synchronize between launches.
pub mod phase {
    /// [`KernelStep::Pack`](super::super::protocol::KernelStep::Pack).
    pub const PACK: u32 = 1;
    /// A barrier on [`FlagSet::Filled`](super::super::protocol::FlagSet::Filled).
    pub const BARRIER_ENTER: u32 = 2;
    /// [`KernelStep::Reduce`](super::super::protocol::KernelStep::Reduce).
    pub const REDUCE: u32 = 4;
    /// A barrier on [`FlagSet::Reduced`](super::super::protocol::FlagSet::Reduced).
    pub const BARRIER_EXIT: u32 = 8;
    /// [`KernelStep::Gather`](super::super::protocol::KernelStep::Gather).
    pub const GATHER: u32 = 16;
    /// Counts the launch at its end. The last launch of each chunk does this.
    pub const COUNT: u32 = 32;
}

/// Kinds of [`Fault`], as kernels write them.
pub mod fault {
    /// The peer did not arrive within the timeout.
    pub const TIMEOUT: u64 = 1;
    /// The job was aborted while the rank waited for the peer.
    pub const ABORTED: u64 = 2;
    /// The peer makes another call.
    pub const MISMATCH: u64 = 3;
    /// The peer's memory does not hold what was written to it.
    pub const UNREACHABLE: u64 = 4;
    /// NCCL did not finish a sum within the limit.
    pub const STALLED: u64 = 5;
}

/// Words in host memory that kernels read and write, in addition to the faults.
pub mod word {
    /// Not zero once the job has ended.
    pub const ABORT: usize = 0;
    /// Number of the last launch whose slot NCCL may sum.
    pub const PACKED: usize = 1;
    /// Number of the last launch whose slot NCCL has summed.
    pub const SUMMED: usize = 2;
    /// Number of words.
    pub const COUNT: usize = 3;
}

/// Base of the numbers that the test of peer access writes. The test adds the ranks of the writer and of the owner.
pub const PROBE_TOKEN: u64 = 0x5bd1_e995_0000_0100;

/// Element type in the slots, and therefore on the links. Tensors are f32. Sums are computed in f32 and rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WireType {
    /// Single precision. Copies keep their bits.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl WireType {
    /// All types.
    pub const ALL: [WireType; 3] = [WireType::F32, WireType::F16, WireType::Bf16];

    /// Returns the bytes of an element.
    pub fn size(self) -> usize {
        if self == WireType::F32 { 4 } else { 2 }
    }

    /// Returns the number of elements in a pack.
    pub fn values(self) -> usize {
        PACK / self.size()
    }

    /// Returns the same type of the CPU's collectives.
    pub fn dtype(self) -> DType {
        match self {
            WireType::F32 => DType::F32,
            WireType::F16 => DType::F16,
            WireType::Bf16 => DType::BF16,
        }
    }

    /// Returns the name that messages use.
    pub fn name(self) -> &'static str {
        match self {
            WireType::F32 => "f32",
            WireType::F16 => "f16",
            WireType::Bf16 => "bf16",
        }
    }
}

/// Returns the bytes of a window whose slots hold `slot_bytes` bytes each.
pub fn window_bytes(slot_bytes: usize) -> usize {
    (SLOTS_AT + super::protocol::SLOTS as usize * slot_bytes).next_multiple_of(PAGE)
}

/// The parameters of a launch. `kernels/collectives.cu` documents the fields.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the kernels' text documents them")]
pub struct LaunchParams {
    pub windows: [u64; MAX_WORLD],
    pub faults: u64,
    pub host_words: u64,
    pub limit_ns: u64,
    pub first: u64,
    pub elements_per_rank: u64,
    pub slot_bytes: u64,
    pub count: u32,
    pub packs: u32,
    pub packs_per_rank: u32,
    pub fingerprint: u32,
    pub rank: u32,
    pub root: u32,
    pub phases: u32,
    pub scale: f32,
    /// Number of elements up to the end of each tensor.
    pub ends: Vec<u32>,
}

impl LaunchParams {
    /// Returns the kernel's last parameter, as words of 64 bits, for a kernel of at most `max_sources` tensors.
    pub fn words(&self, max_sources: usize) -> Vec<u64> {
        let mut words = self.windows.to_vec();
        words.extend([
            self.faults,
            self.host_words,
            self.limit_ns,
            self.first,
            self.elements_per_rank,
            self.slot_bytes,
        ]);
        let last = self.ends.last().copied().unwrap_or(0);
        let mut halves =
            vec![self.count, self.packs, self.packs_per_rank, self.fingerprint, self.rank, self.root, self.phases];
        halves.push(self.scale.to_bits());
        halves
            .extend((0..max_sources.next_multiple_of(2)).map(|source| self.ends.get(source).copied().unwrap_or(last)));
        words.extend(halves.chunks_exact(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32));
        words
    }
}

/// Why a kernel's wait for one peer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The peer, by rank in the group.
    pub peer: usize,
    /// One of the constants in [`fault`].
    pub kind: u64,
    /// Number of the launch.
    pub launch_number: u64,
}

impl Fault {
    /// Decodes the words that a rank's kernels have written, one per peer.
    pub fn read(words: &[u64]) -> Vec<Fault> {
        let some = words.iter().enumerate().filter(|(_, word)| **word != 0);
        some.map(|(peer, word)| Fault { peer, kind: word & 0xff, launch_number: word >> 8 }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_launch_params_are_those_of_the_kernels_struct() {
        let params = LaunchParams {
            windows: std::array::from_fn(|rank| rank as u64 + 100),
            faults: 1,
            host_words: 2,
            limit_ns: 3,
            first: 5,
            elements_per_rank: 6,
            slot_bytes: 7,
            count: 8,
            packs: 9,
            packs_per_rank: 10,
            fingerprint: 11,
            rank: 12,
            root: 13,
            phases: 14,
            scale: 1.0,
            ends: vec![21, 22, 23],
        };
        let words = params.words(8);
        // 8 windows, 6 words, 8 halves, 8 ends, without padding inside, as C lays the struct out.
        assert_eq!(words.len() * 8, 64 + 48 + 32 + 32);
        assert_eq!((words[7], words[13]), (107, 7));
        assert_eq!(words[14], 8 | 9 << 32);
        assert_eq!(words[17], 14 | u64::from(1.0f32.to_bits()) << 32);
        assert_eq!(words[18..], [21 | 22 << 32, 23 | 23 << 32, 23 | 23 << 32, 23 | 23 << 32]);
    }

    #[test]
    fn windows_are_whole_pages() {
        for slot in [0, 16, PAGE, PAGE * 5 + 16] {
            let bytes = window_bytes(slot);
            assert!(bytes.is_multiple_of(PAGE) && bytes >= SLOTS_AT + 2 * slot);
        }
    }

    #[test]
    fn faults_name_peers() {
        let missing = fault::TIMEOUT | 77 << 8;
        assert_eq!(Fault::read(&[0, missing, 0]), [Fault { peer: 1, kind: fault::TIMEOUT, launch_number: 77 }]);
        assert_eq!(Fault::read(&[0; 8]), []);
    }
}
