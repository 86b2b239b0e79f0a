//! MXFP4 and NVFP4: 4-bit floats (E2M1) under a small scale; `d * v`, with v twice the E2M1 value (an integer) and d
//! half the stored scale, both exact, so one rounding a value.
//!
//! MXFP4: 32 values. The scale is E8M0, 2^(e - 127).
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | e |
//! | 1 | 16 | value j < 16 is the low half of byte j, value 16 + j its high half |
//!
//! NVFP4 as ggml packs it: 64 values in 4 groups of 16. A scale is UE4M3 with bias 7; its top bit is not read; 0x7f is 0.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | scale of group g |
//! | 4 | 32 | value 16g + j (j < 8) is the low half of byte 8g + j, value 16g + 8 + j its high half |

use super::field;

/// Twice the E2M1 value of each 4-bit code: one sign, two exponent and one mantissa bit.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

fn doubled(code: u8) -> f32 {
    f32::from(E2M1_DOUBLED[usize::from(code & 15)])
}

/// 2^(e - 128): half of an E8M0 scale. The two smallest are subnormal.
fn half_e8m0(e: u8) -> f32 {
    match e {
        0 => f32::from_bits(1 << 21),
        e => f32::from_bits(u32::from(e - 1) << 23 | if e == 1 { 1 << 22 } else { 0 }),
    }
}

/// Half of a UE4M3 scale.
fn half_ue4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (bits >> 3 & 15, f32::from(bits & 7));
    match (bits, exponent) {
        (0x7f, _) => 0.0,
        // mantissa / 8 * 2^-6, halved.
        (_, 0) => mantissa * (1.0 / 1024.0),
        // (8 + mantissa) / 8 * 2^(exponent - 7), halved; the power is written as bits of 2^(exponent - 11).
        _ => (8.0 + mantissa) * f32::from_bits((u32::from(exponent) + 127 - 11) << 23),
    }
}

pub(super) fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let d = half_e8m0(block[0]);
    let q: &[u8; 16] = field::<1, _, _>(block);
    for (j, &q) in q.iter().enumerate() {
        out[j] = d * doubled(q);
        out[16 + j] = d * doubled(q >> 4);
    }
}

pub(super) fn nvfp4(block: &[u8; 36], out: &mut [f32; 64]) {
    let scales: &[u8; 4] = field::<0, _, _>(block);
    let q: &[u8; 32] = field::<4, _, _>(block);
    for (g, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let d = half_ue4m3(scales[g]);
        for j in 0..8 {
            out[j] = d * doubled(q[8 * g + j]);
            out[8 + j] = d * doubled(q[8 * g + j] >> 4);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scales that no sane model has too: subnormal, the greatest, and what would be NaN or negative.
    #[test]
    fn all_scales() {
        for code in 0..=255u8 {
            assert_eq!(f64::from(half_e8m0(code)), 2f64.powi(i32::from(code) - 128), "{code}");
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let value = match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            let expected = if code == 0x7f { 0.0 } else { value / 2.0 };
            assert_eq!(f64::from(half_ue4m3(code)), expected, "{code}");
        }
        // The greatest of E4M3 is 448.
        assert_eq!(half_ue4m3(0x7e), 224.0);
    }
}
