//! Two bits, scale and minimum of four bits for 16 columns: Q2_K, and the ternary types as `d * q - d`.
//! `d * scale * q - dmin * min`. A block is 256 columns of 16 rows in 1,344 bytes, as many as in Q2_K's file:
//!
//! ```text
//! codes  [8 groups][2][64]: bits 2t of byte 4 row + j of part i = column 16i + 4t + j
//! scales [16 groups of 16][16 rows]: scale | min << 4
//! d      [16] half      dmin   [16] half
//! ```

use super::unpack::{Codes, half_of, interleave2};
use super::{Form, Packed, dots};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Two-bit codes.
pub struct K2;

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    d: [u8; 32],
    dmin: [u8; 32],
    scales: [[u8; 16]; 16],
    codes: [[[u8; 64]; 2]; 8],
}
const _: () = assert!(size_of::<Block>() == 84 * 16);
// SAFETY: bytes only.
unsafe impl Plain for Block {}

impl Packed for K2 {
    fn pack(dtype: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        for (r, row) in rows.iter().enumerate() {
            if dtype == DType::Q2K {
                for (g, codes) in block.codes.iter_mut().enumerate() {
                    interleave2(codes, r, |k| row[16 + g / 4 * 32 + k] >> (g % 4 * 2) & 3);
                }
                for g in 0..16 {
                    block.scales[g][r] = row[g];
                }
                half_of(&mut block.d, r, &row[80..82]);
                half_of(&mut block.dmin, r, &row[82..84]);
            } else {
                let codes = Codes::read(dtype, row);
                for (to, q) in block.codes.iter_mut().zip(codes.q.as_chunks::<32>().0) {
                    interleave2(to, r, |k| q[k]);
                }
                for g in 0..16 {
                    block.scales[g][r] = 0x11;
                }
                let d = &row[row.len() - 2..];
                half_of(&mut block.d, r, d);
                half_of(&mut block.dmin, r, d);
            }
        }
    }
}

impl Form for K2 {
    type Block = Block;
    type X<const NC: usize> = Block256<NC>;
    const COLS: usize = 256;
    const SCALES: Scales = Scales::Per256;

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &Block,
        ahead: usize,
        _: S::B,
        x: &Block256<NC>,
        acc: &mut [S::F; NC],
    ) {
        s.fetch(&w.d, ahead);
        s.fetch(&w.scales, ahead);
        let mut total = [s.splat_f(0.0); NC];
        // Minus 32 times the minima's part, as the sums are stored.
        let mut low = [s.splat_i(0); NC];
        for g in 0..16 {
            let mut part = [s.splat_i(0); NC];
            let packed = s.load_b(&w.codes[g / 2][g % 2], ahead);
            for t in 0..4 {
                let code = s.and_b(s.shr_b(packed, 2 * t as u32), 3);
                dots(s, &mut part, code, &x.q[4 * g + t]);
            }
            let (mut scale, mut min) = ([0; 16], [0; 16]);
            for (i, packed) in w.scales[g].iter().enumerate() {
                (scale[i], min[i]) = (packed & 15, packed >> 4);
            }
            let (scale, min) = (s.to_f(s.widen_u8(&scale)), s.widen_u8(&min));
            for c in 0..NC {
                total[c] = s.fma(s.to_f(part[c]), scale, total[c]);
                low[c] = s.add_i(low[c], s.mul_i(min, s.splat_i(x.start16[g][c])));
            }
        }
        let (d, dmin) = (s.half(&w.d), s.mul_f(s.half(&w.dmin), s.splat_f(1.0 / 32.0)));
        for c in 0..NC {
            let scale = s.splat_f(x.scale[c]);
            acc[c] = s.fma(total[c], s.mul_f(d, scale), acc[c]);
            acc[c] = s.fma(s.to_f(low[c]), s.mul_f(dmin, scale), acc[c]);
        }
    }
}
