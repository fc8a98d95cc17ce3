//! The choice of the instruction set, at run time.

use std::fmt;
use std::sync::LazyLock;

/// Environment variable that limits the choice, e.g. to test the code for older processors.
const VARIABLE: &str = "TRAINER_CPU_ISA";

/// Instruction sets of the CPU kernels. Each includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CpuIsa {
    /// Plain Rust, vectorised by the compiler for the architecture's baseline.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, VL, DQ and BW.
    Avx512,
    /// Dot products of bf16 pairs, summed in f32.
    Avx512Bf16,
    /// AMX: products of 16x32 by 32x16 bf16, summed in f32.
    AmxBf16,
}

impl CpuIsa {
    /// All sets, the smallest first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::AmxBf16];

    /// Returns the name, as `TRAINER_CPU_ISA` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::AmxBf16 => "amx_bf16",
        }
    }

    /// Returns a description of this set's kernels for the screen.
    pub fn description(self) -> &'static str {
        match self {
            Self::Portable => "portable kernels (bf16 computes in f32)",
            Self::Avx2 => "AVX2 (bf16 computes in f32)",
            Self::Avx512 => "AVX-512 (bf16 computes in f32)",
            Self::Avx512Bf16 => "AVX-512 (bf16 by AVX512-BF16)",
            Self::AmxBf16 => "AVX-512 (bf16 by AMX)",
        }
    }

    /// Returns the largest set that this processor has.
    pub fn detected() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw");
            if avx512 && is_x86_feature_detected!("avx512bf16") {
                return if super::kernel_amx::permitted() { Self::AmxBf16 } else { Self::Avx512Bf16 };
            }
            if avx512 {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// Returns the set that is the fastest on this processor: the largest, except where dot products of bf16 are slow.
    fn fastest() -> Self {
        match Self::detected() {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 if slow_dot_products() => Self::Avx512,
            largest => largest,
        }
    }

    /// Returns the set that the kernels use: the one that the environment variable `TRAINER_CPU_ISA` names, or the fastest
    /// on this processor.
    ///
    /// # Errors
    ///
    /// When the value of the variable is not an instruction set, or one that this processor does not have.
    pub fn selected() -> Result<Self, CpuIsaError> {
        let name = std::env::var_os(VARIABLE).map(|name| name.to_string_lossy().into_owned());
        Self::choose(name, Self::detected(), Self::fastest())
    }

    fn choose(name: Option<String>, detected: Self, fastest: Self) -> Result<Self, CpuIsaError> {
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Ok(fastest) };
        match Self::ALL.into_iter().find(|isa| isa.name() == name) {
            Some(isa) if isa <= detected => Ok(isa),
            found => Err(CpuIsaError { name, known: found.is_some(), detected }),
        }
    }
}

/// Returns true if this processor's dot products of bf16 (`vdpbf16ps`) do fewer multiply-adds per second than its f32
/// multiply-adds: on Emerald Rapids (family 6, model 207), 44 instead of 86 G multiply-adds/s per core. Intel's processors from
/// Sapphire Rapids have AMX for bf16 instead, but virtual machines may hide AMX. The dot products of Intel's Cooper Lake, which
/// has no AMX, and of AMD's processors are fast.
#[cfg(target_arch = "x86_64")]
fn slow_dot_products() -> bool {
    use std::arch::x86_64::__cpuid;
    let vendor = __cpuid(0);
    let intel = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel";
    intel && !is_cooper_lake(__cpuid(1).eax)
}

/// Returns true for family 6, model 85 of `cpuid`'s signature. Earlier processors of this model have no instructions for bf16.
#[cfg(target_arch = "x86_64")]
fn is_cooper_lake(signature: u32) -> bool {
    let (family, model) = (signature >> 8 & 0xf, (signature >> 12 & 0xf0) | (signature >> 4 & 0xf));
    (family, model) == (6, 85)
}

/// Error of an invalid `TRAINER_CPU_ISA`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuIsaError {
    name: String,
    known: bool,
    detected: CpuIsa,
}

impl CpuIsaError {
    /// Returns a hint for the user.
    pub fn hint(&self) -> String {
        let names: Vec<_> = CpuIsa::ALL.into_iter().filter(|isa| *isa <= self.detected).map(CpuIsa::name).collect();
        format!("unset {VARIABLE}, or use one that this processor has: {}", names.join(", "))
    }
}

impl fmt::Display for CpuIsaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        if self.known {
            write!(f, "{VARIABLE}={name}: this processor does not have these instructions")
        } else {
            write!(f, "{VARIABLE}={name:?} is not an instruction set")
        }
    }
}

impl std::error::Error for CpuIsaError {}

/// Returns [`CpuIsa::selected`], read once.
///
/// # Panics
///
/// When the environment variable is invalid. The program checks the variable at its start.
pub(crate) fn selected() -> CpuIsa {
    static SELECTED: LazyLock<CpuIsa> =
        LazyLock::new(|| CpuIsa::selected().unwrap_or_else(|error| panic!("{error}\nhint: {}", error.hint())));
    *SELECTED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_names_the_set() {
        let choose = |name: &str, detected| CpuIsa::choose(Some(name.to_owned()), detected, CpuIsa::Avx2);
        assert_eq!(CpuIsa::choose(None, CpuIsa::Avx512, CpuIsa::Avx2), Ok(CpuIsa::Avx2));
        assert_eq!(choose("", CpuIsa::Avx512), Ok(CpuIsa::Avx2));
        for isa in CpuIsa::ALL {
            assert_eq!(choose(isa.name(), CpuIsa::AmxBf16), Ok(isa));
        }
        let missing = choose("avx512_bf16", CpuIsa::Avx2).unwrap_err();
        assert_eq!(missing.to_string(), "TRAINER_CPU_ISA=avx512_bf16: this processor does not have these instructions");
        assert_eq!(missing.hint(), "unset TRAINER_CPU_ISA, or use one that this processor has: portable, avx2");
        let unknown = choose("sse9", CpuIsa::Avx2).unwrap_err();
        assert_eq!(unknown.to_string(), "TRAINER_CPU_ISA=\"sse9\" is not an instruction set");
    }

    /// Signatures of Cascade Lake (which is the same model as Cooper Lake), Sapphire Rapids, Emerald Rapids, and Zen 4 and 5.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn signatures_of_processors() {
        let known = [(0x5065b, true), (0x806f8, false), (0xc06f2, false), (0xa10f11, false), (0xb00f21, false)];
        for (signature, cooper_lake) in known {
            assert_eq!(is_cooper_lake(signature), cooper_lake, "{signature:x}");
        }
    }

    #[test]
    fn the_fastest_set_is_detected() {
        assert!(CpuIsa::fastest() <= CpuIsa::detected());
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        assert_eq!(CpuIsa::fastest() < CpuIsa::detected(), {
            CpuIsa::detected() == CpuIsa::Avx512Bf16
                && std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| {
                    text.contains("GenuineIntel") && !text.lines().any(|line| line == "model\t\t: 85")
                })
        });
    }
}
