//! Blocks of 256 columns of 16 rows as prefill meets them: a byte for each code, a float for each scale. They live in a
//! thread's memory while all tiles of columns pass, so unpacking costs nothing a tile.

use super::{Form, add_floats, add_scaled, dots, starts};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};

/// Bytes between a load and its prefetch: from the second-level cache into the first, which holds no more.
const AHEAD: usize = 256;

/// Eight groups of 32 unsigned codes with scales and minima: Q4_K, Q5_K.
pub struct Minima;
/// Sixteen groups of 16 codes that stand `OFFSET` above their meaning, with signed scales: Q6_K and three-bit types.
pub struct Offset<const OFFSET: i32>;

/// See [`Minima`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MinimaBlock {
    /// Byte 4 row + j of vector i is column 4i + j; the same in the other blocks.
    pub codes: [[u8; 64]; 64],
    /// Scale of each group and row.
    pub scales: [[f32; LANES]; 8],
    /// Minima as the dot units want them: byte 4 row + j of vector q is group 4q + j.
    pub mins: [[u8; 64]; 2],
    /// Minus the step of the minima.
    pub dmin: [f32; LANES],
}
// SAFETY: bytes, then floats at an offset that is a multiple of four; no padding.
unsafe impl Plain for MinimaBlock {}

/// See [`Offset`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OffsetBlock {
    /// Codes.
    pub codes: [[u8; 64]; 64],
    /// Scale of each group and row.
    pub scales: [[f32; LANES]; 16],
}
// SAFETY: bytes, then floats at an offset that is a multiple of four; no padding.
unsafe impl Plain for OffsetBlock {}

/// Adds `total` (scale times code times x) less the minima's part, times the activations' step.
#[inline(always)]
pub fn less_minima<S: Simd, const NC: usize>(
    s: S,
    total: &mut [S::F; NC],
    mins: [S::B; 2],
    dmin: S::F,
    x: &Block256<NC>,
    acc: &mut [S::F; NC],
) {
    for c in 0..NC {
        // Sums of x as 32 * high + low: both fit a byte.
        let mut high = s.splat_i(0);
        let mut low = s.splat_i(0);
        for q in 0..2 {
            high = s.dot(high, mins[q], x.sums_high[q][c]);
            low = s.dot(low, mins[q], x.sums_low[q][c]);
        }
        let sum = s.add_i(s.shl_i(high, 5), low);
        total[c] = s.fma(s.to_f(sum), dmin, total[c]);
    }
    add_floats(s, acc, total, &x.scale);
}

impl Form for Minima {
    type Block = MinimaBlock;
    type X<const NC: usize> = Block256<NC>;
    const COLS: usize = 256;
    const SCALES: Scales = Scales::Per256;

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &MinimaBlock,
        _: usize,
        _: S::B,
        x: &Block256<NC>,
        acc: &mut [S::F; NC],
    ) {
        let mut total = [s.splat_f(0.0); NC];
        for g in 0..8 {
            let mut part = [s.splat_i(0); NC];
            for i in 8 * g..8 * g + 8 {
                dots(s, &mut part, s.load_b(&w.codes[i], AHEAD), &x.q[i]);
            }
            s.fetch(&w.scales[g], AHEAD);
            add_scaled(s, &mut total, &part, s.load_f(&w.scales[g]));
        }
        let mins = [s.load_b(&w.mins[0], AHEAD), s.load_b(&w.mins[1], AHEAD)];
        s.fetch(&w.dmin, AHEAD);
        less_minima(s, &mut total, mins, s.load_f(&w.dmin), x, acc);
    }
}

impl<const OFFSET: i32> Form for Offset<OFFSET> {
    type Block = OffsetBlock;
    type X<const NC: usize> = Block256<NC>;
    const COLS: usize = 256;
    const SCALES: Scales = Scales::Per256;

    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &OffsetBlock,
        _: usize,
        _: S::B,
        x: &Block256<NC>,
        acc: &mut [S::F; NC],
    ) {
        let mut total = [s.splat_f(0.0); NC];
        for g in 0..16 {
            let mut part = starts(s, &x.start16[g]);
            if OFFSET == 64 {
                for c in 0..NC {
                    part[c] = s.add_i(part[c], part[c]);
                }
            }
            for i in 4 * g..4 * g + 4 {
                dots(s, &mut part, s.load_b(&w.codes[i], AHEAD), &x.q[i]);
            }
            s.fetch(&w.scales[g], AHEAD);
            add_scaled(s, &mut total, &part, s.load_f(&w.scales[g]));
        }
        add_floats(s, acc, &total, &x.scale);
    }
}
