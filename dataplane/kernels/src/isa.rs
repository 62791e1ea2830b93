//! The instruction sets that kernels are written for, and which of them this CPU has.

use std::fmt;
use std::sync::OnceLock;

/// An instruction set. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// One element at a time: the reference, on every CPU.
    Scalar,
    /// x86-64 with AVX2, F16C and FMA: vectors of 32 bytes.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL: vectors of 64 bytes.
    Avx512,
    /// aarch64 with Advanced SIMD: vectors of 16 bytes.
    Neon,
}

impl Isa {
    /// Every instruction set, the widest of an architecture last.
    pub const ALL: &[Self] = &[Self::Scalar, Self::Avx2, Self::Avx512, Self::Neon];

    /// The widest that this CPU has; looked up once in the process's life.
    pub fn detect() -> Self {
        static WIDEST: OnceLock<Isa> = OnceLock::new();
        *WIDEST
            .get_or_init(|| Self::ALL.iter().copied().rfind(|isa| isa.is_available()).unwrap_or(Self::Scalar))
    }

    /// Whether this CPU, and this build, can run it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[allow(unreachable_patterns, reason = "which of them remain depends on the architecture")]
            _ => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "AVX2 with F16C and FMA",
            Self::Avx512 => "AVX-512 F, BW, DQ and VL",
            Self::Neon => "NEON",
        })
    }
}
