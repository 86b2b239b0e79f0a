//! Weights times activations: every output is a row of a panel, every column a row of the batch.
//!
//! One column: each weight is read once and used once; memory binds. 2 to 16 columns: the same read serves all of them.
//! Prefill: a few panels stay in the second-level cache while all tiles of columns pass; the dot units bind.
//! Sums run over blocks in order, one lane a row, so a column's result does not depend on its neighbours.

use crate::activations::{Prepared, Scales, Tile};
use crate::arena::{Arena, Pages};
use crate::forms::{Form, FormKind, NEAR, Opens, with_form, with_opening};
use crate::isa::Isa;
use crate::math::SiluMul;
use crate::plain::{Plain, view, view_mut};
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::{Kernel, LANES, Simd, dispatch};
use crate::weights::{BAND, Matrix};
use muser_core::{Model, ModelError};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Mutex;

/// Most columns of a tile.
const COLUMNS: usize = 8;
/// Most panels that take turns on a tile's columns.
pub const PANELS: usize = BAND;
/// Tiles of columns that make unpacking a panel first worth it.
const OPEN: usize = 4;
/// Panels of one unit take about this much of the second-level cache in prefill.
const CACHE: usize = 520 << 10;
/// Bytes between a load and its prefetch for four to six columns of one stream; for eight twice as many.
const FAR: usize = 2304;
/// Results of a column that are so many go past the caches while weights stream through them: the lines they stand on have long
/// left, and fetching them only to overwrite them would hold the weights up.
const LOGITS: usize = 1 << 16;
/// Bytes of the longest run of a matrix that a thread claims with few columns.
const RUN: usize = 4 << 20;

/// What a multiplication needs besides its operands.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Threads.
    pub pool: &'a Pool,
    /// Instructions.
    pub isa: Isa,
    /// Packed weights.
    pub arena: &'a Arena,
    /// Weights as they stand in the file.
    pub model: &'a Model,
}

/// Sums of a panel and a tile: 16 rows of each column.
pub type Out = [[f32; LANES]; COLUMNS];

/// Panels times a tile of columns, added to `out`. Weights that come from memory for few columns: block after block as they
/// stand. Else, where a form has a loop of its own, a panel meets all columns at once; where it has none, panels take turns
/// of 256 columns, so that those stay in the first-level cache for all of them; meanwhile each panel's next blocks arrive.
struct TileOf<'a, F: Form, const NC: usize> {
    /// Whole panels.
    panels: &'a [F::Block],
    /// Blocks of a panel.
    blocks: usize,
    /// Panels of a band.
    band: usize,
    /// Block that `x` begins at.
    first: usize,
    table: &'a [u8; 16],
    x: &'a [F::X<NC>],
    /// Whether the weights come from memory.
    stream: bool,
    /// Bytes from the end of `x` to the same blocks of the next tile.
    skip: usize,
    /// A panel's sums each.
    out: &'a mut [Out],
}

