//! A pass of the strict lane as launches: a kernel a step, in the reference's order, so that every step can be compared.

use crate::buffers::Buffers;
use crate::gpu::Card;
use crate::kv::Kv;
use crate::launch::Args;
use crate::panels::{Form, PANEL, Panels};
use crate::product::Room;
use crate::program::{Key, MOST_HIDDEN, Node, Work};
use crate::weights::Weights;
use muser_core::{Buf, DeviceError, Geometry, Mask, Model, Op, Plan, RopePairs};
use std::ops::Range;

/// Programs of the lane: a name, a text with its headers, and kernels.
pub(crate) const PROGRAMS: [(&str, &str, &[&str]); 4] = [
    (
        "strict",
        concat!(include_str!("kernels/strict.cuh"), include_str!("kernels/strict.cu")),
        &[
            "strict_norm",
            "strict_tail",
            "strict_capture",
            "strict_pick",
            "strict_gather",
            "strict_silu_mul",
            "strict_scale_cap",
        ],
    ),
    (
        "strict_project",
        concat!(
            include_str!("kernels/strict.cuh"),
            include_str!("kernels/panels.cuh"),
            include_str!("kernels/strict_project.cu")
        ),
        &["strict_embed", "strict_project_1", "strict_project_1_wide", "strict_project_8"],
    ),
    (
        "strict_attend",
        concat!(include_str!("kernels/strict.cuh"), include_str!("kernels/strict_attend.cu")),
        &["strict_qk", "strict_store", "strict_scores", "strict_values", "strict_join"],
    ),
    ("norm", include_str!("kernels/norm.cu"), &["argmax"]),
];

/// The program that makes panels, once for each type.
pub(crate) const PACK: &str = concat!(
    include_str!("kernels/panels.cuh"),
    include_str!("kernels/pack.cu"),
    include_str!("kernels/strict_pack.cu")
);

const PROJECT: &str = "src/kernels/strict_project.cu";
const ATTEND: &str = "src/kernels/strict_attend.cu";
const OTHER: &str = "src/kernels/strict.cu";

/// Tiles in a warp's ring, as kernels/strict_project.cu has it.
const STAGES: usize = 4;

/// How a product is spread over a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spread {
    /// Activation rows that a block takes.
    rows: usize,
    /// Panels that a warp takes at a time.
    panels: usize,
    /// Warps of a block, and the blocks.
    warps: usize,
    blocks: usize,
    /// How often a warp takes panels.
    rounds: usize,
    /// Columns that are in shared memory at once.
    slice: usize,
    /// Bytes of a tile's place in a ring.
    slot: usize,
}

impl Spread {
    /// For `n` rows of activations and matrices of these forms and rows, all of `cols` columns.
    fn of(room: Room, n: usize, cols: usize, parts: &[(Form, usize)]) -> Self {
        let rows = if n == 1 { 1 } else { 8 };
        let units =
            |panels: usize| parts.iter().map(|(_, rows)| rows.div_ceil(PANEL * panels)).sum::<usize>();
        // One row takes panels one by one where that is needed to keep a multiprocessor busy.
        let panels = if n > 1 || units(2) >= 12 * room.processors { 2 } else { 1 };
        let slot = panels * parts.iter().map(|(form, _)| form.tile()).max().unwrap_or(0);
        let (ring, whole) = (STAGES * slot, cols.next_multiple_of(256));
        let left = room.block - (rows * whole * 4).min(room.block / 2);
        let most = (left / ring).clamp(1, if rows == 1 { 20 } else { 12 });
        // As few rounds as that allows, and in these all multiprocessors alike.
        let units = units(panels);
        let rounds = units.div_ceil(room.processors * most);
        let warps = units.div_ceil(room.processors * rounds);
        let slice = ((room.block - warps * ring) / (rows * 4) / 256 * 256).min(whole);
        Spread { rows, panels, warps, blocks: units.div_ceil(warps * rounds), rounds, slice, slot }
    }

    /// Bytes of shared memory.
    fn shared(&self) -> usize {
        self.rows * self.slice * 4 + self.warps * STAGES * self.slot
    }

    fn kernel(&self) -> &'static str {
        match (self.rows, self.panels) {
            (1, 1) => "strict_project_1",
            (1, _) => "strict_project_1_wide",
            _ => "strict_project_8",
        }
    }
}

/// Floats of scratch that attention takes for a head of one row.
pub(crate) fn scratch(span: usize, head_dim: usize) -> usize {
    span + span / 32 + 32 * head_dim + 32
}

