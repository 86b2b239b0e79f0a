//! F32, F16 and BF16: `[32 columns][16 rows]` as they stand in the file; the activations stay floats.
//!
//! Even and odd columns have a sum each, so that one multiply-add need not wait for the last.

use super::{Form, Packed};
use crate::activations::Scales;
use crate::simd::{LANES, Simd};
use muser_format::DType;

macro_rules! float_form {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, |$s:ident, $w:ident| $load:expr) => {
        $(#[$doc])*
        pub struct $name;

        impl Packed for $name {
            fn pack(_: DType, rows: &[&[u8]; LANES], block: &mut Self::Block) {
                for (r, row) in rows.iter().enumerate() {
                    let values = row.as_chunks::<$bytes>().0;
                    for (k, column) in block.iter_mut().enumerate() {
                        column.as_chunks_mut::<$bytes>().0[r] = values.get(k).copied().unwrap_or_default();
                    }
                }
            }
        }

        impl Form for $name {
            type Block = [[u8; 16 * $bytes]; 32];
            type X<const NC: usize> = [[f32; NC]; 32];
            const COLS: usize = 32;
            const SCALES: Scales = Scales::Float;

            #[inline(always)]
            fn multiply<S: Simd, const NC: usize>(
                $s: S,
                w: &Self::Block,
                _ahead: usize,
                _: S::B,
                x: &[[f32; NC]; 32],
                acc: &mut [S::F; NC],
            ) {
                let mut part = [[$s.splat_f(0.0); NC]; 2];
                for k in 0..16 {
                    for (odd, part) in part.iter_mut().enumerate() {
                        let $w = &w[2 * k + odd];
                        let w = $load;
                        for c in 0..NC {
                            part[c] = $s.fma(w, $s.splat_f(x[2 * k + odd][c]), part[c]);
                        }
                    }
                }
                for c in 0..NC {
                    acc[c] = $s.add_f(acc[c], $s.add_f(part[0][c], part[1][c]));
                }
            }
        }
    };
}

float_form!(
    /// F16.
    F16, 2, |s, w| s.half(w)
);
float_form!(
    /// BF16.
    Bf16, 2, |s, w| s.bf16(w)
);
float_form!(
    /// F32.
    F32, 4, |s, w| s.load_f(&crate::plain::view::<[f32; 16], u8>(w)[0])
);
