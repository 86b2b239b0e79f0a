//! File blocks as vectors of floats, 32 values at a time: the formulas of `muser_format`'s decoders, the same operations
//! in the same order, so the same bits.
//!
//! Where a code has at most four bits, the formula is applied to all 16 codes at once, which makes a table for a group of
//! values; then 16 values cost one lookup. A minimum is subtracted as the addition of its negative, which rounds alike.

use super::dot::Line;
use crate::plain::Plain;
use crate::simd::Simd;
use muser_format::E2M1_DOUBLED;
use muser_format::iq_grid::IQ4_VALUES;

/// A type that is decoded in vectors.
pub trait Codec: 'static {
    /// The file's block.
    type Block: Plain;
    /// Groups of 32 values of a block.
    const GROUPS: usize;
    /// What the groups share: scales and minima.
    type Head: Copy;
    /// Unpacks what the groups share.
    fn head<S: Simd>(s: S, block: &Self::Block) -> Self::Head;
    /// The values of a group.
    fn group<S: Simd>(s: S, block: &Self::Block, head: &Self::Head, g: usize) -> [S::F; 2];
}

/// Calls `$f::<$codec>($args)` for the codec of a type; `$else` where it has none.
macro_rules! with_codec {
    ($dtype:expr, $f:ident($($arg:expr),*), else $else:expr) => {{
        use $crate::strict::codec as c;
        match $dtype {
            DType::F32 => $f::<c::F32>($($arg),*),
            DType::F16 => $f::<c::F16>($($arg),*),
            DType::BF16 => $f::<c::Bf16>($($arg),*),
            DType::Q4_0 => $f::<c::Q4_0>($($arg),*),
            DType::Q4_1 => $f::<c::Q4_1>($($arg),*),
            DType::Q5_0 => $f::<c::Q5_0>($($arg),*),
            DType::Q5_1 => $f::<c::Q5_1>($($arg),*),
            DType::Q8_0 => $f::<c::Q8_0>($($arg),*),
            DType::Q2K => $f::<c::Q2K>($($arg),*),
            DType::Q3K => $f::<c::Q3K>($($arg),*),
            DType::Q4K => $f::<c::Q4K>($($arg),*),
            DType::Q5K => $f::<c::Q5K>($($arg),*),
            DType::Q6K => $f::<c::Q6K>($($arg),*),
            DType::Iq4Nl => $f::<c::Iq4Nl>($($arg),*),
            DType::Iq4Xs => $f::<c::Iq4Xs>($($arg),*),
            DType::Mxfp4 => $f::<c::Mxfp4>($($arg),*),
            DType::Nvfp4 => $f::<c::Nvfp4>($($arg),*),
            _ => $else,
        }
    }};
}
pub(super) use with_codec;

/// 0, 1, ..., 15.
const COUNT: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
/// What the codes of IQ4 stand for, and twice that of FP4's.
const IQ4: [f32; 16] = floats(IQ4_VALUES);
const FP4: [f32; 16] = floats(E2M1_DOUBLED);

const fn floats(values: [i8; 16]) -> [f32; 16] {
    let mut floats = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        floats[i] = values[i] as f32;
        i += 1;
    }
    floats
}

/// A half-precision number in all lanes.
#[inline(always)]
fn half<S: Simd>(s: S, bytes: [u8; 2]) -> S::F {
    let mut all = [0; 32];
    all.as_chunks_mut::<2>().0.iter_mut().for_each(|to| *to = bytes);
    s.half(&all)
}

/// `d` in the first eight lanes, `dmin` in the others.
#[inline(always)]
fn halves<S: Simd>(s: S, d: [u8; 2], dmin: [u8; 2]) -> S::F {
    let mut all = [0; 32];
    for (i, to) in all.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *to = if i < 8 { d } else { dmin };
    }
    s.half(&all)
}

#[inline(always)]
fn stored<S: Simd>(s: S, v: S::F) -> [f32; 16] {
    let mut to = [0.0; 16];
    s.store_f(&mut to, v);
    to
}

