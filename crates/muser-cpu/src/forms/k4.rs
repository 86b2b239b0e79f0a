//! Q4_K: `d * scale * q - dmin * min`, scale and minimum of six bits for 32 columns.
//!
//! A block is 256 columns of 16 rows in 2,304 bytes, as many as in the file:
//!
//! ```text
//! d      [16] half      dmin   [16] half
//! scales low  [64]: byte v < 64 holds the low four bits of scales v and 64 + v;
//!                   scale v = 32 (group / 2) + 2 row + 1 - group % 2
//! mins   low  [64]: the same for minima
//! scales high [32]: byte j holds the high two bits of scales j, 32 + j, 64 + j, 96 + j;   mins high [32]
//! codes  [8 groups][4][64]: byte 4 row + j of part i = column 8i + j | column 8i + 4 + j << 4
//! ```
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

/// Scales and minima of 16 rows, shared with Q5_K.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Header {
    d: [u8; 32],
    dmin: [u8; 32],
    scale_low: [u8; 64],
    min_low: [u8; 64],
    scale_high: [u8; 32],
    min_high: [u8; 32],
}

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    header: Header,
    codes: [[[u8; 64]; 4]; 8],
}
const _: () = assert!(size_of::<Block>() == 144 * 16);
// SAFETY: bytes only.
unsafe impl Plain for Block {}

/// Where scale and minimum of a group and row stand in the two packed arrays.
fn six_bits(low: &mut [u8; 64], high: &mut [u8; 32], v: usize, value: u8) {
    low[v % 64] |= (value & 15) << (v / 64 * 4);
    high[v % 32] |= (value >> 4) << (v / 32 * 2);
}

impl Header {
    /// Packs the first 16 bytes of Q4_K and Q5_K blocks.
    pub fn pack(rows: &[&[u8]; LANES]) -> Self {
        let zero = [0; 32];
        let mut h = Header {
            d: zero,
            dmin: zero,
            scale_low: [0; 64],
            min_low: [0; 64],
            scale_high: zero,
            min_high: zero,
        };
        for (r, row) in rows.iter().enumerate() {
            half_of(&mut h.d, r, &row[0..2]);
            half_of(&mut h.dmin, r, &row[2..4]);
            for g in 0..8 {
                let (scale, min) = scale_min_k(&row[4..16], g);
                let v = g / 2 * 32 + 2 * r + 1 - g % 2;
                six_bits(&mut h.scale_low, &mut h.scale_high, v, scale);
                six_bits(&mut h.min_low, &mut h.min_high, v, min);
            }
        }
        h
    }

    /// Scales of all groups: of two groups each, the second one's first.
    #[inline(always)]
    pub fn scales(&self) -> [[u8; 32]; 4] {
        unpack_six(&self.scale_low, &self.scale_high)
    }

    /// Adds `total` (whole scale times code times x) in the weights' steps, less the minima's part, times the
    /// activations' step.
    #[inline(always)]
    pub fn finish<S: Simd, const NC: usize>(
        &self,
        s: S,
        total: &[S::F; NC],
        x: &Block256<NC>,
        acc: &mut [S::F; NC],
    ) {
        less_minima(s, total, self.d(s), (self.mins(s), self.dmin(s)), (&x.sums, &x.scale), acc);
    }

    /// Minima of all groups, paired as the activations' sums are.
    #[inline(always)]
    fn mins<S: Simd>(&self, s: S) -> [S::I; 4] {
        let mins = unpack_six(&self.min_low, &self.min_high);
        [s.pairs_u8(&mins[0]), s.pairs_u8(&mins[1]), s.pairs_u8(&mins[2]), s.pairs_u8(&mins[3])]
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
    pub fn open<S: Simd>(&self, s: S, to: &mut MinimaBlock) {
        for (to, both) in to.scales.as_chunks_mut::<2>().0.iter_mut().zip(&self.scales()) {
            let [first, second] = two_scales(s, both);
            s.store_f(&mut to[0], first);
            s.store_f(&mut to[1], second);
        }
        for (to, mins) in to.mins.iter_mut().zip(self.mins(s)) {
            s.store_i(to, mins);
        }
        s.store_f(&mut to.d, self.d(s));
        s.store_f(&mut to.dmin, self.dmin(s));
    }
}

/// Scales of two groups as floats.
#[inline(always)]
pub fn two_scales<S: Simd>(s: S, both: &[u8; 32]) -> [S::F; 2] {
    let both = s.pairs_u8(both);
    [s.to_f(s.shr_i(both, 16)), s.to_f(s.shr_i(s.shl_i(both, 16), 16))]
}

/// The 128 six-bit numbers in order, 32 at a time.
#[inline(always)]
fn unpack_six(low: &[u8; 64], high: &[u8; 32]) -> [[u8; 32]; 4] {
    let mut out = [[0; 32]; 4];
    for (t, out) in out.iter_mut().enumerate() {
        for j in 0..32 {
            out[j] = (low[t % 2 * 32 + j] >> (t / 2 * 4) & 15) | (high[j] >> (2 * t) & 3) << 4;
        }
    }
    out
}

impl Packed for K4 {
    fn pack(_: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        block.header = Header::pack(rows);
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
        s.fetch(&w.header, ahead);
        let scales = w.header.scales();
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
            add_pairs(s, &mut total, &part, s.pairs_u8(&scales[pair]));
        }
        w.header.finish(s, &floats(s, &total), x, acc);
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
        for (to, scales) in to.scales.iter_mut().zip(&self.header.scales()) {
            s.store_i(to, s.pairs_u8(scales));
        }
        for (to, mins) in to.mins.iter_mut().zip(self.header.mins(s)) {
            s.store_i(to, mins);
        }
        s.store_f(&mut to.d, self.header.d(s));
        s.store_f(&mut to.dmin, self.header.dmin(s));
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
