//! Four-bit floats (E2M1). NVFP4: a UE4M3 scale for 16 columns; 64 columns of 16 rows in 576 bytes, as many as in the
//! file. MXFP4: an E8M0 scale for 32 columns, unpacked to a float; 32 columns of 16 rows in 320 bytes (the file: 272).
//!
//! ```text
//! NVFP4: codes [2 groups of 32][4][64] as in Q4_K; scales [4 groups of 16][16 rows], the byte that means "none" as 0
//! MXFP4: codes [4][64]; d [16] float
//! ```
//! The table holds twice the value, 128 above its meaning; scales are halved.

use super::q4::codes_dot;
use super::unpack::{half_e8m0, interleave4, nibbles_16, nibbles_32};
use super::{Form, Packed, add_ints, dots_wide, starts_wide};
use crate::activations::{Block32, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// NVFP4.
pub struct Nv4;
/// MXFP4.
pub struct Mx4;

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    codes: [[[u8; 64]; 4]; 2],
    scales: [[u8; 16]; 4],
}
const _: () = assert!(size_of::<Block>() == 36 * 16);
// SAFETY: bytes only.
unsafe impl Plain for Block {}

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockM {
    codes: [[u8; 64]; 4],
    d: [f32; 16],
}
// SAFETY: bytes, then floats at an offset that is a multiple of four; no padding.
unsafe impl Plain for BlockM {}

impl Packed for Nv4 {
    fn pack(_: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        for (r, row) in rows.iter().enumerate() {
            for g in 0..4 {
                block.scales[g][r] = if row[g] == 0x7f { 0 } else { row[g] & 0x7f };
            }
            for g in 0..2 {
                interleave4(&mut block.codes[g], r, &nibbles_16(&row[4 + 16 * g..20 + 16 * g]));
            }
        }
    }
}

impl Form for Nv4 {
    type Block = Block;
    type X<const NC: usize> = [Block32<NC>; 2];
    const COLS: usize = 64;
    const SCALES: Scales = Scales::Per32;

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &Block,
        ahead: usize,
        table: S::B,
        x: &[Block32<NC>; 2],
        acc: &mut [S::F; NC],
    ) {
        // Exponent and mantissa moved to a float's place make 2^-119 of half the scale.
        let unit = s.splat_f(f32::from_bits((127 + 119) << 23));
        for (g, x) in x.iter().enumerate() {
            for half in 0..2 {
                let mut part = starts_wide(s, &x.start16[half]);
                for i in 0..2 {
                    let both = s.load_b(&w.codes[g][2 * half + i], ahead);
                    let low = s.lookup(table, s.and_b(both, 15));
                    let high = s.lookup(table, s.and_b(s.shr_b(both, 4), 15));
                    let k = 4 * half + 2 * i;
                    dots_wide(s, &mut part, low, &x.q[k]);
                    dots_wide(s, &mut part, high, &x.q[k + 1]);
                }
                let d = s.mul_f(s.bits_f(s.shl_i(s.widen_u8(&w.scales[2 * g + half]), 20)), unit);
                add_ints(s, acc, &part, d, &x.scale);
            }
        }
    }
}

impl Packed for Mx4 {
    fn pack(_: DType, rows: &[&[u8]; LANES], block: &mut BlockM) {
        for (r, row) in rows.iter().enumerate() {
            block.d[r] = half_e8m0(row[0]);
            interleave4(&mut block.codes, r, &nibbles_32(&row[1..17]));
        }
    }
}

impl Form for Mx4 {
    type Block = BlockM;
    type X<const NC: usize> = Block32<NC>;
    const COLS: usize = 32;
    const SCALES: Scales = Scales::Per32;

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &BlockM,
        ahead: usize,
        table: S::B,
        x: &Block32<NC>,
        acc: &mut [S::F; NC],
    ) {
        let part = codes_dot(s, &w.codes, table, x, ahead);
        let d = s.load_f(&w.d);
        add_ints(s, acc, &part, d, &x.scale);
    }
}
