//! Dot products of the strict contract: lane l takes the elements l, l + 32, ..., then lanes are summed pairwise.
//!
//! A step is 32 elements, two vectors. Vectors stand in memory that is aligned to them.

// Kernels index several arrays by the same row.
#![allow(clippy::needless_range_loop)]

use super::codec::Codec;
use crate::plain::Plain;
use crate::simd::{Kernel, Simd};
use muser_core::strict::LANES;
use std::hint::black_box;

/// Half a step of activations or decoded weights.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line(pub [f32; 16]);
// SAFETY: an array of floats; 64 bytes at an alignment of 64 leave no padding.
unsafe impl Plain for Line {}

/// The lanes' sum: distances 16, 8, 4, 2, 1.
#[inline(always)]
fn fold<S: Simd>(s: S, low: S::F, high: S::F) -> f32 {
    let mut lanes = [0.0; 16];
    s.store_f(&mut lanes, s.add_f(low, high));
    macro_rules! halve {
        ($($distance:literal)*) => {
            $(for i in 0..$distance {
                lanes[i] += lanes[i + $distance];
            })*
        };
    }
    halve!(8 4 2 1);
    lanes[0]
}

/// Dot products of `w` with a row of `x` each; the length is a multiple of 32.
#[inline(always)]
pub fn dots<S: Simd>(s: S, w: &[f32], x: &[f32]) -> f32 {
    let mut acc = [s.splat_f(0.0); 2];
    for (w, x) in w.as_chunks::<LANES>().0.iter().zip(x.as_chunks::<LANES>().0) {
        for (half, acc) in acc.iter_mut().enumerate() {
            let at = |v: &[f32; LANES]| s.load_f(&v.as_chunks::<16>().0[half]);
            *acc = s.fma(at(w), at(x), *acc);
        }
    }
    fold(s, acc[0], acc[1])
}

/// Two rows of a weight times one row of activations, decoded as they stream by.
pub struct Pair<'a, C: Codec> {
    /// Blocks of both rows.
    pub rows: [&'a [C::Block]; 2],
    /// Bytes to the row after next, which is asked for.
    pub ahead: usize,
    /// Activations.
    pub x: &'a [Line],
}

/// Runs `$body` for every group of a block with `$g` a literal: the codec's shifts and offsets become constants.
macro_rules! groups {
    ($codec:ident, |$g:ident| $body:expr) => {
        groups!(@ $codec, $g, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $codec:ident, $g:ident, $body:expr, $($n:literal)*) => {
        $(if $n < $codec::GROUPS {
            let $g = $n;
            $body
        })*
    };
}

impl<C: Codec> Kernel for Pair<'_, C> {
    type Out = [f32; 2];
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> [f32; 2] {
        let mut acc = [[s.splat_f(0.0); 2]; 2];
        let blocks = self.rows[0].iter().zip(self.rows[1]).zip(self.x.chunks_exact(2 * C::GROUPS));
        for ((first, second), x) in blocks {
            s.fetch(first, self.ahead);
            s.fetch(second, self.ahead);
            // Through memory: a load spreads a scale over a vector for nothing, a register takes two shuffles.
            let heads = black_box([C::head(s, first), C::head(s, second)]);
            groups!(C, |g| {
                let x = [s.load_f(&x[2 * g].0), s.load_f(&x[2 * g + 1].0)];
                let w = [C::group(s, first, &heads[0], g), C::group(s, second, &heads[1], g)];
                for row in 0..2 {
                    for half in 0..2 {
                        acc[row][half] = s.fma(w[row][half], x[half], acc[row][half]);
                    }
                }
            });
        }
        [fold(s, acc[0][0], acc[0][1]), fold(s, acc[1][0], acc[1][1])]
    }
}

/// Decodes blocks.
pub struct Expand<'a, C: Codec> {
    /// From here.
    pub blocks: &'a [C::Block],
    /// To here.
    pub to: &'a mut [Line],
}

impl<C: Codec> Kernel for Expand<'_, C> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        for (block, to) in self.blocks.iter().zip(self.to.chunks_exact_mut(2 * C::GROUPS)) {
            let head = black_box(C::head(s, block));
            groups!(C, |g| {
                let [low, high] = C::group(s, block, &head, g);
                s.store_f(&mut to[2 * g].0, low);
                s.store_f(&mut to[2 * g + 1].0, high);
            });
        }
    }
}

/// Decoded rows times rows of activations, tiles of `R` and `C` of them, added to the lanes that earlier steps left.
pub struct Tiles<'a, const R: usize, const C: usize> {
    /// Decoded weights, a multiple of `R` rows.
    pub w: &'a [Line],
    /// Lines of a row of `w`.
    pub len: usize,
    /// As many lines of each row of activations; the last row stands in for what a tile lacks.
    pub x: &'a [&'a [Line]],
    /// Two lines a product: row tile, column tile, row, column.
    pub lanes: &'a mut [[Line; 2]],
}

impl<const R: usize, const C: usize> Kernel for Tiles<'_, R, C> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let (len, tiles) = (self.len, self.x.len().div_ceil(C));
        let mut lanes = self.lanes.chunks_exact_mut(R * C);
        for w in self.w.chunks_exact(R * len) {
            for (x, lanes) in self.x.chunks(C).zip(lanes.by_ref().take(tiles)) {
                let mut columns = [x[x.len() - 1]; C];
                columns[..x.len()].copy_from_slice(x);
                // The halves never meet before the fold: one after the other, they need half the registers.
                for half in 0..2 {
                    let mut acc = [[s.splat_f(0.0); C]; R];
                    for r in 0..R {
                        for c in 0..C {
                            acc[r][c] = s.load_f(&lanes[r * C + c][half].0);
                        }
                    }
                    for i in (half..len).step_by(2) {
                        let mut rows = [s.splat_f(0.0); R];
                        for r in 0..R {
                            rows[r] = s.load_f(&w[r * len + i].0);
                        }
                        for c in 0..C {
                            let x = s.load_f(&columns[c][i].0);
                            for r in 0..R {
                                acc[r][c] = s.fma(rows[r], x, acc[r][c]);
                            }
                        }
                    }
                    for r in 0..R {
                        for c in 0..C {
                            s.store_f(&mut lanes[r * C + c][half].0, acc[r][c]);
                        }
                    }
                }
            }
        }
    }
}

/// Sums the lanes of products.
pub struct Fold<'a> {
    /// Two lines each.
    pub lanes: &'a [[Line; 2]],
    /// Their sums.
    pub to: &'a mut [f32],
}

impl Kernel for Fold<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        for (to, [low, high]) in self.to.iter_mut().zip(self.lanes) {
            *to = fold(s, s.load_f(&low.0), s.load_f(&high.0));
        }
    }
}
