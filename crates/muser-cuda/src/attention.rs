//! Attention of the serving lane as launches: norm, rotation and store of a layer's keys, then which kernel reads them, and among how many blocks
//! they are split.

use crate::launch::{Args, Halves, Left, Planes};
use crate::product::{ALONE, GROUP};
use crate::program::{Compiler, SMALL};
use muser_core::{Buf, CacheSpec, DeviceError, Mask, Model, Op, Plan, RopePairs, Row};
use std::ops::Range;

/// Blocks among which the keys of a pass's rows are split: about two for each multiprocessor of a large card.
const BLOCKS: usize = 256;
/// Bytes of what one of them leaves (PART of kernels/cache.cuh).
pub(crate) const PART_BYTES: usize = (16 * 128 + 32) * 4;
/// Query heads of a KV head at most.
const MOST_GROUP: usize = 16;

/// Rows of a block of attend_rows, and its shared memory: their queries, and two stages of 32 keys and values.
const ATTEND_ROWS: usize = 16;
const ATTEND_SHARED: usize = (ATTEND_ROWS * 16 + 2 * 2 * 32) * 256;
/// The same of attend_wide: six stages of 64 keys and values from a multiple of 1,024 bytes on, and two barriers for each.
pub(crate) const WIDE_ROWS: usize = 8;
const WIDE_SHARED: usize = 1024 + 6 * (64 * 2 * 256 + 16);
/// How often few rows that read together are spared a key of a KV head, at least: below, a launch more costs what it saves.
const SPARED: usize = 7 << 15;
/// Parts that attend_join takes at most.
const MOST_SPLITS: usize = 128;

/// The first row of each block of rows that read keys together: neighbours of one sequence.
pub(crate) fn row_blocks(rows: &[Row]) -> Vec<u32> {
    let mut firsts = vec![];
    let mut first = 0;
    for run in rows.chunk_by(|a, b| a.seq == b.seq) {
        firsts.extend((first..first + run.len()).step_by(WIDE_ROWS).map(|row| row as u32));
        first += run.len();
    }
    firsts
}

/// Whether so many rows may read keys together, in so many blocks: few do where that spares them something.
pub(crate) fn shares(rows: usize, blocks: usize) -> bool {
    rows > GROUP || rows > ALONE && blocks < rows
}

/// Blocks among which a row's keys are split: one for each chunk, but two chunks are done as soon in one block as they are joined.
/// A power of two, so that few programs are compiled. A row with fewer chunks leaves blocks idle: where its parts
/// must not depend on others, each chunk has its block. Where rows may read together it tells about how many keys there are, too.
pub(crate) fn splits(depth: usize, even: bool, shared: bool) -> usize {
    let chunks = depth.div_ceil(128).next_power_of_two();
    match chunks {
        0..=2 if !even => 1,
        _ if shared => chunks,
        _ => chunks.min(MOST_SPLITS),
    }
}

/// The same of passes of more rows, whose blocks take some of them: as many as it takes to occupy a large card, of some 256 keys or more. (Blocks of
/// attend_wide have a multiprocessor each, of attend_rows two share one.)
pub(crate) fn row_parts(rows: usize, depth: usize, kv_heads: usize, blocks: Option<usize>) -> usize {
    let enough = match blocks {
        Some(blocks) => 128 / (kv_heads * blocks),
        None => (128 / rows.div_ceil(ATTEND_ROWS)).max(1).next_power_of_two(),
    };
    enough.max(1).min(depth.div_ceil(256).next_power_of_two()).min((MOST_ROW_PARTS / rows).max(1))
}
/// Parts that rows of such a pass leave at most for one KV head.
const MOST_ROW_PARTS: usize = 1024;

/// Parts that rows whose keys are split leave at most.
pub(crate) fn parts(model: &Model, even: bool) -> usize {
    let kv_heads = model.plans.caches.iter().map(|c| c.kv_heads).max().unwrap_or(1);
    few_parts(model, even).max(MOST_ROW_PARTS * kv_heads)
}

/// The same of passes of few rows.
fn few_parts(model: &Model, even: bool) -> usize {
    let of = |c: &CacheSpec| c.kv_heads * splits(c.window.unwrap_or(model.geometry().context), even, false);
    if even { SMALL * model.plans.caches.iter().map(of).max().unwrap_or(1) } else { BLOCKS }
}

/// Files of kernels.
const ATTEND: &str = "src/kernels/attend.cu";
const WIDE: &str = "src/kernels/attend_wide.cu";
const DECODE: &str = "src/kernels/decode.cu";

/// An attention step: which cache, what rows of one batch see of each other, whether a gate follows.
#[derive(Clone, Copy)]
pub(crate) struct Attend {
    pub cache: usize,
    pub mask: Mask,
    pub gated: bool,
}

