//! The inner loop of prefill, in assembly: runs of unpacked blocks where the sums of two groups share a lane. The compiler
//! gathers the shifts and sums of all columns between the groups, and the dots wait for them; and it keeps sums in
//! memory, where a store costs as much as one or two dots. Here a run's sums stay in registers 0 to 9, a block's in 10 to
//! 19, two groups' in 20 to 29.

use crate::activations::Block256;
use crate::forms::{PairedBlock, PairedOffsetBlock};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

/// Columns of a tile.
const COLUMNS: usize = 10;
/// Bytes of a word of all columns.
const WORD: usize = 4 * COLUMNS;

type X = Block256<COLUMNS>;

/// A line of assembly for a column, whose number comes between the pieces.
macro_rules! line {
    ($n:literal, $first:literal $($piece:literal)*) => {
        concat!($first, $($n, $piece,)* "\n")
    };
}

/// A line for each column.
macro_rules! each {
    ($($piece:literal)*) => {
        concat!(
            line!(0, $($piece)*), line!(1, $($piece)*), line!(2, $($piece)*), line!(3, $($piece)*),
            line!(4, $($piece)*), line!(5, $($piece)*), line!(6, $($piece)*), line!(7, $($piece)*),
            line!(8, $($piece)*), line!(9, $($piece)*),
        )
    };
}

/// 64 bytes of codes times a word of each column.
macro_rules! step {
    ($($piece:literal)*) => {
        concat!(
            "vmovdqu64 zmm30, zmmword ptr [{w}]\n",
            each!($($piece)*),
            "add {w}, 64\nadd {x}, {word}\n",
        )
    };
}

/// Asks for five lines of the next block's words: those of eight steps, or of two groups of four.
macro_rules! fetch {
    () => {
        concat!(
            "prefetcht0 [{x} + {next}]\nprefetcht0 [{x} + {next} + 64]\nprefetcht0 [{x} + {next} + 128]\n",
            "prefetcht0 [{x} + {next} + 192]\nprefetcht0 [{x} + {next} + 256]\n",
        )
    };
}