impl<F: Form, const NC: usize> Kernel for TileOf<'_, F, NC> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let table = s.table(self.table);
        let (blocks, first) = (self.blocks, self.first);
        if NC == 1 || self.stream {
            // Up to three columns wait for memory only, and the processor follows them by itself.
            let ahead = match NC {
                ..4 => 0,
                4..8 => FAR,
                _ => 2 * FAR,
            };
            for (band, out) in self.panels.chunks(blocks * self.band).zip(self.out.chunks_mut(self.band)) {
                let mut acc = [[s.splat_f(0.0); NC]; PANELS];
                for (acc, out) in acc.iter_mut().zip(&*out) {
                    for (acc, out) in acc.iter_mut().zip(out) {
                        *acc = s.load_f(out);
                    }
                }
                let count = out.len();
                let blocks = &band[first * count..];
                let done = F::band(s, blocks, ahead, self.x, &mut acc[..count]);
                let turns = if done { &[] } else { self.x };
                for (blocks, x) in blocks.chunks_exact(count).zip(turns) {
                    for (w, acc) in blocks.iter().zip(&mut acc) {
                        let mut sums = *acc;
                        F::multiply::<S, NC>(s, w, ahead, table, x, &mut sums);
                        *acc = sums;
                    }
                }
                for (out, acc) in out.iter_mut().zip(acc) {
                    for (out, acc) in out.iter_mut().zip(acc) {
                        s.store_f(out, acc);
                    }
                }
            }
            return;
        }
        let mut acc = [[s.splat_f(0.0); NC]; PANELS];
        for (acc, out) in acc.iter_mut().zip(&*self.out) {
            for (acc, out) in acc.iter_mut().zip(out) {
                *acc = s.load_f(out);
            }
        }
        let panels = self.panels.len() / blocks;
        // From a panel's block to its next one, and to the next panel's.
        let (step, next_panel) = if self.band == 1 { (1, blocks) } else { (panels, 1) };
        let mut done = false;
        for (p, acc) in acc.iter_mut().enumerate().take(panels) {
            done = step == 1 && F::run(s, &self.panels[p * blocks + first..], self.x, acc);
        }
        let turn = 256usize.div_ceil(F::COLS);
        let turns = if done { &[] } else { self.x };
        for (t, x) in turns.chunks(turn).enumerate() {
            let at = first + t * turn;
            // Where the same panel goes on, or at its end the panel that follows the last one.
            let next = if at + turn < blocks { turn * step } else { panels * blocks - at * step };
            let ahead = if NC < 4 { NEAR } else { next * size_of::<F::Block>() };
            let columns = view::<u8, F::X<NC>>(x);
            let share = columns.len().div_ceil(panels);
            // At the end of `x` the next tile's columns follow.
            let skip = if (t + 1) * turn < self.x.len() { 0 } else { self.skip };
            for (p, acc) in acc.iter_mut().enumerate().take(panels) {
                // The columns' next block, a share with each panel.
                let share = (p * share).min(columns.len())..((p + 1) * share).min(columns.len());
                s.fetch(&columns[share], columns.len() + skip);
                let mut sums = *acc;
                for (w, x) in self.panels[p * next_panel + at * step..].iter().step_by(step).zip(x) {
                    F::multiply::<S, NC>(s, w, ahead, table, x, &mut sums);
                }
                *acc = sums;
            }
        }
        for (out, acc) in self.out.iter_mut().zip(acc) {
            for (out, acc) in out.iter_mut().zip(acc) {
                s.store_f(out, acc);
            }
        }
    }
}

/// Whole bands of a matrix.
#[derive(Clone, Copy)]
pub struct Panels<'a> {
    /// One band, or as many as are wanted where they come from memory.
    pub bytes: &'a [u8],
    /// Form of their blocks.
    pub form: FormKind,
    /// What their codes select from.
    pub table: &'a [u8; 16],
    /// Blocks of a panel.
    pub blocks: usize,
    /// Panels of a band: one where panels stand one after the other.
    pub band: usize,
}

/// Blocks of panels to multiply.
#[derive(Clone)]
struct Piece<'a> {
    panels: Panels<'a>,
    /// Whether the blocks are unpacked: then the panels hold those of `run` only, one panel after the other.
    opened: bool,
    /// Whether few tiles meet them, so that they come from memory.
    stream: bool,
    run: Range<usize>,
}

