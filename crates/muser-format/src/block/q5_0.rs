//! Q5_0 and Q5_1: 32 values of 5 bits: four as in Q4_0, the fifth of value j is bit j of a 32-bit word.
//!
//! Q5_0: `d * (q - 16)`. Q5_1: `(d * q) + m`, product and sum rounded.
//!
//! | Q5_0 offset | Q5_1 offset | bytes | field |
//! |---|---|---|---|
//! | 0 | 0 | 2 | d, half |
//! | | 2 | 2 | m, half |
//! | 2 | 4 | 4 | fifth bits |
//! | 6 | 8 | 16 | low four bits |

use super::{field, half_at};

/// The 32 five-bit numbers.
fn unpack(high: &[u8; 4], low: &[u8; 16]) -> [u8; 32] {
    let high = u32::from_le_bytes(*high);
    let bit = |j: usize| ((high >> j & 1) as u8) << 4;
    std::array::from_fn(|j| if j < 16 { low[j] & 15 } else { low[j - 16] >> 4 } | bit(j))
}

pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at::<0, _>(block);
    let q = unpack(field::<2, _, _>(block), field::<6, _, _>(block));
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * f32::from(q as i8 - 16);
    }
}

pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let d = half_at::<0, _>(block);
    let m = half_at::<2, _>(block);
    let q = unpack(field::<4, _, _>(block), field::<8, _, _>(block));
    for (out, q) in out.iter_mut().zip(q) {
        *out = d * f32::from(q) + m;
    }
}
