//! Packed weights: 16 rows of a matrix make a panel, in which one load brings four neighbouring columns of all 16.
//!
//! A file's block types are many; the forms that kernels know are few. Each form has one file: the layout of its block
//! (all columns of a group, 16 rows), how file blocks are packed into it, and the multiplication of a block.
// Kernels index several arrays by the same column.
#![allow(clippy::needless_range_loop)]

mod cross;
mod floats;
mod k2;
mod k3;
mod k4;
mod k5;
mod k6;
mod lut4;
mod nv4;
mod open;
mod q4;
mod q8;
mod unpack;

use crate::activations::Scales;
use crate::isa::Isa;
use crate::plain::Plain;
use crate::simd::{LANES, Simd};
use muser_format::DType;

pub use cross::CrossedBlock;
pub use floats::{Bf16, F16, F32};
pub use k2::K2;
pub use k3::K3;
pub use k4::{Block as K4Block, Crosses, K4};
pub use k5::K5;
pub use k6::{Block as K6Block, K6};
pub use lut4::Lut4;
pub use nv4::{Mx4, Nv4};
#[cfg(target_arch = "x86_64")]
pub use open::PairedBlock;
pub use open::PairedOffsetBlock;
pub use q4::Q4;
pub use q8::{Q8, Q8M};

/// A layout of weights that kernels multiply.
pub trait Form: 'static {
    /// `COLS` columns of 16 rows.
    type Block: Plain;
    /// The activations that a block meets, `NC` columns of them side by side.
    type X<const NC: usize>: Plain;
    /// Columns of a block.
    const COLS: usize;
    /// How activations are prepared.
    const SCALES: Scales;
    /// Adds the block's part of the dot products to `acc`; asks for what lies `ahead` bytes after each load.
    fn multiply<S: Simd, const NC: usize>(
        s: S,
        w: &Self::Block,
        ahead: usize,
        table: S::B,
        x: &Self::X<NC>,
        acc: &mut [S::F; NC],
    );
    /// The same for a run of blocks at once, where the instruction set has a loop of its own for that: else false, and
    /// nothing is done.
    #[inline(always)]
    fn run<S: Simd, const NC: usize>(_: S, _: &[Self::Block], _: &[Self::X<NC>], _: &mut [S::F; NC]) -> bool {
        false
    }
    /// The same for blocks of a band of `acc.len()` panels, which stand block after block, with few columns.
    #[inline(always)]
    fn band<S: Simd, const NC: usize>(
        _: S,
        _: &[Self::Block],
        _ahead: usize,
        _: &[Self::X<NC>],
        _: &mut [[S::F; NC]],
    ) -> bool {
        false
    }
}

/// A form that files are packed into.
pub trait Packed: Form {
    /// Packs the file blocks of 16 rows (bytes that stand for `COLS` columns each; fewer at a row's end for floats).
    fn pack(dtype: DType, rows: &[&[u8]; LANES], block: &mut Self::Block);
}

/// How a form's blocks are unpacked that many tiles of columns meet: codes as bytes, made once for all of them. Sums of
/// whole numbers are the same, and floats meet the same operations in the same order, so the same bits.
pub trait Opens: 'static {
    /// The packed block.
    type Packed: Plain;
    /// The unpacked form.
    type Open: Form;
    /// Unpacks a block.
    fn open<S: Simd>(s: S, w: &Self::Packed, table: S::B, to: &mut <Self::Open as Form>::Block);
}

/// Which form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FormKind {
    /// Q4_K.
    K4,
    /// Q5_K.
    K5,
    /// Q6_K.
    K6,
    /// Three bits into a table, a signed scale of 16: Q3_K, IQ2, IQ1.
    K3,
    /// Two bits, scale and minimum of 16: Q2_K, TQ.
    K2,
    /// Four bits into a table, a signed scale of 32: IQ4_XS, IQ3.
    Lut4,
    /// Four bits into a table, a half scale of 32: Q4_0, IQ4_NL.
    Q4,
    /// Signed bytes, a half scale of 32: Q8_0, Q5_0.
    Q8,
    /// Unsigned bytes, half scale and minimum of 32: Q4_1, Q5_1.
    Q8M,
    /// MXFP4.
    Mx4,
    /// NVFP4.
    Nv4,
    /// F32.
    F32,
    /// F16.
    F16,
    /// BF16.
    Bf16,
}

