//! Bytes, a half scale for 32 columns. Signed (Q8_0, Q5_0): `d * q`, 544 bytes a block of 16 rows, as many as in
//! Q8_0's file. Unsigned with a minimum (Q4_1, Q5_1): `d * q + m`, 576 bytes.
//!
//! ```text
//! codes [8][64]: byte 4 row + j of part i = column 4i + j (signed ones stand 128 above their meaning)
//! d     [16] half      m [16] half
//! ```

use super::unpack::{half_of, interleave8, small_codes};
use super::{Form, Packed, add_ints, dots, dots_wide, starts_wide};
use crate::activations::{Block32, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Signed bytes.
pub struct Q8;
/// Unsigned bytes with a minimum.
pub struct Q8M;

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    codes: [[u8; 64]; 8],
    d: [u8; 32],
}
const _: () = assert!(size_of::<Block>() == 34 * 16);
// SAFETY: bytes only.
unsafe impl Plain for Block {}

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct BlockM {
    codes: [[u8; 64]; 8],
    d: [u8; 32],
    m: [u8; 32],
}
// SAFETY: bytes only.
unsafe impl Plain for BlockM {}

impl Packed for Q8 {
    fn pack(dtype: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        for (r, row) in rows.iter().enumerate() {
            half_of(&mut block.d, r, &row[..2]);
            interleave8(&mut block.codes, r, &small_codes(dtype, row));
        }
    }
}

impl Form for Q8 {
    type Block = Block;
    type X<const NC: usize> = Block32<NC>;
    const COLS: usize = 32;
    const SCALES: Scales = Scales::Per32;

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &Block,
        ahead: usize,
        _: S::B,
        x: &Block32<NC>,
        acc: &mut [S::F; NC],
    ) {
        let mut part = starts_wide(s, &x.start32);
        for i in 0..8 {
            let q = s.load_b(&w.codes[i], ahead);
            dots_wide(s, &mut part, q, &x.q[i]);
        }
        let d = s.half(&w.d);
        add_ints(s, acc, &part, d, &x.scale);
    }
}

impl Packed for Q8M {
    fn pack(dtype: DType, rows: &[&[u8]; LANES], block: &mut BlockM) {
        for (r, row) in rows.iter().enumerate() {
            half_of(&mut block.d, r, &row[..2]);
            half_of(&mut block.m, r, &row[2..4]);
            interleave8(&mut block.codes, r, &small_codes(dtype, row));
        }
    }
}

impl Form for Q8M {
    type Block = BlockM;
    type X<const NC: usize> = Block32<NC>;
    const COLS: usize = 32;
    const SCALES: Scales = Scales::Per32;

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &BlockM,
        ahead: usize,
        _: S::B,
        x: &Block32<NC>,
        acc: &mut [S::F; NC],
    ) {
        let mut part = [s.splat_i(0); NC];
        for i in 0..8 {
            let q = s.load_b(&w.codes[i], ahead);
            dots(s, &mut part, q, &x.q[i]);
        }
        let (d, m) = (s.half(&w.d), s.half(&w.m));
        for c in 0..NC {
            acc[c] = s.fma(s.to_f(part[c]), s.mul_f(d, s.splat_f(x.scale[c])), acc[c]);
            acc[c] = s.fma(m, s.splat_f(x.start32[c] as f32 / -128.0 * x.scale[c]), acc[c]);
        }
    }
}
