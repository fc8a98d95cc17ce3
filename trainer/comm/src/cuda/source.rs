//! Makes the text of a kernel: constants, platform, collectives, entry point.

use std::fmt::Write as _;

use super::layout::{self, WireType, fault, phase, word};
use super::protocol::{FINGERPRINT_BITS, Kernel, SLOTS};

/// Definitions of the primitives (atomics, barriers, memory accesses) for CUDA.
pub const CUDA: &str = include_str!("kernels/device.cuh");

const COLLECTIVES: &str = include_str!("kernels/collectives.cu");

/// Numbers of source tensors for which kernels exist. A launch uses the smallest kernel that has room for its tensors. The
/// parameters of the largest kernel, with its table of lengths, need 3.2 of the 4 KB that CUDA allows.
pub const SOURCE_COUNTS: [usize; 5] = [2, 8, 32, 128, 256];

/// Returns the entry of [`SOURCE_COUNTS`] for `tensors` tensors; `None` if there are too many for one launch.
pub fn source_count(tensors: usize) -> Option<usize> {
    SOURCE_COUNTS.into_iter().find(|count| *count >= tensors)
}

/// One kernel of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelVariant {
    /// Entry point.
    pub kernel: Kernel,
    /// Type of the elements on the wire.
    pub wire: WireType,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of source tensors, one of [`SOURCE_COUNTS`].
    pub max_sources: usize,
}

impl KernelVariant {
    /// Returns CUDA C++ for NVRTC and nvcc.
    pub fn source(&self) -> String {
        self.source_for(CUDA, layout::THREADS)
    }

    /// Returns the text for another platform, which defines what `device.cuh` defines, with `threads` threads per block.
    pub fn source_for(&self, platform: &str, threads: u32) -> String {
        let mut text = String::from(
            "typedef unsigned int u32;\ntypedef unsigned long long u64;\nstruct alignas(16) Pack { u32 word[4]; };\n",
        );
        let mut define = |name: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(text, "#define {name} {value}");
        };
        let numbers = [
            ("WORLD", self.world_size),
            ("MAX_WORLD", layout::MAX_WORLD),
            ("MAX_SOURCES", self.max_sources),
            ("THREADS", threads as usize),
            ("FINGERPRINT_BITS", FINGERPRINT_BITS as usize),
            ("WIRE_F32", WireType::F32 as usize),
            ("WIRE_F16", WireType::F16 as usize),
            ("WIRE_BF16", WireType::Bf16 as usize),
            ("WIRE", self.wire as usize),
            ("FILLED", layout::FILLED),
            ("REDUCED", layout::REDUCED),
            ("FAULTED_LAUNCH", layout::FAULTED_LAUNCH),
            ("LAUNCH_COUNT", layout::LAUNCH_COUNT),
            ("ENDED_BLOCKS", layout::ENDED_BLOCKS),
            ("SLOTS_AT", layout::SLOTS_AT),
            ("SLOTS", SLOTS as usize),
            ("PROBE", layout::PROBE),
            ("WORD_PACKED", word::PACKED),
            ("WORD_SUMMED", word::SUMMED),
        ];
        numbers.iter().for_each(|(name, value)| define(name, value));
        let phases = [
            ("PHASE_PACK", phase::PACK),
            ("PHASE_BARRIER_ENTER", phase::BARRIER_ENTER),
            ("PHASE_REDUCE", phase::REDUCE),
            ("PHASE_BARRIER_EXIT", phase::BARRIER_EXIT),
            ("PHASE_GATHER", phase::GATHER),
            ("PHASE_COUNT", phase::COUNT),
        ];
        phases.iter().for_each(|(name, value)| define(name, value));
        let faults = [
            ("FAULT_TIMEOUT", fault::TIMEOUT),
            ("FAULT_ABORTED", fault::ABORTED),
            ("FAULT_MISMATCH", fault::MISMATCH),
            ("FAULT_UNREACHABLE", fault::UNREACHABLE),
            ("FAULT_STALLED", fault::STALLED),
            ("PROBE_TOKEN", layout::PROBE_TOKEN),
        ];
        faults.iter().for_each(|(name, value)| define(name, &format_args!("{value}ull")));
        let each = |what: &dyn Fn(usize) -> String| (0..self.max_sources).map(what).collect::<String>();
        let parameters = each(&|i| format!("{}const float* source{i}", if i == 0 { "" } else { ", " }));
        define("SOURCE_PARAMETERS", &parameters);
        define("COPY_SOURCE_POINTERS", &each(&|i| format!("shared.source[{i}] = source{i}; ")));
        text.push_str(platform);
        text.push_str(COLLECTIVES);
        let _ = writeln!(text, "\nDEFINE_KERNEL({})", self.kernel.name());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_fit_into_a_launch() {
        for count in SOURCE_COUNTS {
            let params = 8 * 8 + 6 * 8 + 8 * 4 + 4 * count;
            assert!(8 + 8 * count + params <= 4096, "{count}");
        }
        assert_eq!([1, 9, 256, 257].map(source_count), [Some(2), Some(32), Some(256), None]);
    }

    #[test]
    fn a_text_names_one_entry_and_its_parameters() {
        let variant = KernelVariant { kernel: Kernel::TwoShot, wire: WireType::Bf16, world_size: 4, max_sources: 2 };
        let text = variant.source();
        assert!(text.ends_with("\nDEFINE_KERNEL(two_shot)\n"));
        assert!(text.contains("#define SOURCE_PARAMETERS const float* source0, const float* source1\n"));
        assert!(text.contains("#define WIRE 2\n") && text.contains("#define WORLD 4\n"));
    }
}
