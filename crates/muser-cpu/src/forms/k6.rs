//! Q6_K: `d * scale * (q - 32)`, a signed scale for 16 columns. A block is 256 columns of 16 rows in 3,360 bytes, as
//! many as in the file:
//!
//! ```text
//! 8 groups: codes [4][64] low four bits, as in Q4_K
//!           high  [2][64]: bits 2t of byte 4 row + j of part i = high bits of column 16i + 4t + j
//! scales [16 groups of 16][16 rows] signed
//! d      [16] half
//! ```
//! The 32 is taken off by starting each sum at -32 times the sum of the activations.

use super::unpack::{interleave2, interleave4};
use super::{Form, add_floats, add_scaled, dots, starts};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Q6_K.
pub struct K6;

/// 32 columns.
#[derive(Clone, Copy)]
#[repr(C)]
struct Group {
    codes: [[u8; 64]; 4],
    high: [[u8; 64]; 2],
}

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    d: [f32; 16],
    scales: [[u8; 16]; 16],
    groups: [Group; 8],
}
const _: () = assert!(size_of::<Block>() == 3392);
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
            for (g, group) in block.groups.iter_mut().enumerate() {
                interleave4(&mut group.codes, r, &q[32 * g..]);
                interleave2(&mut group.high, r, |k| high[g / 4 * 32 + k] >> (g % 4 * 2) & 3);
            }
            for g in 0..16 {
                block.scales[g][r] = row[192 + g];
            }
            block.d[r] = half::f16::from_le_bytes([row[208], row[209]]).to_f32();
        }
    }

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &Block,
        ahead: usize,
        _: S::B,
        x: &Block256<NC>,
        acc: &mut [S::F; NC],
    ) {
        let mut total = [s.splat_f(0.0); NC];
        for g in 0..8 {
            for half in 0..2 {
                let mut part = starts(s, &x.negative16[2 * g + half], 5);
                let top = s.load_b(&w.groups[g].high[half], ahead);
                for i in 0..2 {
                    let both = s.load_b(&w.groups[g].codes[2 * half + i], ahead);
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
        let d = s.load_f(&w.d);
        add_floats(s, acc, &total, d, &x.scale);
    }
}