/// Adds the products of a piece and a tile of `width` columns, all of whose blocks `x` holds, to `out`.
fn multiply(isa: Isa, piece: Piece<'_>, width: usize, x: &[i32], out: &mut [Out]) {
    fn tile<F: Form>(isa: Isa, piece: Piece<'_>, width: usize, x: &[i32], out: &mut [Out]) {
        let Piece { panels: Panels { bytes, table, blocks, band, .. }, opened, stream, run } = piece;
        let (panels, first) = (view::<F::Block, u8>(bytes), if opened { 0 } else { run.start });
        macro_rules! run {
            ($nc:literal) => {{
                let x = view::<F::X<$nc>, i32>(x);
                let skip = (x.len() - run.len()) * size_of::<F::X<$nc>>();
                TileOf::<F, $nc> { panels, blocks, band, first, table, x: &x[run], stream, skip, out }
            }};
        }
        match width {
            1 => dispatch(isa, run!(1)),
            2 => dispatch(isa, run!(2)),
            4 => dispatch(isa, run!(4)),
            #[cfg(target_arch = "x86_64")]
            3 => crate::simd::wide(run!(3)),
            #[cfg(target_arch = "x86_64")]
            5 => crate::simd::wide(run!(5)),
            #[cfg(target_arch = "x86_64")]
            6 => crate::simd::wide(run!(6)),
            #[cfg(target_arch = "x86_64")]
            8 => crate::simd::wide(run!(8)),
            _ => unreachable!("tiles have the widths of activations::widths"),
        }
    }
    fn opened<F: Opens>(isa: Isa, piece: Piece<'_>, width: usize, x: &[i32], out: &mut [Out]) {
        tile::<F::Open>(isa, piece, width, x, out);
    }
    if piece.opened {
        with_opening!(piece.panels.form, isa, (), opened, isa, piece, width, x, out)
    } else {
        with_form!(piece.panels.form, tile, isa, piece, width, x, out)
    }
}

/// 64 bytes that stand in one line of the cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);
// SAFETY: bytes only.
unsafe impl Plain for Line {}

thread_local! {
    /// A thread's unpacked blocks.
    static OPENED: RefCell<Pages<Line>> = RefCell::default();
}

/// Unpacks blocks `run` of each panel of a band.
struct Open<'a, F: Opens> {
    panels: &'a [F::Packed],
    blocks: usize,
    run: Range<usize>,
    table: &'a [u8; 16],
    to: &'a mut [<F::Open as Form>::Block],
}

impl<F: Opens> Kernel for Open<'_, F> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let table = s.table(self.table);
        let (panels, run) = (self.panels.len() / self.blocks, self.run);
        for (b, blocks) in self.panels[run.start * panels..run.end * panels].chunks_exact(panels).enumerate()
        {
            for (w, to) in blocks.iter().zip(self.to.chunks_exact_mut(run.len())) {
                F::open(s, w, table, &mut to[b]);
            }
        }
    }
}

/// Unpacks blocks `run` of each panel into `to`.
fn open(isa: Isa, panels: Panels<'_>, run: Range<usize>, to: &mut [Line]) {
    fn blocks_of<F: Opens>(isa: Isa, panels: Panels<'_>, run: Range<usize>, to: &mut [Line]) {
        let Panels { bytes, table, blocks, .. } = panels;
        dispatch(isa, Open::<F> { panels: view(bytes), blocks, run, table, to: view_mut(to) });
    }
    with_opening!(panels.form, isa, (), blocks_of, isa, panels, run, to)
}

/// How activations are prepared that meet `form` in so many tiles.
pub fn scales(isa: Isa, form: FormKind, tiles: usize) -> Scales {
    if tiles >= OPEN { form.open_scales(isa) } else { form.scales() }
}

/// Panels times all columns: the first tile's sums of all panels, then the second one's. A span of each panel's blocks, which
/// fits the second-level cache, meets all tiles before the next does; where there are many tiles, it is unpacked first.
pub fn all_tiles(isa: Isa, panels: Panels<'_>, span: usize, x: &Prepared, sums: &mut Vec<Out>) {
    let Panels { bytes, form, blocks, .. } = panels;
    let opens = form.open_bytes(isa).filter(|_| x.tiles.len() >= OPEN);
    let scales = scales(isa, form, x.tiles.len());
    let count = bytes.len() / (blocks * form.block_bytes());
    sums.clear();
    sums.resize(x.tiles.len() * count, Out::default());
    let mut lines = OPENED.take();
    // One tile alone: nothing is read twice, and a panel's whole length is one run of memory.
    let span = if x.tiles.len() == 1 { blocks } else { span };
    for first in (0..blocks).step_by(span) {
        let run = first..blocks.min(first + span);
        let stream = x.tiles.len() < OPEN;
        let mut piece = Piece { panels, opened: opens.is_some(), stream, run };
        if let Some(block) = opens {
            let need = count * piece.run.len() * block;
            lines.grow(need.div_ceil(64));
            open(isa, panels, piece.run.clone(), &mut lines);
            let bytes = &view::<u8, Line>(&lines)[..need];
            piece.panels = Panels { bytes, blocks: piece.run.len(), band: 1, ..panels };
        }
        for (tile, sums) in x.tiles.iter().zip(sums.chunks_exact_mut(count)) {
            multiply(isa, piece.clone(), tile.width, x.tile(scales, tile), sums);
        }
    }
    OPENED.set(lines);
}

