//! Loops compiled for the widest vectors of the processor: the same operations, so the same bits.

/// A loop that the compiler turns into vectors. `run` is to be `#[inline(always)]`, which brings it into each of the functions below.
pub(super) trait Loop {
    type Out;
    fn run(self) -> Self::Out;
}

/// Runs a loop.
pub(super) fn run<L: Loop>(it: L) -> L::Out {
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx512() {
            // SAFETY: the features were just detected.
            return unsafe { avx512(it) };
        }
        if has_avx2() {
            // SAFETY: the feature was just detected.
            return unsafe { avx2(it) };
        }
    }
    it.run()
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    use std::arch::is_x86_feature_detected as has;
    has!("avx512f") && has!("avx512dq") && has!("avx512vl")
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

/// AVX-512 brings a fused multiply-add along, which the compiler does not make of a product and a sum.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn avx512<L: Loop>(it: L) -> L::Out {
    it.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<L: Loop>(it: L) -> L::Out {
    it.run()
}

/// What a loop gives in each way that this processor knows, plain code first.
#[cfg(test)]
pub(super) fn each<L: Loop>(it: impl Fn() -> L) -> Vec<L::Out> {
    let mut all = vec![it().run()];
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx2() {
            // SAFETY: the feature was just detected.
            all.push(unsafe { avx2(it()) });
        }
        if has_avx512() {
            // SAFETY: the features were just detected.
            all.push(unsafe { avx512(it()) });
        }
    }
    all
}
