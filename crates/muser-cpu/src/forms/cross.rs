//! Blocks of 256 columns of 16 rows as prefill meets them where bytes can be added beside dots: one product serves two
//! columns. Of a column's values a and b and a row's codes y and z, in this order, (a + z) (b + y) is a y + b z, which is
//! wanted, plus a b, which no row, and y z, which no column changes; those are taken off a group's sum at once.
//!
//! a + z is an unsigned byte and b + y a signed one, so a stands 120 higher (0 to 240, and codes are 15 at most) and b 8
//! lower ([`Cross256`]). A block whose values do not lie within 120 steps of zero has them moved there; what the shift
//! adds, itself times each code, is taken off the block's sum. So the sums are exactly those of [`super::open::Paired`].

use super::open::{PairedBlock, less_minima, minima};
use super::{Form, add_pairs, dots, floats, raise};
use crate::activations::{Cross256, Scales};
use crate::plain::Plain;
use crate::simd::{LANES, Simd};

/// Q4_K for one product in place of two.
pub struct Crossed;

/// See [`Crossed`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CrossedBlock {
    /// Codes, scales, minima and steps.
    pub paired: PairedBlock,
    /// Minus the sums of (z + 120) (y - 8) of two groups: the first's in the upper half, the second's in the lower.
    pub starts: [[i32; LANES]; 4],
    /// The sum of scales times codes: its sixteenth in the upper half, the rest in the lower.
    pub codes: [i32; LANES],
}
// SAFETY: a plain block, then words at an offset that is a multiple of four; no padding.
unsafe impl Plain for CrossedBlock {}

impl CrossedBlock {
    /// Makes what stands beside the paired block.
    #[inline(always)]
    pub fn cross<S: Simd>(&mut self, s: S) {
        let mut all = [0; LANES];
        for (p, starts) in self.starts.iter_mut().enumerate() {
            let mut crosses = [[0; LANES]; 2];
            for (half, crosses) in crosses.iter_mut().enumerate() {
                let mut parts = [s.splat_i(0); 3];
                for both in &self.paired.codes.as_chunks::<2>().0[8 * p + 4 * half..][..4] {
                    let (y, z) = (s.load_b(&both[0], 0), s.load_b(&both[1], 0));
                    parts[0] = s.dot_codes(parts[0], z, y);
                    parts[1] = s.dot(parts[1], y, 0x0101_0101);
                    parts[2] = s.dot(parts[2], z, 0x0101_0101);
                }
                let mut sums = [[0; LANES]; 3];
                for (to, part) in sums.iter_mut().zip(parts) {
                    s.store_i(to, part);
                }
                let [both, y, z] = &sums;
                for r in 0..LANES {
                    crosses[r] = both[r] + 120 * y[r] - 8 * z[r] - 16 * 960;
                    all[r] += (self.paired.scales[p][r] >> (16 - 16 * half) & 63) * (y[r] + z[r]);
                }
            }
            for r in 0..LANES {
                starts[r] = 0i32.wrapping_sub(crosses[0][r] << 16).wrapping_sub(crosses[1][r]);
            }
        }
        self.codes = all.map(|sum| sum >> 4 << 16 | sum & 15);
    }
}

/// Adds `by` to each byte.
#[inline(always)]
fn moved<const NC: usize>(words: &[i32; NC], by: i8) -> [i32; NC] {
    words.map(|word| i32::from_le_bytes(word.to_le_bytes().map(|v| v.wrapping_add(by as u8))))
}

impl Form for Crossed {
    type Block = CrossedBlock;
    type X<const NC: usize> = Cross256<NC>;
    const COLS: usize = 256;
    const SCALES: Scales = Scales::Crossed;

    /// For tiles that are no whole ones: two products, of the values and codes themselves.
    #[inline(always)]
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &CrossedBlock,
        _: usize,
        _: S::B,
        x: &Cross256<NC>,
        acc: &mut [S::F; NC],
    ) {
        let w = (&w.paired, s.load_i(&w.codes));
        let mut total = [s.splat_i(0); NC];
        for p in 0..4 {
            let mut part = [s.splat_i(0); NC];
            for i in 16 * p..16 * p + 16 {
                if i % 16 == 8 {
                    raise(s, &mut part);
                }
                let by = if i % 2 == 0 { -120 } else { 8 };
                dots(s, &mut part, s.load_b(&w.0.codes[i], 0), &moved(&x.q[i], by));
            }
            add_pairs(s, &mut total, &part, s.load_i(&w.0.scales[p]));
        }
        for c in 0..NC {
            total[c] = s.dot_pair(total[c], w.1, &x.shift[c]);
        }
        let (d, mins) = (s.load_f(&w.0.d), (minima(s, &w.0.mins), s.load_f(&w.0.dmin)));
        less_minima(s, &floats(s, &total), d, mins, (&x.sums, &x.scale), acc);
    }

    #[inline(always)]
    fn run<S: Simd, const NC: usize>(
        s: S,
        w: &[CrossedBlock],
        x: &[Cross256<NC>],
        acc: &mut [S::F; NC],
    ) -> bool {
        s.crossed(w, x, acc)
    }
}
