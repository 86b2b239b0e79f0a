//! Plain Rust: the definition that the other instruction sets are tested against.

use super::Simd;
use std::array::from_fn;

/// Runs on every processor.
#[derive(Clone, Copy)]
pub struct Scalar;

impl Simd for Scalar {
    type F = [f32; 16];
    type I = [i32; 16];
    type B = [u8; 64];

    #[inline(always)]
    fn load_b(self, from: &[u8; 64], _ahead: usize) -> [u8; 64] {
        *from
    }
    #[inline(always)]
    fn store_b(self, to: &mut [u8; 64], v: [u8; 64]) {
        *to = v;
    }
    #[inline(always)]
    fn fetch<T: ?Sized>(self, _at: &T, _ahead: usize) {}
    #[inline(always)]
    fn table(self, entries: &[u8; 16]) -> [u8; 64] {
        from_fn(|i| entries[i % 16])
    }
    #[inline(always)]
    fn lookup(self, table: [u8; 64], index: [u8; 64]) -> [u8; 64] {
        from_fn(|i| table[usize::from(index[i] & 15)])
    }
    #[inline(always)]
    fn and_b(self, a: [u8; 64], mask: u8) -> [u8; 64] {
        a.map(|v| v & mask)
    }
    #[inline(always)]
    fn shr_b(self, a: [u8; 64], n: u32) -> [u8; 64] {
        a.map(|v| v >> n)
    }
    #[inline(always)]
    fn shl_b(self, a: [u8; 64], n: u32) -> [u8; 64] {
        a.map(|v| v << n)
    }
    #[inline(always)]
    fn select(self, a: [u8; 64], b: [u8; 64], mask: u8) -> [u8; 64] {
        from_fn(|i| (a[i] & mask) | (b[i] & !mask))
    }
    #[inline(always)]
    fn or_masked(self, low: [u8; 64], high: [u8; 64], mask: u8) -> [u8; 64] {
        from_fn(|i| low[i] | (high[i] & mask))
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> [i32; 16] {
        [v; 16]
    }
    #[inline(always)]
    fn add_i(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    fn mul_i(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        from_fn(|i| a[i].wrapping_mul(b[i]))
    }
    #[inline(always)]
    fn shl_i(self, a: [i32; 16], n: u32) -> [i32; 16] {
        a.map(|v| v << n)
    }
    #[inline(always)]
    fn shr_i(self, a: [i32; 16], n: u32) -> [i32; 16] {
        a.map(|v| (v as u32 >> n) as i32)
    }
    #[inline(always)]
    fn widen_u8(self, from: &[u8; 16]) -> [i32; 16] {
        from.map(i32::from)
    }
    #[inline(always)]
    fn widen_i8(self, from: &[u8; 16]) -> [i32; 16] {
        from.map(|v| i32::from(v as i8))
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; 16]) -> [i32; 16] {
        *from
    }
    #[inline(always)]
    fn store_i(self, to: &mut [i32; 16], v: [i32; 16]) {
        *to = v;
    }
    #[inline(always)]
    fn xor_i(self, a: [i32; 16], mask: i32) -> [i32; 16] {
        a.map(|v| v ^ mask)
    }
    #[inline(always)]
    fn even_bytes(self, v: [u8; 64]) -> [i32; 16] {
        from_fn(|i| i32::from(v[4 * i]) | i32::from(v[4 * i + 2]) << 16)
    }
    #[inline(always)]
    fn odd_bytes(self, v: [u8; 64]) -> [i32; 16] {
        from_fn(|i| i32::from(v[4 * i + 1]) | i32::from(v[4 * i + 3]) << 16)
    }
    #[inline(always)]
    fn pairs_i8(self, from: &[u8; 32]) -> [i32; 16] {
        from_fn(|i| i32::from(from[2 * i] as i8) & 0xffff | i32::from(from[2 * i + 1] as i8) << 16)
    }
    #[inline(always)]
    fn dot_pairs(self, acc: [i32; 16], a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        let halves = |v: i32| (i32::from(v as i16), v >> 16);
        from_fn(|i| {
            let ((al, ah), (bl, bh)) = (halves(a[i]), halves(b[i]));
            acc[i] + al * bl + ah * bh
        })
    }
    #[inline(always)]
    fn dot(self, acc: [i32; 16], w: [u8; 64], x: i32) -> [i32; 16] {
        let x = x.to_le_bytes().map(|v| i32::from(v as i8));
        from_fn(|i| acc[i] + (0..4).map(|j| i32::from(w[4 * i + j]) * x[j]).sum::<i32>())
    }
    #[inline(always)]
    fn dot_wide(self, acc: [i32; 16], w: [u8; 64], x: i32) -> [i32; 16] {
        let x = x.to_le_bytes().map(|v| i32::from(v as i8));
        from_fn(|i| acc[i] + (0..4).map(|j| (i32::from(w[4 * i + j]) - 128) * x[j]).sum::<i32>())
    }
    #[inline(always)]
    fn start_wide(self, _start: i32) -> [i32; 16] {
        [0; 16]
    }

    #[inline(always)]
    fn splat_f(self, v: f32) -> [f32; 16] {
        [v; 16]
    }
    #[inline(always)]
    fn load_f(self, from: &[f32; 16]) -> [f32; 16] {
        *from
    }
    #[inline(always)]
    fn store_f(self, to: &mut [f32; 16], v: [f32; 16]) {
        *to = v;
    }
    #[inline(always)]
    fn mul_f(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn add_f(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn to_f(self, a: [i32; 16]) -> [f32; 16] {
        a.map(|v| v as f32)
    }
    #[inline(always)]
    fn bits_f(self, a: [i32; 16]) -> [f32; 16] {
        a.map(|v| f32::from_bits(v as u32))
    }
    #[inline(always)]
    fn pick(self, table: [f32; 16], index: [i32; 16]) -> [f32; 16] {
        index.map(|i| table[(i & 15) as usize])
    }
    #[inline(always)]
    fn half(self, from: &[u8; 32]) -> [f32; 16] {
        from_fn(|i| half::f16::from_le_bytes([from[2 * i], from[2 * i + 1]]).to_f32())
    }
    #[inline(always)]
    fn to_half(self, to: &mut [u8; 32], v: [f32; 16]) {
        for (to, v) in to.as_chunks_mut::<2>().0.iter_mut().zip(v) {
            *to = half::f16::from_f32(v).to_le_bytes();
        }
    }
    #[inline(always)]
    fn bf16(self, from: &[u8; 32]) -> [f32; 16] {
        from_fn(|i| f32::from_bits(u32::from(u16::from_le_bytes([from[2 * i], from[2 * i + 1]])) << 16))
    }
}
