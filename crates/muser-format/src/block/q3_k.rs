//! Q3_K: 256 values of 3 bits in 16 groups of 16; `(d * (scale - 32)) * (q - 4)`, both products rounded.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 32 | third bit: value 32s + j is bit s of byte j |
//! | 32 | 64 | low two bits, as in Q2_K |
//! | 96 | 12 | scales, 6 bits: low four bits of scale g are half g / 8 of byte g % 8, high two are bits 2(g / 4) of byte 8 + g % 4 |
//! | 108 | 2 | d, half |

use super::{field, half_at};

pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let high: &[u8; 32] = field::<0, _, _>(block);
    let low: &[u8; 64] = field::<32, _, _>(block);
    let scales: &[u8; 12] = field::<96, _, _>(block);
    let d = half_at::<108, _>(block);
    for (g, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = (scales[g % 8] >> (g / 8 * 4) & 15) | (scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4;
        let dl = d * f32::from(scale as i8 - 32);
        let (half, shift, start) = (g / 8, g % 8 / 2 * 2, g % 2 * 16);
        for (j, out) in out.iter_mut().enumerate() {
            let low = low[32 * half + start + j] >> shift & 3;
            let high = (high[start + j] >> (g / 2) & 1) << 2;
            *out = dl * f32::from((low | high) as i8 - 4);
        }
    }
}
