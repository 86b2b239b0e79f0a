//! Three bits into a table of signed bytes, a signed scale for 16 columns: Q3_K, the IQ2 and the IQ1 types.
//! `d * scale * value`. A block is 256 columns of 16 rows in 1,856 bytes (Q3_K's file has 1,760):
//!
//! ```text
//! 8 groups: codes [3][64]: byte 4 row + j of part i = column 4i + j | column 12 + 4i + j << 3 | top bits; these are the
//!           low two bits of column 24 + j, the low two of column 28 + j, and the third bits of both
//! scales [16 groups of 16][16 rows] signed
//! d      [16] float, with the format's power of two in it
//! ```
//! Table entries stand 64 above their meaning, so that they are unsigned and below 128.

use super::open::{Offset, OffsetBlock};
use super::unpack::Codes;
use super::{Form, NEAR, Opens, Packed, add_floats, add_scaled, dots, starts};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Three-bit codes.
pub struct K3;

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    d: [f32; 16],
    scales: [[u8; 16]; 16],
    codes: [[[u8; 64]; 3]; 8],
}
// SAFETY: bytes, then floats at an offset that is a multiple of four; no padding.
unsafe impl Plain for Block {}
const _: () = assert!(size_of::<Block>() == 1856);

impl Packed for K3 {
    fn pack(dtype: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        for (r, row) in rows.iter().enumerate() {
            let codes = Codes::read(dtype, row);
            for (group, q) in block.codes.iter_mut().zip(codes.q.as_chunks::<32>().0) {
                for j in 0..4 {
                    let (a, b) = (q[24 + j], q[28 + j]);
                    let top = [a & 3, b & 3, a >> 2 | b >> 2 << 1];
                    for (i, part) in group.iter_mut().enumerate() {
                        part[4 * r + j] = q[4 * i + j] | q[12 + 4 * i + j] << 3 | top[i] << 6;
                    }
                }
            }
            for g in 0..16 {
                block.scales[g][r] = codes.scale[g] as u8;
            }
            block.d[r] = codes.d;
        }
    }
}

impl Form for K3 {
    type Block = Block;
    type X<const NC: usize> = Block256<NC>;
    const COLS: usize = 256;
    const SCALES: Scales = Scales::Per256;

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &Block,
        ahead: usize,
        table: S::B,
        x: &Block256<NC>,
        acc: &mut [S::F; NC],
    ) {
        s.fetch(&w.d, ahead);
        s.fetch(&w.scales, ahead);
        let d = s.load_f(&w.d);
        let mut total = [s.splat_f(0.0); NC];
        for g in 0..8 {
            let codes = codes(s, &w.codes[g], ahead);
            for half in 0..2 {
                let mut part = starts(s, &x.start16[2 * g + half]);
                for c in 0..NC {
                    part[c] = s.add_i(part[c], part[c]);
                }
                for i in 4 * half..4 * half + 4 {
                    dots(s, &mut part, s.lookup(table, codes[i]), &x.q[8 * g + i]);
                }
                let scale = s.mul_f(d, s.to_f(s.widen_i8(&w.scales[2 * g + half])));
                add_scaled(s, &mut total, &part, scale);
            }
        }
        add_floats(s, acc, &total, &x.scale);
    }
}

/// The codes of 32 columns.
#[inline(always)]
fn codes<S: Simd>(s: S, group: &[[u8; 64]; 3], ahead: usize) -> [S::B; 8] {
    let [a, b, c] = [s.load_b(&group[0], ahead), s.load_b(&group[1], ahead), s.load_b(&group[2], ahead)];
    let top_a = s.and_b(s.select(s.shr_b(a, 6), s.shr_b(c, 4), 3), 7);
    let top_b = s.and_b(s.select(s.shr_b(b, 6), s.shr_b(c, 5), 3), 7);
    let [middle_a, middle_b, middle_c] = [s.shr_b(a, 3), s.shr_b(b, 3), s.shr_b(c, 3)];
    [
        s.and_b(a, 7),
        s.and_b(b, 7),
        s.and_b(c, 7),
        s.and_b(middle_a, 7),
        s.and_b(middle_b, 7),
        s.and_b(middle_c, 7),
        top_a,
        top_b,
    ]
}

impl Opens for K3 {
    type Packed = Block;
    type Open = Offset;

    #[inline(always)]
    fn open<S: Simd>(s: S, w: &Block, table: S::B, to: &mut OffsetBlock) {
        let d = s.load_f(&w.d);
        for g in 0..8 {
            let codes = codes(s, &w.codes[g], NEAR);
            for i in 0..8 {
                s.store_b(&mut to.codes[8 * g + i], s.lookup(table, codes[i]));
            }
        }
        for g in 0..16 {
            s.store_f(&mut to.scales[g], s.mul_f(d, s.to_f(s.widen_i8(&w.scales[g]))));
        }
    }
}
