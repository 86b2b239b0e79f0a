//! Weights times activations: one row of activations reads the weights as they stream by; more rows share decoded ones.

use super::codec::{Codec, with_codec};
use super::dot::{Expand, Fold, Line, Pair, Tiles};
use crate::isa::Isa;
use crate::kernels::matmul::Context;
use crate::plain::{view, view_mut};
use crate::shared::SharedMut;
use crate::simd::dispatch;
use muser_core::strict::{LANES, dot};
use muser_core::{ModelError, Slot, TensorView};
use muser_format::DType;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Mutex;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A thread's memory.
#[derive(Default)]
struct Scratch {
    /// Decoded weights.
    weights: Vec<Line>,
    /// Lanes of products.
    lanes: Vec<[Line; 2]>,
    /// Their sums.
    sums: Vec<f32>,
}

/// A weight of the file and the rows (`tensor.rows` wide) that take its products.
pub struct Job<'a> {
    /// Which weight.
    pub slot: Slot,
    /// Result.
    pub out: &'a mut [f32],
}

/// Rows of a weight that one unit takes.
const UNIT: usize = 16;
/// Rows of activations that share decoded weights: their lanes, 256 bytes a product, stay in the second-level cache.
const COLUMNS: usize = 64;
/// Elements that are decoded at a time: whole blocks of every type; those of a unit stay in the cache too.
const CHUNK: usize = 512;

/// Each weight times every row of `input`.
pub fn project(ctx: Context<'_>, input: &[f32], jobs: &mut [Job<'_>]) -> Result<(), ModelError> {
    let jobs = jobs
        .iter_mut()
        .map(|j| Ok((ctx.model.tensor(j.slot)?, SharedMut::new(&mut *j.out))))
        .collect::<Result<Vec<(TensorView<'_>, SharedMut<'_, f32>)>, ModelError>>()?;
    let Some(cols) = jobs.first().map(|(t, _)| t.cols) else { return Ok(()) };
    let units: usize = jobs.iter().map(|(t, _)| t.rows.div_ceil(UNIT)).sum();
    let error = Mutex::new(None);
    let mut lines = vec![];
    for (block, input) in input.chunks(COLUMNS * cols).enumerate() {
        lines.resize(input.len().div_ceil(16), Line([0.0; 16]));
        view_mut::<f32, Line>(&mut lines)[..input.len()].copy_from_slice(input);
        let task = |t, out| Task { isa: ctx.isa, t, input, lines: &lines, out, first: block * COLUMNS };
        ctx.pool.run(units, |mut unit| {
            for (t, out) in &jobs {
                let here = t.rows.div_ceil(UNIT);
                if unit >= here {
                    unit -= here;
                    continue;
                }
                let rows = unit * UNIT..t.rows.min((unit + 1) * UNIT);
                let done = SCRATCH.with_borrow_mut(|scratch| task(t, out).rows(rows, scratch));
                if let (Err(e), Ok(mut slot)) = (done, error.lock()) {
                    slot.get_or_insert(e);
                }
                return;
            }
        });
    }
    error.into_inner().ok().flatten().map_or(Ok(()), Err)
}

/// One weight and a block of activation rows.
struct Task<'a> {
    isa: Isa,
    t: &'a TensorView<'a>,
    input: &'a [f32],
    /// The same in lines.
    lines: &'a [Line],
    out: &'a SharedMut<'a, f32>,
    /// Row of the batch that the block begins with.
    first: usize,
}

