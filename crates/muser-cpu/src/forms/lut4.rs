//! Four bits into a table of signed bytes, a signed scale for 32 columns: IQ4_XS, IQ3_XXS, IQ3_S.
//! `d * scale * value`. A block is 256 columns of 16 rows in 2,240 bytes (IQ4_XS's file has 2,176):
//!
//! ```text
//! codes  [8 groups][4][64] as in Q4_K
//! scales [8 groups][16 rows] signed
//! d      [16] float, with the format's power of two in it
//! ```
//! Table entries stand 128 above their meaning.

use super::unpack::{Codes, interleave4};
use super::{Form, Packed, add_floats, add_scaled, dots_wide, starts_wide};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

/// Four-bit codes with integer scales.
pub struct Lut4;

/// See the file's head.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block {
    d: [f32; 16],
    scales: [[u8; 16]; 8],
    codes: [[[u8; 64]; 4]; 8],
}
const _: () = assert!(size_of::<Block>() == 2240);
// SAFETY: bytes, then floats at an offset that is a multiple of four; no padding.
unsafe impl Plain for Block {}

impl Packed for Lut4 {
    fn pack(dtype: DType, rows: &[&[u8]; LANES], block: &mut Block) {
        for (r, row) in rows.iter().enumerate() {
            let codes = Codes::read(dtype, row);
            for (to, q) in block.codes.iter_mut().zip(codes.q.chunks(32)) {
                interleave4(to, r, q);
            }
            for g in 0..8 {
                block.scales[g][r] = codes.scale[2 * g] as u8;
            }
            block.d[r] = codes.d;
        }
    }
}

impl Form for Lut4 {
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
            let mut part = starts_wide(s, &x.start32[g]);
            for i in 0..4 {
                let both = s.load_b(&w.codes[g][i], ahead);
                let low = s.lookup(table, s.and_b(both, 15));
                let high = s.lookup(table, s.and_b(s.shr_b(both, 4), 15));
                dots_wide(s, &mut part, low, &x.q[8 * g + 2 * i]);
                dots_wide(s, &mut part, high, &x.q[8 * g + 2 * i + 1]);
            }
            let scale = s.mul_f(d, s.to_f(s.widen_i8(&w.scales[g])));
            add_scaled(s, &mut total, &part, scale);
        }
        add_floats(s, acc, &total, &x.scale);
    }
}
