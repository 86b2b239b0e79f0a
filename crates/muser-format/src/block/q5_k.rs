//! Q5_K: Q4_K with a fifth bit; `((d * scale) * q) - (dmin * min)`, each of the four rounded.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 2 | dmin, half |
//! | 4 | 12 | scales and minima as in Q4_K |
//! | 16 | 32 | fifth bit: value 32g + j is bit g of byte j |
//! | 48 | 128 | low four bits as in Q4_K |

use super::q4_k::scale_min;
use super::{field, half_at};

pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let d = half_at::<0, _>(block);
    let dmin = half_at::<2, _>(block);
    let scales: &[u8; 12] = field::<4, _, _>(block);
    let high: &[u8; 32] = field::<16, _, _>(block);
    let low: &[u8; 128] = field::<48, _, _>(block);
    for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(scales, g);
        let dl = d * f32::from(scale);
        let ml = dmin * f32::from(min);
        let (start, shift) = (g / 2 * 32, g % 2 * 4);
        for ((out, &low), &high) in out.iter_mut().zip(&low[start..start + 32]).zip(high) {
            let q = (low >> shift & 15) | (high >> g & 1) << 4;
            *out = dl * f32::from(q) - ml;
        }
    }
}
