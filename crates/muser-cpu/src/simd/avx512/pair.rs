//! The inner loops of prefill, in assembly: runs of unpacked blocks where the sums of two groups share a lane. The compiler
//! gathers the shifts and sums of all columns between the groups, and the dots wait for them; and it keeps sums in
//! memory, where a store costs as much as one or two dots. Here a run's sums stay in registers 0 to 7, a block's in 10 to
//! 17, two groups' in 20 to 27.

use crate::activations::{Block256, Cross256};
use crate::forms::{CrossedBlock, PairedBlock, PairedOffsetBlock};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

/// Columns of a tile.
const COLUMNS: usize = 8;
/// Bytes of a word of all columns.
const WORD: usize = 4 * COLUMNS;

type X = Block256<COLUMNS>;
type C = Cross256<COLUMNS>;

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
        )
    };
}

/// Asks for four lines of the next block's words, those of eight steps.
macro_rules! fetch {
    () => {
        concat!(
            "prefetcht0 [{x} + {next}]\nprefetcht0 [{x} + {next} + 64]\n",
            "prefetcht0 [{x} + {next} + 128]\nprefetcht0 [{x} + {next} + 192]\n",
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

/// 128 bytes of codes and two words of each column, in one product; `$first` ends with the second word's address.
macro_rules! cross {
    ($($first:literal)*) => {
        concat!(
            "vmovdqu64 zmm28, zmmword ptr [{w}]\nvmovdqu64 zmm29, zmmword ptr [{w} + 64]\n",
            each!($($first)* "]
                vpaddd zmm30, zmm29, dword ptr [{x} + 4*" "]{{1to16}}
                vpaddb zmm31, zmm31, zmm28
                vpdpbusd zmm2" ", zmm30, zmm31"),
            "add {w}, 128\nadd {x}, 2 * {word}\n",
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

/// Runs a loop over `$n` blocks with operands of its own and those of every such loop; `next` bytes are between words of
/// two blocks.
macro_rules! run {
    (($w:ident, $x:ident: $X:ty, $acc:ident, $n:ident), $code:expr, $($own:tt)*) => {
        asm!(
            $code,
            $($own)*
            word = const WORD, next = const size_of::<$X>(),
            blocks = inout(reg) $n => _, acc = in(reg) $acc.as_mut_ptr(), scales = out(reg) _, start = out(reg) _,
            w = inout(reg) $w.as_ptr() => _, x = inout(reg) $x.as_ptr() => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
            out("zmm6") _, out("zmm7") _, inout("zmm8") _mm512_set1_epi32(0x8000) => _,
            out("zmm10") _, out("zmm11") _, out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
            out("zmm16") _, out("zmm17") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
            out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _,
            out("zmm30") _, out("zmm31") _,
            options(nostack)
        )
    };
}

/// Adds blocks of [`CrossedBlock`] times a tile to `acc`. Beside 32 dots of codes a column and block, 64 sums of
/// bytes: together they fill all four pipes, where 64 dots would fill two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub fn crossed(w: &[CrossedBlock], x: &[C], acc: &mut [__m512; COLUMNS]) {
    let blocks = w.len().min(x.len());
    if blocks == 0 {
        return;
    }
    // SAFETY: instructions of the features named here. Of each block, `w` reads the codes, all else is read through a
    // register that begins at the scales, and `w` ends at the next block; `x` reads the words, `start` what follows them up
    // to the next block.
    unsafe {
        run!(
            (w, x: C, acc, blocks),
            blocks!(
                "lea {scales}, [{w} + {first_scale}]\nlea {start}, [{x} + {first_start}]\n.rept 4\n",
                each!("vpxord zmm2" ", zmm2" ", zmm2" ""),
                fetch!(),
                ".rept 4\n",
                cross!("vpbroadcastd zmm31, dword ptr [{x} + {word} + 4*"),
                ".endr\n",
                fetch!(),
                cross!("vpslld zmm2" ", zmm2" ", 16
                    vpaddd zmm2" ", zmm2" ", dword ptr [{start} + 4*" "]{{1to16}}
                    vpbroadcastd zmm31, dword ptr [{x} + {word} + 4*"),
                ".rept 3\n",
                cross!("vpbroadcastd zmm31, dword ptr [{x} + {word} + 4*"),
                ".endr\n",
                "vmovdqu64 zmm28, zmmword ptr [{scales} + {starts}]\nvmovdqu64 zmm29, zmmword ptr [{scales}]\n",
                each!("vpaddd zmm2" ", zmm2" ", zmm28
                    vpxord zmm2" ", zmm2" ", zmm8
                    vpdpwssd zmm1" ", zmm2" ", zmm29"),
                "add {scales}, 64\nadd {start}, {word}\n.endr\n",
                each!("vpxord zmm2" ", zmm2" ", zmm2" ""),
                // The minima follow the scales, and sums the starts.
                ".rept 4\n",
                "vmovdqu64 zmm28, zmmword ptr [{scales}]\nadd {scales}, 64\n",
                each!("vpdpwssd zmm2" ", zmm28, dword ptr [{start} + 4*" "]{{1to16}}"),
                "add {start}, {word}\n.endr\n",
                "vmovdqu64 zmm28, zmmword ptr [{scales} + {codes}]\nvmovups zmm29, zmmword ptr [{scales} + {dmin}]\n",
                each!("vpdpwssd zmm1" ", zmm28, dword ptr [{start} + 4*" "]{{1to16}}
                    vcvtdq2ps zmm2" ", zmm2" "
                    vcvtdq2ps zmm1" ", zmm1" "
                    vmulps zmm1" ", zmm1" ", zmmword ptr [{scales}]
                    vfmadd231ps zmm1" ", zmm2" ", zmm29
                    vfmadd231ps zmm" ", zmm1" ", dword ptr [{start} + {scale} + 4*" "]{{1to16}}"),
                "lea {w}, [{scales} + {rest}]\nlea {x}, [{start} + {rest_x}]\n",
            ),
            first_scale = const offset_of!(PairedBlock, scales),
            first_start = const offset_of!(C, starts),
            starts = const offset_of!(CrossedBlock, starts) - offset_of!(PairedBlock, scales),
            // From where the minima end, and from where the sums end.
            codes = const offset_of!(CrossedBlock, codes) - offset_of!(PairedBlock, d),
            dmin = const offset_of!(PairedBlock, dmin) - offset_of!(PairedBlock, d),
            rest = const size_of::<CrossedBlock>() - offset_of!(PairedBlock, d),
            scale = const offset_of!(C, scale) - offset_of!(C, shift),
            rest_x = const size_of::<C>() - offset_of!(C, shift),
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
    // SAFETY: instructions of the features named here. Of each block, `w` reads the codes, the scales through a register of
    // their own, then the steps at an offset, and ends at the next block; `x` reads the words, beginnings of sums through
    // registers of their own, the scale at an offset, and ends at the next block.
    unsafe {
        run!(
            (w, x: X, acc, blocks),
            blocks!(
                "lea {scales}, [{w} + {first_scale}]\nlea {start}, [{x} + {first_start}]\n",
                "lea {raised}, [{x} + {first_raised}]\n.rept 8\n",
                each!("vpbroadcastd zmm2" ", dword ptr [{start} + 4*" "]"),
                fetch!(),
                ".rept 4\n",
                step!("vpdpbusd zmm2" ", zmm30, dword ptr [{x} + 4*" "]{{1to16}}"),
                ".endr\n",
                step!("vpslld zmm2" ", zmm2" ", 16
                    vpaddd zmm2" ", zmm2" ", dword ptr [{raised} + 4*" "]{{1to16}}
                    vpdpbusd zmm2" ", zmm30, dword ptr [{x} + 4*" "]{{1to16}}"),
                ".rept 3\n",
                step!("vpdpbusd zmm2" ", zmm30, dword ptr [{x} + 4*" "]{{1to16}}"),
                ".endr\n",
                "vmovdqu64 zmm30, zmmword ptr [{scales}]\nadd {scales}, 64\n",
                each!("vpxord zmm2" ", zmm2" ", zmm8
                    vpdpwssd zmm1" ", zmm2" ", zmm30"),
                "add {start}, 2 * {word}\nadd {raised}, {word}\n.endr\n",
                each!("vcvtdq2ps zmm1" ", zmm1" "
                    vmulps zmm1" ", zmm1" ", zmmword ptr [{w} + {d}]
                    vfmadd231ps zmm" ", zmm1" ", dword ptr [{x} + {scale} + 4*" "]{{1to16}}"),
                "add {w}, {rest}\nadd {x}, {rest_x}\n",
            ),
            first_scale = const offset_of!(PairedOffsetBlock, scales),
            first_start = const offset_of!(X, start16), first_raised = const offset_of!(X, raised16),
            // From where the codes end, and from where the words end.
            d = const offset_of!(PairedOffsetBlock, d) - offset_of!(PairedOffsetBlock, scales),
            rest = const size_of::<PairedOffsetBlock>() - offset_of!(PairedOffsetBlock, scales),
            scale = const offset_of!(X, scale) - offset_of!(X, sums),
            rest_x = const size_of::<X>() - offset_of!(X, sums),
            raised = out(reg) _,
        );
    }
}
