//! Two groups of ten columns, the inner loop of prefill, in assembly: the compiler gathers the shifts and sums of all
//! columns between the groups, and the dots wait for them (83 % of the dot units' rate; this reaches 85).

use std::arch::asm;
use std::arch::x86_64::*;

/// A line of assembly for a column, whose number comes between the pieces.
macro_rules! line {
    ($n:literal, $first:literal $($piece:literal)*) => {
        concat!($first, $($n, $piece,)* "\n")
    };
}

/// A line for each of ten columns.
macro_rules! ten {
    ($($piece:literal)*) => {
        concat!(
            line!(0, $($piece)*), line!(1, $($piece)*), line!(2, $($piece)*), line!(3, $($piece)*),
            line!(4, $($piece)*), line!(5, $($piece)*), line!(6, $($piece)*), line!(7, $($piece)*),
            line!(8, $($piece)*), line!(9, $($piece)*),
        )
    };
}

/// [`super::Simd::pair`].
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub fn pair<const N: usize>(
    total: &mut [__m512i; 10],
    codes: &[[u8; 64]; N],
    x: &[[i32; 10]; N],
    starts: [&[i32; 10]; 2],
    scales: __m512i,
) {
    const { assert!(N >= 4 && N.is_multiple_of(2)) }
    let [t0, t1, t2, t3, t4, t5, t6, t7, t8, t9] = total;
    // SAFETY: instructions of the features named here. `codes` and `x` advance a step of 64 and 40 bytes N times, so
    // reads stay inside their arrays of N, and inside the ten words of `first` and `second`.
    unsafe {
        asm!(
            ten!("vpbroadcastd zmm" ", dword ptr [{first} + 4*" "]"),
            ".rept {steps} + 1",
            "vmovdqu64 zmm10, zmmword ptr [{codes}]",
            ten!("vpdpbusd zmm" ", zmm10, dword ptr [{x} + 4*" "]{{1to16}}"),
            "add {codes}, 64",
            "add {x}, 40",
            ".endr",
            "vmovdqu64 zmm10, zmmword ptr [{codes}]",
            ten!(
                "vpslld zmm" ", zmm" ", 16
                vpaddd zmm" ", zmm" ", dword ptr [{second} + 4*" "]{{1to16}}
                vpdpbusd zmm" ", zmm10, dword ptr [{x} + 4*" "]{{1to16}}"
            ),
            ".rept {steps}",
            "add {codes}, 64",
            "add {x}, 40",
            "vmovdqu64 zmm10, zmmword ptr [{codes}]",
            ten!("vpdpbusd zmm" ", zmm10, dword ptr [{x} + 4*" "]{{1to16}}"),
            ".endr",
            ten!("vpxord zmm" ", zmm" ", {sign}
                vpdpwssd {t" "}, zmm" ", {scales}"),
            steps = const N / 2 - 1,
            first = in(reg) starts[0], second = in(reg) starts[1],
            codes = inout(reg) codes => _, x = inout(reg) x => _,
            sign = in(zmm_reg) _mm512_set1_epi32(0x8000), scales = in(zmm_reg) scales,
            t0 = inout(zmm_reg) *t0, t1 = inout(zmm_reg) *t1, t2 = inout(zmm_reg) *t2, t3 = inout(zmm_reg) *t3,
            t4 = inout(zmm_reg) *t4, t5 = inout(zmm_reg) *t5, t6 = inout(zmm_reg) *t6, t7 = inout(zmm_reg) *t7,
            t8 = inout(zmm_reg) *t8, t9 = inout(zmm_reg) *t9,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
            out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _,
            options(pure, readonly, nostack)
        );
    }
}