/// The `N` bytes at `at`.
#[inline(always)]
fn bytes<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    match block[at..].first_chunk() {
        Some(bytes) => bytes,
        None => unreachable!("fields lie inside their block"),
    }
}

/// Values of 32 signed codes, the first 16 under one scale and the others under another.
#[inline(always)]
fn scaled<S: Simd>(s: S, codes: &[u8; 32], scales: [S::F; 2]) -> [S::F; 2] {
    let low = s.mul_f(scales[0], s.to_f(s.widen_i8(bytes(codes, 0))));
    [low, s.mul_f(scales[1], s.to_f(s.widen_i8(bytes(codes, 16))))]
}

/// Looks up 16 bytes' low halves, then their high halves.
#[inline(always)]
fn nibbles<S: Simd>(s: S, table: S::F, codes: &[u8; 16]) -> [S::F; 2] {
    let codes = s.widen_u8(codes);
    [s.pick(table, codes), s.pick(table, s.shr_i(codes, 4))]
}

/// Types whose head is one half-precision scale; `$value` makes a group of it.
macro_rules! plain_codec {
    ($name:ident, $bytes:literal, $groups:literal, |$s:ident, $block:ident, $g:ident| $value:expr) => {
        #[doc = concat!(stringify!($name), ".")]
        pub struct $name;

        impl Codec for $name {
            type Block = [u8; $bytes];
            const GROUPS: usize = $groups;
            type Head = ();
            #[inline(always)]
            fn head<S: Simd>(_: S, _: &Self::Block) {}
            #[inline(always)]
            fn group<S: Simd>($s: S, $block: &Self::Block, _: &(), $g: usize) -> [S::F; 2] {
                $value
            }
        }
    };
}

plain_codec!(F32, 128, 1, |s, block, _g| {
    let values = block.as_chunks::<4>().0;
    let mut floats = [[0.0; 16]; 2];
    for (to, from) in floats.as_flattened_mut().iter_mut().zip(values) {
        *to = f32::from_le_bytes(*from);
    }
    [s.load_f(&floats[0]), s.load_f(&floats[1])]
});
plain_codec!(F16, 64, 1, |s, block, _g| [s.half(bytes(block, 0)), s.half(bytes(block, 32))]);
plain_codec!(Bf16, 64, 1, |s, block, _g| [s.bf16(bytes(block, 0)), s.bf16(bytes(block, 32))]);
plain_codec!(Q4_0, 18, 1, |s, block, _g| {
    let codes = s.add_f(s.load_f(&COUNT), s.splat_f(-8.0));
    nibbles(s, s.mul_f(half(s, *bytes(block, 0)), codes), bytes(block, 2))
});
plain_codec!(Q4_1, 20, 1, |s, block, _g| {
    let scaled = s.mul_f(half(s, *bytes(block, 0)), s.load_f(&COUNT));
    nibbles(s, s.add_f(scaled, half(s, *bytes(block, 2))), bytes(block, 4))
});
plain_codec!(Q5_0, 22, 1, |s, block, _g| {
    let mut codes = fifth_bits(bytes(block, 2), bytes(block, 6));
    codes.iter_mut().for_each(|q| *q = q.wrapping_sub(16));
    scaled(s, &codes, [half(s, *bytes(block, 0)); 2])
});
plain_codec!(Q5_1, 24, 1, |s, block, _g| {
    let codes = fifth_bits(bytes(block, 4), bytes(block, 8));
    let m = half(s, *bytes(block, 2));
    let [low, high] = scaled(s, &codes, [half(s, *bytes(block, 0)); 2]);
    [s.add_f(low, m), s.add_f(high, m)]
});
plain_codec!(Q8_0, 34, 1, |s, block, _g| scaled(s, bytes(block, 2), [half(s, *bytes(block, 0)); 2]));
plain_codec!(Iq4Nl, 18, 1, |s, block, _g| {
    nibbles(s, s.mul_f(half(s, *bytes(block, 0)), s.load_f(&IQ4)), bytes(block, 2))
});
plain_codec!(Mxfp4, 17, 1, |s, block, _g| {
    // 2^(e - 128): half of an E8M0 scale. The two smallest are subnormal.
    let bits = match u32::from(block[0]) {
        e @ 0..=1 => 1 << (21 + e),
        e => (e - 1) << 23,
    };
    nibbles(s, s.mul_f(s.splat_f(f32::from_bits(bits)), s.load_f(&FP4)), bytes(block, 1))
});

