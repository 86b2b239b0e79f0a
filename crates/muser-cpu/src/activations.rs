//! Activations as the weight kernels want them: columns (rows of the batch) side by side in tiles, quantised.
//!
//! Types of 256-column blocks meet signed bytes with one float scale for 256 columns; types of 32-column blocks, one
//! for 32; float types meet floats. Sums of the bytes come along, times minus the offset of the unsigned codes that meet
//! them: a sum of products begins there.

use crate::arena::Pages;
use crate::isa::Isa;
use crate::plain::Plain;
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::{Kernel, Simd, dispatch};

/// How a weight form wants its activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// [`Block256`].
    Per256,
    /// [`Block32`].
    Per32,
    /// Floats.
    Float,
    /// [`Cross256`].
    Crossed,
}

/// 256 values of `NC` columns.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block256<const NC: usize> {
    /// Four signed bytes each.
    pub q: [[i32; NC]; 64],
    /// Sums of 32 values: word t holds group 2t in its upper half of 16 bits, group 2t + 1 in its lower half.
    pub sums: [[i32; NC]; 4],
    /// Minus 32 times the sums of 16 values.
    pub start16: [[i32; NC]; 16],
    /// Those of groups 1, 3, 5 and so on, plus 2^15.
    pub raised16: [[i32; NC]; 8],
    /// Minus 128 times the sums of 32 values.
    pub start32: [[i32; NC]; 8],
    /// Value of a byte's step.
    pub scale: [f32; NC],
}
// SAFETY: words only, no padding.
unsafe impl<const NC: usize> Plain for Block256<NC> {}

/// 32 values of `NC` columns.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Block32<const NC: usize> {
    /// Four signed bytes each.
    pub q: [[i32; NC]; 8],
    /// Minus 128 times the sums of 16 values.
    pub start16: [[i32; NC]; 2],
    /// Minus 128 times the sum.
    pub start32: [i32; NC],
    /// Value of a byte's step.
    pub scale: [f32; NC],
}
// SAFETY: words only, no padding.
unsafe impl<const NC: usize> Plain for Block32<NC> {}

/// 256 values of `NC` columns for [`crate::forms::CrossedBlock`]: moved by a shift of at most [`SHIFT`] to within 120 steps of
/// zero.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Cross256<const NC: usize> {
    /// Four bytes each, by turns unsigned ones 120 above the moved values and signed ones 8 below them.
    pub q: [[i32; NC]; 64],
    /// Minus the [`crosses`] of two groups: the first's in the upper half of 16 bits, the second's plus 2^15 below.
    pub starts: [[i32; NC]; 4],
    /// As in [`Block256`], of values that were not moved.
    pub sums: [[i32; NC]; 4],
    /// Minus 16 times the shift in the upper half, minus the shift in the lower half.
    pub shift: [i32; NC],
    /// Value of a byte's step.
    pub scale: [f32; NC],
}
// SAFETY: words only, no padding.
unsafe impl<const NC: usize> Plain for Cross256<NC> {}

const WORDS_256: usize = size_of::<Block256<1>>() / 4;
const WORDS_32: usize = size_of::<Block32<1>>() / 4;
const WORDS_CROSS: usize = size_of::<Cross256<1>>() / 4;

impl Scales {
    /// Values of a block, and words that hold them.
    fn block(self) -> (usize, usize) {
        match self {
            Scales::Per256 => (256, WORDS_256),
            Scales::Per32 => (32, WORDS_32),
            Scales::Float => (32, 32),
            Scales::Crossed => (256, WORDS_CROSS),
        }
    }
}

/// Columns that one kernel call multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// First column.
    pub first: usize,
    /// Columns that mean something.
    pub used: usize,
    /// Columns that the kernel computes.
    pub width: usize,
    /// Widths of the tiles before it.
    pub before: usize,
}

/// Widths of tiles that kernels exist for.
pub fn widths(isa: Isa) -> &'static [usize] {
    match isa {
        Isa::Avx512 => &[1, 2, 3, 4, 5, 6, 8],
        _ => &[1, 2, 4],
    }
}