/// Attention weights that are kept for a head: `depth`, rounded so that few programs are compiled.
pub(crate) fn span(depth: usize) -> usize {
    depth.next_power_of_two().max(256)
}

struct Compiler<'a> {
    card: &'a Card,
    model: &'a Model,
    weights: &'a Weights,
    kv: &'a Kv,
    buffers: &'a Buffers,
    key: Key,
    nodes: Vec<Node>,
}

/// All launches of the plan, in order.
pub(crate) fn compile(
    card: &Card,
    model: &Model,
    weights: &Weights,
    kv: &Kv,
    buffers: &Buffers,
    key: Key,
    plan: &Plan,
) -> Result<Vec<Node>, DeviceError> {
    let mut compiler = Compiler { card, model, weights, kv, buffers, key, nodes: vec![] };
    let mut i = 0;
    while i < plan.steps.len() {
        i += compiler.step(i, plan)?;
    }
    Ok(compiler.nodes)
}

impl Compiler<'_> {
    /// `block` is threads and bytes of dynamic shared memory.
    fn push(
        &mut self,
        steps: Range<usize>,
        file: &'static str,
        name: &str,
        grid: (usize, usize, usize),
        (block, shared): (usize, usize),
        args: Args,
    ) -> Result<(), DeviceError> {
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        let work = Work::Kernel { grid, block: block as u32, shared: shared as u32, args };
        self.nodes.push(Node { steps, name: name.to_string(), file, work, leaves: vec![] });
        Ok(())
    }

    /// `n` rows at address x times matrices of as many columns, each to its address.
    fn project(
        &mut self,
        steps: Range<usize>,
        parts: &[(Panels, u64)],
        x: u64,
        n: usize,
    ) -> Result<(), DeviceError> {
        for parts in parts.chunks(4) {
            let kinds: Vec<_> = parts.iter().map(|(m, _)| (m.form, m.rows)).collect();
            let s = Spread::of(self.card.room, n, parts[0].0.cols, &kinds);
            let args = Args::default().parts(parts).ptr(x).int(n).int(s.slice).int(s.rounds).int(s.slot);
            let grid = (s.blocks, n.div_ceil(s.rows), 1);
            self.push(steps.clone(), PROJECT, s.kernel(), grid, (s.warps * 32, s.shared()), args)?;
        }
        Ok(())
    }

    /// The f32 rows of a buffer.
    fn at(&self, buf: Buf) -> u64 {
        self.buffers.memory(buf).ptr
    }

    /// Compiles the step at `i`; returns how many steps it served.
    fn step(&mut self, i: usize, plan: &Plan) -> Result<usize, DeviceError> {
        let (b, n, steps) = (self.buffers, self.key.rows, i..i + 1);
        let next = plan.steps.get(i + 1).map(|s| &s.op);
        let (hidden, g) = (plan.geometry.hidden, &plan.geometry);
        if hidden > MOST_HIDDEN {
            return Err(self.no_kernel(plan, i, format!("rows of {hidden} elements")));
        }
        // A row, and the zeros behind it that norms sum.
        let row = hidden.next_multiple_of(512) * 4;
        let rows = Args::default().ptr(b.rows.ptr);
        match &plan.steps[i].op {
            Op::Embed { table, norm_eps } => {
                let args = rows.panels(&self.weights.panels(*table)?, 0).float(norm_eps.unwrap_or(-1.0));
                self.push(steps, PROJECT, "strict_embed", (n, 1, 1), (256, row), args.ptr(b.x.ptr))?;
            }
            Op::Norm { from, weight, eps, to } => {
                let args = Args::default().ptr(self.at(*from)).ptr(self.weights.vector(*weight)?).int(hidden);
                let args = args.float(*eps).ptr(self.at(*to));
                self.push(steps, OTHER, "strict_norm", (n, 1, 1), (1024, row), args)?;
            }
            Op::Project { from, outs } => {
                let mut x = self.at(*from);
                if *from == Buf::Features {
                    let width = self.model.plans.width(plan.pass, Buf::Features);
                    x = b.picked.addresses().f;
                    let args = rows.ptr(b.features.ptr).int(width).ptr(x);
                    self.push(steps.clone(), OTHER, "strict_pick", (n, 1, 1), (256, 0), args)?;
                }
                let part = |(slot, out): &_| Ok((self.weights.panels(*slot)?, self.at(*out)));
                let parts = outs.iter().map(part).collect::<Result<Vec<_>, DeviceError>>()?;
                self.project(steps, &parts, x, n)?;
            }
            Op::QkNormRope { q_norm, k_norm, eps, rope } => {
                // Queries of a KV head stand in shared memory together.
                if g.head_dim != 128 || g.heads / g.kv_heads > 64 {
                    let what = format!("{} heads of {} on {} KV heads", g.heads, g.head_dim, g.kv_heads);
                    return Err(self.no_kernel(plan, i, what));
                }
                let rope = match rope {
                    None => 0,
                    Some(RopePairs::Interleaved) => 1,
                    Some(RopePairs::Halves) => 2,
                };
                let heads = if q_norm.is_some() { g.heads } else { 0 };
                let q_norm = q_norm.map_or(Ok(0), |slot| self.weights.vector(slot))?;
                let args = rows.ptr(self.at(Buf::Q)).ptr(self.at(Buf::K)).int(heads).ptr(q_norm);
                let args = args.ptr(self.weights.vector(*k_norm)?).float(*eps).int(rope);
                let args = args.ptr(b.angles(plan.pass));
                self.push(steps, ATTEND, "strict_qk", (n, heads + g.kv_heads, 1), (32, 0), args)?;
            }
            Op::Store { cache } => {
                let args = rows.ptr(self.at(Buf::K)).ptr(self.at(Buf::V)).cache(&self.kv.cache(*cache));
                self.push(steps, ATTEND, "strict_store", (n, 1, 1), (256, 0), args)?;
            }
            Op::Attend { cache, mask } => {
                let gated = matches!(next, Some(Op::Gate));
                let steps = i..i + 1 + usize::from(gated);
                self.attend(steps.clone(), *cache, *mask, gated, g)?;
                return Ok(steps.len());
            }
            Op::Tail { post, next } => {
                let (weight, eps) =
                    post.map_or(Ok((0, 0.0)), |(slot, eps)| self.weights.vector(slot).map(|v| (v, eps)))?;
                let args = Args::default().ptr(self.at(Buf::P)).ptr(weight).float(eps).ptr(b.x.ptr);
                let args =
                    args.ptr(self.weights.vector(next.0)?).float(next.1).int(hidden).ptr(self.at(Buf::H));
                self.push(steps, OTHER, "strict_tail", (n, 1, 1), (1024, row), args)?;
            }
            Op::Capture { index } => {
                let features = b.features.ptr + (index * hidden * 4) as u64;
                let args = rows.ptr(b.x.ptr).int(hidden).ptr(features);
                let args = args.int(self.model.plans.width(plan.pass, Buf::Features));
                self.push(steps, OTHER, "strict_capture", (n, 1, 1), (256, 0), args)?;
            }
            Op::GateUp { gate, up } => {
                let (gate, up) = (self.weights.panels(*gate)?, self.weights.panels(*up)?);
                let parts = [(gate, b.raw.gate.ptr), (up, b.raw.up.ptr)];
                self.project(steps.clone(), &parts, self.at(Buf::H), n)?;
                let all = n * gate.rows;
                let args =
                    Args::default().ptr(b.raw.gate.ptr).ptr(b.raw.up.ptr).long(all).ptr(self.at(Buf::F));
                self.push(steps, OTHER, "strict_silu_mul", (all.div_ceil(256), 1, 1), (256, 0), args)?;
            }
            Op::Head { weight } => {
                let (m, asked) = (self.weights.panels(*weight)?, self.key.logits);
                if asked > 0 {
                    let x = b.picked.addresses().f;
                    let args = rows.ptr(self.at(Buf::H)).int(m.cols).ptr(x);
                    self.push(steps.clone(), OTHER, "strict_gather", (n, 1, 1), (256, 0), args)?;
                    self.project(steps, &[(m, b.logits.ptr)], x, asked)?;
                }
            }
            Op::ScaleCap { scale, cap } => {
                let all = self.key.logits * self.model.geometry().vocab;
                if all > 0 {
                    let args = Args::default().ptr(b.logits.ptr).long(all).float(*scale);
                    let args = args.float(cap.unwrap_or(0.0));
                    self.push(steps, OTHER, "strict_scale_cap", (all.div_ceil(256), 1, 1), (256, 0), args)?;
                }
            }
            Op::Gate => return Err(self.no_kernel(plan, i, "a gate that stands alone".into())),
        }
        Ok(1)
    }

    /// Attention of all rows, as many at a time as the scratch has room for.
    fn attend(
        &mut self,
        steps: Range<usize>,
        cache: usize,
        mask: Mask,
        gated: bool,
        g: &Geometry,
    ) -> Result<(), DeviceError> {
        let (b, n, span) = (self.buffers, self.key.rows, self.key.splits);
        let (q, gate, out) = (self.at(Buf::Q), self.at(Buf::G), self.at(Buf::A));
        let cache = self.kv.cache(cache);
        let (group, block) = (g.heads / g.kv_heads, usize::from(mask == Mask::Block));
        // A row sees a window, or more where rows of a block see each other.
        let keys = if cache.window > 0 && block == 0 { span.min(cache.window) } else { span };
        let each = g.heads * scratch(span, g.head_dim);
        let most = (b.scratch_bytes / 4 / each).max(1);
        for first in (0..n).step_by(most) {
            let count = (n - first).min(most);
            let at = |address: u64| address + (first * g.q_width() * 4) as u64;
            let rows = b.rows.ptr + (first * crate::buffers::ROW_BYTES) as u64;
            let heads = count * g.heads;
            // Scores, the greatest of each 32, values and sums of lanes, one behind the other.
            let sizes = [0, heads * span, heads * span / 32, heads * 32 * g.head_dim];
            let mut address = b.scratch.ptr;
            let parts = sizes.map(|floats| {
                address += (floats * 4) as u64;
                address
            });
            let words = [span, g.heads];
            let steps = || steps.clone();
            let args = Args::default().ptr(rows).ptr(at(q)).cache(&cache).int(block).float(g.score_scale());
            let (grid, queries) = ((keys.div_ceil(32), g.kv_heads, count), group * g.head_dim * 4);
            self.push(steps(), ATTEND, "strict_scores", grid, (256, queries), args.scratch(parts, words))?;
            let args = Args::default().ptr(rows).cache(&cache).int(block).scratch(parts, words);
            let grid = (32, g.kv_heads * group.div_ceil(4), count);
            self.push(steps(), ATTEND, "strict_values", grid, (64, 0), args)?;
            let args =
                Args::default().scratch(parts, words).ptr(if gated { at(gate) } else { 0 }).ptr(at(out));
            self.push(steps(), ATTEND, "strict_join", (g.heads, count, 1), (g.head_dim, 0), args)?;
        }
        Ok(())
    }

    fn no_kernel(&self, plan: &Plan, i: usize, why: String) -> DeviceError {
        DeviceError::NoKernel {
            step: plan.steps[i].name.clone(),
            why,
            device: self.card.name.clone(),
            mend: "use --device cpu".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Card;

    #[test]
    fn products_fit_their_card() {
        let consumer = Room { block: 101_376, processor: 102_400, processors: 82, wide: false };
        for room in [Card::h200().room, consumer] {
            for (cols, rows) in
                [(6656, 8704), (6656, 39_936), (19_968, 6656), (33_280, 6656), (6656, 202_048), (64, 8)]
            {
                for (form, n) in
                    [Form::NibbleMin, Form::ByteFine, Form::F32].into_iter().flat_map(|f| [(f, 1), (f, 512)])
                {
                    let s = Spread::of(room, n, cols, &[(form, rows)]);
                    assert!(s.shared() <= room.block, "{n} rows, {cols} columns: {s:?}");
                    assert!(
                        (1..=20).contains(&s.warps) && s.slice >= 256 && s.slice.is_multiple_of(256),
                        "{s:?}"
                    );
                    assert!(s.blocks * s.warps * s.rounds * s.panels * PANEL >= rows, "{s:?}");
                    assert!(s.blocks <= room.processors, "a multiprocessor with two blocks: {s:?}");
                }
            }
        }
    }

    #[test]
    fn few_panels_go_to_warps_one_by_one() {
        let (room, form) = (Card::h200().room, Form::NibbleMin);
        let down = Spread { rows: 1, panels: 1, warps: 13, blocks: 128, rounds: 1, slice: 19_968, slot: 768 };
        assert_eq!(Spread::of(room, 1, 19_968, &[(form, 6656)]), down);
        let up = Spread { rows: 1, panels: 2, warps: 19, blocks: 132, rounds: 2, slice: 6656, slot: 1536 };
        assert_eq!(Spread::of(room, 1, 6656, &[(form, 19_968), (form, 19_968)]), up);
    }
}