/// Five-bit codes of 32 values.
#[inline(always)]
fn fifth_bits(high: &[u8; 4], low: &[u8; 16]) -> [u8; 32] {
    let high = u32::from_le_bytes(*high);
    let mut codes = [0; 32];
    for j in 0..16 {
        codes[j] = low[j] & 15 | ((high >> j & 1) as u8) << 4;
        codes[16 + j] = low[j] >> 4 | ((high >> (16 + j) & 1) as u8) << 4;
    }
    codes
}

/// What the codes stand for under each UE4M3 scale, whose top bit says nothing, and 0 under 0x7f. A product is exact, so it may be made
/// beforehand.
static NVFP4: [Line; 256] = {
    let mut values = [Line([0.0; 16]); 256];
    let mut i = 0;
    while i < 256 {
        let whole = match (i >> 3 & 15, i & 7) {
            _ if i == 0x7f => 0,
            (0, mantissa) => mantissa,
            (exponent, mantissa) => (8 + mantissa) << (exponent - 1),
        };
        let mut code = 0;
        while code < 16 {
            values[i].0[code] = whole as f32 / 1024.0 * FP4[code];
            code += 1;
        }
        i += 1;
    }
    values
};

/// NVFP4.
pub struct Nvfp4;

impl Codec for Nvfp4 {
    type Block = [u8; 36];
    const GROUPS: usize = 2;
    type Head = ();

    #[inline(always)]
    fn head<S: Simd>(_: S, _: &[u8; 36]) {}

    #[inline(always)]
    fn group<S: Simd>(s: S, block: &[u8; 36], _: &(), g: usize) -> [S::F; 2] {
        let mut values = [s.splat_f(0.0); 2];
        for (half, values) in values.iter_mut().enumerate() {
            let at = 2 * g + half;
            // Eight low halves, then eight high ones; what else stands in a byte chooses nothing.
            let word = u64::from_le_bytes(*bytes(block, 4 + 8 * at));
            let mut codes = [[0; 8]; 2];
            codes[0] = word.to_le_bytes();
            codes[1] = (word >> 4).to_le_bytes();
            let table = &NVFP4[usize::from(block[at])];
            *values = s.pick(s.load_f(&table.0), s.widen_u8(bytes(codes.as_flattened(), 0)));
        }
        values
    }
}

/// Scales of Q4_K and Q5_K, then their minima, negative.
#[inline(always)]
fn scales_k<S: Simd>(s: S, head: &[u8; 16]) -> [f32; 16] {
    let word = |i: usize| u32::from_le_bytes(*bytes(head, 4 * i));
    let (a, b, c) = (word(1), word(2), word(3));
    let words = [
        a & 0x3f3f_3f3f,
        c & 0x0f0f_0f0f | a >> 2 & 0x3030_3030,
        b & 0x3f3f_3f3f,
        c >> 4 & 0x0f0f_0f0f | b >> 2 & 0x3030_3030,
    ];
    let mut numbers = [0; 16];
    for (to, word) in numbers.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    let d = halves(s, [head[0], head[1]], [head[2], head[3] ^ 0x80]);
    stored(s, s.mul_f(d, s.to_f(s.widen_u8(&numbers))))
}

/// Q4_K.
pub struct Q4K;

impl Codec for Q4K {
    type Block = [u8; 144];
    const GROUPS: usize = 8;
    type Head = [f32; 16];

    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8; 144]) -> [f32; 16] {
        scales_k(s, bytes(block, 0))
    }

    #[inline(always)]
    fn group<S: Simd>(s: S, block: &[u8; 144], head: &[f32; 16], g: usize) -> [S::F; 2] {
        let table = s.mul_f(s.splat_f(head[g]), s.load_f(&COUNT));
        let table = s.add_f(table, s.splat_f(head[8 + g]));
        let mut values = [table; 2];
        for (half, values) in values.iter_mut().enumerate() {
            let codes = s.widen_u8(bytes(block, 16 + g / 2 * 32 + 16 * half));
            *values = s.pick(table, if g % 2 == 1 { s.shr_i(codes, 4) } else { codes });
        }
        values
    }
}

