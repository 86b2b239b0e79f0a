//! Three bits into a table of signed bytes, a signed scale for 16 columns: Q3_K, the IQ2 and the IQ1 types.
//! `d * scale * value`. A block is 256 columns of 16 rows in 1,856 bytes (Q3_K's file has 1,760):
//!
//! ```text
//! 8 groups: high [64]: bit b of byte 4 row + j = third bit of column 4b + j
//!           low  [2][64]: bits 2t of byte 4 row + j of part i = low bits of column 16i + 4t + j
//! scales [16 groups of 16][16 rows] signed
//! d      [16] float, with the format's power of two in it
//! ```
//! Table entries stand 64 above their meaning, so that they are unsigned and below 128.

use super::unpack::{Codes, interleave1, interleave2};
use super::{Form, add_floats, add_scaled, dots, starts};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Three-bit codes.
pub struct K3;

/// 32 columns.
#[derive(Clone, Copy)]
#[repr(C)]
struct Group {
    high: [u8; 64],
    low: [[u8; 64]; 2],
}

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    d: [f32; 16],
    scales: [[u8; 16]; 16],
    groups: [Group; 8],
}
// SAFETY: bytes, then floats at an offset that is a multiple of four; no padding.
unsafe impl Plain for Block {}
const _: () = assert!(size_of::<Block>() == 1856);

impl Form for K3 {
    type Block = Block;
    type X<const NC: usize> = Block256<NC>;
    const COLS: usize = 256;
    const SCALES: Scales = Scales::Per256;

    fn pack(dtype: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        for (r, row) in rows.iter().enumerate() {
            let codes = Codes::read(dtype, row);
            for (group, q) in block.groups.iter_mut().zip(codes.q.as_chunks::<32>().0) {
                interleave2(&mut group.low, r, |k| q[k] & 3);
                interleave1(&mut group.high, r, |k| q[k] >> 2);
            }
            for g in 0..16 {
                block.scales[g][r] = codes.scale[g] as u8;
            }
            block.d[r] = codes.d;
        }
    }

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &Block,
        ahead: usize,
        table: S::B,
        x: &Block256<NC>,
        acc: &mut [S::F; NC],
    ) {
        let mut total = [s.splat_f(0.0); NC];
        for g in 0..8 {
            let third = s.load_b(&w.groups[g].high, ahead);
            for half in 0..2 {
                let mut part = starts(s, &x.negative16[2 * g + half], 6);
                let low = s.load_b(&w.groups[g].low[half], ahead);
                for t in 0..4 {
                    // Bit b goes to place 2.
                    let b = 4 * half + t;
                    let bit =
                        if b <= 2 { s.shl_b(third, 2 - b as u32) } else { s.shr_b(third, b as u32 - 2) };
                    let code = s.or_masked(s.and_b(s.shr_b(low, 2 * t as u32), 3), bit, 4);
                    let value = s.lookup(table, code);
                    dots(s, &mut part, value, &x.q[8 * g + b]);
                }
                let scale = s.widen_i8(&w.scales[2 * g + half]);
                add_scaled(s, &mut total, &part, scale);
            }
        }
        let d = s.load_f(&w.d);
        add_floats(s, acc, &total, d, &x.scale);
    }
}
