//! Blocks of 256 columns of 16 rows as prefill meets them: a byte for each code, a float for each scale. They live in a
//! thread's memory while all tiles of columns pass, so unpacking costs nothing a tile.

use super::{Form, add_floats, add_scaled, add_steps, dots, floats, starts};
use crate::activations::{Block256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};

/// Eight groups of 32 unsigned codes with scales and minima: Q5_K.
pub struct Minima;
/// The same where the sums of two groups share a lane: Q4_K but with AVX-512.
pub struct Paired;
/// Sixteen groups of 16 codes that stand 64 above their meaning, with signed scales: three-bit types.
pub struct Offset;
/// The same with codes that stand 32 above, where the sums of two groups share a lane: Q6_K.
pub struct PairedOffset;

/// See [`Minima`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MinimaBlock {
    /// Byte 4 row + j of vector i is column 4i + j; the same in the other blocks.
    pub codes: [[u8; 64]; 64],
    /// Whole scale of each group and row.
    pub scales: [[f32; LANES]; 8],
    /// Minima of two groups and a row, as the activations' sums are paired.
    pub mins: [[i32; LANES]; 4],
    /// Step of the scales.
    pub d: [f32; LANES],
    /// Minus the step of the minima.
    pub dmin: [f32; LANES],
}
// SAFETY: bytes, then words at an offset that is a multiple of four; no padding.
unsafe impl Plain for MinimaBlock {}

/// See [`Paired`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PairedBlock {
    /// Codes.
    pub codes: [[u8; 64]; 64],
    /// Whole scales of two groups and a row: the second group's in the lower half.
    pub scales: [[i32; LANES]; 4],
    /// Minima, paired the same way.
    pub mins: [[i32; LANES]; 4],
    /// Step of the scales.
    pub d: [f32; LANES],
    /// Minus the step of the minima.
    pub dmin: [f32; LANES],
}
// SAFETY: bytes, then words at an offset that is a multiple of four; no padding.
unsafe impl Plain for PairedBlock {}

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

/// See [`PairedOffset`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PairedOffsetBlock {
    /// Codes.
    pub codes: [[u8; 64]; 64],
    /// Whole scales of two groups and a row: the second group's in the lower half.
    pub scales: [[i32; LANES]; 8],
    /// Step of the scales.
    pub d: [f32; LANES],
}
// SAFETY: bytes, then words at an offset that is a multiple of four; no padding.
unsafe impl Plain for PairedOffsetBlock {}

/// Columns whose minima are summed together: enough to keep the units busy, few enough for the registers.
const SHARE: usize = 5;

/// Sums of minima times activations, of up to [`SHARE`] columns from `first` on.
#[inline(always)]
fn minima_sums<S: Simd, const NC: usize>(
    s: S,
    mins: &[S::I; 4],
    x: &[[i32; NC]; 4],
    first: usize,
) -> [S::I; SHARE] {
    let mut sums = [s.splat_i(0); SHARE];
    for q in 0..4 {
        for c in first..NC.min(first + SHARE) {
            sums[c - first] = s.dot_pair(sums[c - first], mins[q], &x[q][c]);
        }
    }
    sums
}

/// Adds `total` (whole scale times code times x) in steps of `d`, less the minima's part, times the activations' step: `x`
/// are their sums and steps.
#[inline(always)]
pub fn less_minima<S: Simd, const NC: usize>(
    s: S,
    total: &[S::F; NC],
    d: S::F,
    (mins, dmin): ([S::I; 4], S::F),
    (x, step): (&[[i32; NC]; 4], &[f32; NC]),
    acc: &mut [S::F; NC],
) {
    const { assert!(NC <= 2 * SHARE) }
    // Written twice, not a loop: the compiler keeps in memory what a loop indexes.
    let sums = minima_sums(s, &mins, x, 0);
    for c in 0..NC.min(SHARE) {
        let sum = s.fma(s.to_f(sums[c]), dmin, s.mul_f(total[c], d));
        acc[c] = s.fma(sum, s.splat_f(step[c]), acc[c]);
    }
    if NC > SHARE {
        let sums = minima_sums(s, &mins, x, SHARE);
        for c in SHARE..NC {
            let sum = s.fma(s.to_f(sums[c - SHARE]), dmin, s.mul_f(total[c], d));
            acc[c] = s.fma(sum, s.splat_f(step[c]), acc[c]);
        }
    }
}

/// Loads a block's minima.
#[inline(always)]
pub fn minima<S: Simd>(s: S, mins: &[[i32; LANES]; 4]) -> [S::I; 4] {
    [s.load_i(&mins[0]), s.load_i(&mins[1]), s.load_i(&mins[2]), s.load_i(&mins[3])]
}

