//! Function multiversioning: plain loops, compiled once per instruction set.

/// Wraps a function whose body the compiler vectorises. `multiversion!(fn name(args) = body)` defines `name`, which
/// selects at run time between copies of the inlined `body` for AVX-512, AVX2 and the baseline. The function may be generic
/// over the element type: `fn name<E: Element>(args)`.
macro_rules! multiversion {
    ($(#[$doc:meta])* fn $name:ident $(<$element:ident: Element>)? ($($arg:ident: $ty:ty),* $(,)?) = $body:path) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "one slice per tensor")]
        pub(crate) fn $name $(<$element: $crate::cpu::element::Element>)? ($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::cpu::cpu_isa::CpuIsa;
                #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
                fn avx512 $(<$element: $crate::cpu::element::Element>)? ($($arg: $ty),*) { $body($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2 $(<$element: $crate::cpu::element::Element>)? ($($arg: $ty),*) { $body($($arg),*) }
                match $crate::cpu::cpu_isa::selected() {
                    // SAFETY: the processor has the features (AVX-512 implies AVX2 and FMA).
                    CpuIsa::AmxBf16 | CpuIsa::Avx512Bf16 | CpuIsa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: the processor has the features.
                    CpuIsa::Avx2 => return unsafe { avx2($($arg),*) },
                    CpuIsa::Portable => {}
                }
            }
            $body($($arg),*)
        }
    };
}
pub(crate) use multiversion;
