//! AVX-512 with VNNI: one register is one vector.

mod few;
mod pair;
mod quantise;

use super::{Kernel, Simd};
use crate::activations::{Block256, Cross256};
use crate::forms::{CrossedBlock, K4Block, K6Block, PairedOffsetBlock};
use crate::plain::view;
use std::arch::asm;
use std::arch::x86_64::*;

/// Proof of AVX-512 F, BW, DQ, VL and VNNI: only [`run`] makes one.
#[derive(Clone, Copy)]
pub struct Avx512(());

/// Runs a kernel compiled for AVX-512.
pub fn run<K: Kernel>(kernel: K) -> K::Out {
    assert!(crate::isa::Isa::Avx512.available(), "the device checked the processor");
    // SAFETY: the features were just checked.
    unsafe { eval(kernel) }
}

/// # Safety
/// The processor has the features named here.
#[target_feature(enable = "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn eval<K: Kernel>(kernel: K) -> K::Out {
    kernel.eval(Avx512(()))
}

/// Adds to each lane the products of its signed halves. Not the intrinsic: the compiler makes a product and a sum of that
/// where it counts on lower latency, and the product takes as much of the dot units as the whole.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn dot_words(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
    let mut acc = acc;
    // SAFETY: one instruction of the features named here, on registers.
    unsafe {
        asm!(
            "vpdpwssd {acc}, {a}, {b}",
            acc = inout(zmm_reg) acc, a = in(zmm_reg) a, b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// [`dot_words`] with the same two halves in all lanes, straight from memory.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn dot_word(acc: __m512i, a: __m512i, x: &i32) -> __m512i {
    let mut acc = acc;
    // SAFETY: one instruction of the features named here, which reads the four bytes that `x` refers to.
    unsafe {
        asm!(
            "vpdpwssd {acc}, {a}, dword ptr [{x}]{{1to16}}",
            acc = inout(zmm_reg) acc, a = in(zmm_reg) a, x = in(reg) x,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    acc
}

/// An intrinsic of AVX-512.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a value of `Avx512` exists only where the processor has the feature; memory operands are references to
        // arrays of the accessed size, and the accesses need no alignment; a prefetch may name any address.
        #[allow(unused_unsafe)]
        unsafe {
            $e
        }
    }};
}

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;

    #[inline(always)]
    fn load_b(self, from: &[u8; 64], ahead: usize) -> __m512i {
        if ahead > 0 {
            op!(_mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(ahead).cast()));
        }
        op!(_mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn store_b(self, to: &mut [u8; 64], v: __m512i) {
        op!(_mm512_storeu_si512(to.as_mut_ptr().cast(), v))
    }
    #[inline(always)]
    fn fetch<T: ?Sized>(self, at: &T, ahead: usize) {
        for line in (0..size_of_val(at)).step_by(64).filter(|_| ahead > 0) {
            op!(_mm_prefetch::<_MM_HINT_T0>((&raw const *at).cast::<i8>().wrapping_add(ahead + line)));
        }
    }
    #[inline(always)]
    fn table(self, entries: &[u8; 16]) -> __m512i {
        op!(_mm512_broadcast_i32x4(_mm_loadu_si128(entries.as_ptr().cast())))
    }
    #[inline(always)]
    fn lookup(self, table: __m512i, index: __m512i) -> __m512i {
        op!(_mm512_shuffle_epi8(table, index))
    }
    #[inline(always)]
    fn and_b(self, a: __m512i, mask: u8) -> __m512i {
        op!(_mm512_and_si512(a, _mm512_set1_epi8(mask as i8)))
    }
    #[inline(always)]
    fn shr_b(self, a: __m512i, n: u32) -> __m512i {
        op!(_mm512_srl_epi16(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shl_b(self, a: __m512i, n: u32) -> __m512i {
        op!(_mm512_sll_epi16(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn select(self, a: __m512i, b: __m512i, mask: u8) -> __m512i {
        // Truth table of (mask & a) | (!mask & b).
        op!(_mm512_ternarylogic_epi32::<0b1100_1010>(_mm512_set1_epi8(mask as i8), a, b))
    }
    #[inline(always)]
    fn or_masked(self, low: __m512i, high: __m512i, mask: u8) -> __m512i {
        // Truth table of low | (high & mask).
        op!(_mm512_ternarylogic_epi32::<0b1111_1000>(low, high, _mm512_set1_epi8(mask as i8)))
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> __m512i {
        op!(_mm512_set1_epi32(v))
    }
    #[inline(always)]
    fn add_i(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn mul_i(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_mullo_epi32(a, b))
    }
    #[inline(always)]
    fn shl_i(self, a: __m512i, n: u32) -> __m512i {
        op!(_mm512_sll_epi32(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn shr_i(self, a: __m512i, n: u32) -> __m512i {
        op!(_mm512_srl_epi32(a, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    fn widen_u8(self, from: &[u8; 16]) -> __m512i {
        op!(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn widen_i8(self, from: &[u8; 16]) -> __m512i {
        op!(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; 16]) -> __m512i {
        op!(_mm512_loadu_si512(from.as_ptr().cast()))
    }
    #[inline(always)]
    fn store_i(self, to: &mut [i32; 16], v: __m512i) {
        op!(_mm512_storeu_si512(to.as_mut_ptr().cast(), v))
    }
    #[inline(always)]
    fn xor_i(self, a: __m512i, mask: i32) -> __m512i {
        op!(_mm512_xor_si512(a, _mm512_set1_epi32(mask)))
    }
    #[inline(always)]
    fn even_bytes(self, v: __m512i) -> __m512i {
        op!(_mm512_and_si512(v, _mm512_set1_epi16(255)))
    }
    #[inline(always)]
    fn odd_bytes(self, v: __m512i) -> __m512i {
        op!(_mm512_srli_epi16::<8>(v))
    }
    #[inline(always)]
    fn pairs_i8(self, from: &[u8; 32]) -> __m512i {
        op!(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn dot_pairs(self, acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        op!(dot_words(acc, a, b))
    }
    #[inline(always)]
    fn dot_pair(self, acc: __m512i, a: __m512i, x: &i32) -> __m512i {
        op!(dot_word(acc, a, x))
    }
    #[inline(always)]
    fn dot(self, acc: __m512i, w: __m512i, x: i32) -> __m512i {
        op!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)))
    }
    #[inline(always)]
    fn dot_codes(self, acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_dpbusd_epi32(acc, a, b))
    }
    #[inline(always)]
    fn crossed<const NC: usize>(
        self,
        w: &[CrossedBlock],
        x: &[Cross256<NC>],
        acc: &mut [__m512; NC],
    ) -> bool {
        let Ok(acc) = acc.as_mut_slice().try_into() else { return false };
        op!(pair::crossed(w, view(x), acc));
        true
    }
    #[inline(always)]
    fn paired_offset<const NC: usize>(
        self,
        w: &[PairedOffsetBlock],
        x: &[Block256<NC>],
        acc: &mut [__m512; NC],
    ) -> bool {
        let Ok(acc) = acc.as_mut_slice().try_into() else { return false };
        op!(pair::paired_offset(w, view(x), acc));
        true
    }
    #[inline(always)]
    fn few_k4<const NC: usize>(
        self,
        w: &[K4Block],
        ahead: usize,
        x: &[Block256<NC>],
        acc: &mut [[__m512; NC]],
    ) -> bool {
        op!(few::k4(w, ahead, x, acc))
    }
    #[inline(always)]
    fn few_k6<const NC: usize>(
        self,
        w: &[K6Block],
        ahead: usize,
        x: &[Block256<NC>],
        acc: &mut [[__m512; NC]],
    ) -> bool {
        op!(few::k6(w, ahead, x, acc))
    }
    #[inline(always)]
    fn dot_wide(self, acc: __m512i, w: __m512i, x: i32) -> __m512i {
        op!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)))
    }
    #[inline(always)]
    fn start_wide(self, start: i32) -> __m512i {
        op!(_mm512_set1_epi32(start))
    }

    #[inline(always)]
    fn quantise(self, x: &[f32; 256], q: &mut [i8; 256], sums: &mut [i32; 16]) -> f32 {
        op!(quantise::quantise(x, q, sums))
    }
    #[inline(always)]
    fn crosses(self, q: &[i8; 256]) -> [i32; 8] {
        op!(quantise::crosses(q))
    }

    #[inline(always)]
    fn splat_f(self, v: f32) -> __m512 {
        op!(_mm512_set1_ps(v))
    }
    #[inline(always)]
    fn load_f(self, from: &[f32; 16]) -> __m512 {
        op!(_mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store_f(self, to: &mut [f32; 16], v: __m512) {
        op!(_mm512_storeu_ps(to.as_mut_ptr(), v))
    }
    #[inline(always)]
    fn store_past(self, to: &mut [f32; 16], v: __m512) {
        if to.as_ptr().cast::<__m512>().is_aligned() {
            op!(_mm512_stream_ps(to.as_mut_ptr(), v))
        } else {
            self.store_f(to, v)
        }
    }
    #[inline(always)]
    fn settle(self) {
        op!(_mm_sfence())
    }
    #[inline(always)]
    fn mul_f(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn add_f(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn to_f(self, a: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn bits_f(self, a: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(a))
    }
    #[inline(always)]
    fn pick(self, table: __m512, index: __m512i) -> __m512 {
        op!(_mm512_permutexvar_ps(index, table))
    }
    #[inline(always)]
    fn half(self, from: &[u8; 32]) -> __m512 {
        op!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn to_half(self, to: &mut [u8; 32], v: __m512) {
        op!(_mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }
    #[inline(always)]
    fn bf16(self, from: &[u8; 32]) -> __m512 {
        let wide = op!(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast())));
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
    }
}