/// Calls `$f::<$form>($args)` for the form of a kind.
macro_rules! with_form {
    ($kind:expr, $f:ident $(, $arg:expr)*) => {
        match $kind {
            $crate::forms::FormKind::K4 => $f::<$crate::forms::K4>($($arg),*),
            $crate::forms::FormKind::K5 => $f::<$crate::forms::K5>($($arg),*),
            $crate::forms::FormKind::K6 => $f::<$crate::forms::K6>($($arg),*),
            $crate::forms::FormKind::K3 => $f::<$crate::forms::K3>($($arg),*),
            $crate::forms::FormKind::K2 => $f::<$crate::forms::K2>($($arg),*),
            $crate::forms::FormKind::Lut4 => $f::<$crate::forms::Lut4>($($arg),*),
            $crate::forms::FormKind::Q4 => $f::<$crate::forms::Q4>($($arg),*),
            $crate::forms::FormKind::Q8 => $f::<$crate::forms::Q8>($($arg),*),
            $crate::forms::FormKind::Q8M => $f::<$crate::forms::Q8M>($($arg),*),
            $crate::forms::FormKind::Mx4 => $f::<$crate::forms::Mx4>($($arg),*),
            $crate::forms::FormKind::Nv4 => $f::<$crate::forms::Nv4>($($arg),*),
            $crate::forms::FormKind::F32 => $f::<$crate::forms::F32>($($arg),*),
            $crate::forms::FormKind::F16 => $f::<$crate::forms::F16>($($arg),*),
            $crate::forms::FormKind::Bf16 => $f::<$crate::forms::Bf16>($($arg),*),
        }
    };
}
pub(crate) use with_form;

/// Calls `$f::<$opens>($args)` for what unpacks the form of a kind for these instructions; where nothing does, gives `$other`.
macro_rules! with_opening {
    ($kind:expr, $isa:expr, $other:expr, $f:ident $(, $arg:expr)*) => {
        match $kind {
            $crate::forms::FormKind::K4 if $isa == $crate::isa::Isa::Avx512 => $f::<$crate::forms::Crosses>($($arg),*),
            $crate::forms::FormKind::K4 => $f::<$crate::forms::K4>($($arg),*),
            $crate::forms::FormKind::K5 => $f::<$crate::forms::K5>($($arg),*),
            $crate::forms::FormKind::K6 => $f::<$crate::forms::K6>($($arg),*),
            $crate::forms::FormKind::K3 => $f::<$crate::forms::K3>($($arg),*),
            _ => $other,
        }
    };
}
pub(crate) use with_opening;

impl FormKind {
    /// The form that a file's type is packed into.
    pub fn of(dtype: DType) -> FormKind {
        match dtype {
            DType::Q4K => FormKind::K4,
            DType::Q5K => FormKind::K5,
            DType::Q6K => FormKind::K6,
            DType::Q3K | DType::Iq2Xxs | DType::Iq2Xs | DType::Iq2S | DType::Iq1S | DType::Iq1M => {
                FormKind::K3
            }
            DType::Q2K | DType::Tq1_0 | DType::Tq2_0 => FormKind::K2,
            DType::Iq4Xs | DType::Iq3Xxs | DType::Iq3S => FormKind::Lut4,
            DType::Q4_0 | DType::Iq4Nl => FormKind::Q4,
            DType::Q8_0 | DType::Q5_0 => FormKind::Q8,
            DType::Q4_1 | DType::Q5_1 => FormKind::Q8M,
            DType::Mxfp4 => FormKind::Mx4,
            DType::Nvfp4 => FormKind::Nv4,
            DType::F32 => FormKind::F32,
            DType::F16 => FormKind::F16,
            DType::BF16 => FormKind::Bf16,
        }
    }

    /// Columns of a block.
    pub fn cols(self) -> usize {
        fn cols<F: Form>() -> usize {
            F::COLS
        }
        with_form!(self, cols)
    }

    /// Bytes of a block of 16 rows.
    pub fn block_bytes(self) -> usize {
        fn bytes<F: Form>() -> usize {
            size_of::<F::Block>()
        }
        with_form!(self, bytes)
    }

    /// Bytes of an unpacked block of 16 rows; none where unpacking does not pay.
    pub fn open_bytes(self, isa: Isa) -> Option<usize> {
        fn bytes<F: Opens>() -> Option<usize> {
            Some(size_of::<<F::Open as Form>::Block>())
        }
        with_opening!(self, isa, None, bytes)
    }

    /// How activations are prepared that meet it unpacked, where it is.
    pub fn open_scales(self, isa: Isa) -> Scales {
        fn scales<F: Opens>() -> Scales {
            F::Open::SCALES
        }
        with_opening!(self, isa, self.scales(), scales)
    }

    /// How activations are prepared.
    pub fn scales(self) -> Scales {
        fn scales<F: Form>() -> Scales {
            F::SCALES
        }
        with_form!(self, scales)
    }

    /// Bytes of a panel of 16 rows.
    pub fn panel_bytes(self, cols: usize) -> usize {
        cols.div_ceil(self.cols()) * self.block_bytes()
    }
}

/// Bytes between a load of weights and its prefetch where blocks are unpacked. One column has none: its blocks are read in
/// rising order, which the processor fetches ahead by itself (measured on Zen 4).
pub const NEAR: usize = 256;

// Loops below are plain: a closure does not inherit the caller's instruction set, and where it is not inlined every
// operation becomes a call.

/// Sums that begin at `start` in every column.
#[inline(always)]
fn starts<S: Simd, const NC: usize>(s: S, start: &[i32; NC]) -> [S::I; NC] {
    let mut part = [s.splat_i(0); NC];
    for c in 0..NC {
        part[c] = s.splat_i(start[c]);
    }
    part
}

