//! Q8_0: 32 values, `d * q`.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 32 | q, signed bytes |

use super::{field, half_at};

pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at::<0, _>(block);
    let q: &[u8; 32] = field::<2, _, _>(block);
    for (out, &q) in out.iter_mut().zip(q) {
        *out = d * f32::from(q as i8);
    }
}