/// Cuts `n` columns into tiles.
pub fn tiles(n: usize, isa: Isa) -> Vec<Tile> {
    let widths = widths(isa);
    let most = widths[widths.len() - 1];
    // Up to sixteen columns, equal tiles: no narrow remainder that costs as much to unpack as a wide one.
    let step = if isa == Isa::Avx512 && n <= 16 { n.div_ceil(n.div_ceil(8)) } else { most };
    let mut tiles = vec![];
    let (mut first, mut before) = (0, 0);
    while first < n {
        let used = step.min(n - first);
        // More: what is left takes a whole tile or at most half of one, since whole ones have loops of their own.
        let fits = |w: &usize| *w >= used && (n <= 16 || w.is_power_of_two());
        let width = widths.iter().copied().find(fits).unwrap_or(most);
        tiles.push(Tile { first, used, width, before });
        (first, before) = (first + used, before + width);
    }
    tiles
}

/// The input of a multiplication, prepared in the ways that its weights want.
#[derive(Default)]
pub struct Prepared {
    /// Values of a column.
    pub cols: usize,
    /// Columns.
    pub tiles: Vec<Tile>,
    words: [Pages<i32>; 4],
}

impl Prepared {
    /// Words of a tile's columns.
    pub fn tile(&self, scales: Scales, tile: &Tile) -> &[i32] {
        let per_column = words_per_column(scales, self.cols);
        &self.words[scales as usize][tile.before * per_column..][..tile.width * per_column]
    }

    /// Prepares the rows of `input` (each `cols` long) that `picks` names, in each way that `wanted` names.
    pub fn fill(
        &mut self,
        pool: &Pool,
        isa: Isa,
        input: &[f32],
        cols: usize,
        picks: &[usize],
        wanted: &[Scales],
    ) {
        self.cols = cols;
        self.tiles = tiles(picks.len(), isa);
        let width: usize = self.tiles.last().map_or(0, |t| t.before + t.width);
        for scales in wanted {
            let (len, words) = scales.block();
            let per_column = words_per_column(*scales, cols);
            let all = &mut self.words[*scales as usize];
            all.grow(width * per_column);
            // A unit is a run of a tile's blocks, long enough to be worth claiming.
            let blocks = cols.div_ceil(len);
            let run = (1024 / len).max(1);
            let runs = blocks.div_ceil(run);
            let (all, tiles) = (SharedMut::new(all), &self.tiles);
            pool.run(tiles.len() * runs, |unit| {
                let (tile, first) = (&tiles[unit / runs], unit % runs * run);
                let count = run.min(blocks - first);
                let at = tile.before * per_column + first * words * tile.width;
                // SAFETY: tiles and their runs of blocks do not overlap, and each unit has its own.
                let out = unsafe { all.part(at, count * words * tile.width) };
                let rows: Vec<&[f32]> = picks[tile.first..tile.first + tile.used]
                    .iter()
                    .map(|pick| &input[pick * cols..][first * len..cols.min((first + count) * len)])
                    .collect();
                dispatch(isa, Quantise { rows: &rows, scales: *scales, width: tile.width, to: out });
            });
        }
    }
}

fn words_per_column(scales: Scales, cols: usize) -> usize {
    let (len, words) = scales.block();
    cols.div_ceil(len) * words
}

/// Quantises the same part of each row into the columns of a tile of `width` columns.
struct Quantise<'a> {
    rows: &'a [&'a [f32]],
    scales: Scales,
    width: usize,
    to: &'a mut [i32],
}

/// Columns of the widest tile.
const WIDEST: usize = 8;

impl Kernel for Quantise<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let (len, words) = self.scales.block();
        let mut columns = [[0; WORDS_256]; WIDEST];
        for (b, to) in self.to.chunks_exact_mut(words * self.width).enumerate() {
            for (row, column) in self.rows.iter().zip(&mut columns) {
                let from = &row[b * len..row.len().min((b + 1) * len)];
                match self.scales {
                    Scales::Per256 => block256(s, from, column),
                    Scales::Crossed => cross256(s, from, column),
                    Scales::Per32 => block32(from, column),
                    Scales::Float => {
                        column[..len].fill(0);
                        column.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_bits() as i32);
                    }
                }
            }
            match self.width {
                1 => to.copy_from_slice(&columns[0][..words]),
                8 => interleave::<8>(&columns, to),
                width => {
                    for (w, to) in to.chunks_exact_mut(width).enumerate() {
                        to.iter_mut().zip(&columns).for_each(|(to, column)| *to = column[w]);
                    }
                }
            }
        }
    }
}

