//! Q4_K: `d * scale * q - dmin * min`, scale and minimum of six bits for 32 columns.
//!
//! A block is 256 columns of 16 rows in 2,304 bytes, as many as in the file:
//!
//! ```text
//! scales [2][64]: byte 4 row + j of part i = scale of group 4i + 2 (j % 2) + 1 - j / 2, in six bits
//! codes  [8 groups][4][64]: byte 4 row + j of part i = column 8i + j | column 8i + 4 + j << 4
//! mins   [64]: the same as part 0 of the scales. The minima of part 1 stand in the upper two bits of the three, the
//!              lowest two bits in part 0 of the scales
//! d      [16] half      dmin   [16] half
//! ```
//! What a kernel reads stands in the order that it reads it: the processor fetches ahead along rising addresses, and a line
//! that is read out of turn holds that up.
//! Per 64 bytes of codes: one load, three operations to unpack, two dots. Memory binds. The sums of two groups, each of
//! 16 bits, share a lane, so that one operation scales both; what a block adds to is a whole number until its end.

use super::cross::{Crossed, CrossedBlock};
use super::open::{MinimaBlock, Paired, PairedBlock, less_minima};
use super::unpack::{half_of, interleave4, nibbles_k, scale_min_k};
use super::{Form, NEAR, Opens, Packed, add_pairs, dots, floats, raise};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Q4_K.
pub struct K4;

/// What comes before the codes of 16 rows, shared with Q5_K.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Head {
    scales: [[u8; 64]; 2],
}

/// What comes after them.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Foot {
    mins: [u8; 64],
    /// Step of the scales.
    pub d: [u8; 32],
    /// Step of the minima.
    pub dmin: [u8; 32],
}

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    head: Head,
    codes: [[[u8; 64]; 4]; 8],
    /// What comes after the codes.
    pub foot: Foot,
}
const _: () = assert!(size_of::<Block>() == 144 * 16);
// SAFETY: bytes only.
unsafe impl Plain for Block {}

/// Packs the first 16 bytes of Q4_K and Q5_K blocks.
pub fn pack_scales(rows: &[&[u8]; LANES], head: &mut Head, foot: &mut Foot) {
    *head = Head { scales: [[0; 64]; 2] };
    foot.mins = [0; 64];
    for (r, row) in rows.iter().enumerate() {
        half_of(&mut foot.d, r, &row[0..2]);
        half_of(&mut foot.dmin, r, &row[2..4]);
        for g in 0..8 {
            let (scale, min) = scale_min_k(&row[4..16], g);
            let at = 4 * r + g / 2 % 2 + 2 * (1 - g % 2);
            head.scales[g / 4][at] |= scale;
            if g < 4 {
                foot.mins[at] |= min;
            } else {
                head.scales[0][at] |= min << 6;
                head.scales[1][at] |= min >> 2 << 6;
                foot.mins[at] |= min >> 4 << 6;
            }
        }
    }
}

impl Head {
    /// Scales of all groups: of two groups each, the second one's in the lower half.
    #[inline(always)]
    pub fn scales<S: Simd>(&self, s: S, ahead: usize) -> [S::I; 4] {
        let [first, second] = [s.load_b(&self.scales[0], ahead), s.load_b(&self.scales[1], ahead)];
        let [first, second] = [s.and_b(first, 63), s.and_b(second, 63)];
        [s.even_bytes(first), s.odd_bytes(first), s.even_bytes(second), s.odd_bytes(second)]
    }
}

impl Foot {
    /// Adds `total` (whole scale times code times x) in the weights' steps, less the minima's part, times the
    /// activations' step.
    #[inline(always)]
    pub fn finish<S: Simd, const NC: usize>(
        &self,
        s: S,
        head: &Head,
        ahead: usize,
        total: &[S::F; NC],
        x: &Block256<NC>,
        acc: &mut [S::F; NC],
    ) {
        let mins = self.mins(s, head, ahead);
        s.fetch(&self.d, ahead);
        less_minima(s, total, self.d(s), (mins, self.dmin(s)), (&x.sums, &x.scale), acc);
    }

    /// Minima of all groups, paired as the activations' sums are.
    #[inline(always)]
    fn mins<S: Simd>(&self, s: S, head: &Head, ahead: usize) -> [S::I; 4] {
        let mins = s.load_b(&self.mins, ahead);
        let low = s.shr_b(s.load_b(&head.scales[0], 0), 6);
        let low = s.select(low, s.shr_b(s.load_b(&head.scales[1], 0), 4), 3);
        let first = s.and_b(mins, 63);
        let second = s.and_b(s.select(low, s.shr_b(mins, 2), 15), 63);
        [s.even_bytes(first), s.odd_bytes(first), s.even_bytes(second), s.odd_bytes(second)]
    }

