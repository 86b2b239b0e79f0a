//! Q6_K: `d * scale * (q - 32)`, a signed scale for 16 columns. A block is 256 columns of 16 rows in 3,392 bytes (the
//! file has 3,360):
//!
//! ```text
//! 4 quarters: scales [2 pairs of groups of 16][16 rows][2] signed, the second group's first
//!             4 groups: codes [3][64]: byte 4 row + j of part i = column 4i + j | bits 2i of column 12 + j << 6
//! d      [16] float
//! ```
//! It stands in the order that a kernel reads it, as in Q4_K.
//! The 32 is taken off by starting each sum at -32 times the sum of the activations. The sums of two groups share a lane
//! as in Q4_K.

use super::open::{PairedOffset, PairedOffsetBlock};
use super::{Form, NEAR, Opens, Packed, add_pairs, add_steps, dots, raise_onto, starts};
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
    quarters: [Quarter; 4],
    /// Step of the scales.
    pub d: [f32; 16],
}

/// Two pairs of groups.
#[derive(Clone, Copy)]
#[repr(C)]
struct Quarter {
    scales: [[u8; 32]; 2],
    codes: [[[u8; 64]; 3]; 4],
}
const _: () = assert!(size_of::<Block>() == 3392);
// SAFETY: bytes only.
unsafe impl Plain for Block {}

impl Packed for K6 {
    fn pack(_: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        for (r, row) in rows.iter().enumerate() {
            let (low, high) = (&row[..128], &row[128..192]);
            let mut q = [0u8; 256];
            for (half, q) in q.as_chunks_mut::<128>().0.iter_mut().enumerate() {
                let (low, high) = (&low[64 * half..][..64], &high[32 * half..][..32]);
                for j in 0..32 {
                    q[j] = low[j] & 15 | (high[j] & 3) << 4;
                    q[32 + j] = low[32 + j] & 15 | (high[j] >> 2 & 3) << 4;
                    q[64 + j] = low[j] >> 4 | (high[j] >> 4 & 3) << 4;
                    q[96 + j] = low[32 + j] >> 4 | high[j] >> 6 << 4;
                }
            }
            let groups = block.quarters.iter_mut().flat_map(|quarter| &mut quarter.codes);
            for (group, q) in groups.zip(q.as_chunks::<16>().0) {
                let words = q.as_chunks::<4>().0;
                let last = u32::from_le_bytes(words[3]);
                for (i, part) in group.iter_mut().enumerate() {
                    let bits = (last >> (2 * i) & 0x0303_0303) << 6;
                    part.as_chunks_mut::<4>().0[r] = (u32::from_le_bytes(words[i]) | bits).to_le_bytes();
                }
            }
            for g in 0..16 {
                block.quarters[g / 4].scales[g / 2 % 2][2 * r + 1 - g % 2] = row[192 + g];
            }
            block.d[r] = half::f16::from_le_bytes([row[208], row[209]]).to_f32();
        }
    }
}

impl Form for K6 {
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
        let mut total = [s.splat_i(0); NC];
        for pair in 0..8 {
            let quarter = &w.quarters[pair / 2];
            if pair % 2 == 0 {
                s.fetch(&quarter.scales, ahead);
            }
            let mut part = starts(s, &x.start16[2 * pair]);
            for g in 2 * pair..2 * pair + 2 {
                if g % 2 == 1 {
                    raise_onto(s, &mut part, &x.raised16[pair]);
                }
                let codes = codes(s, &quarter.codes[g % 4], ahead);
                for i in 0..4 {
                    dots(s, &mut part, codes[i], &x.q[4 * g + i]);
                }
            }
            add_pairs(s, &mut total, &part, s.pairs_i8(&quarter.scales[pair % 2]));
        }
        s.fetch(&w.d, ahead);
        add_steps(s, acc, &total, s.load_f(&w.d), &x.scale);
    }

    #[inline(always)]
    fn band<S: Simd, const NC: usize>(
        s: S,
        w: &[Block],
        ahead: usize,
        x: &[Block256<NC>],
        acc: &mut [[S::F; NC]],
    ) -> bool {
        // A block ahead, as Q4_K's loop fetches with so many columns.
        let ahead = if NC < 8 { size_of::<Block>() } else { ahead };
        s.few_k6(w, ahead, x, acc)
    }
}

/// A group's codes.
#[inline(always)]
fn codes<S: Simd>(s: S, group: &[[u8; 64]; 3], ahead: usize) -> [S::B; 4] {
    let [a, b, c] = [s.load_b(&group[0], ahead), s.load_b(&group[1], ahead), s.load_b(&group[2], ahead)];
    let low = s.select(s.shr_b(a, 6), s.shr_b(b, 4), 3);
    let last = s.and_b(s.select(low, s.shr_b(c, 2), 15), 63);
    [s.and_b(a, 63), s.and_b(b, 63), s.and_b(c, 63), last]
}

impl Opens for K6 {
    type Packed = Block;
    type Open = PairedOffset;

    #[inline(always)]
    fn open<S: Simd>(s: S, w: &Block, _: S::B, to: &mut PairedOffsetBlock) {
        to.d = w.d;
        for g in 0..16 {
            let codes = codes(s, &w.quarters[g / 4].codes[g % 4], NEAR);
            for i in 0..4 {
                s.store_b(&mut to.codes[4 * g + i], codes[i]);
            }
        }
        for (to, scales) in to.scales.iter_mut().zip(w.quarters.iter().flat_map(|quarter| &quarter.scales)) {
            s.store_i(to, s.pairs_i8(scales));
        }
    }
}
