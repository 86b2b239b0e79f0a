//! Instruction sets: what this processor has, and which one the kernels use.

use std::fmt;

/// An instruction set that kernels are compiled for. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust; runs everywhere.
    Scalar,
    /// NEON with the dot products of ARMv8.2.
    Neon,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512];

    /// Whether this processor runs it.
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            match self {
                Isa::Scalar => true,
                Isa::Neon => false,
                Isa::Avx2 => has!("avx2") && has!("fma") && has!("f16c"),
                Isa::Avx512 => {
                    Isa::Avx2.available()
                        && has!("avx512f")
                        && has!("avx512bw")
                        && has!("avx512dq")
                        && has!("avx512vl")
                        && has!("avx512vnni")
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            self == Isa::Scalar || self == Isa::Neon && std::arch::is_aarch64_feature_detected!("dotprod")
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            self == Isa::Scalar
        }
    }

    /// The fastest that this processor runs.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.available()).unwrap_or(Isa::Scalar)
    }

    /// `scalar`, `neon`, `avx2`, `avx512`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// The instruction set of that name.
    pub fn from_name(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a processor offers, for people.
#[derive(Clone, Debug)]
pub struct Features {
    /// The processor's own name, where the system tells it.
    pub model: String,
    /// Instruction set that the kernels will use.
    pub isa: Isa,
    /// Threads that a device starts by default: one a physical core.
    pub threads: usize,
    /// Instruction sets that kernels know of, with whether this processor has them.
    pub isas: Vec<(Isa, bool)>,
    /// Whether anonymous memory may use 2 MB pages.
    pub huge_pages: bool,
}

/// What this processor offers.
pub fn features() -> Features {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|l| l.strip_prefix("model name")).and_then(|l| l.split(':').nth(1));
    let pages = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    Features {
        model: model.map_or_else(|| std::env::consts::ARCH.to_string(), |m| m.trim().to_string()),
        isa: Isa::best(),
        threads: default_threads(),
        isas: Isa::ALL.iter().map(|isa| (*isa, isa.available())).collect(),
        huge_pages: pages.contains("[always]") || pages.contains("[madvise]"),
    }
}

/// One thread a physical core, and never more than the process may use.
pub(crate) fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, |n| n.get());
    let siblings = |cpu: usize| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
            .ok()
    };
    let cores: std::collections::HashSet<String> = (0..).map_while(siblings).collect();
    if cores.is_empty() { allowed } else { allowed.min(cores.len()) }
}
