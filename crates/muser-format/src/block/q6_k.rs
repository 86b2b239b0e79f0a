//! Q6_K: 256 values of 6 bits in 16 groups of 16; `(d * scale) * (q - 32)`, both products rounded.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 128 | low four bits: value 128h + 64p + j (j < 64, p = 0..2, h = 0..2) is half p of byte 64h + j |
//! | 128 | 64 | high two bits: value 128h + 32s + j (j < 32, s = 0..4) is bit 2s of byte 32h + j |
//! | 192 | 16 | scales, signed bytes |
//! | 208 | 2 | d, half |

use super::{field, half_at};

pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let low: &[u8; 128] = field::<0, _, _>(block);
    let high: &[u8; 64] = field::<128, _, _>(block);
    let scales: &[u8; 16] = field::<192, _, _>(block);
    let d = half_at::<208, _>(block);
    for (g, (out, &scale)) in out.as_chunks_mut::<16>().0.iter_mut().zip(scales).enumerate() {
        let dl = d * f32::from(scale as i8);
        // Group g covers values 16g..16g + 16; h, p and s as in the table.
        let (h, p, s) = (g / 8, g % 8 / 4, g % 8 / 2);
        let (low_start, high_start) = (64 * h + g % 4 * 16, 32 * h + g % 2 * 16);
        for (j, out) in out.iter_mut().enumerate() {
            let q = (low[low_start + j] >> (4 * p) & 15) | (high[high_start + j] >> (2 * s) & 3) << 4;
            *out = dl * f32::from(q as i8 - 32);
        }
    }
}
