//! NEON with the dot products of ARMv8.2: four registers are one vector.

use super::{Kernel, Simd};
use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

/// Proof of NEON and its dot products: only [`run`] makes one.
#[derive(Clone, Copy)]
pub struct Neon(());

/// Runs a kernel compiled for NEON.
pub fn run<K: Kernel>(kernel: K) -> K::Out {
    assert!(crate::isa::Isa::Neon.available(), "the device checked the processor");
    // SAFETY: the features were just checked.
    unsafe { eval(kernel) }
}

/// # Safety
/// The processor has the features named here.
#[target_feature(enable = "neon,dotprod")]
unsafe fn eval<K: Kernel>(kernel: K) -> K::Out {
    kernel.eval(Neon(()))
}

/// An intrinsic or an instruction of NEON.
macro_rules! op {
    ($e:expr) => {{
        // SAFETY: a value of `Neon` exists only where the processor has the feature; memory operands are references to
        // arrays of the accessed size, and the accesses need no alignment.
        #[allow(unused_unsafe)]
        unsafe {
            $e
        }
    }};
}

/// Applies an operation to all four registers.
macro_rules! four {
    (|$i:ident| $e:expr) => {
        from_fn(|$i| op!($e))
    };
}

type F4 = [float32x4_t; 4];
type I4 = [int32x4_t; 4];
type B4 = [uint8x16_t; 4];

/// `acc` plus the products of four signed bytes a lane.
#[inline(always)]
fn sdot(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut acc = acc;
    op!(asm!(
        ".arch_extension dotprod",
        "sdot {acc:v}.4s, {a:v}.16b, {b:v}.16b",
        acc = inout(vreg) acc, a = in(vreg) a, b = in(vreg) b,
        options(pure, nomem, nostack, preserves_flags)
    ));
    acc
}

/// Four bytes, four times.
#[inline(always)]
fn bytes(x: i32) -> int8x16_t {
    op!(vreinterpretq_s8_s32(vdupq_n_s32(x)))
}

/// Bytes that stand 128 above their meaning.
#[inline(always)]
fn lowered(w: uint8x16_t) -> int8x16_t {
    op!(vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128))))
}

impl Simd for Neon {
    type F = F4;
    type I = I4;
    type B = B4;

    #[inline(always)]
    fn load_b(self, from: &[u8; 64], _ahead: usize) -> B4 {
        four!(|i| vld1q_u8(from.as_ptr().add(16 * i)))
    }
    #[inline(always)]
    fn store_b(self, to: &mut [u8; 64], v: B4) {
        for i in 0..4 {
            op!(vst1q_u8(to.as_mut_ptr().add(16 * i), v[i]));
        }
    }
    #[inline(always)]
    fn fetch<T: ?Sized>(self, _at: &T, _ahead: usize) {
        // These processors follow streams by themselves, and the intrinsic is not stable.
    }
    #[inline(always)]
    fn table(self, entries: &[u8; 16]) -> B4 {
        [op!(vld1q_u8(entries.as_ptr())); 4]
    }
    #[inline(always)]
    fn lookup(self, table: B4, index: B4) -> B4 {
        four!(|i| vqtbl1q_u8(table[i], index[i]))
    }
    #[inline(always)]
    fn and_b(self, a: B4, mask: u8) -> B4 {
        four!(|i| vandq_u8(a[i], vdupq_n_u8(mask)))
    }
    #[inline(always)]
    fn shr_b(self, a: B4, n: u32) -> B4 {
        four!(|i| vshlq_u8(a[i], vdupq_n_s8(-(n as i8))))
    }
    #[inline(always)]
    fn shl_b(self, a: B4, n: u32) -> B4 {
        four!(|i| vshlq_u8(a[i], vdupq_n_s8(n as i8)))
    }
    #[inline(always)]
    fn select(self, a: B4, b: B4, mask: u8) -> B4 {
        four!(|i| vbslq_u8(vdupq_n_u8(mask), a[i], b[i]))
    }
    #[inline(always)]
    fn or_masked(self, low: B4, high: B4, mask: u8) -> B4 {
        four!(|i| vorrq_u8(low[i], vandq_u8(high[i], vdupq_n_u8(mask))))
    }

