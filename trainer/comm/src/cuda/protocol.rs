//! What the ranks do in turn, and how they tell each other: the part that the kernels, the host-synchronised variant and
//! the loom models (`trainer/testing/loom`) share. Nothing here touches memory.

/// Bits of a flag word that hold the call's fingerprint; the others hold its number.
pub const FINGERPRINT_BITS: u32 = 20;

/// Slots that consecutive launches use in turn.
pub const SLOTS: u64 = 2;

/// A set of flags, one word for each block and sender. Those of the start and of the end of a reduction are apart: with
/// one set, a rank that is ahead would take a late rank's first signal for its second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagSet {
    /// The sender's slot is filled.
    Filled,
    /// The sender's part of the sum is in its slot.
    Reduced,
}

/// What every rank does between two meetings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelStep {
    /// Copies its tensors into its slot: cast, scaled, one behind the other.
    Pack,
    /// Says that it is here, and waits for all the others.
    Meet(FlagSet),
    /// Adds up from everybody's slots, in the order of ranks.
    Reduce,
    /// Copies from everybody's slots into its output.
    Gather,
}

/// A collective of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// All-reduce; everybody reads everything.
    OneShot,
    /// All-reduce; each rank reduces a part.
    TwoShot,
    /// Each rank gets its part of the sum.
    ReduceScatter,
    /// Each rank gets everybody's elements.
    AllGather,
    /// Each rank gets the root's elements.
    Broadcast,
    /// Whether stores and loads reach every peer.
    Probe,
}

impl Kernel {
    /// Those that move data.
    pub const ALL: [Kernel; 5] =
        [Kernel::OneShot, Kernel::TwoShot, Kernel::ReduceScatter, Kernel::AllGather, Kernel::Broadcast];

    /// The entry point's name.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::OneShot => "one_shot",
            Kernel::TwoShot => "two_shot",
            Kernel::ReduceScatter => "reduce_scatter",
            Kernel::AllGather => "all_gather",
            Kernel::Broadcast => "broadcast",
            Kernel::Probe => "probe",
        }
    }

    /// What a rank does, in this order.
    pub fn steps(self) -> &'static [KernelStep] {
        use KernelStep::{Gather, Meet, Pack, Reduce};
        match self {
            Kernel::OneShot | Kernel::ReduceScatter => &[Pack, Meet(FlagSet::Filled), Reduce],
            Kernel::TwoShot => &[Pack, Meet(FlagSet::Filled), Reduce, Meet(FlagSet::Reduced), Gather],
            Kernel::AllGather | Kernel::Broadcast => &[Pack, Meet(FlagSet::Filled), Gather],
            Kernel::Probe => &[Pack, Meet(FlagSet::Filled), Reduce],
        }
    }
}

/// The word that a rank writes into the flags of the others.
pub fn flag(epoch: u64, fingerprint: u32) -> u64 {
    epoch << FINGERPRINT_BITS | u64::from(fingerprint)
}

/// What a flag word says to a rank that waits for `epoch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagState {
    /// The sender is not there yet.
    NotYet,
    /// The sender is there, or further on, which it cannot be without having compared the calls itself.
    Arrived,
    /// The sender is there with another call.
    Differs,
}

/// Reads a flag word.
pub fn flag_state(word: u64, epoch: u64, fingerprint: u32) -> FlagState {
    let there = word >> FINGERPRINT_BITS;
    match there.cmp(&epoch) {
        std::cmp::Ordering::Less => FlagState::NotYet,
        std::cmp::Ordering::Equal if word != flag(epoch, fingerprint) => FlagState::Differs,
        _ => FlagState::Arrived,
    }
}

/// The slot of launch number `epoch`.
pub fn slot(epoch: u64) -> u64 {
    epoch % SLOTS
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_flag_says_where_the_sender_is() {
        for epoch in [1, 2, 1 << 30, (1 << 43) - 1] {
            assert_eq!(flag_state(flag(epoch, 7), epoch, 7), FlagState::Arrived);
            assert_eq!(flag_state(flag(epoch, 7), epoch + 1, 7), FlagState::NotYet);
            assert_eq!(flag_state(flag(epoch, 7), epoch, 8), FlagState::Differs);
            assert_eq!(flag_state(flag(epoch + 1, 8), epoch, 7), FlagState::Arrived);
        }
        assert_eq!(flag_state(0, 1, 0), FlagState::NotYet, "flags start as zero, launches as one");
    }

    #[test]
    fn slots_alternate() {
        assert!((1..20).all(|epoch| slot(epoch) != slot(epoch + 1) && slot(epoch) == slot(epoch + 2)));
    }
}
