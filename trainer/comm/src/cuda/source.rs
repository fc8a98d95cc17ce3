//! Makes the text of a kernel: constants, platform, collectives, entry point.

use std::fmt::Write as _;

use super::layout::{self, WireType, fault, phase, word};
use super::protocol::{FINGERPRINT_BITS, Kernel, SLOTS};

/// Definitions of the primitives (atomics, barriers, memory accesses) for CUDA.
pub const CUDA: &str = include_str!("kernels/device.cuh");

const COLLECTIVES: &str = include_str!("kernels/collectives.cu");

/// Numbers of source tensors for which kernels exist. A launch uses the smallest kernel that has room for its tensors. The
/// parameters of the largest kernel, with its table of lengths, need 3.2 of the 4 KB that CUDA allows.
pub const PARTS: [usize; 5] = [2, 8, 32, 128, 256];

/// Returns the entry of [`PARTS`] for `tensors` tensors; `None` if there are too many for one launch.
pub fn parts(tensors: usize) -> Option<usize> {
    PARTS.into_iter().find(|parts| *parts >= tensors)
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
    /// Number of source tensors, one of [`PARTS`].
    pub parts: usize,
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
            ("PARTS", self.parts),
            ("THREADS", threads as usize),
            ("FINGERPRINT_BITS", FINGERPRINT_BITS as usize),
            ("WIRE_F32", WireType::F32 as usize),
            ("WIRE_F16", WireType::F16 as usize),
            ("WIRE_BF16", WireType::Bf16 as usize),
            ("WIRE", self.wire as usize),
            ("FILLED", layout::FILLED),
            ("REDUCED", layout::REDUCED),
            ("BROKEN", layout::BROKEN),
            ("LAUNCH_NUMBER", layout::LAUNCH_NUMBER),
            ("ENDED", layout::ENDED),
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
            ("FAULT_MISSING", fault::MISSING),
            ("FAULT_ABORTED", fault::ABORTED),
            ("FAULT_DIFFERS", fault::DIFFERS),
            ("FAULT_UNREACHABLE", fault::UNREACHABLE),
            ("FAULT_STALLED", fault::STALLED),
            ("PROBE_TOKEN", layout::PROBE_TOKEN),
        ];
        faults.iter().for_each(|(name, value)| define(name, &format_args!("{value}ull")));
        let each = |what: &dyn Fn(usize) -> String| (0..self.parts).map(what).collect::<String>();
        let parameters = each(&|i| format!("{}const float* source{i}", if i == 0 { "" } else { ", " }));
        define("PARAMETERS", &parameters);
        define("TAKE_PARAMETERS", &each(&|i| format!("shared.source[{i}] = source{i}; ")));
        text.push_str(platform);
        text.push_str(COLLECTIVES);
        let _ = writeln!(text, "\nENTRY({})", self.kernel.name());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_fit_into_a_launch() {
        for parts in PARTS {
            let params = 8 * 8 + 6 * 8 + 8 * 4 + 4 * parts;
            assert!(8 + 8 * parts + params <= 4096, "{parts}");
        }
        assert_eq!((parts(1), parts(9), parts(256), parts(257)), (Some(2), Some(32), Some(256), None));
    }

    #[test]
    fn a_text_names_one_entry_and_its_parameters() {
        let variant = KernelVariant { kernel: Kernel::TwoShot, wire: WireType::Bf16, world_size: 4, parts: 2 };
        let text = variant.source();
        assert!(text.ends_with("\nENTRY(two_shot)\n"));
        assert!(text.contains("#define PARAMETERS const float* source0, const float* source1\n"));
        assert!(text.contains("#define WIRE 2\n") && text.contains("#define WORLD 4\n"));
    }
}