impl Compiler<'_> {
    /// The step at `i`, norm and rotation, with the store behind it; of few rows attention and its gate, too. Returns how many steps these are.
    pub(crate) fn norm_rope_store(&mut self, i: usize, plan: &Plan) -> Result<usize, DeviceError> {
        let op = |i: usize| plan.steps.get(i).map(|s| &s.op);
        let (Some(Op::QkNormRope { q_norm, k_norm, eps, rope }), Some(Op::Store { cache })) =
            (op(i), op(i + 1))
        else {
            return Err(self.no_kernel(plan, i, "QK-norm that no store follows".into()));
        };
        let (b, n, g) = (self.buffers, self.key.rows, &plan.geometry);
        if g.head_dim != 128 || g.heads / g.kv_heads > MOST_GROUP {
            return Err(self.no_kernel(
                plan,
                i,
                format!("{} heads of {} on {} KV heads", g.heads, g.head_dim, g.kv_heads),
            ));
        }
        let heads = if q_norm.is_some() { g.heads } else { 0 };
        let q_norm = q_norm.map_or(Ok(0), |s| self.weights.vector(s))?;
        let k_norm = self.weights.vector(*k_norm)?;
        let rope = match rope {
            None => 0,
            Some(RopePairs::Interleaved) => 1,
            Some(RopePairs::Halves) => 2,
        };
        let grid = (n, (heads + 2 * g.kv_heads).div_ceil(4), 1);
        let turn = |args: Args, kv: &Self| {
            args.ptr(k_norm).float(*eps).int(rope).ptr(b.angles(plan.pass)).cache(&kv.kv.cache(*cache))
        };
        if self.large() {
            let (q, k) = (b.q16.ptr, b.k.ptr);
            let args = Args::default().ptr(b.rows.ptr);
            let args =
                [Buf::Q, Buf::K, Buf::V].iter().fold(args, |args, buf| args.halves(&self.halves(*buf)));
            let args = turn(args.ptr(q).ptr(k).int(heads).ptr(q_norm), self);
            self.push(i..i + 2, ATTEND, &self.kv.kernel("qk_rows"), grid, 128, args)?;
            let rows = |ptr, heads| Left::Halves(Halves::rows(ptr, heads * g.head_dim));
            self.leave(&[(Buf::Q, rows(q, heads)), (Buf::K, rows(k, g.kv_heads))]);
            return Ok(2);
        }
        let q = if heads > 0 { self.left(Buf::Q) } else { Planes::default() };
        let [k, v] = [Buf::K, Buf::V].map(|buf| self.left(buf));
        let attends = match op(i + 2) {
            Some(Op::Attend { mask, .. }) => {
                let gated = matches!(op(i + 3), Some(Op::Gate));
                Some((i..i + 3 + usize::from(gated), Attend { cache: *cache, mask: *mask, gated }))
            }
            _ => None,
        };
        let together = attends.as_ref().and_then(|(_, attend)| self.together(attend.cache, g.kv_heads));
        if let Some((steps, attend)) = attends.as_ref().filter(|_| together.is_none()) {
            let args = Args::default().ptr(b.rows.ptr).int(heads).planes(&q).ptr(q_norm);
            self.attend_few(steps.clone(), turn(args.planes(&k).planes(&v), self), *attend, plan)?;
            return Ok(steps.len());
        }
        let args = Args::default().ptr(b.rows.ptr).planes(&q).planes(&k).planes(&v);
        let args = turn(args.ptr(b.q16.ptr).int(heads).ptr(q_norm), self);
        let (Some((steps, attend)), Some((blocks, parts))) = (attends, together) else {
            self.push(i..i + 2, ATTEND, &self.kv.kernel("qk_few"), grid, 128, args)?;
            return Ok(2);
        };
        self.push(steps.clone(), ATTEND, &self.kv.kernel("qk_few"), grid, 128, args)?;
        self.attend_wide(steps.clone(), attend, (blocks, parts), 1.0, Halves::default(), plan)?;
        self.attend_join(steps.clone(), attend, (parts, true), plan)?;
        Ok(steps.len())
    }

    /// Blocks of few rows and parts of the keys of a cache that they read together, where they do; several parts, for what joins them applies
    /// the gate.
    fn together(&self, cache: usize, kv_heads: usize) -> Option<(usize, usize)> {
        let (n, blocks, all) = (self.key.rows, self.key.blocks?, 128 * self.key.splits);
        let keys = self.model.plans.caches[cache].window.map_or(all, |window| all.min(window + n));
        let parts = row_parts(n, keys, kv_heads, Some(blocks));
        ((n - blocks) * keys * kv_heads > SPARED && parts > 1).then_some((blocks, parts))
    }

    /// Attention of many rows.
    pub(crate) fn attend(
        &mut self,
        steps: Range<usize>,
        attend: Attend,
        plan: &Plan,
    ) -> Result<(), DeviceError> {
        let (b, g, n, blocks) = (self.buffers, &plan.geometry, self.key.rows, self.key.blocks);
        let cache = self.kv.cache(attend.cache);
        let gate = if attend.gated { self.halves(Buf::G) } else { Halves::default() };
        let out = b.a.addresses().h;
        let of = |depth| row_parts(n, depth, g.kv_heads, blocks);
        let all = if n > SMALL { self.key.splits } else { of(128 * self.key.splits) };
        let parts = all.min(if cache.window > 0 { of(cache.window + n) } else { of(g.context) });
        if let Some(blocks) = blocks {
            let unit = g.score_scale() * std::f32::consts::LOG2_E;
            self.attend_wide(steps.clone(), attend, (blocks, parts), unit, gate, plan)?;
        } else {
            let args = self.attend_args(Args::default().ptr(b.rows.ptr).int(n), attend, gate, plan);
            let grid = (g.kv_heads, n.div_ceil(ATTEND_ROWS), parts);
            let block = (256, ATTEND_SHARED + self.kv.shared_rows());
            self.push_shared(steps.clone(), ATTEND, &self.kv.kernel("attend_rows"), grid, block, args)?;
        }
        if parts > 1 {
            let args = Args::default().ptr(b.partial.ptr).int(parts).int(g.heads).cache(&cache);
            let args = args.halves(&gate).ptr(out);
            let join = self.kv.kernel("attend_rows_join");
            self.push(steps, ATTEND, &join, (g.kv_heads, n, 1), 256, args)?;
        }
        self.leave(&[(Buf::A, Left::Halves(Halves::rows(out, g.q_width())))]);
        Ok(())
    }

    /// What attend_rows and attend_wide are told behind their rows.
    fn attend_args(&self, rows: Args, attend: Attend, gate: Halves, plan: &Plan) -> Args {
        let (b, g) = (self.buffers, &plan.geometry);
        let args = rows
            .ptr(b.q16.ptr)
            .int(g.heads)
            .cache(&self.kv.cache(attend.cache))
            .int(usize::from(attend.mask == Mask::Block));
        args.float(g.score_scale()).halves(&gate).ptr(b.a.addresses().h).ptr(b.partial.ptr)
    }

    /// `left`: what maxima are multiplied with where keys are split.
    fn attend_wide(
        &mut self,
        steps: Range<usize>,
        attend: Attend,
        (blocks, parts): (usize, usize),
        left: f32,
        gate: Halves,
        plan: &Plan,
    ) -> Result<(), DeviceError> {
        let rows = Args::default().ptr(self.buffers.rows.ptr);
        let args = self.attend_args(rows, attend, gate, plan).float(left);
        let grid = (plan.geometry.kv_heads, blocks, parts);
        self.push_shared(steps, WIDE, "attend_wide", grid, (384, WIDE_SHARED), args)
    }

    /// `args` are those of kernels/decode.cu up to the cache.
    fn attend_few(
        &mut self,
        steps: Range<usize>,
        args: Args,
        attend: Attend,
        plan: &Plan,
    ) -> Result<(), DeviceError> {
        let (b, g) = (self.buffers, &plan.geometry);
        let (n, cache, out) = (self.key.rows, self.kv.cache(attend.cache), self.activation(&b.a));
        let gate = if attend.gated { self.left(Buf::G) } else { Planes::default() };
        let most = if cache.window > 0 { splits(cache.window, self.key.even, false) } else { MOST_SPLITS };
        let room = few_parts(self.model, self.key.even) / (n * g.kv_heads);
        let splits = self.key.splits.min(most).min(room).max(1);
        let args = args.int(usize::from(attend.mask == Mask::Block)).float(g.score_scale()).planes(&gate);
        let args = args.ptr(b.partial.ptr).activation(&out);
        let grid = (splits, g.kv_heads, n);
        let name = self.kv.kernel("attend_few");
        self.push_shared(steps.clone(), DECODE, &name, grid, (256, self.kv.shared_few()), args)?;
        self.leave_activation(Buf::A, &out, g.q_width());
        if splits > 1 { self.attend_join(steps, attend, (splits, false), plan) } else { Ok(()) }
    }

    /// Joins the parts of few rows: `all` of each, or as many as attend_few leaves.
    fn attend_join(
        &mut self,
        steps: Range<usize>,
        attend: Attend,
        (splits, all): (usize, bool),
        plan: &Plan,
    ) -> Result<(), DeviceError> {
        let (b, g) = (self.buffers, &plan.geometry);
        let (cache, out) = (self.kv.cache(attend.cache), self.activation(&b.a));
        let gate = if attend.gated { self.left(Buf::G) } else { Planes::default() };
        let args = Args::default().ptr(b.rows.ptr).ptr(b.partial.ptr).int(g.heads).cache(&cache);
        let args = args.int(usize::from(attend.mask == Mask::Block)).int(splits).int(usize::from(all));
        let args = args.float(g.score_scale()).planes(&gate).activation(&out);
        let grid = (g.heads, self.key.rows, 1);
        self.push(steps, DECODE, &self.kv.kernel("attend_join"), grid, 128, args)?;
        self.leave_activation(Buf::A, &out, g.q_width());
        Ok(())
    }
}