    #[inline(always)]
    fn splat_i(self, v: i32) -> I4 {
        [op!(vdupq_n_s32(v)); 4]
    }
    #[inline(always)]
    fn add_i(self, a: I4, b: I4) -> I4 {
        four!(|i| vaddq_s32(a[i], b[i]))
    }
    #[inline(always)]
    fn mul_i(self, a: I4, b: I4) -> I4 {
        four!(|i| vmulq_s32(a[i], b[i]))
    }
    #[inline(always)]
    fn shl_i(self, a: I4, n: u32) -> I4 {
        four!(|i| vshlq_s32(a[i], vdupq_n_s32(n as i32)))
    }
    #[inline(always)]
    fn shr_i(self, a: I4, n: u32) -> I4 {
        four!(|i| vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a[i]), vdupq_n_s32(-(n as i32)))))
    }
    #[inline(always)]
    fn widen_u8(self, from: &[u8; 16]) -> I4 {
        let all = op!(vld1q_u8(from.as_ptr()));
        let halves = op!([vmovl_u8(vget_low_u8(all)), vmovl_high_u8(all)]);
        four!(|i| vreinterpretq_s32_u32(if i % 2 == 0 {
            vmovl_u16(vget_low_u16(halves[i / 2]))
        } else {
            vmovl_high_u16(halves[i / 2])
        }))
    }
    #[inline(always)]
    fn widen_i8(self, from: &[u8; 16]) -> I4 {
        let all = op!(vreinterpretq_s8_u8(vld1q_u8(from.as_ptr())));
        let halves = op!([vmovl_s8(vget_low_s8(all)), vmovl_high_s8(all)]);
        four!(|i| if i % 2 == 0 {
            vmovl_s16(vget_low_s16(halves[i / 2]))
        } else {
            vmovl_high_s16(halves[i / 2])
        })
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; 16]) -> I4 {
        four!(|i| vld1q_s32(from.as_ptr().add(4 * i)))
    }
    #[inline(always)]
    fn store_i(self, to: &mut [i32; 16], v: I4) {
        for i in 0..4 {
            op!(vst1q_s32(to.as_mut_ptr().add(4 * i), v[i]));
        }
    }
    #[inline(always)]
    fn xor_i(self, a: I4, mask: i32) -> I4 {
        four!(|i| veorq_s32(a[i], vdupq_n_s32(mask)))
    }
    #[inline(always)]
    fn even_bytes(self, v: B4) -> I4 {
        four!(|i| vreinterpretq_s32_u16(vandq_u16(vreinterpretq_u16_u8(v[i]), vdupq_n_u16(255))))
    }
    #[inline(always)]
    fn odd_bytes(self, v: B4) -> I4 {
        four!(|i| vreinterpretq_s32_u16(vshrq_n_u16::<8>(vreinterpretq_u16_u8(v[i]))))
    }
    #[inline(always)]
    fn pairs_i8(self, from: &[u8; 32]) -> I4 {
        four!(|i| vreinterpretq_s32_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(from.as_ptr().add(8 * i))))))
    }
    #[inline(always)]
    fn dot_pairs(self, acc: I4, a: I4, b: I4) -> I4 {
        four!(|i| {
            let (a, b) = (vreinterpretq_s16_s32(a[i]), vreinterpretq_s16_s32(b[i]));
            let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
            vaddq_s32(acc[i], vpaddq_s32(low, vmull_high_s16(a, b)))
        })
    }
    #[inline(always)]
    fn dot(self, acc: I4, w: B4, x: i32) -> I4 {
        // Both operands are signed: the bytes of w go in 128 lower, and 128 times x comes back in two halves.
        let (x, half) = (bytes(x), op!(vdupq_n_s8(64)));
        from_fn(|i| sdot(sdot(sdot(acc[i], lowered(w[i]), x), half, x), half, x))
    }
    #[inline(always)]
    fn dot_wide(self, acc: I4, w: B4, x: i32) -> I4 {
        let x = bytes(x);
        from_fn(|i| sdot(acc[i], lowered(w[i]), x))
    }
    #[inline(always)]
    fn start_wide(self, _start: i32) -> I4 {
        [op!(vdupq_n_s32(0)); 4]
    }

    #[inline(always)]
    fn splat_f(self, v: f32) -> F4 {
        [op!(vdupq_n_f32(v)); 4]
    }
    #[inline(always)]
    fn load_f(self, from: &[f32; 16]) -> F4 {
        four!(|i| vld1q_f32(from.as_ptr().add(4 * i)))
    }
    #[inline(always)]
    fn store_f(self, to: &mut [f32; 16], v: F4) {
        for (i, v) in v.into_iter().enumerate() {
            op!(vst1q_f32(to.as_mut_ptr().add(4 * i), v));
        }
    }
    #[inline(always)]
    fn mul_f(self, a: F4, b: F4) -> F4 {
        four!(|i| vmulq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn add_f(self, a: F4, b: F4) -> F4 {
        four!(|i| vaddq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn fma(self, a: F4, b: F4, c: F4) -> F4 {
        four!(|i| vfmaq_f32(c[i], a[i], b[i]))
    }
    #[inline(always)]
    fn to_f(self, a: I4) -> F4 {
        four!(|i| vcvtq_f32_s32(a[i]))
    }
    #[inline(always)]
    fn bits_f(self, a: I4) -> F4 {
        four!(|i| vreinterpretq_f32_s32(a[i]))
    }
    #[inline(always)]
    fn pick(self, table: F4, index: I4) -> F4 {
        // Byte 4 i + j of the table for byte j of a lane.
        let bytes = op!(uint8x16x4_t(
            vreinterpretq_u8_f32(table[0]),
            vreinterpretq_u8_f32(table[1]),
            vreinterpretq_u8_f32(table[2]),
            vreinterpretq_u8_f32(table[3])
        ));
        four!(|i| {
            let first = vmulq_s32(vandq_s32(index[i], vdupq_n_s32(15)), vdupq_n_s32(0x0404_0404));
            let at = vreinterpretq_u8_s32(vaddq_s32(first, vdupq_n_s32(0x0302_0100)));
            vreinterpretq_f32_u8(vqtbl4q_u8(bytes, at))
        })
    }
    #[inline(always)]
    fn half(self, from: &[u8; 32]) -> F4 {
        // The types of half precision are not stable; the instruction is part of every NEON.
        from_fn(|i| {
            let (halves, out): (uint8x8_t, float32x4_t);
            halves = op!(vld1_u8(from.as_ptr().add(8 * i)));
            op!(asm!(
                "fcvtl {out:v}.4s, {halves:v}.4h",
                out = lateout(vreg) out, halves = in(vreg) halves,
                options(pure, nomem, nostack, preserves_flags)
            ));
            out
        })
    }
    #[inline(always)]
    fn to_half(self, to: &mut [u8; 32], v: F4) {
        for (i, v) in v.into_iter().enumerate() {
            let halves: uint8x8_t;
            op!(asm!(
                "fcvtn {halves:v}.4h, {v:v}.4s",
                halves = lateout(vreg) halves, v = in(vreg) v,
                options(pure, nomem, nostack, preserves_flags)
            ));
            op!(vst1_u8(to.as_mut_ptr().add(8 * i), halves));
        }
    }
    #[inline(always)]
    fn bf16(self, from: &[u8; 32]) -> F4 {
        four!(|i| vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vreinterpret_u16_u8(vld1_u8(
            from.as_ptr().add(8 * i)
        ))))))
    }
}