impl Task<'_> {
    fn rows(&self, rows: Range<usize>, scratch: &mut Scratch) -> Result<(), ModelError> {
        let t = self.t;
        if !t.cols.is_multiple_of(LANES) {
            return self.odd(rows);
        }
        let one = self.input.len() == t.cols;
        if one && with_codec!(t.dtype, stream(self, rows.clone()), else false) {
            return Ok(());
        }
        match (self.isa, one) {
            (Isa::Avx512, true) => self.shared::<4, 1>(rows, scratch),
            (Isa::Avx512, false) => self.shared::<4, 4>(rows, scratch),
            (_, true) => self.shared::<2, 1>(rows, scratch),
            (_, false) => self.shared::<2, 2>(rows, scratch),
        }
    }

    /// The blocks of a row.
    fn blocks(&self, row: usize) -> &[u8] {
        &self.t.data[row * self.t.row_bytes()..][..self.t.row_bytes()]
    }

    /// Takes the product of weight row `r` and activation row `c` of the block.
    fn put(&self, r: usize, c: usize, y: f32) {
        // SAFETY: each unit has its own weight rows, so its own element of every row.
        let to = unsafe { self.out.part((self.first + c) * self.t.rows + r, 1) };
        to[0] = if self.t.scale == 1.0 { y } else { y * self.t.scale };
    }

    /// Rows that don't fill the last step: floats only.
    fn odd(&self, rows: Range<usize>) -> Result<(), ModelError> {
        let mut weights = vec![0.0; self.t.cols];
        for r in rows {
            muser_format::dequantize(self.t.dtype, self.blocks(r), &mut weights)?;
            for (c, x) in self.input.chunks_exact(self.t.cols).enumerate() {
                self.put(r, c, dot(&weights, x));
            }
        }
        Ok(())
    }

    /// Rows that are decoded into the cache, then multiplied in tiles of `R` by `C`.
    fn shared<const R: usize, const C: usize>(
        &self,
        rows: Range<usize>,
        scratch: &mut Scratch,
    ) -> Result<(), ModelError> {
        let (dtype, cols, isa) = (self.t.dtype, self.t.cols, self.isa);
        let Scratch { weights, lanes, sums } = scratch;
        let held = rows.len().next_multiple_of(R);
        let columns: Vec<&[Line]> = self.lines.chunks_exact(cols / 16).collect();
        let tiles = columns.len().div_ceil(C);
        lanes.clear();
        lanes.resize(held * tiles * C, [Line([0.0; 16]); 2]);
        let mut x = columns.clone();
        for first in (0..cols).step_by(CHUNK) {
            let elements = CHUNK.min(cols - first);
            let len = elements / 16;
            weights.resize(held * len, Line([0.0; 16]));
            for (r, to) in weights.chunks_exact_mut(len).enumerate() {
                // The last row stands in for what a tile lacks.
                let blocks = self.blocks((rows.start + r).min(rows.end - 1));
                let bytes = |n: usize| n / dtype.block_len() * dtype.block_bytes();
                let blocks = &blocks[bytes(first)..][..bytes(elements)];
                if !with_codec!(dtype, expand(isa, blocks, to), else false) {
                    muser_format::dequantize(dtype, blocks, view_mut::<f32, Line>(to))?;
                }
            }
            x.iter_mut().zip(&columns).for_each(|(x, column)| *x = &column[first / 16..][..len]);
            dispatch(isa, Tiles::<R, C> { w: weights, len, x: &x, lanes });
        }
        sums.resize(lanes.len(), 0.0);
        dispatch(isa, Fold { lanes, to: sums });
        for (tile, sums) in sums.chunks_exact(R * C).enumerate() {
            for (i, y) in sums.iter().enumerate() {
                let (r, c) = (rows.start + tile / tiles * R + i / C, tile % tiles * C + i % C);
                if r < rows.end && c < columns.len() {
                    self.put(r, c, *y);
                }
            }
        }
        Ok(())
    }
}

/// One row of activations; true, as it is done.
fn stream<C: Codec>(task: &Task<'_>, rows: Range<usize>) -> bool {
    let ahead = 2 * task.t.row_bytes();
    for r in rows.clone().step_by(2) {
        let next = (r + 1).min(rows.end - 1);
        let blocks = [r, next].map(|r| view::<C::Block, u8>(task.blocks(r)));
        let y = dispatch(task.isa, Pair::<C> { rows: blocks, ahead, x: task.lines });
        task.put(r, 0, y[0]);
        task.put(next, 0, y[1]);
    }
    true
}

/// Decodes blocks; true, as it is done.
fn expand<C: Codec>(isa: Isa, blocks: &[u8], to: &mut [Line]) -> bool {
    dispatch(isa, Expand::<C> { blocks: view(blocks), to });
    true
}