/// Q5_K.
pub struct Q5K;

impl Codec for Q5K {
    type Block = [u8; 176];
    const GROUPS: usize = 8;
    type Head = [f32; 16];

    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8; 176]) -> [f32; 16] {
        scales_k(s, bytes(block, 0))
    }

    #[inline(always)]
    fn group<S: Simd>(s: S, block: &[u8; 176], head: &[f32; 16], g: usize) -> [S::F; 2] {
        let (high, low): (&[u8; 32], &[u8; 32]) = (bytes(block, 16), bytes(block, 48 + g / 2 * 32));
        let mut codes = [0; 32];
        for (j, code) in codes.iter_mut().enumerate() {
            *code = low[j] >> (g % 2 * 4) & 15 | (high[j] >> g & 1) << 4;
        }
        let min = s.splat_f(head[8 + g]);
        let [low, high] = scaled(s, &codes, [s.splat_f(head[g]); 2]);
        [s.add_f(low, min), s.add_f(high, min)]
    }
}

/// Q6_K.
pub struct Q6K;

impl Codec for Q6K {
    type Block = [u8; 210];
    const GROUPS: usize = 8;
    type Head = [f32; 16];

    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8; 210]) -> [f32; 16] {
        stored(s, s.mul_f(half(s, *bytes(block, 208)), s.to_f(s.widen_i8(bytes(block, 192)))))
    }

    #[inline(always)]
    fn group<S: Simd>(s: S, block: &[u8; 210], head: &[f32; 16], g: usize) -> [S::F; 2] {
        let low: &[u8; 32] = bytes(block, 64 * (g / 4) + 32 * (g % 2));
        let high: &[u8; 32] = bytes(block, 128 + 32 * (g / 4));
        let mut codes = [0; 32];
        for (j, code) in codes.iter_mut().enumerate() {
            let q = low[j] >> (g % 4 / 2 * 4) & 15 | (high[j] >> (g % 4 * 2) & 3) << 4;
            *code = q.wrapping_sub(32);
        }
        scaled(s, &codes, [s.splat_f(head[2 * g]), s.splat_f(head[2 * g + 1])])
    }
}

/// Q2_K.
pub struct Q2K;

impl Codec for Q2K {
    type Block = [u8; 84];
    const GROUPS: usize = 8;
    /// Scales, then minima, negative.
    type Head = [[f32; 16]; 2];

    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8; 84]) -> [[f32; 16]; 2] {
        let packed: &[u8; 16] = bytes(block, 0);
        let (mut scales, mut mins) = ([0; 16], [0; 16]);
        for (i, packed) in packed.iter().enumerate() {
            (scales[i], mins[i]) = (packed & 15, packed >> 4);
        }
        let (d, dmin) = (half(s, [block[80], block[81]]), half(s, [block[82], block[83] ^ 0x80]));
        let times = |d: S::F, by: &[u8; 16]| stored(s, s.mul_f(d, s.to_f(s.widen_u8(by))));
        [times(d, &scales), times(dmin, &mins)]
    }

    #[inline(always)]
    fn group<S: Simd>(s: S, block: &[u8; 84], [dl, ml]: &[[f32; 16]; 2], g: usize) -> [S::F; 2] {
        // Only a code's two bits choose: the table repeats.
        let mut counts = COUNT;
        counts.iter_mut().enumerate().for_each(|(i, count)| *count = (i % 4) as f32);
        let mut values = [s.splat_f(0.0); 2];
        for (half, values) in values.iter_mut().enumerate() {
            let table = s.mul_f(s.splat_f(dl[2 * g + half]), s.load_f(&counts));
            let table = s.add_f(table, s.splat_f(ml[2 * g + half]));
            let codes = s.widen_u8(bytes(block, 16 + g / 4 * 32 + 16 * half));
            *values = s.pick(table, s.shr_i(codes, (g % 4 * 2) as u32));
        }
        values
    }
}

