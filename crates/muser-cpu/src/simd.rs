//! The vocabulary of the kernels: sixteen 32-bit lanes or 64 bytes at a time, whatever the registers' width.
//!
//! A lane is a weight row, or a query, never a part of a sum: no operation here adds lanes up. So every instruction
//! set gives the same bits, and a kernel is written once.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use crate::activations::{Block256, Cross256, crosses, quantise};
use crate::forms::{CrossedBlock, K4Block, K6Block, PairedOffsetBlock};
use crate::isa::Isa;

/// Lanes of a vector: rows of a panel.
pub const LANES: usize = 16;

/// The operations of an instruction set. A value of the type proves that the processor has it.
pub trait Simd: Copy + Send + Sync {
    /// 16 floats.
    type F: Copy;
    /// 16 integers of 32 bits.
    type I: Copy;
    /// 64 bytes.
    type B: Copy;

    /// Loads 64 bytes of weights, and asks for those `ahead` bytes later.
    fn load_b(self, from: &[u8; 64], ahead: usize) -> Self::B;
    /// Stores 64 bytes.
    fn store_b(self, to: &mut [u8; 64], v: Self::B);
    /// Asks for the bytes that stand `ahead` bytes after `at`.
    fn fetch<T: ?Sized>(self, at: &T, ahead: usize);
    /// A table of 16 bytes, for [`Simd::lookup`].
    fn table(self, entries: &[u8; 16]) -> Self::B;
    /// `table[index]` for each byte; indices are below 16.
    fn lookup(self, table: Self::B, index: Self::B) -> Self::B;
    /// Each byte and `mask`.
    fn and_b(self, a: Self::B, mask: u8) -> Self::B;
    /// Bytes shifted right; bits may come in from a neighbouring byte, so the caller masks.
    fn shr_b(self, a: Self::B, n: u32) -> Self::B;
    /// Bytes shifted left; bits may come in from a neighbouring byte, so the caller masks.
    fn shl_b(self, a: Self::B, n: u32) -> Self::B;
    /// Bits of `a` where `mask` has them, else of `b`.
    fn select(self, a: Self::B, b: Self::B, mask: u8) -> Self::B;
    /// `low | (high & mask)`.
    fn or_masked(self, low: Self::B, high: Self::B, mask: u8) -> Self::B;

