//! Q2_K: 256 values of 2 bits in 16 groups of 16; `((d * scale) * q) - (dmin * min)`, each of the four rounded.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 16 | group g: scale = low four bits, min = high four bits |
//! | 16 | 64 | q: byte 32h + j holds values 128h + 32s + j at bit 2s (h = 0..2, s = 0..4) |
//! | 80 | 2 | d, half |
//! | 82 | 2 | dmin, half |

use super::{field, half_at};

pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let scales: &[u8; 16] = field::<0, _, _>(block);
    let q: &[u8; 64] = field::<16, _, _>(block);
    let d = half_at::<80, _>(block);
    let dmin = half_at::<82, _>(block);
    for (g, (out, &scale)) in out.as_chunks_mut::<16>().0.iter_mut().zip(scales).enumerate() {
        let (half, shift, start) = (g / 8, g % 8 / 2 * 2, g % 2 * 16);
        let dl = d * f32::from(scale & 15);
        let ml = dmin * f32::from(scale >> 4);
        for (j, out) in out.iter_mut().enumerate() {
            let q = q[32 * half + start + j] >> shift & 3;
            *out = dl * f32::from(q) - ml;
        }
    }
}