/// Words of the columns side by side.
#[inline(always)]
fn interleave<const NC: usize>(columns: &[[i32; WORDS_256]; WIDEST], to: &mut [i32]) {
    for (w, to) in to.as_chunks_mut::<NC>().0.iter_mut().enumerate() {
        for c in 0..NC {
            to[c] = columns[c][w];
        }
    }
}

/// Four bytes of each word.
#[inline(always)]
fn words<const N: usize>(q: &[i8; N], to: &mut [i32]) {
    for (to, q) in to.iter_mut().zip(q.as_chunks::<4>().0) {
        *to = i32::from_le_bytes(q.map(|v| v as u8));
    }
}

/// [`Simd::quantise`], where zeros follow a row's end.
#[inline(always)]
fn padded<S: Simd>(s: S, from: &[f32], q: &mut [i8; 256], sums: &mut [i32; 16]) -> f32 {
    if let Ok(from) = from.try_into() {
        return s.quantise(from, q, sums);
    }
    let mut padded = [0.0; 256];
    padded[..from.len()].copy_from_slice(from);
    s.quantise(&padded, q, sums)
}

/// Sums of 32 values in pairs, from those of 16.
#[inline(always)]
fn pairs(sums: &[i32; 16]) -> [i32; 4] {
    std::array::from_fn(|t| {
        (sums[4 * t] + sums[4 * t + 1]) << 16 | (sums[4 * t + 2] + sums[4 * t + 3]) & 0xffff
    })
}

/// A column of a [`Cross256`].
#[inline(always)]
fn cross256<S: Simd>(s: S, from: &[f32], to: &mut [i32; WORDS_256]) {
    let (mut q, mut sums) = ([0; 256], [0; 16]);
    let scale = padded(s, from, &mut q, &mut sums);
    let (mut least, mut greatest) = (0, 0);
    for q in &q {
        (least, greatest) = (least.min(*q), greatest.max(*q));
    }
    // Only one of them is not 0: their distance is 240 at most.
    let shift = (120 - greatest).min(0) + (-120 - least).max(0);
    for q in q.as_chunks_mut::<8>().0 {
        for j in 0..4 {
            q[j] = q[j].wrapping_add(shift).wrapping_add(120);
            q[4 + j] = q[4 + j].wrapping_add(shift).wrapping_sub(8);
        }
    }
    words(&q, to);
    for (p, both) in s.crosses(&q).as_chunks::<2>().0.iter().enumerate() {
        to[64 + p] = 0x8000i32.wrapping_sub(both[0] << 16).wrapping_sub(both[1]);
    }
    to[68..72].copy_from_slice(&pairs(&sums));
    let shift = i32::from(shift);
    to[72] = (-16 * shift) << 16 | -shift & 0xffff;
    to[73] = scale.to_bits() as i32;
}

/// For each 32 bytes of a [`Cross256`], of the values that they stand for (a of unsigned and b of signed ones): the sum of
/// (a + 120) (b - 8) + 960, which is a b - 8 a + 120 b.
#[inline(always)]
pub fn crosses(q: &[i8; 256]) -> [i32; 8] {
    let of = |q: &[i8; 8]| (0..4).map(|j| i32::from(q[j] as u8) * i32::from(q[4 + j])).sum::<i32>();
    std::array::from_fn(|g| 16 * 960 + q.as_chunks::<8>().0[4 * g..4 * g + 4].iter().map(of).sum::<i32>())
}

/// A column of a [`Block256`].
#[inline(always)]
fn block256<S: Simd>(s: S, from: &[f32], to: &mut [i32; WORDS_256]) {
    let (mut q, mut sums) = ([0; 256], [0; 16]);
    let scale = padded(s, from, &mut q, &mut sums);
    words(&q, to);
    to[64..68].copy_from_slice(&pairs(&sums));
    for (g, sum) in sums.iter().enumerate() {
        to[68 + g] = -32 * sum;
    }
    for g in 0..8 {
        to[84 + g] = 0x8000 - 32 * sums[2 * g + 1];
        to[92 + g] = -128 * (sums[2 * g] + sums[2 * g + 1]);
    }
    to[100] = scale.to_bits() as i32;
}

