//! A matrix of weights: packed in the arena, or packed band by band at each use from the mapped file.
//!
//! A band is a few panels whose blocks stand by turns: the first block of each, then the second of each. Read in rising order,
//! it meets each block of the columns once for all its panels, so that the columns come from the first-level cache.

use crate::arena::Arena;
use crate::forms::{FormKind, pack_panel, table};
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::LANES;
use muser_core::{Model, ModelError, Slot, TensorView};
use muser_format::DType;
use std::cell::RefCell;
use std::ops::Range;

/// Most panels of a band.
pub const BAND: usize = 4;

/// One matrix.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Which weight.
    pub slot: Slot,
    /// The file's type.
    pub dtype: DType,
    /// The packed form.
    pub form: FormKind,
    /// Outputs.
    pub rows: usize,
    /// Factor on every output.
    pub scale: f32,
    /// What the codes select from.
    pub table: [u8; 16],
    /// Bytes of a panel of 16 rows.
    pub panel_bytes: usize,
    /// Panels of a band; the last one may have fewer.
    pub band: usize,
    /// Where the panels begin in the arena; none where they are packed at each use.
    pub at: Option<usize>,
}

thread_local! {
    /// Panels packed for one use, in words so that their blocks are aligned.
    static PANELS: RefCell<Vec<i32>> = const { RefCell::new(vec![]) };
}

impl Matrix {
    /// Shape of a weight that so many threads share.
    pub fn new(slot: Slot, t: &TensorView<'_>, threads: usize) -> Self {
        let form = FormKind::of(t.dtype);
        Matrix {
            slot,
            dtype: t.dtype,
            form,
            rows: t.rows,
            scale: t.scale,
            table: table(t.dtype),
            panel_bytes: form.panel_bytes(t.cols),
            // Bands are what threads claim: few panels make small ones.
            band: (t.rows.div_ceil(LANES) / (8 * threads)).clamp(1, BAND),
            at: None,
        }
    }

    /// Panels of 16 rows.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Bands of panels.
    pub fn bands(&self) -> usize {
        self.panels().div_ceil(self.band)
    }

    /// Bytes of all panels.
    pub fn bytes(&self) -> usize {
        self.panels() * self.panel_bytes
    }

    /// Packs the panels of one band.
    fn pack(&self, t: &TensorView<'_>, panels: Range<usize>, to: &mut [u8]) {
        let bytes = t.row_bytes();
        // Past the matrix's end the last row stands in: those outputs are thrown away.
        let row = |r: usize| {
            let r = r.min(self.rows - 1);
            &t.data[r * bytes..(r + 1) * bytes]
        };
        for (at, panel) in panels.clone().enumerate() {
            let rows = std::array::from_fn(|r| row(panel * LANES + r));
            pack_panel(self.dtype, &rows, to, at, panels.len());
        }
    }

    /// Panels of band `band`.
    fn panels_of(&self, band: usize) -> Range<usize> {
        band * self.band..self.panels().min((band + 1) * self.band)
    }

    /// Calls `use_panels` with the packed panels of `bands`.
    pub fn with_panels<R>(
        &self,
        arena: &Arena,
        model: &Model,
        bands: Range<usize>,
        use_panels: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, ModelError> {
        let first = bands.start * self.band;
        let bytes = (self.panels().min(bands.end * self.band) - first) * self.panel_bytes;
        if let Some(at) = self.at {
            return Ok(use_panels(&arena.bytes()[at + first * self.panel_bytes..][..bytes]));
        }
        let t = model.tensor(self.slot)?;
        // Taken, not borrowed: two matrices may be in use at once.
        let mut words = PANELS.take();
        words.clear();
        words.resize(bytes.div_ceil(4), 0);
        let bytes = &mut crate::plain::view_mut::<u8, i32>(&mut words)[..bytes];
        for (band, to) in bands.zip(bytes.chunks_mut(self.band * self.panel_bytes)) {
            self.pack(&t, self.panels_of(band), to);
        }
        let result = use_panels(bytes);
        PANELS.set(words);
        Ok(result)
    }
}

/// Packs all panels of a matrix, on all threads.
pub fn pack_matrix(pool: &Pool, model: &Model, matrix: &Matrix, to: &mut [u8]) -> Result<(), ModelError> {
    let t = model.tensor(matrix.slot)?;
    let to = SharedMut::new(to);
    pool.run(matrix.bands(), |band| {
        let panels = matrix.panels_of(band);
        // SAFETY: each unit has its own panels.
        let to = unsafe { to.part(panels.start * matrix.panel_bytes, panels.len() * matrix.panel_bytes) };
        matrix.pack(&t, panels, to);
    });
    Ok(())
}
