//! The inner loops of 4 to 8 columns and packed blocks of Q4_K and Q6_K, in assembly, where a band of panels meets the
//! columns block after block. The compiler gathers what unpacks a line, and what joins two groups' sums, between the dots,
//! and dots wait for it; here both stand between the dots of the line before. Two groups of a pair are summed in registers
//! of their own, so that no dot waits for the one before it, even with four columns.
//!
//! Registers: a block's sums in 0 to 7, sums of a pair's first group in 10 to 17 and of its second in 20 to 27, codes
//! in 28 to 31, masks in 8 and 19, what moves the first sums' lower halves to upper ones in 9, scales in 18.

use crate::activations::Block256;
use crate::forms::{K4Block, K6Block};
use crate::plain::view;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

/// Byte 0 and 1 of each lane come to 2 and 3.
static UP: [u8; 64] = {
    let mut up = [0; 64];
    let mut i = 0;
    while i < 64 {
        up[i] = (i % 16 / 4 * 4 + i % 2) as u8;
        i += 1;
    }
    up
};
/// Bytes 2 and 3 of each lane.
const UPPER: u64 = 0xcccc_cccc_cccc_cccc;

/// The text for each column, whose number is `\c` in it.
macro_rules! each {
    ($cols:literal, $($text:expr),+) => {
        concat!(".irp c,", $cols, "\n", $($text,)+ "\n.endr\n")
    };
}

/// Dots of codes and word `$word` of each column from `q` on. Before and after each: the first texts; after those of the
/// first four columns one of the other texts each.
macro_rules! dots {
    (
        $cols:literal, $sums:expr, $codes:literal, $word:literal, [$first:expr, $then:expr],
        [$a:expr, $b:expr, $c:expr, $d:expr]
    ) => {
        each!(
            $cols,
            $first,
            "\nvpdpbusd ",
            $sums,
            "\\c, ",
            $codes,
            ", dword ptr [{q} + 4*\\c + ",
            $word,
            "*{word}]{{1to16}}\n",
            $then,
            "\n.if \\c == 0\n",
            $a,
            "\n.elseif \\c == 1\n",
            $b,
            "\n.elseif \\c == 2\n",
            $c,
            "\n.elseif \\c == 3\n",
            $d,
            "\n.endif"
        )
    };
}

/// Begins both sums of a pair: nothing stands in them yet.
macro_rules! zero {
    ($sums:literal) => {
        concat!("vpxord ", $sums, "\\c, ", $sums, "\\c, ", $sums, "\\c")
    };
}

/// The sums of the pair before, joined; they join the block's by [`scale`].
macro_rules! join {
    () => {
        "vpshufb zmm2\\c{{k1}}, zmm1\\c, zmm9\n"
    };
}

/// Adds the pair before, scaled.
macro_rules! scale {
    () => {
        "vpdpwssd zmm\\c, zmm2\\c, zmm18"
    };
}

/// A loop over blocks of the columns, in it one over panels: `q` begins at the block's words.
macro_rules! blocks {
    ($($panel:expr,)+) => {
        concat!(
            "kmovq k1, {p}\n3:\nmov {p}, {panels}\nmov {a}, {acc}\n2:\nmov {q}, {x}\n",
            $($panel,)+
            "add {w}, {foot}\nadd {a}, 16 * {word}\ndec {p}\njnz 2b\nadd {x}, {next}\ndec {blocks}\njnz 3b\n",
        )
    };
}

/// Runs such a loop with operands of its own and those of both; `$foot` bytes of a block follow where `w` stands last.
macro_rules! run {
    (($w:ident, $ahead:ident, $x:ident, $acc:ident, $blocks:ident, $nc:literal, $foot:expr), $code:expr, $($own:tt)*) => {
        asm!(
            $code,
            $($own)*
            word = const 4 * $nc, next = const size_of::<Block256<$nc>>(), foot = const $foot,
            scale = const offset_of!(Block256<$nc>, scale) - offset_of!(Block256<$nc>, sums),
            blocks = inout(reg) $blocks => _, panels = in(reg) $acc.len() / $nc, p = inout(reg) UPPER => _,
            w = inout(reg) $w.as_ptr() => _, ahead = in(reg) $ahead, s = out(reg) _,
            x = inout(reg) $x.as_ptr() => _, q = out(reg) _, acc = in(reg) $acc.as_mut_ptr(), a = out(reg) _,
            out("zmm18") _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
            out("zmm10") _, out("zmm11") _, out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
            out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _, out("zmm24") _,
            out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _, out("zmm30") _, out("zmm31") _,
            out("k1") _, options(nostack)
        )
    };
}

