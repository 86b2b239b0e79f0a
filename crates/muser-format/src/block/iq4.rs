//! IQ4_NL and IQ4_XS: 4-bit codes into 16 uneven steps v. Value j < 16 of each 32 is the low half of byte j, value
//! 16 + j its high half.
//!
//! IQ4_NL, 32 values: `d * v`.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 16 | codes |
//!
//! IQ4_XS, 256 values in 8 groups of 32: `(d * (scale - 32)) * v`, both products rounded.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 2 | upper two bits of the scale of group g, at bit 2g of a u16 |
//! | 4 | 4 | lower four bits of the scales, low half first |
//! | 8 | 128 | codes, 16 bytes a group |

use super::iq_grid::IQ4_VALUES;
use super::{field, half_at};

fn group(scale: f32, codes: &[u8; 16], out: &mut [f32; 32]) {
    for (j, &code) in codes.iter().enumerate() {
        out[j] = scale * f32::from(IQ4_VALUES[usize::from(code & 15)]);
        out[16 + j] = scale * f32::from(IQ4_VALUES[usize::from(code >> 4)]);
    }
}

pub(super) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    group(half_at::<0, _>(block), field::<2, _, _>(block), out);
}

pub(super) fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let d = half_at::<0, _>(block);
    let high = u16::from_le_bytes(*field::<2, _, _>(block));
    let low: &[u8; 4] = field::<4, _, _>(block);
    let codes: &[u8; 128] = field::<8, _, _>(block);
    let groups = out.as_chunks_mut::<32>().0.iter_mut().zip(codes.as_chunks::<16>().0);
    for (g, (out, codes)) in groups.enumerate() {
        let scale = (low[g / 2] >> (g % 2 * 4) & 15) | ((high >> (2 * g) & 3) as u8) << 4;
        group(d * f32::from(scale as i8 - 32), codes, out);
    }
}