    /// All lanes `v`.
    fn splat_i(self, v: i32) -> Self::I;
    /// Sum.
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Low 32 bits of the product.
    fn mul_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// Shift left.
    fn shl_i(self, a: Self::I, n: u32) -> Self::I;
    /// Shift right, zeros coming in.
    fn shr_i(self, a: Self::I, n: u32) -> Self::I;
    /// 16 unsigned bytes.
    fn widen_u8(self, from: &[u8; 16]) -> Self::I;
    /// 16 signed bytes.
    fn widen_i8(self, from: &[u8; 16]) -> Self::I;
    /// Loads 16 integers.
    fn load_i(self, from: &[i32; 16]) -> Self::I;
    /// Stores 16 integers.
    fn store_i(self, to: &mut [i32; 16], v: Self::I);
    /// Each lane and `mask`, exclusive or.
    fn xor_i(self, a: Self::I, mask: i32) -> Self::I;
    /// The first and the third byte of each lane, as its halves of 16 bits.
    fn even_bytes(self, v: Self::B) -> Self::I;
    /// The second and the fourth byte of each lane, as its halves of 16 bits.
    fn odd_bytes(self, v: Self::B) -> Self::I;
    /// Two signed bytes a lane, as its halves of 16 bits.
    fn pairs_i8(self, from: &[u8; 32]) -> Self::I;
    /// Adds to each lane the products of its signed halves.
    fn dot_pairs(self, acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// [`Simd::dot_pairs`] with the same two halves in all lanes.
    fn dot_pair(self, acc: Self::I, a: Self::I, x: &i32) -> Self::I {
        self.dot_pairs(acc, a, self.splat_i(*x))
    }
    /// Adds to each lane the products of its four unsigned bytes of `w` (at most 128) and the four signed bytes of `x`
    /// (at least -127).
    fn dot(self, acc: Self::I, w: Self::B, x: i32) -> Self::I;
    /// Adds to each lane the products of its four bytes of `a` and of `b`, codes of 15 at most.
    #[inline(always)]
    fn dot_codes(self, acc: Self::I, a: Self::B, b: Self::B) -> Self::I {
        let (mut codes, mut sums) = ([[0; 64]; 2], [0; LANES]);
        self.store_b(&mut codes[0], a);
        self.store_b(&mut codes[1], b);
        for (i, (a, b)) in codes[0].iter().zip(&codes[1]).enumerate() {
            sums[i / 4] += i32::from(*a) * i32::from(*b);
        }
        self.add_i(acc, self.load_i(&sums))
    }
    /// Adds a run of blocks of [`CrossedBlock`] times the columns to `acc`, where there is a loop of its own for
    /// that: then true.
    fn crossed<const NC: usize>(self, _: &[CrossedBlock], _: &[Cross256<NC>], _: &mut [Self::F; NC]) -> bool {
        false
    }
    /// The same for blocks of Q6_K.
    fn paired_offset<const NC: usize>(
        self,
        _: &[PairedOffsetBlock],
        _: &[Block256<NC>],
        _: &mut [Self::F; NC],
    ) -> bool {
        false
    }
    /// Adds blocks of Q4_K in a band of `acc.len()` panels times the columns to `acc`, where there is a loop of its own for
    /// that: then true. Asks for what lies `ahead` bytes after each load.
    fn few_k4<const NC: usize>(
        self,
        _: &[K4Block],
        _ahead: usize,
        _: &[Block256<NC>],
        _: &mut [[Self::F; NC]],
    ) -> bool {
        false
    }
    /// The same for Q6_K.
    fn few_k6<const NC: usize>(
        self,
        _: &[K6Block],
        _ahead: usize,
        _: &[Block256<NC>],
        _: &mut [[Self::F; NC]],
    ) -> bool {
        false
    }
    /// Like [`Simd::dot`] for bytes that stand 128 above their meaning. The accumulator begins as [`Simd::start_wide`].
    fn dot_wide(self, acc: Self::I, w: Self::B, x: i32) -> Self::I;
    /// Where a sum of [`Simd::dot_wide`] begins; `start` is minus 128 times the sum of all x that it will see.
    fn start_wide(self, start: i32) -> Self::I;

    /// [`quantise`].
    #[inline(always)]
    fn quantise(self, x: &[f32; 256], q: &mut [i8; 256], sums: &mut [i32; 16]) -> f32 {
        quantise(x, q, sums)
    }
    /// [`crosses`].
    #[inline(always)]
    fn crosses(self, q: &[i8; 256]) -> [i32; 8] {
        crosses(q)
    }

    /// All lanes `v`.
    fn splat_f(self, v: f32) -> Self::F;
    /// Loads 16 floats.
    fn load_f(self, from: &[f32; 16]) -> Self::F;
    /// Stores 16 floats.
    fn store_f(self, to: &mut [f32; 16], v: Self::F);
    /// Stores 16 floats that are not read soon: past the caches, where the instruction set can. [`Simd::settle`] comes before
    /// another thread may read them.
    #[inline(always)]
    fn store_past(self, to: &mut [f32; 16], v: Self::F) {
        self.store_f(to, v)
    }
    /// Orders what [`Simd::store_past`] stored before all later stores.
    #[inline(always)]
    fn settle(self) {}
    /// Product.
    fn mul_f(self, a: Self::F, b: Self::F) -> Self::F;
    /// Sum.
    fn add_f(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Integers to floats, rounded to nearest even.
    fn to_f(self, a: Self::I) -> Self::F;
    /// Bits as floats.
    fn bits_f(self, a: Self::I) -> Self::F;
    /// `table[low four bits of index]` for each lane.
    fn pick(self, table: Self::F, index: Self::I) -> Self::F;
    /// 16 half-precision numbers, little endian.
    fn half(self, from: &[u8; 32]) -> Self::F;
    /// Rounds to half precision, to nearest even.
    fn to_half(self, to: &mut [u8; 32], v: Self::F);
    /// 16 bfloat16 numbers, little endian.
    fn bf16(self, from: &[u8; 32]) -> Self::F;
}

/// A computation that is compiled once for each instruction set. `eval` and all that it calls are `#[inline(always)]`.
pub trait Kernel {
    /// What it returns.
    type Out;
    /// Computes.
    fn eval<S: Simd>(self, s: S) -> Self::Out;
}

/// Runs `kernel` with the instructions of `isa`. Panics where the processor lacks them: a device checks once.
pub fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Out {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::run(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::run(kernel),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => neon::run(kernel),
        _ => kernel.eval(scalar::Scalar),
    }
}

/// Runs a kernel that exists for AVX-512 only.
#[cfg(target_arch = "x86_64")]
pub fn wide<K: Kernel>(kernel: K) -> K::Out {
    avx512::run(kernel)
}