/// A column of a [`Block32`].
#[inline(always)]
fn block32(from: &[f32], to: &mut [i32; WORDS_256]) {
    let (mut x, mut q) = ([0.0; 32], [0; 32]);
    x[..from.len()].copy_from_slice(from);
    let (least, greatest) = ends(&x);
    let scale = round(&x, &mut q, if greatest > -least { greatest } else { -least }, 127.0);
    let sum = |q: &[i8]| q.iter().map(|v| i32::from(*v)).sum::<i32>();
    let sums = [sum(&q[..16]), sum(&q[16..])];
    words(&q, to);
    to[8] = -128 * sums[0];
    to[9] = -128 * sums[1];
    to[10] = -128 * (sums[0] + sums[1]);
    to[11] = scale.to_bits() as i32;
}

/// Rounds 256 values to whole steps; returns the step. `sums` are those of 16 bytes each.
#[inline(always)]
pub fn quantise(x: &[f32; 256], q: &mut [i8; 256], sums: &mut [i32; 16]) -> f32 {
    let step = steps_within(x, q);
    for (sum, q) in sums.iter_mut().zip(q.as_chunks::<16>().0) {
        *sum = q.iter().map(|v| i32::from(*v)).sum();
    }
    step
}

/// Most that a block's values are moved by in [`Cross256`].
pub const SHIFT: i32 = 7;
/// Most that the magnitudes of 16 values may add up to, so that what they give with codes of up to 32 steps fits 16 bits,
/// and so does what 32 moved values give with codes of up to 15.
pub const MOST: i32 = 980;
const _: () = assert!(32 * MOST < 1 << 15 && 15 * (2 * MOST + 32 * SHIFT) < 1 << 15);
/// Where they do, so many times as many steps, over what they add up to: rounding adds at most 8 to a sum here, and 8
/// were in the sum, so 957 stays within 973.
pub const WITHIN: f32 = 957.0;
/// Steps of half the distance between a block's least and greatest value: rounded, they stand 240 steps apart at most, so
/// that a code of four bits and one of them make a byte.
pub const HALF: f32 = 119.95;

/// The magnitude that makes so many steps.
#[inline(always)]
pub fn count(least: f32, greatest: f32) -> (f32, f32) {
    // In halves, which are finite.
    let half = 0.5 * greatest - 0.5 * least;
    let most = if greatest > -least { greatest } else { -least };
    if half * 127.0 > most * HALF { (half, HALF) } else { (most, 127.0) }
}

/// [`steps`], wider ones where the magnitudes of 16 values add up to more than [`MOST`]: where many stand near the
/// largest, at a mean of 61 of 127 steps. The rounding then stays below what it is to a block of the usual spread.
#[inline(always)]
fn steps_within(from: &[f32; 256], q: &mut [i8; 256]) -> f32 {
    let (least, greatest) = ends(from);
    let (most, steps) = count(least, greatest);
    let step = round(from, q, most, steps);
    let mut sum = 0;
    for q in q.as_chunks::<16>().0 {
        sum = sum.max(q.iter().map(|v| i32::from(v.unsigned_abs())).sum());
    }
    if sum <= MOST {
        return step;
    }
    round(from, q, most, steps * WITHIN / sum as f32)
}

/// The least and the greatest value, or zero.
#[inline(always)]
fn ends<const N: usize>(x: &[f32; N]) -> (f32, f32) {
    let (mut least, mut greatest) = ([0f32; 16], [0f32; 16]);
    for x in x.as_chunks::<16>().0 {
        for ((least, greatest), x) in least.iter_mut().zip(&mut greatest).zip(x) {
            *least = if x < least { *x } else { *least };
            *greatest = if x > greatest { *x } else { *greatest };
        }
    }
    let least = least.iter().fold(0f32, |a, b| if *b < a { *b } else { a });
    (least, greatest.iter().fold(0f32, |a, b| if *b > a { *b } else { a }))
}

