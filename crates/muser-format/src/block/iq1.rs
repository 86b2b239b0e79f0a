//! IQ1_S and IQ1_M: 256 values, groups of 8 from a ternary codebook, shifted by an eighth:
//! `(d * (2 * scale + 1)) * (g + shift)`, both products rounded, shift 1/8 or -1/8 (the sum is exact).
//!
//! IQ1_S:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 32 | low eight bits of the codebook index of each group of 8 |
//! | 34 | 16 | one u16 per 32 values: bits 3i..3i+3 = upper index bits of group i < 4, 12..15 = scale, 15 = shift is minus |
//!
//! IQ1_M:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 32 | low eight bits of the codebook index of each group of 8 |
//! | 32 | 16 | half a byte per group of 8, low half first: bits 0..3 = upper index bits, 3 = shift is minus |
//! | 48 | 8 | four u16, one per 64 values: bits 3i..3i+3 = scale of 16 values i < 4; their top four bits are d, low part first |

use super::iq_grid::{IQ1_GRID, IQ1_VALUES, unpack8};
use super::{field, half_at};

/// Eight values of one codebook entry.
fn group(scale: f32, index: usize, minus: bool, out: &mut [f32; 8]) {
    let shift = if minus { -0.125 } else { 0.125 };
    for (out, g) in out.iter_mut().zip(unpack8(IQ1_GRID[index], &IQ1_VALUES)) {
        *out = scale * (f32::from(g) + shift);
    }
}

pub(super) fn iq1_s(block: &[u8; 50], out: &mut [f32; 256]) {
    let d = half_at::<0, _>(block);
    let low: &[u8; 32] = field::<2, _, _>(block);
    let high: &[u8; 16] = field::<34, _, _>(block);
    for (g, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16::from_le_bytes([high[g / 4 * 2], high[g / 4 * 2 + 1]]);
        let scale = d * f32::from(2 * (word >> 12 & 7) + 1);
        let index = usize::from(low[g]) | usize::from(word >> (g % 4 * 3) & 7) << 8;
        group(scale, index, word >> 15 == 1, out);
    }
}

pub(super) fn iq1_m(block: &[u8; 56], out: &mut [f32; 256]) {
    let low: &[u8; 32] = field::<0, _, _>(block);
    let high: &[u8; 16] = field::<32, _, _>(block);
    let packed: &[u8; 8] = field::<48, _, _>(block);
    let words: [u16; 4] = std::array::from_fn(|i| u16::from_le_bytes([packed[2 * i], packed[2 * i + 1]]));
    let bits = words.iter().enumerate().fold(0, |bits, (i, word)| bits | (word >> 12) << (4 * i));
    let d = half::f16::from_bits(bits).to_f32();
    for (g, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = d * f32::from(2 * (words[g / 8] >> (g % 8 / 2 * 3) & 7) + 1);
        let high = high[g / 2] >> (g % 2 * 4);
        group(scale, usize::from(low[g]) | usize::from(high & 7) << 8, high & 8 != 0, out);
    }
}