/// A line of Q4_K's codes and two words of each column; the next line is unpacked into the last two registers.
macro_rules! line4 {
    (
        $cols:literal, $sums:literal, [$first:expr, $then:expr], $low:literal, $high:literal, $next_low:literal,
        $next_high:literal
    ) => {
        concat!(
            dots!(
                $cols,
                $sums,
                $low,
                "0",
                [$first, $then],
                [
                    concat!("vpandd ", $next_low, ", zmm8, zmmword ptr [{w} + 64]"),
                    "",
                    concat!("vpsrlw ", $next_high, ", zmmword ptr [{w} + 64], 4"),
                    "prefetcht0 [{w} + {ahead}]"
                ]
            ),
            dots!(
                $cols,
                $sums,
                $high,
                "1",
                ["", ""],
                ["", concat!("vpandd ", $next_high, ", ", $next_high, ", zmm8"), "", ""]
            ),
            "add {w}, 64\nadd {q}, 2 * {word}\n",
        )
    };
}

/// A group of Q4_K.
macro_rules! group4 {
    ($cols:literal, $sums:literal, $first:expr, $then:expr) => {
        concat!(
            line4!($cols, $sums, [$first, $then], "zmm28", "zmm29", "zmm30", "zmm31"),
            line4!($cols, $sums, ["", ""], "zmm30", "zmm31", "zmm28", "zmm29"),
            line4!($cols, $sums, ["", ""], "zmm28", "zmm29", "zmm30", "zmm31"),
            line4!($cols, $sums, ["", ""], "zmm30", "zmm31", "zmm28", "zmm29"),
        )
    };
}

/// A pair of groups of Q4_K that follows another one, then its scales.
macro_rules! pair4 {
    ($cols:literal, $scales:expr) => {
        concat!(
            group4!($cols, "zmm1", concat!(join!(), zero!("zmm1")), scale!()),
            $scales,
            group4!($cols, "zmm2", zero!("zmm2"), ""),
        )
    };
}

/// What masks keep of Q4_K's minima: bits 0 to 5 of the even bytes; of these 0 and 1; 2 and 3; 4 and 5.
static PARTS: [u32; 3] = [0x0003_0003, 0x000c_000c, 0x0030_0030];

