//! From file blocks (see muser-format's `block`) to codes, and from codes to their places in a panel.

use muser_format::iq_grid::*;
use muser_format::{DType, E2M1_DOUBLED};

/// Row `r`'s half-precision number into an array of 16.
pub fn half_of(to: &mut [u8; 32], r: usize, from: &[u8]) {
    to[2 * r] = from[0];
    to[2 * r + 1] = from[1];
}

/// Scale and minimum of group `g` < 8 of Q4_K and Q5_K.
pub fn scale_min_k(packed: &[u8], g: usize) -> (u8, u8) {
    if g < 4 {
        (packed[g] & 63, packed[4 + g] & 63)
    } else {
        (packed[4 + g] & 15 | packed[g - 4] >> 6 << 4, packed[4 + g] >> 4 | packed[g] >> 6 << 4)
    }
}

/// The 256 low halves of Q4_K and Q5_K in order.
pub fn nibbles_k(packed: &[u8]) -> [u8; 256] {
    let mut q = [0; 256];
    for (q, packed) in q.as_chunks_mut::<64>().0.iter_mut().zip(packed.as_chunks::<32>().0) {
        for j in 0..32 {
            q[j] = packed[j] & 15;
            q[32 + j] = packed[j] >> 4;
        }
    }
    q
}

/// 32 codes whose first 16 are the low halves of 16 bytes.
pub fn nibbles_32(packed: &[u8]) -> [u8; 32] {
    std::array::from_fn(|j| if j < 16 { packed[j] & 15 } else { packed[j - 16] >> 4 })
}

/// 32 codes in two groups of 16, each of 8 bytes with the first eight codes in the low halves.
pub fn nibbles_16(packed: &[u8]) -> [u8; 32] {
    std::array::from_fn(|j| packed[j / 16 * 8 + j % 8] >> (j / 8 % 2 * 4) & 15)
}

/// The first 32 codes of four bits, as row `r`.
pub fn interleave4(to: &mut [[u8; 64]; 4], r: usize, q: &[u8]) {
    for (to, q) in to.iter_mut().zip(q.as_chunks::<8>().0) {
        let [low, high] = [[q[0], q[1], q[2], q[3]], [q[4], q[5], q[6], q[7]]].map(u32::from_le_bytes);
        to.as_chunks_mut::<4>().0[r] = (low | high << 4).to_le_bytes();
    }
}

/// 32 codes of two bits, as row `r`.
pub fn interleave2(to: &mut [[u8; 64]; 2], r: usize, q: impl Fn(usize) -> u8) {
    let q: [u8; 32] = std::array::from_fn(q);
    for (to, q) in to.iter_mut().zip(q.as_chunks::<16>().0) {
        let words = q.as_chunks::<4>().0.iter().map(|q| u32::from_le_bytes(*q));
        let packed = words.enumerate().fold(0, |all, (t, word)| all | word << (2 * t));
        to.as_chunks_mut::<4>().0[r] = packed.to_le_bytes();
    }
}

/// 32 single bits, as row `r`.
pub fn interleave1(to: &mut [u8; 64], r: usize, q: impl Fn(usize) -> u8) {
    let q: [u8; 32] = std::array::from_fn(q);
    let words = q.as_chunks::<4>().0.iter().map(|q| u32::from_le_bytes(*q));
    let packed = words.enumerate().fold(0, |all, (b, word)| all | word << b);
    to.as_chunks_mut::<4>().0[r] = packed.to_le_bytes();
}

/// 32 bytes of row `r`.
pub fn interleave8(to: &mut [[u8; 64]; 8], r: usize, q: &[u8; 32]) {
    for (to, q) in to.iter_mut().zip(q.as_chunks::<4>().0) {
        to.as_chunks_mut::<4>().0[r] = *q;
    }
}

/// Codes of one byte of 32 values: signed ones (Q8_0, Q5_0) 128 above their meaning, unsigned ones (Q4_1, Q5_1) as
/// they are.
pub fn small_codes(dtype: DType, block: &[u8]) -> [u8; 32] {
    let fifth = |at: usize, j: usize| (block[at + j / 8] >> (j % 8) & 1) << 4;
    match dtype {
        DType::Q8_0 => std::array::from_fn(|j| block[2 + j] ^ 128),
        DType::Q5_0 => {
            let low = nibbles_32(&block[6..22]);
            std::array::from_fn(|j| (low[j] | fifth(2, j)) + 112)
        }
        DType::Q5_1 => {
            let low = nibbles_32(&block[8..24]);
            std::array::from_fn(|j| low[j] | fifth(4, j))
        }
        _ => nibbles_32(&block[4..20]),
    }
}

