//! IQ3_XXS and IQ3_S: 256 values, groups of 4 magnitudes from a codebook, with signs for 8 values together.
//!
//! IQ3_XXS: `(d * (scale + 0.5) / 2) * g`. IQ3_S: `(d * (2 * scale + 1)) * g`. Both products rounded (the half is
//! exact), then the sign.
//!
//! IQ3_XXS:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 64 | index of each group of 4 |
//! | 66 | 32 | a u32 per 32 values: bits 7i..7i+7 = signs of 8 values i < 4 (see `even_signs`), 28.. = scale |
//!
//! IQ3_S:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 64 | low eight bits of the index of each group of 4 |
//! | 66 | 8 | ninth bit of each group's index, from bit 0 |
//! | 74 | 32 | signs, bit j of byte i set: value 8i + j is negative |
//! | 106 | 4 | half a byte per 32 values, low half first: scale |

use super::iq_grid::{IQ3_S_GRID, IQ3_S_VALUES, IQ3_XXS_GRID, IQ3_XXS_VALUES, even_signs, unpack4};
use super::{field, half_at};

/// Four values of one codebook entry; the low four bits of `signs` are theirs.
fn group(scale: f32, entry: u16, values: &[i8; 8], signs: u8, out: &mut [f32; 4]) {
    for (j, (out, g)) in out.iter_mut().zip(unpack4(entry, values)).enumerate() {
        let value = scale * f32::from(g);
        *out = if signs >> j & 1 == 1 { -value } else { value };
    }
}

pub(super) fn iq3_xxs(block: &[u8; 98], out: &mut [f32; 256]) {
    let d = half_at::<0, _>(block);
    let index: &[u8; 64] = field::<2, _, _>(block);
    let words: &[u8; 32] = field::<66, _, _>(block);
    let words = words.as_chunks::<4>().0;
    for (g, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let word = u32::from_le_bytes(words[g / 8]);
        let scale = d * ((word >> 28) as f32 + 0.5) * 0.5;
        let signs = even_signs((word >> (g % 8 / 2 * 7)) as u8) >> (g % 2 * 4);
        group(scale, IQ3_XXS_GRID[usize::from(index[g])], &IQ3_XXS_VALUES, signs, out);
    }
}

pub(super) fn iq3_s(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half_at::<0, _>(block);
    let low: &[u8; 64] = field::<2, _, _>(block);
    let high: &[u8; 8] = field::<66, _, _>(block);
    let signs: &[u8; 32] = field::<74, _, _>(block);
    let scales: &[u8; 4] = field::<106, _, _>(block);
    for (g, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let scale = d * f32::from(2 * (scales[g / 16] >> (g % 16 / 8 * 4) & 15) + 1);
        let index = usize::from(low[g]) | usize::from(high[g / 8] >> (g % 8) & 1) << 8;
        group(scale, IQ3_S_GRID[index], &IQ3_S_VALUES, signs[g / 2] >> (g % 2 * 4), out);
    }
}
