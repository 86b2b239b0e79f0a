//! AVX2 with FMA and F16C: two registers are one vector.

use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// Proof of AVX2, FMA and F16C: only [`run`] makes one.
#[derive(Clone, Copy)]
pub struct Avx2(());

/// Runs a kernel compiled for AVX2.
pub fn run<K: Kernel>(kernel: K) -> K::Out {
    assert!(crate::isa::Isa::Avx2.available(), "the device checked the processor");
    // SAFETY: the features were just checked.
    unsafe { eval(kernel) }
}

/// # Safety
/// The processor has the features named here.
#[target_feature(enable = "avx,avx2,fma,f16c")]
unsafe fn eval<K: Kernel>(kernel: K) -> K::Out {
    kernel.eval(Avx2(()))
}

/// An intrinsic of AVX2.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a value of `Avx2` exists only where the processor has the feature; memory operands are references to
        // arrays of the accessed size, and the accesses need no alignment; a prefetch may name any address.
        #[allow(unused_unsafe)]
        unsafe {
            $e
        }
    }};
}

/// Applies an operation to both halves.
macro_rules! both {
    (|$i:ident| $e:expr) => {
        [
            {
                let $i = 0;
                op!($e)
            },
            {
                let $i = 1;
                op!($e)
            },
        ]
    };
}

type I2 = [__m256i; 2];
type F2 = [__m256; 2];

impl Simd for Avx2 {
    type F = F2;
    type I = I2;
    type B = I2;

