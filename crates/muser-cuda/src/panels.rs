//! How the strict lane keeps a matrix: the forms of kernels/panels.cuh.

use muser_format::DType;

/// Layout of a matrix of the strict lane; the numbers are those of kernels/panels.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Form {
    F32 = 0,
    F16 = 1,
    BF16 = 2,
    Nibble = 3,
    NibbleMin = 4,
    NibbleMinSigned = 5,
    Table = 6,
    Fp4 = 7,
    Byte = 8,
    ByteFine = 9,
    ByteMin = 10,
    ByteMinSigned = 11,
}

/// Rows of a panel.
pub(crate) const PANEL: usize = 4;

impl Form {
    /// The form that a type is kept in; types without one of their own become f32.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Form::F16,
            DType::BF16 => Form::BF16,
            DType::Q8_0 => Form::Byte,
            DType::Q4_0 => Form::Nibble,
            DType::Q4K => Form::NibbleMin,
            DType::Q5K => Form::ByteMin,
            DType::Q6K | DType::Q3K => Form::ByteFine,
            DType::Iq4Nl | DType::Iq4Xs => Form::Table,
            DType::Nvfp4 => Form::Fp4,
            _ => Form::F32,
        }
    }

    /// Columns of a tile.
    pub fn columns(self) -> usize {
        match self {
            Form::F32 => 64,
            Form::F16 | Form::BF16 => 128,
            _ => 256,
        }
    }

    /// The form where a scale has a sign; forms that have no minimum bear it.
    pub fn signed(self) -> Self {
        match self {
            Form::NibbleMin => Form::NibbleMinSigned,
            Form::ByteMin => Form::ByteMinSigned,
            other => other,
        }
    }

    /// Bytes of a tile: codes, then scales and minima.
    pub fn tile(self) -> usize {
        match self {
            Form::F32 | Form::F16 | Form::BF16 => 1024,
            Form::Nibble | Form::Table => 512 + 128,
            Form::NibbleMin | Form::NibbleMinSigned | Form::Fp4 => 512 + 256,
            Form::Byte => 1024 + 128,
            Form::ByteFine | Form::ByteMin | Form::ByteMinSigned => 1024 + 256,
        }
    }

    /// Bytes of a matrix; edges are padded to whole tiles, and to pairs of panels.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        rows.next_multiple_of(2 * PANEL) / PANEL * cols.div_ceil(self.columns()) * self.tile()
    }
}

/// A matrix of the strict lane.
#[derive(Clone, Copy)]
pub(crate) struct Panels {
    pub ptr: u64,
    pub form: Form,
    pub rows: usize,
    pub cols: usize,
    /// What products are multiplied with.
    pub scale: f32,
}
