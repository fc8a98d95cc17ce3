//! The steps of the ranks and the meaning of their flags. The kernels, the variant that synchronizes on the CPU, and the loom
//! models (`trainer/testing/loom`) share these definitions. Nothing here accesses memory.

/// Bits of a flag word that hold the call's fingerprint. The other bits hold the launch's number.
pub const FINGERPRINT_BITS: u32 = 20;

/// Number of slots, which consecutive launches use in turn.
pub const SLOTS: u64 = 2;

/// A set of flags: one word per block and sender. The start and the end of a reduction have separate sets. With one set, a rank
/// that is ahead would mistake the first signal of a late rank for the second signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagSet {
    /// The sender's slot is filled.
    Filled,
    /// The sender's part of the sum is in its slot.
    Reduced,
}

/// A step of every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelStep {
    /// Copies this rank's tensors into its slot: scaled, cast and concatenated.
    Pack,
    /// Signals that this rank has arrived, and waits for all other ranks.
    Barrier(FlagSet),
    /// Sums all ranks' slots, in rank order.
    Reduce,
    /// Copies from all ranks' slots to the output.
    Gather,
}

/// A collective on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// All-reduce in one phase: every rank reads and sums the whole slots of all ranks.
    OneShot,
    /// All-reduce in two phases: each rank sums one part, and then reads the other parts.
    TwoShot,
    /// Each rank gets its part of the sum.
    ReduceScatter,
    /// Each rank gets all ranks' elements.
    AllGather,
    /// Each rank gets the root's elements.
    Broadcast,
    /// Tests whether stores and loads reach every peer.
    Probe,
    /// Orders the launches and NCCL's stream: signals that a slot is packed, or waits until NCCL has summed it.
    Order,
}

impl Kernel {
    /// The kernels that move data.
    pub const ALL: [Kernel; 5] =
        [Kernel::OneShot, Kernel::TwoShot, Kernel::ReduceScatter, Kernel::AllGather, Kernel::Broadcast];

    /// Returns the name of the entry point.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::OneShot => "one_shot",
            Kernel::TwoShot => "two_shot",
            Kernel::ReduceScatter => "reduce_scatter",
            Kernel::AllGather => "all_gather",
            Kernel::Broadcast => "broadcast",
            Kernel::Probe => "probe",
            Kernel::Order => "order",
        }
    }

    /// Returns a rank's steps, in order.
    pub fn steps(self) -> &'static [KernelStep] {
        use KernelStep::{Barrier, Gather, Pack, Reduce};
        match self {
            Kernel::OneShot | Kernel::ReduceScatter => &[Pack, Barrier(FlagSet::Filled), Reduce],
            Kernel::TwoShot => &[Pack, Barrier(FlagSet::Filled), Reduce, Barrier(FlagSet::Reduced), Gather],
            Kernel::AllGather | Kernel::Broadcast => &[Pack, Barrier(FlagSet::Filled), Gather],
            Kernel::Probe => &[Pack, Barrier(FlagSet::Filled), Reduce],
            Kernel::Order => &[],
        }
    }
}

/// Returns the word that a rank writes into the other ranks' flags.
pub fn flag(launch_number: u64, fingerprint: u32) -> u64 {
    launch_number << FINGERPRINT_BITS | u64::from(fingerprint)
}

/// The meaning of a flag word for a rank that waits for `launch_number`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagState {
    /// The sender has not arrived.
    NotYet,
    /// The sender has arrived, or is one launch ahead. A sender that is ahead has already compared the calls of this launch.
    Arrived,
    /// The sender has arrived with another call.
    Mismatch,
}

/// Decodes a flag word.
pub fn flag_state(word: u64, launch_number: u64, fingerprint: u32) -> FlagState {
    let there = word >> FINGERPRINT_BITS;
    match there.cmp(&launch_number) {
        std::cmp::Ordering::Less => FlagState::NotYet,
        std::cmp::Ordering::Equal if word != flag(launch_number, fingerprint) => FlagState::Mismatch,
        _ => FlagState::Arrived,
    }
}

/// Returns the slot of launch number `launch_number`.
pub fn slot(launch_number: u64) -> u64 {
    launch_number % SLOTS
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn flag_words_decode_to_flag_states() {
        for launch_number in [1, 2, 1 << 30, (1 << 43) - 1] {
            assert_eq!(flag_state(flag(launch_number, 7), launch_number, 7), FlagState::Arrived);
            assert_eq!(flag_state(flag(launch_number, 7), launch_number + 1, 7), FlagState::NotYet);
            assert_eq!(flag_state(flag(launch_number, 7), launch_number, 8), FlagState::Mismatch);
            assert_eq!(flag_state(flag(launch_number + 1, 8), launch_number, 7), FlagState::Arrived);
        }
        assert_eq!(flag_state(0, 1, 0), FlagState::NotYet, "flags start as zero, launches as one");
    }

    #[test]
    fn slots_alternate() {
        assert!((1..20).all(|number| slot(number) != slot(number + 1) && slot(number) == slot(number + 2)));
    }
}