    #[inline(always)]
    fn load_b(self, from: &[u8; 64], ahead: usize) -> I2 {
        if ahead > 0 {
            op!(_mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(ahead).cast()));
        }
        both!(|i| _mm256_loadu_si256(from.as_ptr().add(32 * i).cast()))
    }
    #[inline(always)]
    fn store_b(self, to: &mut [u8; 64], v: I2) {
        both!(|i| _mm256_storeu_si256(to.as_mut_ptr().add(32 * i).cast(), v[i]));
    }
    #[inline(always)]
    fn fetch<T: ?Sized>(self, at: &T, ahead: usize) {
        for line in (0..size_of_val(at)).step_by(64).filter(|_| ahead > 0) {
            op!(_mm_prefetch::<_MM_HINT_T0>((&raw const *at).cast::<i8>().wrapping_add(ahead + line)));
        }
    }
    #[inline(always)]
    fn table(self, entries: &[u8; 16]) -> I2 {
        [op!(_mm256_broadcastsi128_si256(_mm_loadu_si128(entries.as_ptr().cast()))); 2]
    }
    #[inline(always)]
    fn lookup(self, table: I2, index: I2) -> I2 {
        both!(|i| _mm256_shuffle_epi8(table[i], index[i]))
    }
    #[inline(always)]
    fn and_b(self, a: I2, mask: u8) -> I2 {
        both!(|i| _mm256_and_si256(a[i], _mm256_set1_epi8(mask as i8)))
    }
    #[inline(always)]
    fn shr_b(self, a: I2, n: u32) -> I2 {
        both!(|i| _mm256_srl_epi16(a[i], _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shl_b(self, a: I2, n: u32) -> I2 {
        both!(|i| _mm256_sll_epi16(a[i], _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn select(self, a: I2, b: I2, mask: u8) -> I2 {
        both!(|i| _mm256_or_si256(
            _mm256_and_si256(a[i], _mm256_set1_epi8(mask as i8)),
            _mm256_andnot_si256(_mm256_set1_epi8(mask as i8), b[i])
        ))
    }
    #[inline(always)]
    fn or_masked(self, low: I2, high: I2, mask: u8) -> I2 {
        both!(|i| _mm256_or_si256(low[i], _mm256_and_si256(high[i], _mm256_set1_epi8(mask as i8))))
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> I2 {
        [op!(_mm256_set1_epi32(v)); 2]
    }
    #[inline(always)]
    fn add_i(self, a: I2, b: I2) -> I2 {
        both!(|i| _mm256_add_epi32(a[i], b[i]))
    }
    #[inline(always)]
    fn mul_i(self, a: I2, b: I2) -> I2 {
        both!(|i| _mm256_mullo_epi32(a[i], b[i]))
    }
    #[inline(always)]
    fn shl_i(self, a: I2, n: u32) -> I2 {
        both!(|i| _mm256_sll_epi32(a[i], _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shr_i(self, a: I2, n: u32) -> I2 {
        both!(|i| _mm256_srl_epi32(a[i], _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn widen_u8(self, from: &[u8; 16]) -> I2 {
        both!(|i| _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().add(8 * i).cast())))
    }
    #[inline(always)]
    fn widen_i8(self, from: &[u8; 16]) -> I2 {
        both!(|i| _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().add(8 * i).cast())))
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; 16]) -> I2 {
        both!(|i| _mm256_loadu_si256(from.as_ptr().add(8 * i).cast()))
    }
    #[inline(always)]
    fn store_i(self, to: &mut [i32; 16], v: I2) {
        both!(|i| _mm256_storeu_si256(to.as_mut_ptr().add(8 * i).cast(), v[i]));
    }
    #[inline(always)]
    fn xor_i(self, a: I2, mask: i32) -> I2 {
        both!(|i| _mm256_xor_si256(a[i], _mm256_set1_epi32(mask)))
    }
    #[inline(always)]
    fn even_bytes(self, v: I2) -> I2 {
        both!(|i| _mm256_and_si256(v[i], _mm256_set1_epi16(255)))
    }
    #[inline(always)]
    fn odd_bytes(self, v: I2) -> I2 {
        both!(|i| _mm256_srli_epi16::<8>(v[i]))
    }
    #[inline(always)]
    fn pairs_i8(self, from: &[u8; 32]) -> I2 {
        both!(|i| _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().add(16 * i).cast())))
    }
    #[inline(always)]
    fn dot_pairs(self, acc: I2, a: I2, b: I2) -> I2 {
        both!(|i| _mm256_add_epi32(acc[i], _mm256_madd_epi16(a[i], b[i])))
    }
    #[inline(always)]
    fn dot(self, acc: I2, w: I2, x: i32) -> I2 {
        // Pairs of products fit 16 bits: at most 2 * 128 * 127.
        let x = op!(_mm256_set1_epi32(x));
        both!(|i| _mm256_add_epi32(
            acc[i],
            _mm256_madd_epi16(_mm256_maddubs_epi16(w[i], x), _mm256_set1_epi16(1))
        ))
    }
    #[inline(always)]
    fn dot_wide(self, acc: I2, w: I2, x: i32) -> I2 {
        // |w| times x with w's sign: the pair sums stay within 16 bits where w + 128 would not.
        let x = op!(_mm256_set1_epi32(x));
        let w = both!(|i| _mm256_xor_si256(w[i], _mm256_set1_epi8(-128)));
        both!(|i| _mm256_add_epi32(
            acc[i],
            _mm256_madd_epi16(
                _mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(x, w[i])),
                _mm256_set1_epi16(1)
            )
        ))
    }
    #[inline(always)]
    fn start_wide(self, _start: i32) -> I2 {
        [op!(_mm256_setzero_si256()); 2]
    }

    #[inline(always)]
    fn splat_f(self, v: f32) -> F2 {
        [op!(_mm256_set1_ps(v)); 2]
    }
    #[inline(always)]
    fn load_f(self, from: &[f32; 16]) -> F2 {
        both!(|i| _mm256_loadu_ps(from.as_ptr().add(8 * i)))
    }
    #[inline(always)]
    fn store_f(self, to: &mut [f32; 16], v: F2) {
        both!(|i| _mm256_storeu_ps(to.as_mut_ptr().add(8 * i), v[i]));
    }
    #[inline(always)]
    fn mul_f(self, a: F2, b: F2) -> F2 {
        both!(|i| _mm256_mul_ps(a[i], b[i]))
    }
    #[inline(always)]
    fn add_f(self, a: F2, b: F2) -> F2 {
        both!(|i| _mm256_add_ps(a[i], b[i]))
    }
    #[inline(always)]
    fn fma(self, a: F2, b: F2, c: F2) -> F2 {
        both!(|i| _mm256_fmadd_ps(a[i], b[i], c[i]))
    }
    #[inline(always)]
    fn to_f(self, a: I2) -> F2 {
        both!(|i| _mm256_cvtepi32_ps(a[i]))
    }
    #[inline(always)]
    fn bits_f(self, a: I2) -> F2 {
        both!(|i| _mm256_castsi256_ps(a[i]))
    }
    #[inline(always)]
    fn pick(self, table: F2, index: I2) -> F2 {
        // A lookup in each half of the table reads three bits; the fourth, as the sign, chooses between them.
        both!(|i| _mm256_blendv_ps(
            _mm256_permutevar8x32_ps(table[0], index[i]),
            _mm256_permutevar8x32_ps(table[1], index[i]),
            _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index[i]))
        ))
    }
    #[inline(always)]
    fn half(self, from: &[u8; 32]) -> F2 {
        both!(|i| _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(16 * i).cast())))
    }
    #[inline(always)]
    fn to_half(self, to: &mut [u8; 32], v: F2) {
        both!(|i| _mm_storeu_si128(
            to.as_mut_ptr().add(16 * i).cast(),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[i])
        ));
    }
    #[inline(always)]
    fn bf16(self, from: &[u8; 32]) -> F2 {
        both!(|i| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(
            from.as_ptr().add(16 * i).cast()
        )))))
    }
}