/// Adds to each column's lanes two groups' products of `codes` and `x`, one group after the other, as pairs of 16 bits
/// times `scales`. The first group's sum begins at `starts[0]` and moves to the lanes' upper halves; the second one's
/// at `starts[1]`, which is 2^15 above.
#[inline(always)]
fn pair<S: Simd, const NC: usize, const N: usize>(
    s: S,
    total: &mut [S::I; NC],
    codes: &[[u8; 64]; N],
    x: &[[i32; NC]; N],
    starts: [&[i32; NC]; 2],
    scales: S::I,
) {
    let mut part = [s.splat_i(0); NC];
    for c in 0..NC {
        part[c] = s.splat_i(starts[0][c]);
    }
    for i in 0..N {
        if i == N / 2 {
            for c in 0..NC {
                part[c] = s.add_i(s.shl_i(part[c], 16), s.splat_i(starts[1][c]));
            }
        }
        let w = s.load_b(&codes[i], 0);
        for c in 0..NC {
            part[c] = s.dot(part[c], w, x[i][c]);
        }
    }
    for c in 0..NC {
        total[c] = s.dot_pairs(total[c], s.xor_i(part[c], 0x8000), scales);
    }
}

/// A form of such blocks; `$multiply` adds a block's part for `NC` columns of activations, in the instructions of `S`.
/// Where those have a loop of their own, `$own` runs it.
macro_rules! open_form {
    (
        $name:ident, $block:ident, $(own $own:ident,)?
        |$s:ident, $w:ident, $x:ident, $acc:ident| $multiply:expr
    ) => {
        impl Form for $name {
            type Block = $block;
            type X<const NC: usize> = Block256<NC>;
            const COLS: usize = 256;
            const SCALES: Scales = Scales::Per256;

            #[inline(always)]
            fn multiply<S: Simd, const NC: usize>(
                $s: S,
                $w: &$block,
                _: usize,
                _: S::B,
                $x: &Block256<NC>,
                $acc: &mut [S::F; NC],
            ) {
                $multiply
            }

            $(
                #[inline(always)]
                fn run<S: Simd, const NC: usize>(
                    s: S,
                    w: &[$block],
                    x: &[Block256<NC>],
                    acc: &mut [S::F; NC],
                ) -> bool {
                    s.$own(w, x, acc)
                }
            )?
        }
    };
}

open_form!(Minima, MinimaBlock, |s, w, x, acc| {
    let mut total = [s.splat_f(0.0); NC];
    for g in 0..8 {
        let mut part = [s.splat_i(0); NC];
        for i in 8 * g..8 * g + 8 {
            dots(s, &mut part, s.load_b(&w.codes[i], 0), &x.q[i]);
        }
        add_scaled(s, &mut total, &part, s.load_f(&w.scales[g]));
    }
    let (d, dmin) = (s.load_f(&w.d), s.load_f(&w.dmin));
    less_minima(s, &total, d, (minima(s, &w.mins), dmin), (&x.sums, &x.scale), acc);
});

open_form!(Paired, PairedBlock, |s, w, x, acc| {
    let mut total = [s.splat_i(0); NC];
    for p in 0..4 {
        let (codes, x) = (&w.codes.as_chunks::<16>().0[p], &x.q.as_chunks::<16>().0[p]);
        pair(s, &mut total, codes, x, [&[0; NC], &[0x8000; NC]], s.load_i(&w.scales[p]));
    }
    let (d, dmin) = (s.load_f(&w.d), s.load_f(&w.dmin));
    less_minima(s, &floats(s, &total), d, (minima(s, &w.mins), dmin), (&x.sums, &x.scale), acc);
});

open_form!(Offset, OffsetBlock, |s, w, x, acc| {
    let mut total = [s.splat_f(0.0); NC];
    for g in 0..16 {
        let mut part = starts(s, &x.start16[g]);
        // Starts are made for codes that stand 32 above.
        for c in 0..NC {
            part[c] = s.add_i(part[c], part[c]);
        }
        for i in 4 * g..4 * g + 4 {
            dots(s, &mut part, s.load_b(&w.codes[i], 0), &x.q[i]);
        }
        add_scaled(s, &mut total, &part, s.load_f(&w.scales[g]));
    }
    add_floats(s, acc, &total, &x.scale);
});

open_form!(PairedOffset, PairedOffsetBlock, own paired_offset, |s, w, x, acc| {
    let mut total = [s.splat_i(0); NC];
    for p in 0..8 {
        let starts = [&x.start16[2 * p], &x.raised16[p]];
        let (codes, x) = (&w.codes.as_chunks::<8>().0[p], &x.q.as_chunks::<8>().0[p]);
        pair(s, &mut total, codes, x, starts, s.load_i(&w.scales[p]));
    }
    add_steps(s, acc, &total, s.load_f(&w.d), &x.scale);
});
