//! Q5_K: Q4_K with a fifth bit. A block is 256 columns of 16 rows in 2,816 bytes, as many as in the file:
//!
//! ```text
//! scales as in Q4_K
//! 8 groups: high  [64]: bit b of byte 4 row + j = fifth bit of column 4b + j
//!           codes [4][64] as in Q4_K
//! mins, d, dmin as in Q4_K
//! ```

use super::k4::{Foot, Head, pack_scales, two_scales};
use super::open::{Minima, MinimaBlock};
use super::unpack::{interleave1, interleave4, nibbles_k};
use super::{Form, NEAR, Opens, Packed, add_scaled, dots};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Q5_K.
pub struct K5;

/// 32 columns.
#[derive(Clone, Copy)]
#[repr(C)]
struct Group {
    high: [u8; 64],
    codes: [[u8; 64]; 4],
}

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    head: Head,
    groups: [Group; 8],
    foot: Foot,
}
const _: () = assert!(size_of::<Block>() == 176 * 16);
// SAFETY: bytes only.
unsafe impl Plain for Block {}

impl Packed for K5 {
    fn pack(_: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        pack_scales(rows, &mut block.head, &mut block.foot);
        for (r, row) in rows.iter().enumerate() {
            let q = nibbles_k(&row[48..176]);
            for (g, group) in block.groups.iter_mut().enumerate() {
                interleave4(&mut group.codes, r, &q[32 * g..]);
                interleave1(&mut group.high, r, |k| row[16 + k] >> g & 1);
            }
        }
    }
}

impl Form for K5 {
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
        let scales = w.head.scales(s, ahead);
        let mut total = [s.splat_f(0.0); NC];
        for pair in 0..4 {
            let scales = two_scales(s, scales[pair]);
            for half in 0..2 {
                let g = 2 * pair + half;
                let mut part = [s.splat_i(0); NC];
                let fifth = s.load_b(&w.groups[g].high, ahead);
                for i in 0..4 {
                    let [low, high] = codes(s, s.load_b(&w.groups[g].codes[i], ahead), fifth, i);
                    dots(s, &mut part, low, &x.q[8 * g + 2 * i]);
                    dots(s, &mut part, high, &x.q[8 * g + 2 * i + 1]);
                }
                add_scaled(s, &mut total, &part, scales[half]);
            }
        }
        w.foot.finish(s, &w.head, ahead, &total, x, acc);
    }
}

/// The codes of part `i` of a group: four bits each, with their fifth bits.
#[inline(always)]
fn codes<S: Simd>(s: S, both: S::B, fifth: S::B, i: usize) -> [S::B; 2] {
    // Bit 2i (then 2i + 1) goes to place 4.
    let (at, next) = (2 * i as u32, 2 * i as u32 + 1);
    let bit = if at <= 4 { s.shl_b(fifth, 4 - at) } else { s.shr_b(fifth, at - 4) };
    let low = s.or_masked(s.and_b(both, 15), bit, 16);
    let bit = if next <= 4 { s.shl_b(fifth, 4 - next) } else { s.shr_b(fifth, next - 4) };
    [low, s.or_masked(s.and_b(s.shr_b(both, 4), 15), bit, 16)]
}

impl Opens for K5 {
    type Packed = Block;
    type Open = Minima;

    #[inline(always)]
    fn open<S: Simd>(s: S, w: &Block, _: S::B, to: &mut MinimaBlock) {
        for (group, to) in w.groups.iter().zip(to.codes.as_chunks_mut::<8>().0) {
            let fifth = s.load_b(&group.high, NEAR);
            for i in 0..4 {
                let [low, high] = codes(s, s.load_b(&group.codes[i], NEAR), fifth, i);
                s.store_b(&mut to[2 * i], low);
                s.store_b(&mut to[2 * i + 1], high);
            }
        }
        w.foot.open(s, &w.head, to);
    }
}
