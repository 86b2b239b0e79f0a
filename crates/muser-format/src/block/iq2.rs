//! IQ2_XXS, IQ2_XS, IQ2_S: 256 values, groups of 8 magnitudes from a codebook, with signs:
//! `(d * (scale + 0.5) / 4) * g`, the first and the last product rounded (the quarter is exact), then the sign.
//!
//! IQ2_XXS:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 64 | per 32 values: four index bytes, then a u32: bits 7i..7i+7 = signs of group i < 4 (see `even_signs`), 28.. = scale |
//!
//! IQ2_XS:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 64 | a u16 per group of 8: index in bits 0..9, signs in 9..16 (see `even_signs`) |
//! | 66 | 8 | half a byte per 16 values, low half first: scale |
//!
//! IQ2_S:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 2 | d, half |
//! | 2 | 32 | low eight bits of the index of each group of 8 |
//! | 34 | 32 | signs of each group of 8, bit j set: value j is negative |
//! | 66 | 8 | two upper index bits per group of 8, from bit 0 |
//! | 74 | 8 | half a byte per 16 values, low half first: scale |

use super::iq_grid::{IQ2_S_GRID, IQ2_VALUES, IQ2_XS_GRID, IQ2_XXS_GRID, even_signs, unpack8};
use super::{field, half_at};

fn scaled(d: f32, scale: u8) -> f32 {
    d * (f32::from(scale) + 0.5) * 0.25
}

/// Eight values of one codebook entry.
fn group(scale: f32, entry: u16, signs: u8, out: &mut [f32; 8]) {
    for (j, (out, g)) in out.iter_mut().zip(unpack8(entry, &IQ2_VALUES)).enumerate() {
        let value = scale * f32::from(g);
        *out = if signs >> j & 1 == 1 { -value } else { value };
    }
}

pub(super) fn iq2_xxs(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = half_at::<0, _>(block);
    let groups: &[u8; 64] = field::<2, _, _>(block);
    for (out, [i0, i1, i2, i3, w0, w1, w2, w3]) in
        out.as_chunks_mut::<32>().0.iter_mut().zip(groups.as_chunks::<8>().0)
    {
        let word = u32::from_le_bytes([*w0, *w1, *w2, *w3]);
        let scale = scaled(d, (word >> 28) as u8);
        for (i, (out, index)) in out.as_chunks_mut::<8>().0.iter_mut().zip([i0, i1, i2, i3]).enumerate() {
            group(scale, IQ2_XXS_GRID[usize::from(*index)], even_signs((word >> (7 * i)) as u8), out);
        }
    }
}

pub(super) fn iq2_xs(block: &[u8; 74], out: &mut [f32; 256]) {
    let d = half_at::<0, _>(block);
    let groups: &[u8; 64] = field::<2, _, _>(block);
    let scales: &[u8; 8] = field::<66, _, _>(block);
    for (g, (out, word)) in out.as_chunks_mut::<8>().0.iter_mut().zip(groups.as_chunks::<2>().0).enumerate() {
        let word = u16::from_le_bytes(*word);
        let scale = scaled(d, scales[g / 4] >> (g % 4 / 2 * 4) & 15);
        group(scale, IQ2_XS_GRID[usize::from(word & 511)], even_signs((word >> 9) as u8), out);
    }
}

pub(super) fn iq2_s(block: &[u8; 82], out: &mut [f32; 256]) {
    let d = half_at::<0, _>(block);
    let low: &[u8; 32] = field::<2, _, _>(block);
    let signs: &[u8; 32] = field::<34, _, _>(block);
    let high: &[u8; 8] = field::<66, _, _>(block);
    let scales: &[u8; 8] = field::<74, _, _>(block);
    for (g, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = scaled(d, scales[g / 4] >> (g % 4 / 2 * 4) & 15);
        let index = usize::from(low[g]) | usize::from(high[g / 4] >> (g % 4 * 2) & 3) << 8;
        group(scale, IQ2_S_GRID[index], signs[g], out);
    }
}
