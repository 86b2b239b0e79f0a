//! The block types of ggml: their table, and `dequantize`, the exact scalar decoder of each.
//!
//! A block holds `block_len` consecutive values of a row in `block_bytes` bytes. Layouts are those of ggml's
//! `ggml-common.h`; every file below states its own. All decoders work in f32 and round each operation once, in the
//! order that the file's formula has: that order is part of the contract of the strict lane.

mod float;
mod fp4;
mod iq1;
mod iq2;
mod iq3;
mod iq4;
pub mod iq_grid;
pub use fp4::E2M1_DOUBLED;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_k;
mod q5_0;
mod q5_k;
mod q6_k;
mod q8_0;
mod tq;

use crate::FormatError;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $id:literal, $name:literal, $len:literal, $bytes:literal;)*) => {
        /// A ggml weight type.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DType {
            $($(#[$doc])* $variant,)*
        }

        impl DType {
            /// Every type, in the order of the enum.
            pub const ALL: &[DType] = &[$(DType::$variant),*];

            /// The type with this number in a GGUF file (ggml's `ggml_type`).
            pub fn from_ggml(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// The number of this type in a GGUF file.
            pub fn ggml_id(self) -> u32 {
                match self {
                    $(Self::$variant => $id,)*
                }
            }

            /// The name that ggml gives it, such as `Q4_K`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The type of this name; upper and lower case are the same.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|dtype| dtype.name().eq_ignore_ascii_case(name))
            }

            /// Values in a block.
            pub fn block_len(self) -> usize {
                match self {
                    $(Self::$variant => $len,)*
                }
            }

            /// Bytes of a block.
            pub fn block_bytes(self) -> usize {
                match self {
                    $(Self::$variant => $bytes,)*
                }
            }
        }
    };
}

dtypes! {
    /// IEEE single precision.
    F32 = 0, "F32", 1, 4;
    /// IEEE half precision.
    F16 = 1, "F16", 1, 2;
    /// The upper half of a single.
    BF16 = 30, "BF16", 1, 2;
    /// 4 bits, scale.
    Q4_0 = 2, "Q4_0", 32, 18;
    /// 4 bits, scale and minimum.
    Q4_1 = 3, "Q4_1", 32, 20;
    /// 5 bits, scale.
    Q5_0 = 6, "Q5_0", 32, 22;
    /// 5 bits, scale and minimum.
    Q5_1 = 7, "Q5_1", 32, 24;
    /// 8 bits, scale.
    Q8_0 = 8, "Q8_0", 32, 34;
    /// 2 bits, 4-bit scales and minima of 16 values.
    Q2K = 10, "Q2_K", 256, 84;
    /// 3 bits, 6-bit scales of 16 values.
    Q3K = 11, "Q3_K", 256, 110;
    /// 4 bits, 6-bit scales and minima of 32 values.
    Q4K = 12, "Q4_K", 256, 144;
    /// 5 bits, 6-bit scales and minima of 32 values.
    Q5K = 13, "Q5_K", 256, 176;
    /// 6 bits, 8-bit scales of 16 values.
    Q6K = 14, "Q6_K", 256, 210;
    /// 1.56 bits: a codebook of 2048 ternary groups of 8, 3-bit scales of 32 values.
    Iq1S = 19, "IQ1_S", 256, 50;
    /// 1.75 bits: the same codebook, 3-bit scales of 16 values.
    Iq1M = 29, "IQ1_M", 256, 56;
    /// 2.06 bits: a codebook of 256 groups of 8, signs by parity.
    Iq2Xxs = 16, "IQ2_XXS", 256, 66;
    /// 2.31 bits: a codebook of 512 groups of 8, signs by parity.
    Iq2Xs = 17, "IQ2_XS", 256, 74;
    /// 2.56 bits: a codebook of 1024 groups of 8, all signs stored.
    Iq2S = 22, "IQ2_S", 256, 82;
    /// 3.06 bits: a codebook of 256 groups of 4, signs by parity.
    Iq3Xxs = 18, "IQ3_XXS", 256, 98;
    /// 3.44 bits: a codebook of 512 groups of 4, all signs stored.
    Iq3S = 21, "IQ3_S", 256, 110;
    /// 4 bits into 16 uneven steps, scale.
    Iq4Nl = 20, "IQ4_NL", 32, 18;
    /// 4 bits into 16 uneven steps, 6-bit scales of 32 values.
    Iq4Xs = 23, "IQ4_XS", 256, 136;
    /// Ternary, five values a byte.
    Tq1_0 = 34, "TQ1_0", 256, 54;
    /// Ternary, four values a byte.
    Tq2_0 = 35, "TQ2_0", 256, 66;
    /// OCP microscaling FP4: E2M1 values, one E8M0 scale.
    Mxfp4 = 39, "MXFP4", 32, 17;
    /// NVIDIA FP4: E2M1 values, a UE4M3 scale of 16 values.
    Nvfp4 = 40, "NVFP4", 64, 36;
}