macro_rules! k4 {
    ($name:ident, $nc:literal, $cols:literal) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        fn $name(w: &[K4Block], ahead: usize, x: &[Block256<$nc>], acc: &mut [__m512]) {
            let blocks = x.len().min(w.len() / (acc.len() / $nc).max(1));
            if blocks == 0 || acc.len() < $nc {
                return;
            }
            // SAFETY: instructions of the features named here. `w` passes `blocks` times as many blocks as `acc` holds
            // panels, of which it has so many: of each the scales, through `s` too, the codes, then at offsets the foot;
            // one line after the codes is read, and that is the foot. `x` passes as many blocks, `q` the words and sums of
            // each. `a` passes the panels' sums. Prefetches may name any address.
            unsafe {
                run!(
                    (w, ahead, x, acc, blocks, $nc, size_of::<K4Block>() - offset_of!(K4Block, foot)),
                    blocks!(
                        "mov {s}, {w}\nprefetcht0 [{w} + {ahead}]\nprefetcht0 [{w} + {ahead} + 64]\n",
                        "vpandd zmm28, zmm8, zmmword ptr [{w} + 128]\nvpsrlw zmm29, zmmword ptr [{w} + 128], 4\n",
                        "vpandd zmm29, zmm29, zmm8\nvpandd zmm18, zmm19, zmmword ptr [{w}]\nadd {w}, 128\n",
                        each!($cols, zero!("zmm")),
                        group4!($cols, "zmm1", zero!("zmm1"), ""),
                        group4!($cols, "zmm2", zero!("zmm2"), ""),
                        pair4!($cols, "vpsrlw zmm18, zmmword ptr [{s}], 8\nvpandd zmm18, zmm18, zmm19\n"),
                        pair4!($cols, "vpandd zmm18, zmm19, zmmword ptr [{s} + 64]\n"),
                        pair4!($cols, "vpsrlw zmm18, zmmword ptr [{s} + 64], 8\nvpandd zmm18, zmm18, zmm19\n"),
                        // The minima, as `Foot::mins` has them: their sums in 10 to 17.
                        "vpandd zmm28, zmm19, zmmword ptr [{w}]\nvpsrlw zmm29, zmmword ptr [{w}], 8\n",
                        "vpandd zmm29, zmm29, zmm19\nprefetcht0 [{w} + {ahead}]\n",
                        each!($cols, join!(), zero!("zmm1"),
                            "\nvpdpwssd zmm1\\c, zmm28, dword ptr [{q} + 4*\\c]{{1to16}}\n", scale!()),
                        "vpsrlw zmm30, zmmword ptr [{s}], 6\nvpandd zmm30, zmm30, dword ptr [{parts}]{{1to16}}\n",
                        "vpsrlw zmm31, zmmword ptr [{s} + 64], 4\n",
                        "vpternlogd zmm30, zmm31, dword ptr [{parts} + 4]{{1to16}}, 0xf8\n",
                        "vpsrlw zmm31, zmmword ptr [{w}], 2\n",
                        "vpternlogd zmm30, zmm31, dword ptr [{parts} + 8]{{1to16}}, 0xf8\n",
                        each!($cols, "vpdpwssd zmm1\\c, zmm29, dword ptr [{q} + {word} + 4*\\c]{{1to16}}
                            vcvtdq2ps zmm\\c, zmm\\c"),
                        "vpsrlw zmm28, zmmword ptr [{s}], 14\nvpsrlw zmm31, zmmword ptr [{s} + 64], 12\n",
                        "vpternlogd zmm28, zmm31, dword ptr [{parts} + 4]{{1to16}}, 0xf8\n",
                        "vpsrlw zmm31, zmmword ptr [{w}], 10\n",
                        "vpternlogd zmm28, zmm31, dword ptr [{parts} + 8]{{1to16}}, 0xf8\n",
                        "vcvtph2ps zmm29, ymmword ptr [{w} + {d}]\nvcvtph2ps zmm31, ymmword ptr [{w} + {dmin}]\n",
                        "prefetcht0 [{w} + {ahead} + 64]\n",
                        each!($cols, "vpdpwssd zmm1\\c, zmm30, dword ptr [{q} + 2 * {word} + 4*\\c]{{1to16}}
                            vmulps zmm\\c, zmm\\c, zmm29"),
                        each!($cols, "vpdpwssd zmm1\\c, zmm28, dword ptr [{q} + 3 * {word} + 4*\\c]{{1to16}}"),
                        each!($cols, "vcvtdq2ps zmm1\\c, zmm1\\c
                            vmovups zmm2\\c, zmmword ptr [{a} + 64*\\c]
                            vfnmadd231ps zmm\\c, zmm1\\c, zmm31
                            vfmadd231ps zmm2\\c, zmm\\c, dword ptr [{q} + {scale} + 4*\\c]{{1to16}}
                            vmovups zmmword ptr [{a} + 64*\\c], zmm2\\c"),
                    ),
                    d = const offset_of!(K4Block, foot.d) - offset_of!(K4Block, foot),
                    dmin = const offset_of!(K4Block, foot.dmin) - offset_of!(K4Block, foot),
                    parts = in(reg) PARTS.as_ptr(),
                    inout("zmm8") _mm512_set1_epi8(15) => _, inout("zmm19") _mm512_set1_epi16(63) => _,
                    inout("zmm9") _mm512_loadu_si512(UP.as_ptr().cast()) => _,
                    out("zmm6") _, out("zmm7") _, out("zmm16") _, out("zmm17") _, out("zmm25") _,
                );
            }
        }
    };
}

k4!(k4_4, 4, "0,1,2,3");
k4!(k4_5, 5, "0,1,2,3,4");
k4!(k4_6, 6, "0,1,2,3,4,5");
k4!(k4_8, 8, "0,1,2,3,4,5,6,7");

/// Adds blocks of Q4_K times the columns to `acc`, where a loop is for so many of them: then true.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub fn k4<const NC: usize>(
    w: &[K4Block],
    ahead: usize,
    x: &[Block256<NC>],
    acc: &mut [[__m512; NC]],
) -> bool {
    let acc = acc.as_flattened_mut();
    match NC {
        4 => k4_4(w, ahead, view(x), acc),
        5 => k4_5(w, ahead, view(x), acc),
        6 => k4_6(w, ahead, view(x), acc),
        8 => k4_8(w, ahead, view(x), acc),
        _ => return false,
    }
    true
}

/// How the two groups of a pair are summed in Q6_K: `apart` in registers of their own; `above`, where eight columns leave
/// too few, in one, as [`crate::forms::raise_onto`] has it. Sums begin at minus 32 times those of the activations.
macro_rules! sums6 {
    (apart begin) => {
        ""
    };
    (apart next) => {
        ""
    };
    (apart join) => {
        join!()
    };
    (apart scale) => {
        scale!()
    };
    (apart first) => {
        "vpbroadcastd zmm1\\c, dword ptr [{start} + 4*\\c]"
    };
    (apart second) => {
        "vpbroadcastd zmm2\\c, dword ptr [{start} + {word} + 4*\\c]"
    };
    (apart register) => {
        "zmm2"
    };
    (apart low) => {
        "zmm16"
    };
    (above begin) => {
        "lea {raised}, [{x} + {first_raised}]\n"
    };
    (above next) => {
        "add {raised}, {word}\n"
    };
    (above join) => {
        "vpxord zmm20, zmm1\\c, zmm9\n"
    };
    (above scale) => {
        "vpdpwssd zmm\\c, zmm20, zmm18"
    };
    (above first) => {
        "vpbroadcastd zmm1\\c, dword ptr [{start} + 4*\\c]"
    };
    (above second) => {
        "vpslld zmm1\\c, zmm1\\c, 16\nvpaddd zmm1\\c, zmm1\\c, dword ptr [{raised} + 4*\\c]{{1to16}}"
    };
    (above register) => {
        "zmm1"
    };
    (above low) => {
        "zmm25"
    };
}

/// A group of Q6_K. Register 26 has its raw first line; `$next` bytes stand between this group and the next.
macro_rules! group6 {
    ($kind:ident, $cols:literal, $sums:expr, $first:expr, $then:expr, $next:literal, $scales:expr) => {
        concat!(
            dots!(
                $cols, $sums, "zmm28", "0", [$first, $then],
                [
                    "vmovdqu64 zmm27, zmmword ptr [{w} + 64]\nvpsrlw zmm26, zmm26, 6",
                    "vpandd zmm29, zmm8, zmm27\nvpsrlw zmm27, zmm27, 4",
                    "vpternlogd zmm26, zmm27, zmm19, 0xd8",
                    "prefetcht0 [{w} + {ahead}]"
                ]
            ),
            dots!(
                $cols, $sums, "zmm29", "1", ["", ""],
                [
                    "vmovdqu64 zmm27, zmmword ptr [{w} + 128]",
                    "vpandd zmm30, zmm8, zmm27\nvpsrlw zmm27, zmm27, 2",
                    concat!("vpternlogd zmm27, zmm26, ", sums6!($kind low), ", 0xd8"),
                    "prefetcht0 [{w} + {ahead} + 64]"
                ]
            ),
            dots!(
                $cols, $sums, "zmm30", "2", ["", ""],
                ["vpandd zmm31, zmm27, zmm8", "", $scales, "prefetcht0 [{w} + {ahead} + 128]"]
            ),
            dots!(
                $cols, $sums, "zmm31", "3", ["", ""],
                [
                    concat!("vmovdqu64 zmm26, zmmword ptr [{w} + 192 + ", $next, "]"),
                    "vpandd zmm28, zmm8, zmm26", "", ""
                ]
            ),
            "add {w}, 192 + ", $next, "\nadd {q}, 4 * {word}\n",
        )
    };
}

/// A pair of groups of Q6_K, then its scales, `$at` bytes from `s`.
macro_rules! pair6 {
    ($kind:ident, $cols:literal, [$first:expr, $then:expr], $next:literal, $at:literal) => {
        concat!(
            group6!($kind, $cols, "zmm1", concat!($first, sums6!($kind first)), $then, "0", ""),
            group6!(
                $kind, $cols, sums6!($kind register), sums6!($kind second), "", $next,
                concat!("vpmovsxbw zmm18, ymmword ptr [{s} + ", $at, "]")
            ),
            "add {start}, 2 * {word}\n", sums6!($kind next),
        )
    };
}

/// A quarter of Q6_K, after whose groups `$next` bytes follow up to the next one's.
macro_rules! quarter6 {
    ($kind:ident, $cols:literal, $next:literal) => {
        concat!(
            "lea {s}, [{w} - 64]\nprefetcht0 [{s} + {ahead}]\n",
            pair6!($kind, $cols, [sums6!($kind join), sums6!($kind scale)], "0", "0"),
            pair6!($kind, $cols, [sums6!($kind join), sums6!($kind scale)], $next, "32"),
        )
    };
}

macro_rules! k6 {
    ($name:ident, $nc:literal, $cols:literal, $kind:ident, $nine:expr, $($own:tt)*) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        fn $name(w: &[K6Block], ahead: usize, x: &[Block256<$nc>], acc: &mut [__m512]) {
            let blocks = x.len().min(w.len() / (acc.len() / $nc).max(1));
            if blocks == 0 || acc.len() < $nc {
                return;
            }
            // SAFETY: as in `k4!`; `w` passes a block's quarters, `s` reads the scales of each, and what is read after the
            // last quarter is the steps; `start` passes beginnings of sums.
            unsafe {
                run!(
                    (w, ahead, x, acc, blocks, $nc, size_of::<K6Block>() - offset_of!(K6Block, d)),
                    blocks!(
                        "mov {s}, {w}\nprefetcht0 [{w} + {ahead}]\nadd {w}, 64\nlea {start}, [{x} + {first_start}]\n",
                        sums6!($kind begin),
                        "vmovdqu64 zmm26, zmmword ptr [{w}]\nvpandd zmm28, zmm8, zmm26\n",
                        each!($cols, zero!("zmm")),
                        pair6!($kind, $cols, ["", ""], "0", "0"),
                        pair6!($kind, $cols, [sums6!($kind join), sums6!($kind scale)], "64", "32"),
                        quarter6!($kind, $cols, "64"),
                        quarter6!($kind, $cols, "64"),
                        quarter6!($kind, $cols, "0"),
                        "prefetcht0 [{w} + {ahead}]\nvmovups zmm28, zmmword ptr [{w}]\n",
                        each!($cols, sums6!($kind join), sums6!($kind scale)),
                        each!($cols, "vcvtdq2ps zmm\\c, zmm\\c
                            vmovups zmm1\\c, zmmword ptr [{a} + 64*\\c]
                            vmulps zmm\\c, zmm\\c, zmm28"),
                        each!($cols, "vfmadd231ps zmm1\\c, zmm\\c, dword ptr [{q} + {scale} + 4*\\c]{{1to16}}
                            vmovups zmmword ptr [{a} + 64*\\c], zmm1\\c"),
                    ),
                    first_start = const offset_of!(Block256<$nc>, start16), start = out(reg) _,
                    inout("zmm8") _mm512_set1_epi8(63) => _, inout("zmm9") $nine => _,
                    inout("zmm19") _mm512_set1_epi8(!3) => _, $($own)*
                );
            }
        }
    };
}

/// [`k6`] with registers of its own for each group of a pair.
macro_rules! k6_apart {
    ($name:ident, $nc:literal, $cols:literal) => {
        k6!(
            $name, $nc, $cols, apart, _mm512_loadu_si512(UP.as_ptr().cast()),
            inout("zmm16") _mm512_set1_epi8(15) => _, out("zmm25") _,
        );
    };
}

k6_apart!(k6_4, 4, "0,1,2,3");
k6_apart!(k6_5, 5, "0,1,2,3,4");
k6_apart!(k6_6, 6, "0,1,2,3,4,5");
k6!(
    k6_8, 8, "0,1,2,3,4,5,6,7", above, _mm512_set1_epi32(0x8000),
    first_raised = const offset_of!(Block256<8>, raised16), raised = out(reg) _,
    inout("zmm25") _mm512_set1_epi8(15) => _, out("zmm6") _, out("zmm7") _, out("zmm16") _, out("zmm17") _,
);

/// The same for Q6_K.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub fn k6<const NC: usize>(
    w: &[K6Block],
    ahead: usize,
    x: &[Block256<NC>],
    acc: &mut [[__m512; NC]],
) -> bool {
    let acc = acc.as_flattened_mut();
    match NC {
        4 => k6_4(w, ahead, view(x), acc),
        5 => k6_5(w, ahead, view(x), acc),
        6 => k6_6(w, ahead, view(x), acc),
        8 => k6_8(w, ahead, view(x), acc),
        _ => return false,
    }
    true
}
