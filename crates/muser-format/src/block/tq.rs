//! TQ1_0 and TQ2_0: 256 ternary values, `d * (q - 1)` with q in 0..=2 (TQ2_0's two bits can also say 3).
//!
//! | TQ1_0 offset | bytes | field |
//! |---|---|---|
//! | 0 | 32 | value 32n + j (n < 5) is digit n of byte j |
//! | 32 | 16 | value 160 + 16n + j (n < 5) is digit n of byte 32 + j |
//! | 48 | 4 | value 240 + 4n + j (n < 4) is digit n of byte 48 + j |
//! | 52 | 2 | d, half |
//!
//! | TQ2_0 offset | bytes | field |
//! |---|---|---|
//! | 0 | 64 | byte 32h + j holds values 128h + 32s + j at bit 2s |
//! | 64 | 2 | d, half |

use super::{field, half_at};

/// Digit n of a byte that holds the base-3 fraction 0.abcde scaled to 256: shift the point n places, keep the
/// fraction, and the next digit is its integer part after one more multiplication.
fn digit(byte: u8, n: u32) -> u8 {
    let fraction = byte.wrapping_mul(3u8.wrapping_pow(n));
    ((u16::from(fraction) * 3) >> 8) as u8
}

pub(super) fn tq1_0(block: &[u8; 54], out: &mut [f32; 256]) {
    let q: &[u8; 52] = field::<0, _, _>(block);
    let d = half_at::<52, _>(block);
    for (first, width, digits, values) in [(0, 32, 5, 0), (32, 16, 5, 160), (48, 4, 4, 240)] {
        for n in 0..digits {
            for j in 0..width {
                out[values + n * width + j] = d * f32::from(digit(q[first + j], n as u32) as i8 - 1);
            }
        }
    }
}

pub(super) fn tq2_0(block: &[u8; 66], out: &mut [f32; 256]) {
    let q: &[u8; 64] = field::<0, _, _>(block);
    let d = half_at::<64, _>(block);
    for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (start, shift) = (g / 4 * 32, g % 4 * 2);
        for (out, &q) in out.iter_mut().zip(&q[start..start + 32]) {
            *out = d * f32::from((q >> shift & 3) as i8 - 1);
        }
    }
}