/// Q3_K.
pub struct Q3K;

impl Codec for Q3K {
    type Block = [u8; 110];
    const GROUPS: usize = 8;
    type Head = [f32; 16];

    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8; 110]) -> [f32; 16] {
        let packed: &[u8; 12] = bytes(block, 96);
        let mut scales = [0; 16];
        for (g, scale) in scales.iter_mut().enumerate() {
            let q = packed[g % 8] >> (g / 8 * 4) & 15 | (packed[8 + g % 4] >> (g / 4 * 2) & 3) << 4;
            *scale = q.wrapping_sub(32);
        }
        stored(s, s.mul_f(half(s, *bytes(block, 108)), s.to_f(s.widen_i8(&scales))))
    }

    #[inline(always)]
    fn group<S: Simd>(s: S, block: &[u8; 110], head: &[f32; 16], g: usize) -> [S::F; 2] {
        let (high, low): (&[u8; 32], &[u8; 32]) = (bytes(block, 0), bytes(block, 32 + g / 4 * 32));
        let mut codes = [0; 32];
        for (j, code) in codes.iter_mut().enumerate() {
            let q = low[j] >> (g % 4 * 2) & 3 | (high[j] >> g & 1) << 2;
            *code = q.wrapping_sub(4);
        }
        scaled(s, &codes, [s.splat_f(head[2 * g]), s.splat_f(head[2 * g + 1])])
    }
}

/// IQ4_XS.
pub struct Iq4Xs;

impl Codec for Iq4Xs {
    type Block = [u8; 136];
    const GROUPS: usize = 8;
    type Head = [f32; 16];

    #[inline(always)]
    fn head<S: Simd>(s: S, block: &[u8; 136]) -> [f32; 16] {
        let high = u16::from_le_bytes([block[2], block[3]]);
        let mut scales = [0; 16];
        for (g, scale) in scales.iter_mut().take(8).enumerate() {
            let q = block[4 + g / 2] >> (g % 2 * 4) & 15 | ((high >> (2 * g) & 3) as u8) << 4;
            *scale = q.wrapping_sub(32);
        }
        stored(s, s.mul_f(half(s, *bytes(block, 0)), s.to_f(s.widen_i8(&scales))))
    }

    #[inline(always)]
    fn group<S: Simd>(s: S, block: &[u8; 136], head: &[f32; 16], g: usize) -> [S::F; 2] {
        nibbles(s, s.mul_f(s.splat_f(head[g]), s.load_f(&IQ4)), bytes(block, 8 + 16 * g))
    }
}

#[cfg(test)]
mod tests {
    use crate::isa::Isa;
    use crate::plain::{view, view_mut};
    use crate::simd::dispatch;
    use crate::strict::dot::{Expand, Line};
    use muser_format::DType;

    fn expand<C: super::Codec>(isa: Isa, blocks: &[u8], to: &mut [Line]) -> bool {
        dispatch(isa, Expand::<C> { blocks: view(blocks), to });
        true
    }

    /// Any bytes are a block: the scalar decoders, which golden blocks check, say what they hold.
    #[test]
    fn every_block_has_the_scalar_decoders_bits() {
        for dtype in DType::ALL.iter().copied() {
            let values = 1 << 15;
            let mut state = 1u32;
            let bytes: Vec<u8> = (0..dtype.row_bytes(values).unwrap())
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .collect();
            let mut want = vec![0.0; values];
            muser_format::dequantize(dtype, &bytes, &mut want).unwrap();
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let mut got = vec![Line([0.0; 16]); values / 16];
                if !super::with_codec!(dtype, expand(isa, &bytes, &mut got), else false) {
                    continue;
                }
                for (i, (got, want)) in view_mut::<f32, Line>(&mut got).iter().zip(&want).enumerate() {
                    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    assert!(same, "{dtype:?}, {isa}, value {i}: {got:?} where {want:?} belongs");
                }
            }
        }
    }
}
