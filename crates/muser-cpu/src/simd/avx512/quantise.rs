//! Sixteen values at a time to bytes: the compiler packs and unpacks the bytes of a loop one by one.

use crate::activations::{MOST, WITHIN, count};
use std::arch::x86_64::*;

/// Rounds to whole steps of `most / count`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn round(x: &[f32; 256], q: &mut [i8; 256], most: f32, count: f32) -> f32 {
    let inverse = _mm512_set1_ps(if most > 0.0 { count / most } else { 0.0 });
    for (x, q) in x.as_chunks::<16>().0.iter().zip(q.as_chunks_mut::<16>().0) {
        // SAFETY: both are arrays of 16.
        unsafe {
            let steps = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), inverse));
            _mm_storeu_si128(q.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(steps));
        }
    }
    most / count
}

/// The sums of 16 bytes each of `q`, and the largest of their magnitudes' sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn sums(q: &[i8; 256], sums: &mut [i32; 16]) -> i32 {
    let mut most = _mm512_setzero_si512();
    for (q, sums) in q.as_chunks::<64>().0.iter().zip(sums.as_chunks_mut::<4>().0) {
        // SAFETY: an array of 64, another of four words.
        unsafe {
            let q = _mm512_loadu_si512(q.as_ptr().cast());
            let eights = _mm512_sad_epu8(_mm512_abs_epi8(q), _mm512_setzero_si512());
            let sixteens = _mm512_add_epi64(eights, _mm512_shuffle_epi32::<0b01_00_11_10>(eights));
            most = _mm512_max_epi32(most, sixteens);
            let fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), q);
            let eights = _mm512_add_epi32(fours, _mm512_shuffle_epi32::<0b10_11_00_01>(fours));
            let sixteens = _mm512_add_epi32(eights, _mm512_shuffle_epi32::<0b01_00_11_10>(eights));
            let first = _mm512_maskz_compress_epi32(0x1111, sixteens);
            _mm_storeu_si128(sums.as_mut_ptr().cast(), _mm512_castsi512_si128(first));
        }
    }
    _mm512_reduce_max_epi32(most)
}

/// [`crate::activations::quantise`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub fn quantise(x: &[f32; 256], q: &mut [i8; 256], to: &mut [i32; 16]) -> f32 {
    let (mut least, mut greatest) = ([_mm512_setzero_ps(); 2], [_mm512_setzero_ps(); 2]);
    for x in x.as_chunks::<32>().0 {
        for (i, x) in x.as_chunks::<16>().0.iter().enumerate() {
            // SAFETY: an array of 16.
            let x = unsafe { _mm512_loadu_ps(x.as_ptr()) };
            // Where x is no number, the second operand stands.
            least[i] = _mm512_min_ps(x, least[i]);
            greatest[i] = _mm512_max_ps(x, greatest[i]);
        }
    }
    let least = _mm512_reduce_min_ps(_mm512_min_ps(least[0], least[1]));
    let (most, steps) = count(least, _mm512_reduce_max_ps(_mm512_max_ps(greatest[0], greatest[1])));
    let step = round(x, q, most, steps);
    let magnitudes = sums(q, to);
    if magnitudes <= MOST {
        return step;
    }
    let step = round(x, q, most, steps * WITHIN / magnitudes as f32);
    sums(q, to);
    step
}

/// [`crate::activations::crosses`].
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub fn crosses(q: &[i8; 256]) -> [i32; 8] {
    let mut sums = [0; 8];
    for (q, sums) in q.as_chunks::<64>().0.iter().zip(sums.as_chunks_mut::<2>().0) {
        let mut fours = [0; 16];
        // SAFETY: an array of 64, another of sixteen words.
        unsafe {
            let q = _mm512_loadu_si512(q.as_ptr().cast());
            // Each second word comes under the first; zeros come under itself.
            let dots = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q, _mm512_srli_epi64::<32>(q));
            _mm512_storeu_si512(fours.as_mut_ptr().cast(), dots);
        }
        for (sum, fours) in sums.iter_mut().zip(fours.as_chunks::<8>().0) {
            *sum = 16 * 960 + fours[0] + fours[2] + fours[4] + fours[6];
        }
    }
    sums
}