impl DType {
    /// Bytes of a row of `cols` values; `None` where `cols` is not whole blocks or the size overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }
}

/// Decodes whole blocks into `out`, which must hold exactly their values.
///
/// # Errors
/// [`FormatError::BlockLength`] where `blocks` is not whole blocks or `out` has another length.
pub fn dequantize(dtype: DType, blocks: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    if dtype.row_bytes(out.len()) != Some(blocks.len()) {
        return Err(FormatError::BlockLength { dtype, bytes: blocks.len(), values: out.len() });
    }
    match dtype {
        DType::F32 => each(blocks, out, float::f32),
        DType::F16 => each(blocks, out, float::f16),
        DType::BF16 => each(blocks, out, float::bf16),
        DType::Q4_0 => each(blocks, out, q4_0::q4_0),
        DType::Q4_1 => each(blocks, out, q4_0::q4_1),
        DType::Q5_0 => each(blocks, out, q5_0::q5_0),
        DType::Q5_1 => each(blocks, out, q5_0::q5_1),
        DType::Q8_0 => each(blocks, out, q8_0::q8_0),
        DType::Q2K => each(blocks, out, q2_k::q2_k),
        DType::Q3K => each(blocks, out, q3_k::q3_k),
        DType::Q4K => each(blocks, out, q4_k::q4_k),
        DType::Q5K => each(blocks, out, q5_k::q5_k),
        DType::Q6K => each(blocks, out, q6_k::q6_k),
        DType::Iq1S => each(blocks, out, iq1::iq1_s),
        DType::Iq1M => each(blocks, out, iq1::iq1_m),
        DType::Iq2Xxs => each(blocks, out, iq2::iq2_xxs),
        DType::Iq2Xs => each(blocks, out, iq2::iq2_xs),
        DType::Iq2S => each(blocks, out, iq2::iq2_s),
        DType::Iq3Xxs => each(blocks, out, iq3::iq3_xxs),
        DType::Iq3S => each(blocks, out, iq3::iq3_s),
        DType::Iq4Nl => each(blocks, out, iq4::iq4_nl),
        DType::Iq4Xs => each(blocks, out, iq4::iq4_xs),
        DType::Tq1_0 => each(blocks, out, tq::tq1_0),
        DType::Tq2_0 => each(blocks, out, tq::tq2_0),
        DType::Mxfp4 => each(blocks, out, fp4::mxfp4),
        DType::Nvfp4 => each(blocks, out, fp4::nvfp4),
    }
    Ok(())
}

/// Runs one decoder over all blocks. Block and output sizes are part of the decoder's type, so inside it every index
/// is checked against a constant.
fn each<const BYTES: usize, const LEN: usize>(
    blocks: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    let (blocks, _) = blocks.as_chunks::<BYTES>();
    let (out, _) = out.as_chunks_mut::<LEN>();
    for (block, values) in blocks.iter().zip(out) {
        decode(block, values);
    }
}

/// The `N` bytes at `OFFSET` of a block.
fn field<const OFFSET: usize, const N: usize, const BYTES: usize>(block: &[u8; BYTES]) -> &[u8; N] {
    const { assert!(OFFSET + N <= BYTES, "a field lies inside its block") };
    match block[OFFSET..].first_chunk() {
        Some(field) => field,
        None => unreachable!("asserted above"),
    }
}

/// The half-precision number at `OFFSET` of a block, widened (exactly).
fn half_at<const OFFSET: usize, const BYTES: usize>(block: &[u8; BYTES]) -> f32 {
    half::f16::from_le_bytes(*field::<OFFSET, 2, BYTES>(block)).to_f32()
}
