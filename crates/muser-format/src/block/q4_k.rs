//! Q4_K: 256 values of 4 bits in 8 groups of 32; `((d * scale) * q) - (dmin * min)`, each of the four rounded.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 2 | dmin, half |
//! | 4 | 12 | scales and minima, 6 bits each: see `scale_min` |
//! | 16 | 128 | q: byte 32p + j holds value 64p + j in its low half and value 64p + 32 + j in its high half |

use super::{field, half_at};

/// Scale and minimum of group g < 8. Groups 0..4: the low six bits of bytes g and 4 + g. Groups 4..8: low four bits
/// from byte 4 + g (scale low half, minimum high half), the two bits above them from the top of bytes g - 4 and g.
pub(super) fn scale_min(packed: &[u8; 12], g: usize) -> (u8, u8) {
    if g < 4 {
        (packed[g] & 63, packed[4 + g] & 63)
    } else {
        (packed[4 + g] & 15 | packed[g - 4] >> 6 << 4, packed[4 + g] >> 4 | packed[g] >> 6 << 4)
    }
}

pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let d = half_at::<0, _>(block);
    let dmin = half_at::<2, _>(block);
    let scales: &[u8; 12] = field::<4, _, _>(block);
    let q: &[u8; 128] = field::<16, _, _>(block);
    for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(scales, g);
        let dl = d * f32::from(scale);
        let ml = dmin * f32::from(min);
        let (start, shift) = (g / 2 * 32, g % 2 * 4);
        for (out, &q) in out.iter_mut().zip(&q[start..start + 32]) {
            *out = dl * f32::from(q >> shift & 15) - ml;
        }
    }
}