/// Results of panels from `panel` on and a tile's columns into `out`, whose rows are `rows` wide.
struct Store<'a> {
    rows: usize,
    panel: usize,
    tile: &'a Tile,
    results: &'a [Out],
    out: &'a SharedMut<'a, f32>,
    /// Whether they go past the caches.
    past: bool,
}

impl Kernel for Store<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        for c in 0..self.tile.used {
            for (panel, results) in (self.panel..).zip(self.results) {
                let first = panel * LANES;
                let count = LANES.min(self.rows - first);
                // SAFETY: each unit has its own panels, so its own elements of every row.
                let to = unsafe { self.out.part((self.tile.first + c) * self.rows + first, count) };
                match <&mut [f32; LANES]>::try_from(&mut *to) {
                    Ok(to) if self.past => s.store_past(to, s.load_f(&results[c])),
                    Ok(to) => *to = results[c],
                    Err(_) => to.copy_from_slice(&results[c][..count]),
                }
            }
        }
        if self.past {
            s.settle();
        }
    }
}

/// Some of a matrix's panels times all columns, as [`all_tiles`].
fn panels_times(
    ctx: Context<'_>,
    matrix: &Matrix,
    panels: &[u8],
    span: usize,
    x: &Prepared,
    sums: &mut Vec<Out>,
) {
    let blocks = matrix.panel_bytes / matrix.form.block_bytes();
    let panels = Panels { bytes: panels, form: matrix.form, table: &matrix.table, blocks, band: matrix.band };
    all_tiles(ctx.isa, panels, span, x, sums);
    if matrix.scale != 1.0 {
        sums.as_flattened_mut().as_flattened_mut().iter_mut().for_each(|v| *v *= matrix.scale);
    }
}

/// How a multiplication's bands are shared: most of one claim, blocks of a panel that meet all columns before the next do.
struct Shares {
    most: usize,
    span: usize,
}

/// Blocks of each of `panels` panels that fit the second-level cache together: whole turns of 256 columns.
pub fn span(isa: Isa, form: FormKind, panels: usize) -> usize {
    let turn = 256usize.div_ceil(form.cols());
    let bytes = form.open_bytes(isa).unwrap_or(form.block_bytes());
    (CACHE / (panels * turn * bytes)).max(1) * turn
}

impl Shares {
    /// Few columns: long runs of memory, since each new place costs a microsecond of waiting.
    fn new(ctx: Context<'_>, matrix: &Matrix, x: &Prepared) -> Self {
        let bytes = (matrix.band * matrix.panel_bytes).max(1);
        let most = if columns(x) > 16 { 1 } else { (RUN / bytes).max(1) };
        let span = span(ctx.isa, matrix.form, matrix.band);
        Shares { most, span }
    }