/// 2^(e - 128), half of an E8M0 scale.
pub fn half_e8m0(e: u8) -> f32 {
    2f32.powi(i32::from(e) - 128)
}

/// The bytes that codes select from: signed values above an offset (64 for three-bit codes, 128 for four-bit ones).
pub fn table(dtype: DType) -> [u8; 16] {
    let above = |offset: i8, value: &dyn Fn(usize) -> i8| {
        std::array::from_fn(|i| (value(i) as u8).wrapping_add(offset as u8))
    };
    // Three bits: magnitude, then sign. Four bits of IQ3: the same.
    let signed3 = |values: [i8; 4]| above(64, &|i| if i & 4 == 0 { values[i & 3] } else { -values[i & 3] });
    let signed4 = |values: [i8; 8]| above(-128, &|i| if i < 8 { values[i] } else { -values[i - 8] });
    match dtype {
        DType::Q3K => above(64, &|i| (i & 7) as i8 - 4),
        DType::Iq2Xxs | DType::Iq2Xs | DType::Iq2S => signed3(IQ2_VALUES),
        // Eight times (value + 1/8 or - 1/8).
        DType::Iq1S | DType::Iq1M => above(64, &|i| 8 * IQ1_VALUES[i & 3] + if i & 4 == 0 { 1 } else { -1 }),
        DType::Iq3Xxs => signed4(IQ3_XXS_VALUES),
        DType::Iq3S => signed4(IQ3_S_VALUES),
        DType::Iq4Xs | DType::Iq4Nl => above(-128, &|i| IQ4_VALUES[i]),
        DType::Q4_0 => above(-128, &|i| i as i8 - 8),
        DType::Mxfp4 | DType::Nvfp4 => above(-128, &|i| E2M1_DOUBLED[i]),
        _ => [0; 16],
    }
}

/// A block of 256 columns of one row as codes into the type's table, with signed scales of 16 columns.
pub struct Codes {
    /// Code of each column.
    pub q: [u8; 256],
    /// Integer scale of 16 columns.
    pub scale: [i8; 16],
    /// Float scale of all.
    pub d: f32,
}

