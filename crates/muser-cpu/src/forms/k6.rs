//! Q6_K: `d * scale * (q - 32)`, a signed scale for 16 columns. A block is 256 columns of 16 rows in 3,360 bytes, as
//! many as in the file:
//!
//! ```text
//! codes  [8 groups][4][64] low four bits, as in Q4_K
//! high   [8 groups][2][64]: bits 2t of byte 4 row + j of part i = high bits of column 16i + 4t + j
//! scales [16 groups of 16][16 rows] signed
//! d      [16] half
//! ```
//! The 32 is taken off by starting each sum at -32 times the sum of the activations.

use super::unpack::{half_of, interleave2, interleave4};
use super::{Form, add_floats, add_scaled, dots};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Q6_K.
pub struct K6;

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    codes: [[[u8; 64]; 4]; 8],
    high: [[[u8; 64]; 2]; 8],
    scales: [[u8; 16]; 16],
    d: [u8; 32],
}
const _: () = assert!(size_of::<Block>() == 210 * 16);
// SAFETY: bytes only.
unsafe impl Plain for Block {}

impl Form for K6 {
    type Block = Block;
    type X<const NC: usize> = Block256<NC>;
    const COLS: usize = 256;
    const SCALES: Scales = Scales::Per256;

    fn pack(_: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        for (r, row) in rows.iter().enumerate() {
            let (low, high) = (&row[..128], &row[128..192]);
            let mut q = [0u8; 256];
            for (k, q) in q.iter_mut().enumerate() {
                *q = low[k / 128 * 64 + k % 64] >> (k / 64 % 2 * 4) & 15;
            }
            interleave4(&mut block.codes, r, &q);
            interleave2(&mut block.high, r, |k| high[k / 128 * 32 + k % 32] >> (k / 32 % 4 * 2) & 3);
            for g in 0..16 {
                block.scales[g][r] = row[192 + g];
            }
            half_of(&mut block.d, r, &row[208..210]);
        }
    }

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(s: S, w: &Block, _: S::B, x: &Block256<NC>, acc: &mut [S::F; NC]) {
        let mut total = [s.splat_i(0); NC];
        for g in 0..8 {
            for half in 0..2 {
                let mut part = x.negative16[2 * g + half].map(|sum| s.shl_i(s.splat_i(sum), 5));
                let top = s.load_b(&w.high[g][half]);
                for i in 0..2 {
                    let both = s.load_b(&w.codes[g][2 * half + i]);
                    let bits = if i == 0 { s.shl_b(top, 4) } else { top };
                    let low = s.or_masked(s.and_b(both, 15), bits, 48);
                    let bits = if i == 0 { s.shl_b(top, 2) } else { s.shr_b(top, 2) };
                    let high = s.or_masked(s.and_b(s.shr_b(both, 4), 15), bits, 48);
                    let k = 8 * g + 4 * half + 2 * i;
                    dots(s, &mut part, low, &x.q[k]);
                    dots(s, &mut part, high, &x.q[k + 1]);
                }
                let scale = s.widen_i8(&w.scales[2 * g + half]);
                add_scaled(s, &mut total, &part, scale);
            }
        }
        let d = s.half(&w.d);
        add_floats(s, acc, &total, d, &x.scale);
    }
}