    #[inline(always)]
    fn d<S: Simd>(&self, s: S) -> S::F {
        s.half(&self.d)
    }

    /// Minus the step of the minima.
    #[inline(always)]
    fn dmin<S: Simd>(&self, s: S) -> S::F {
        s.mul_f(s.half(&self.dmin), s.splat_f(-1.0))
    }

    /// What an unpacked block of Q5_K needs besides its codes.
    #[inline(always)]
    pub fn open<S: Simd>(&self, s: S, head: &Head, to: &mut MinimaBlock) {
        for (to, both) in to.scales.as_chunks_mut::<2>().0.iter_mut().zip(head.scales(s, NEAR)) {
            let [first, second] = two_scales(s, both);
            s.store_f(&mut to[0], first);
            s.store_f(&mut to[1], second);
        }
        for (to, mins) in to.mins.iter_mut().zip(self.mins(s, head, NEAR)) {
            s.store_i(to, mins);
        }
        s.store_f(&mut to.d, self.d(s));
        s.store_f(&mut to.dmin, self.dmin(s));
    }
}

/// Scales of two groups as floats.
#[inline(always)]
pub fn two_scales<S: Simd>(s: S, both: S::I) -> [S::F; 2] {
    [s.to_f(s.shr_i(both, 16)), s.to_f(s.shr_i(s.shl_i(both, 16), 16))]
}

impl Packed for K4 {
    fn pack(_: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        pack_scales(rows, &mut block.head, &mut block.foot);
        for (r, row) in rows.iter().enumerate() {
            let q = nibbles_k(&row[16..144]);
            for (codes, q) in block.codes.iter_mut().zip(q.chunks(32)) {
                interleave4(codes, r, q);
            }
        }
    }
}

impl Form for K4 {
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
        let mut total = [s.splat_i(0); NC];
        for pair in 0..4 {
            let mut part = [s.splat_i(0); NC];
            for g in 2 * pair..2 * pair + 2 {
                if g % 2 == 1 {
                    raise(s, &mut part);
                }
                for i in 0..4 {
                    let both = s.load_b(&w.codes[g][i], ahead);
                    let (low, high) = (s.and_b(both, 15), s.and_b(s.shr_b(both, 4), 15));
                    dots(s, &mut part, low, &x.q[8 * g + 2 * i]);
                    dots(s, &mut part, high, &x.q[8 * g + 2 * i + 1]);
                }
            }
            add_pairs(s, &mut total, &part, scales[pair]);
        }
        w.foot.finish(s, &w.head, ahead, &floats(s, &total), x, acc);
    }

    #[inline(always)]
    fn band<S: Simd, const NC: usize>(
        s: S,
        w: &[Block],
        ahead: usize,
        x: &[Block256<NC>],
        acc: &mut [[S::F; NC]],
    ) -> bool {
        s.few_k4(w, ahead, x, acc)
    }
}

impl Opens for K4 {
    type Packed = Block;
    type Open = Paired;

    #[inline(always)]
    fn open<S: Simd>(s: S, w: &Block, _: S::B, to: &mut PairedBlock) {
        w.open(s, to);
    }
}

impl Block {
    #[inline(always)]
    fn open<S: Simd>(&self, s: S, to: &mut PairedBlock) {
        for (both, to) in self.codes.as_flattened().iter().zip(to.codes.as_chunks_mut::<2>().0) {
            let both = s.load_b(both, NEAR);
            s.store_b(&mut to[0], s.and_b(both, 15));
            s.store_b(&mut to[1], s.and_b(s.shr_b(both, 4), 15));
        }
        for (to, scales) in to.scales.iter_mut().zip(self.head.scales(s, NEAR)) {
            s.store_i(to, scales);
        }
        for (to, mins) in to.mins.iter_mut().zip(self.foot.mins(s, &self.head, NEAR)) {
            s.store_i(to, mins);
        }
        s.store_f(&mut to.d, self.foot.d(s));
        s.store_f(&mut to.dmin, self.foot.dmin(s));
    }
}

/// Unpacks Q4_K into [`Crossed`].
pub struct Crosses;

impl Opens for Crosses {
    type Packed = Block;
    type Open = Crossed;

    #[inline(always)]
    fn open<S: Simd>(s: S, w: &Block, _: S::B, to: &mut CrossedBlock) {
        w.open(s, &mut to.paired);
        to.cross(s);
    }
}