impl Codes {
    /// Reads a file block of Q3_K, IQ4_XS, or an IQ3, IQ2, IQ1 or TQ type.
    pub fn read(dtype: DType, block: &[u8]) -> Codes {
        let half = |at: usize| half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let word = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
        let long = |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
        let mut c = Codes { q: [0; 256], scale: [1; 16], d: 0.0 };
        match dtype {
            DType::Q3K => {
                let scales = &block[96..108];
                for g in 0..16 {
                    let scale =
                        (scales[g % 8] >> (g / 8 * 4) & 15) | (scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4;
                    c.scale[g] = scale as i8 - 32;
                }
                for (k, q) in c.q.iter_mut().enumerate() {
                    let low = block[32 + k / 128 * 32 + k % 32] >> (k / 32 % 4 * 2) & 3;
                    *q = low | (block[k % 32] >> (k / 32) & 1) << 2;
                }
                c.d = half(108);
            }
            DType::Iq4Xs => {
                for g in 0..8 {
                    let scale =
                        (block[4 + g / 2] >> (g % 2 * 4) & 15) | ((word(2) >> (2 * g) & 3) as u8) << 4;
                    c.scale[2 * g] = scale as i8 - 32;
                    c.scale[2 * g + 1] = c.scale[2 * g];
                    let codes = nibbles_32(&block[8 + 16 * g..24 + 16 * g]);
                    c.q[32 * g..32 * g + 32].copy_from_slice(&codes);
                }
                c.d = half(0);
            }
            DType::Iq3Xxs => {
                for (g, q) in c.q.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let signs = even_signs((long(66 + g / 8 * 4) >> (g % 8 / 2 * 7)) as u8) >> (g % 2 * 4);
                    group4(IQ3_XXS_GRID[usize::from(block[2 + g])], signs, q);
                }
                for g in 0..16 {
                    c.scale[g] = 2 * (long(66 + g / 2 * 4) >> 28) as i8 + 1;
                }
                c.d = half(0) * 0.25;
            }
            DType::Iq3S => {
                for (g, q) in c.q.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let index =
                        usize::from(block[2 + g]) | usize::from(block[66 + g / 8] >> (g % 8) & 1) << 8;
                    group4(IQ3_S_GRID[index], block[74 + g / 2] >> (g % 2 * 4), q);
                }
                for g in 0..16 {
                    c.scale[g] = 2 * (block[106 + g / 4] >> (g / 2 % 2 * 4) & 15) as i8 + 1;
                }
                c.d = half(0);
            }
            DType::Iq2Xxs => {
                for (g, q) in c.q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let at = 2 + g / 4 * 8;
                    let signs = even_signs((long(at + 4) >> (g % 4 * 7)) as u8);
                    group8(IQ2_XXS_GRID[usize::from(block[at + g % 4])], signs, q);
                }
                for g in 0..16 {
                    c.scale[g] = 2 * (long(6 + g / 2 * 8) >> 28) as i8 + 1;
                }
                c.d = half(0) * 0.125;
            }
            DType::Iq2Xs => {
                for (g, q) in c.q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let word = word(2 + 2 * g);
                    group8(IQ2_XS_GRID[usize::from(word & 511)], even_signs((word >> 9) as u8), q);
                }
                for g in 0..16 {
                    c.scale[g] = 2 * (block[66 + g / 2] >> (g % 2 * 4) & 15) as i8 + 1;
                }
                c.d = half(0) * 0.125;
            }
            DType::Iq2S => {
                for (g, q) in c.q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let high = usize::from(block[66 + g / 4] >> (g % 4 * 2) & 3);
                    group8(IQ2_S_GRID[usize::from(block[2 + g]) | high << 8], block[34 + g], q);
                }
                for g in 0..16 {
                    c.scale[g] = 2 * (block[74 + g / 2] >> (g % 2 * 4) & 15) as i8 + 1;
                }
                c.d = half(0) * 0.125;
            }
            DType::Iq1S => {
                for (g, q) in c.q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let word = word(34 + g / 4 * 2);
                    let index = usize::from(block[2 + g]) | usize::from(word >> (g % 4 * 3) & 7) << 8;
                    group8(IQ1_GRID[index], if word >> 15 == 1 { 255 } else { 0 }, q);
                    c.scale[g / 2] = 2 * (word >> 12 & 7) as i8 + 1;
                }
                c.d = half(0) * 0.125;
            }
            DType::Iq1M => {
                for (g, q) in c.q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let high = block[32 + g / 2] >> (g % 2 * 4);
                    let index = usize::from(block[g]) | usize::from(high & 7) << 8;
                    group8(IQ1_GRID[index], if high & 8 != 0 { 255 } else { 0 }, q);
                    c.scale[g / 2] = 2 * (word(48 + g / 8 * 2) >> (g % 8 / 2 * 3) & 7) as i8 + 1;
                }
                let bits = (0..4).fold(0, |bits, i| bits | (word(48 + 2 * i) >> 12) << (4 * i));
                c.d = half::f16::from_bits(bits).to_f32() * 0.125;
            }
            DType::Tq1_0 => {
                // Digit n of a byte that holds a base-3 fraction scaled to 256.
                let digit = |byte: u8, n: usize| {
                    let fraction = byte.wrapping_mul([1, 3, 9, 27, 81][n]);
                    ((u16::from(fraction) * 3) >> 8) as u8
                };
                for (first, width, digits, values) in [(0, 32, 5, 0), (32, 16, 5, 160), (48, 4, 4, 240)] {
                    for n in 0..digits {
                        for j in 0..width {
                            c.q[values + n * width + j] = digit(block[first + j], n);
                        }
                    }
                }
            }
            // TQ2_0; nothing else is asked for.
            _ => {
                for (k, q) in c.q.iter_mut().enumerate() {
                    *q = block[k / 128 * 32 + k % 32] >> (k / 32 % 4 * 2) & 3;
                }
            }
        }
        c
    }
}

/// Eight codes: two bits of magnitude, then the sign.
fn group8(entry: u16, signs: u8, q: &mut [u8; 8]) {
    for (j, q) in q.iter_mut().enumerate() {
        *q = (entry >> (2 * j) & 3) as u8 | (signs >> j & 1) << 2;
    }
}

/// Four codes: three bits of magnitude, then the sign.
fn group4(entry: u16, signs: u8, q: &mut [u8; 4]) {
    for (j, q) in q.iter_mut().enumerate() {
        *q = (entry >> (4 * j) & 7) as u8 | (signs >> j & 1) << 3;
    }
}
