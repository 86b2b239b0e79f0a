//! A matrix of weights: packed in the arena, or packed panel by panel at each use from the mapped file.

use crate::arena::Arena;
use crate::forms::{FormKind, pack_panel, table};
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::LANES;
use muser_core::{Model, ModelError, Slot, TensorView};
use muser_format::DType;
use std::cell::RefCell;
use std::ops::Range;

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
    /// Where the panels begin in the arena; none where they are packed at each use.
    pub at: Option<usize>,
}

thread_local! {
    /// Panels packed for one use, in words so that their blocks are aligned.
    static PANELS: RefCell<Vec<i32>> = const { RefCell::new(vec![]) };
}

impl Matrix {
    /// Shape and place of a weight.
    pub fn new(slot: Slot, t: &TensorView<'_>, at: Option<usize>) -> Self {
        let form = FormKind::of(t.dtype);
        Matrix {
            slot,
            dtype: t.dtype,
            form,
            rows: t.rows,
            scale: t.scale,
            table: table(t.dtype),
            panel_bytes: form.panel_bytes(t.cols),
            at,
        }
    }

    /// Panels of 16 rows.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Bytes of all panels.
    pub fn bytes(&self) -> usize {
        self.panels() * self.panel_bytes
    }

    fn pack(&self, t: &TensorView<'_>, panel: usize, to: &mut [u8]) {
        let bytes = t.row_bytes();
        // Past the matrix's end the last row stands in: those outputs are thrown away.
        let row = |r: usize| {
            let r = (panel * LANES + r).min(self.rows - 1);
            &t.data[r * bytes..(r + 1) * bytes]
        };
        pack_panel(self.dtype, &std::array::from_fn(row), to);
    }

    /// Calls `use_panels` with the packed panels.
    pub fn with_panels<R>(
        &self,
        arena: &Arena,
        model: &Model,
        panels: Range<usize>,
        use_panels: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, ModelError> {
        let bytes = panels.len() * self.panel_bytes;
        if let Some(at) = self.at {
            return Ok(use_panels(&arena.bytes()[at + panels.start * self.panel_bytes..][..bytes]));
        }
        let t = model.tensor(self.slot)?;
        // Taken, not borrowed: two matrices may be in use at once.
        let mut words = PANELS.take();
        words.clear();
        words.resize(bytes.div_ceil(4), 0);
        let bytes = &mut crate::plain::view_mut::<u8, i32>(&mut words)[..bytes];
        for (panel, to) in panels.zip(bytes.chunks_exact_mut(self.panel_bytes)) {
            self.pack(&t, panel, to);
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
    pool.run(matrix.panels(), |panel| {
        // SAFETY: each unit has its own panel.
        let to = unsafe { to.part(panel * matrix.panel_bytes, matrix.panel_bytes) };
        matrix.pack(&t, panel, to);
    });
    Ok(())
}
