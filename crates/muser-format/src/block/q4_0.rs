//! Q4_0 and Q4_1: 32 values of 4 bits. Value j < 16 is the low half of byte j, value 16 + j its high half.
//!
//! Q4_0: `d * (q - 8)`. Q4_1: `(d * q) + m`, product and sum rounded.
//!
//! | Q4_0 offset | Q4_1 offset | bytes | field |
//! |---|---|---|---|
//! | 0 | 0 | 2 | d, half |
//! | | 2 | 2 | m, half |
//! | 2 | 4 | 16 | q |

use super::{field, half_at};

pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at::<0, _>(block);
    let q: &[u8; 16] = field::<2, _, _>(block);
    for (j, &q) in q.iter().enumerate() {
        out[j] = d * f32::from((q & 15) as i8 - 8);
        out[16 + j] = d * f32::from((q >> 4) as i8 - 8);
    }
}

pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let d = half_at::<0, _>(block);
    let m = half_at::<2, _>(block);
    let q: &[u8; 16] = field::<4, _, _>(block);
    for (j, &q) in q.iter().enumerate() {
        out[j] = d * f32::from(q & 15) + m;
        out[16 + j] = d * f32::from(q >> 4) + m;
    }
}