/// Rounds to whole steps of `most / count`, to nearest even; returns the step.
#[inline(always)]
fn round<const N: usize>(x: &[f32; N], q: &mut [i8; N], most: f32, count: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves the rounded number in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let inverse = if most > 0.0 { count / most } else { 0.0 };
    for (q, x) in q.iter_mut().zip(x) {
        *q = ((x * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32) as i8;
    }
    most / count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_column_once() {
        for isa in [Isa::Avx512, Isa::Scalar] {
            for n in 1..200 {
                let tiles = tiles(n, isa);
                assert_eq!(tiles.iter().map(|t| t.used).sum::<usize>(), n);
                assert!(tiles.iter().all(|t| t.used <= t.width && widths(isa).contains(&t.width)));
                assert!(tiles.windows(2).all(|p| p[0].first + p[0].used == p[1].first));
            }
        }
        assert_eq!(tiles(16, Isa::Avx512).iter().map(|t| t.width).collect::<Vec<_>>(), [8, 8]);
        let wide = |n| tiles(n, Isa::Avx512).iter().map(|t| t.width).collect::<Vec<_>>();
        assert_eq!(wide(31), [8, 8, 8, 8]);
        assert_eq!(wide(46), [8; 6]);
        assert_eq!(wide(35), [8, 8, 8, 8, 4]);
        assert_eq!(wide(512), [8; 64]);
    }

    struct One<'a>(&'a [f32; 256]);

    impl Kernel for One<'_> {
        type Out = (f32, [i8; 256], [i32; 16], [i32; 8]);
        #[inline(always)]
        fn eval<S: Simd>(self, s: S) -> Self::Out {
            let (mut q, mut sums) = ([0; 256], [0; 16]);
            let step = s.quantise(self.0, &mut q, &mut sums);
            (step, q, sums, s.crosses(&q))
        }
    }

    struct Cross<'a>(&'a [f32; 256]);

    impl Kernel for Cross<'_> {
        type Out = [i32; WORDS_256];
        #[inline(always)]
        fn eval<S: Simd>(self, s: S) -> Self::Out {
            let mut words = [0; WORDS_256];
            cross256(s, self.0, &mut words);
            words
        }
    }

    /// Values that stand further on one side than 120 steps are moved, and bytes and shift say what they were.
    #[test]
    fn crossed_values_come_back() {
        for (least, greatest, want) in [(-1.0, 0.9, 6), (-0.9, 1.0, -6), (-1.0, 1.0, 0), (-1.0, 0.1, 7)] {
            let mut x = std::array::from_fn(|i| (i as f32 * 0.7).sin() * 0.08);
            (x[3], x[200]) = (least, greatest);
            let (mut q, mut sums) = ([0; 256], [0; 16]);
            quantise(&x, &mut q, &mut sums);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let words = dispatch(isa, Cross(&x));
                let shift = -i32::from(words[72] as i16);
                assert_eq!((shift, words[72] >> 16), (want, -16 * want), "{isa}");
                for (i, (word, q)) in words.iter().zip(q.as_chunks::<4>().0).enumerate() {
                    let of = |v: u8| if i % 2 == 0 { i32::from(v) - 120 } else { i32::from(v as i8) + 8 };
                    assert_eq!(word.to_le_bytes().map(|v| of(v) - shift), q.map(i32::from), "{isa}");
                    assert!(i % 2 == 1 || word.to_le_bytes().iter().all(|v| *v <= 240), "{isa}");
                }
            }
        }
    }

    /// The sums that pairs of 16 bits hold stay within them, whatever the values; and a step is never more than twice
    /// the largest magnitude / 127.
    #[test]
    fn sums_of_sixteen_stay_within_bounds() {
        for outlier in [1.0f32, 1.01, 1.5, 2.5, 100.0] {
            for sign in [1.0, -1.0] {
                let mut x = std::array::from_fn(|i| sign * (1.0 - (i % 5) as f32 * 1e-3));
                x[77] = outlier;
                let (mut q, mut sums) = ([0; 256], [0; 16]);
                let step = quantise(&x, &mut q, &mut sums);
                for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                    assert_eq!(dispatch(isa, One(&x)), (step, q, sums, crosses(&q)), "{isa}");
                }
                for (q, x) in q.iter().zip(&x) {
                    assert!((f32::from(*q) * step - x).abs() <= 0.5001 * step);
                }
                let sum = |q: &[i8; 16]| q.iter().map(|v| i32::from(v.unsigned_abs())).sum::<i32>();
                assert!(q.as_chunks::<16>().0.iter().all(|q| sum(q) <= MOST));
                assert!(step <= outlier.max(1.0) / 127.0 * 2.2);
                // With one value of the other sign, 240 steps from the greatest to the least.
                x[78] = -outlier;
                quantise(&x, &mut q, &mut sums);
                let ends = q.iter().fold((0, 0), |(a, b), q| (a.min(i32::from(*q)), b.max(i32::from(*q))));
                assert!(ends.1 - ends.0 <= 240, "{ends:?}");
            }
        }
    }
}