    /// The bands of a claim, in the pieces that one call multiplies. One tile: all of them, since starting and ending such
    /// a run costs a microsecond of memory; but one where they are packed for this use.
    fn pieces(
        &self,
        matrix: &Matrix,
        x: &Prepared,
        bands: Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> {
        let step = if matrix.at.is_some() && x.tiles.len() == 1 { self.most } else { 1 };
        bands.clone().step_by(step).map(move |first| first..bands.end.min(first + step))
    }
}

/// Columns in all.
fn columns(x: &Prepared) -> usize {
    x.tiles.last().map_or(0, |t| t.first + t.used)
}

/// Keeps the first error of a job.
pub fn keep(error: &Mutex<Option<ModelError>>, result: Result<(), ModelError>) {
    if let (Err(e), Ok(mut slot)) = (result, error.lock()) {
        slot.get_or_insert(e);
    }
}

/// That error, if there is one.
pub fn outcome(error: Mutex<Option<ModelError>>) -> Result<(), ModelError> {
    error.into_inner().ok().flatten().map_or(Ok(()), Err)
}

/// Each matrix times the same columns, in one job.
pub fn project(ctx: Context<'_>, x: &Prepared, jobs: &mut [(&Matrix, &mut [f32])]) -> Result<(), ModelError> {
    let mut units = 0;
    let mut most = usize::MAX;
    // Matrix, result, shares, its bands among all.
    let mut parts = vec![];
    for (matrix, out) in jobs.iter_mut() {
        let shares = Shares::new(ctx, matrix, x);
        let first = units;
        units += matrix.bands();
        most = most.min(shares.most);
        parts.push((*matrix, SharedMut::new(out), shares, first..units));
    }
    let error = Mutex::new(None);
    ctx.pool.run_runs(units, most, |run| {
        let mut sums = vec![];
        for (matrix, out, shares, units) in &parts {
            let own = run.start.max(units.start) - units.start
                ..run.end.min(units.end).max(units.start) - units.start;
            for bands in shares.pieces(matrix, x, own) {
                let done = matrix.with_panels(ctx.arena, ctx.model, bands.clone(), |bytes| {
                    panels_times(ctx, matrix, bytes, shares.span, x, &mut sums);
                    let panels = bytes.len() / matrix.panel_bytes;
                    for (tile, sums) in x.tiles.iter().zip(sums.chunks_exact(panels)) {
                        let (rows, panel) = (matrix.rows, bands.start * matrix.band);
                        let past = rows >= LOGITS && x.tiles.len() < OPEN;
                        dispatch(ctx.isa, Store { rows, panel, tile, results: sums, out, past });
                    }
                });
                keep(&error, done);
            }
        }
    });
    outcome(error)
}

/// `out = silu(gate x) * (up x)`: both matrices' panels of the same rows in one unit.
pub fn gate_up(
    ctx: Context<'_>,
    x: &Prepared,
    gate: &Matrix,
    up: &Matrix,
    out: &mut [f32],
) -> Result<(), ModelError> {
    let shares = Shares::new(ctx, gate, x);
    let out = SharedMut::new(out);
    let error = Mutex::new(None);
    ctx.pool.run_runs(gate.bands(), shares.most, |run| {
        let (mut gated, mut upped) = (vec![], vec![]);
        for bands in shares.pieces(gate, x, run) {
            let done = gate.with_panels(ctx.arena, ctx.model, bands.clone(), |gates| {
                up.with_panels(ctx.arena, ctx.model, bands.clone(), |ups| {
                    panels_times(ctx, gate, gates, shares.span, x, &mut gated);
                    panels_times(ctx, up, ups, shares.span, x, &mut upped);
                    let panels = gates.len() / gate.panel_bytes;
                    let tiles = gated.chunks_exact_mut(panels).zip(upped.chunks_exact(panels));
                    for (tile, (g, u)) in x.tiles.iter().zip(tiles) {
                        for (g, u) in g.iter_mut().zip(u) {
                            let (gate, up) = (&mut g[..tile.used], &u[..tile.used]);
                            dispatch(
                                ctx.isa,
                                SiluMul { gate: gate.as_flattened_mut(), up: up.as_flattened() },
                            );
                        }
                        let (rows, panel, out) = (gate.rows, bands.start * gate.band, &out);
                        dispatch(ctx.isa, Store { rows, panel, tile, results: g, out, past: false });
                    }
                })
            });
            keep(&error, done.and_then(|inner| inner));
        }
    });
    outcome(error)
}

#[cfg(test)]
mod tests;
