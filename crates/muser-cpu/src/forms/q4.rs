//! Four bits into a table of signed bytes, a half scale for 32 columns: Q4_0 and IQ4_NL. `d * value`.
//! A block is 32 columns of 16 rows in 288 bytes, as many as in the file:
//!
//! ```text
//! codes [4][64] as in Q4_K
//! d     [16] half
//! ```
//! Table entries stand 128 above their meaning.

use super::unpack::{half_of, interleave4, nibbles_32};
use super::{Form, Packed, add_ints, dots_wide, starts_wide};
use crate::activations::{Block32, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Four-bit codes with half scales.
pub struct Q4;

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    codes: [[u8; 64]; 4],
    d: [u8; 32],
}
const _: () = assert!(size_of::<Block>() == 18 * 16);
// SAFETY: bytes only.
unsafe impl Plain for Block {}

impl Packed for Q4 {
    fn pack(_: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        for (r, row) in rows.iter().enumerate() {
            half_of(&mut block.d, r, &row[..2]);
            interleave4(&mut block.codes, r, &nibbles_32(&row[2..18]));
        }
    }
}

impl Form for Q4 {
    type Block = Block;
    type X<const NC: usize> = Block32<NC>;
    const COLS: usize = 32;
    const SCALES: Scales = Scales::Per32;

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &Block,
        ahead: usize,
        table: S::B,
        x: &Block32<NC>,
        acc: &mut [S::F; NC],
    ) {
        let part = codes_dot(s, &w.codes, table, x, ahead);
        let d = s.half(&w.d);
        add_ints(s, acc, &part, d, &x.scale);
    }
}

/// Dot products of 32 columns of table values that stand 128 above their meaning.
#[inline(always)]
pub fn codes_dot<S: Simd, const NC: usize>(
    s: S,
    codes: &[[u8; 64]; 4],
    table: S::B,
    x: &Block32<NC>,
    ahead: usize,
) -> [S::I; NC] {
    let mut part = starts_wide(s, &x.start32);
    for (i, both) in codes.iter().enumerate() {
        let both = s.load_b(both, ahead);
        let low = s.lookup(table, s.and_b(both, 15));
        let high = s.lookup(table, s.and_b(s.shr_b(both, 4), 15));
        dots_wide(s, &mut part, low, &x.q[2 * i]);
        dots_wide(s, &mut part, high, &x.q[2 * i + 1]);
    }
    part
}