/// `{steps}` words of two groups: sums begin as `$first`, the second group's at `$second`, which ends with
/// the dot's beginning.
macro_rules! two {
    ($first:expr, $($second:literal)*) => {
        concat!(
            $first,
            fetch!(),
            ".rept {steps}\n",
            step!("vpdpbusd zmm2" ", zmm30, dword ptr [{x} + 4*" "]{{1to16}}"),
            ".endr\n.if {steps} == 8\n",
            fetch!(),
            ".endif\n",
            step!("vpslld zmm2" ", zmm2" ", 16
                vpaddd zmm2" ", zmm2" $($second)* ", zmm30, dword ptr [{x} + 4*" "]{{1to16}}"),
            ".rept {steps} - 1\n",
            step!("vpdpbusd zmm2" ", zmm30, dword ptr [{x} + 4*" "]{{1to16}}"),
            ".endr\n",
            "vmovdqu64 zmm30, zmmword ptr [{scales}]\nadd {scales}, 64\n",
            each!("vpxord zmm2" ", zmm2" ", zmm31
                vpdpwssd zmm1" ", zmm2" ", zmm30"),
        )
    };
}

/// A loop over blocks: sums of the run are loaded before and stored after it.
macro_rules! blocks {
    ($($block:expr,)*) => {
        concat!(
            each!("vmovups zmm" ", zmmword ptr [{acc} + 64*" "]"),
            "2:\n",
            each!("vpxord zmm1" ", zmm1" ", zmm1" ""),
            $($block,)*
            "dec {blocks}\njnz 2b\n",
            each!("vmovups zmmword ptr [{acc} + 64*" "], zmm" ""),
        )
    };
}

/// Runs a loop over `$n` blocks with operands of its own and those of every such loop.
macro_rules! run {
    (($w:ident, $x:ident, $acc:ident, $n:ident), $code:expr, $($own:tt)*) => {
        asm!(
            $code,
            $($own)*
            word = const WORD, next = const size_of::<X>(),
            blocks = inout(reg) $n => _, acc = in(reg) $acc.as_mut_ptr(), scales = out(reg) _,
            w = inout(reg) $w.as_ptr() => _, x = inout(reg) $x.as_ptr() => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
            out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
            out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _,
            out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
            out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _,
            out("zmm30") _, inout("zmm31") _mm512_set1_epi32(0x8000) => _,
            options(nostack)
        )
    };
}

/// Adds blocks of [`crate::forms::Paired`] times a tile to `acc`.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub fn paired(w: &[PairedBlock], x: &[X], acc: &mut [__m512; COLUMNS]) {
    let blocks = w.len().min(x.len());
    if blocks == 0 {
        return;
    }
    // SAFETY: instructions of the features named here. Of each block, `w` reads the codes, the scales through a register of
    // their own, then minima and steps at offsets, and ends at the next block; so does `x` with words, sums and scale.
    unsafe {
        run!(
            (w, x, acc, blocks),
            blocks!(
                "lea {scales}, [{w} + {first_scale}]\n.rept 4\n",
                two!(each!("vpxord zmm2" ", zmm2" ", zmm2" ""), ", zmm31\nvpdpbusd zmm2"),
                ".endr\n",
                each!("vpxord zmm2" ", zmm2" ", zmm2" ""),
                ".rept 4\n",
                "vmovdqu64 zmm30, zmmword ptr [{scales}]\nadd {scales}, 64\n",
                each!("vpdpwssd zmm2" ", zmm30, dword ptr [{x} + 4*" "]{{1to16}}"),
                "add {x}, {word}\n.endr\n",
                "vmovups zmm30, zmmword ptr [{w} + {dmin}]\n",
                each!("vcvtdq2ps zmm1" ", zmm1" "
                    vcvtdq2ps zmm2" ", zmm2" "
                    vmulps zmm1" ", zmm1" ", zmmword ptr [{w} + {d}]
                    vfmadd231ps zmm1" ", zmm2" ", zmm30
                    vfmadd231ps zmm" ", zmm1" ", dword ptr [{x} + {scale} + 4*" "]{{1to16}}"),
                "add {w}, {rest}\nadd {x}, {rest_x}\n",
            ),
            steps = const 8,
            first_scale = const offset_of!(PairedBlock, scales),
            // From where the codes end, and from where the sums end.
            d = const offset_of!(PairedBlock, d) - offset_of!(PairedBlock, scales),
            dmin = const offset_of!(PairedBlock, dmin) - offset_of!(PairedBlock, scales),
            rest = const size_of::<PairedBlock>() - offset_of!(PairedBlock, scales),
            scale = const offset_of!(X, scale) - offset_of!(X, start16),
            rest_x = const size_of::<X>() - offset_of!(X, start16),
        );
    }
}

/// Adds blocks of [`crate::forms::PairedOffset`] times a tile to `acc`.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub fn paired_offset(w: &[PairedOffsetBlock], x: &[X], acc: &mut [__m512; COLUMNS]) {
    let blocks = w.len().min(x.len());
    if blocks == 0 {
        return;
    }
    // SAFETY: as in `paired`; beginnings of sums are read through registers of their own.
    unsafe {
        run!(
            (w, x, acc, blocks),
            blocks!(
                "lea {scales}, [{w} + {first_scale}]\nlea {start}, [{x} + {first_start}]\n",
                "lea {raised}, [{x} + {first_raised}]\n.rept 8\n",
                two!(
                    each!("vpbroadcastd zmm2" ", dword ptr [{start} + 4*" "]"),
                    ", dword ptr [{raised} + 4*" "]{{1to16}}\nvpdpbusd zmm2"
                ),
                "add {start}, 2 * {word}\nadd {raised}, {word}\n.endr\n",
                each!("vcvtdq2ps zmm1" ", zmm1" "
                    vmulps zmm1" ", zmm1" ", zmmword ptr [{w} + {d}]
                    vfmadd231ps zmm" ", zmm1" ", dword ptr [{x} + {scale} + 4*" "]{{1to16}}"),
                "add {w}, {rest}\nadd {x}, {rest_x}\n",
            ),
            steps = const 4,
            first_scale = const offset_of!(PairedOffsetBlock, scales),
            first_start = const offset_of!(X, start16), first_raised = const offset_of!(X, raised16),
            // From where the codes end, and from where the words end.
            d = const offset_of!(PairedOffsetBlock, d) - offset_of!(PairedOffsetBlock, scales),
            rest = const size_of::<PairedOffsetBlock>() - offset_of!(PairedOffsetBlock, scales),
            scale = const offset_of!(X, scale) - offset_of!(X, sums),
            rest_x = const size_of::<X>() - offset_of!(X, sums),
            start = out(reg) _, raised = out(reg) _,
        );
    }
}