/// Sums of [`dots_wide`] at their beginning.
#[inline(always)]
fn starts_wide<S: Simd, const NC: usize>(s: S, start: &[i32; NC]) -> [S::I; NC] {
    let mut part = [s.splat_i(0); NC];
    for c in 0..NC {
        part[c] = s.start_wide(start[c]);
    }
    part
}

/// `part += w * x` in every column, four products a lane.
#[inline(always)]
fn dots<S: Simd, const NC: usize>(s: S, part: &mut [S::I; NC], w: S::B, x: &[i32; NC]) {
    for c in 0..NC {
        part[c] = s.dot(part[c], w, x[c]);
    }
}

/// [`dots`] with codes that stand 128 above their meaning.
#[inline(always)]
fn dots_wide<S: Simd, const NC: usize>(s: S, part: &mut [S::I; NC], w: S::B, x: &[i32; NC]) {
    for c in 0..NC {
        part[c] = s.dot_wide(part[c], w, x[c]);
    }
}

/// `total += part * scale` in every column. In floats: on Zen 4 conversion and multiply-add leave the dot units more
/// time than an integer product and sum.
#[inline(always)]
fn add_scaled<S: Simd, const NC: usize>(s: S, total: &mut [S::F; NC], part: &[S::I; NC], scale: S::F) {
    for c in 0..NC {
        total[c] = s.fma(s.to_f(part[c]), scale, total[c]);
    }
}

/// Sums of a group move to the upper halves of their lanes, for the next group to sum in the lower ones, 2^15 above.
#[inline(always)]
fn raise<S: Simd, const NC: usize>(s: S, part: &mut [S::I; NC]) {
    for c in 0..NC {
        part[c] = s.add_i(s.shl_i(part[c], 16), s.splat_i(0x8000));
    }
}

/// [`raise`], where the next group begins at `start`, which is 2^15 above.
#[inline(always)]
fn raise_onto<S: Simd, const NC: usize>(s: S, part: &mut [S::I; NC], start: &[i32; NC]) {
    for c in 0..NC {
        part[c] = s.add_i(s.shl_i(part[c], 16), s.splat_i(start[c]));
    }
}

/// `total += part * scale` for the two groups of [`raise`], whose sums fit 16 bits: the activations see to that.
#[inline(always)]
fn add_pairs<S: Simd, const NC: usize>(s: S, total: &mut [S::I; NC], part: &[S::I; NC], scales: S::I) {
    for c in 0..NC {
        total[c] = s.dot_pairs(total[c], s.xor_i(part[c], 0x8000), scales);
    }
}

/// Whole sums as floats.
#[inline(always)]
fn floats<S: Simd, const NC: usize>(s: S, total: &[S::I; NC]) -> [S::F; NC] {
    let mut floats = [s.splat_f(0.0); NC];
    for c in 0..NC {
        floats[c] = s.to_f(total[c]);
    }
    floats
}

/// `acc += total * d * x` in every column; `x` is the activations' step.
#[inline(always)]
fn add_steps<S: Simd, const NC: usize>(
    s: S,
    acc: &mut [S::F; NC],
    total: &[S::I; NC],
    d: S::F,
    x: &[f32; NC],
) {
    for c in 0..NC {
        acc[c] = s.fma(s.mul_f(s.to_f(total[c]), d), s.splat_f(x[c]), acc[c]);
    }
}

/// `acc += total * x` in every column; `x` is the activations' step.
#[inline(always)]
fn add_floats<S: Simd, const NC: usize>(s: S, acc: &mut [S::F; NC], total: &[S::F; NC], x: &[f32; NC]) {
    for c in 0..NC {
        acc[c] = s.fma(total[c], s.splat_f(x[c]), acc[c]);
    }
}

/// `acc += total * (d * x)` in every column.
#[inline(always)]
fn add_ints<S: Simd, const NC: usize>(
    s: S,
    acc: &mut [S::F; NC],
    total: &[S::I; NC],
    d: S::F,
    x: &[f32; NC],
) {
    for c in 0..NC {
        acc[c] = s.fma(s.to_f(total[c]), s.mul_f(d, s.splat_f(x[c])), acc[c]);
    }
}

/// The 16 bytes that a type's codes select from, as the kernels of its form want them.
pub fn table(dtype: DType) -> [u8; 16] {
    unpack::table(dtype)
}

/// Packs panel `at` of a band of `of` panels: `rows[i]` is the whole file row i.
pub fn pack_panel(dtype: DType, rows: &[&[u8]; LANES], band: &mut [u8], at: usize, of: usize) {
    fn pack<F: Packed>(dtype: DType, rows: &[&[u8]; LANES], band: &mut [u8], at: usize, of: usize) {
        let bytes = F::COLS / dtype.block_len() * dtype.block_bytes();
        let own = crate::plain::view_mut::<F::Block, u8>(band).iter_mut().skip(at).step_by(of);
        for (b, block) in own.enumerate() {
            let part = rows.map(|row| &row[(b * bytes).min(row.len())..((b + 1) * bytes).min(row.len())]);
            F::pack(dtype, &part, block);
        }
    }
    with_form!(FormKind::of(dtype), pack, dtype, rows, band, at, of)
}
