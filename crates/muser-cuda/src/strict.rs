//! A pass of the strict lane as launches: a kernel a step, in the reference's order, so that every step can be compared.

use crate::buffers::Buffers;
use crate::gpu::Card;
use crate::kv::Kv;
use crate::launch::Args;
use crate::program::{Key, Node, Work};
use crate::weights::{Blocks, Weights};
use muser_core::{Buf, DeviceError, Mask, Model, Op, Plan, RopePairs};
use std::ops::Range;

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
    fn push(
        &mut self,
        steps: Range<usize>,
        name: &str,
        grid: (usize, usize),
        block: u32,
        args: Args,
    ) -> Result<(), DeviceError> {
        let grid = (grid.0 as u32, grid.1 as u32, 1);
        let work = Work::Kernel { grid, block, shared: 0, args };
        let name = name.to_string();
        self.nodes.push(Node { steps, name, file: "src/kernels/strict.cu", work, leaves: vec![] });
        Ok(())
    }

    /// `n` rows at address x times a matrix, to address out.
    fn project(
        &mut self,
        steps: Range<usize>,
        m: Blocks,
        x: u64,
        n: usize,
        out: u64,
    ) -> Result<(), DeviceError> {
        let args = Args::default().blocks(&m).ptr(x).int(n).ptr(out);
        self.push(steps, "strict_project", (m.rows.div_ceil(8), 1), 256, args)
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
        let rows = Args::default().ptr(b.rows.ptr);
        match &plan.steps[i].op {
            Op::Embed { table, norm_eps } => {
                let args =
                    rows.blocks(&self.weights.blocks(*table)?).float(norm_eps.unwrap_or(-1.0)).ptr(b.x.ptr);
                self.push(steps, "strict_embed", (n, 1), 32, args)?;
            }
            Op::Norm { from, weight, eps, to } => {
                let args = Args::default().ptr(self.at(*from)).ptr(self.weights.vector(*weight)?).int(hidden);
                self.push(steps, "strict_norm", (n, 1), 32, args.float(*eps).ptr(self.at(*to)))?;
            }
            Op::Project { from, outs } => {
                let mut x = self.at(*from);
                if *from == Buf::Features {
                    let width = self.model.plans.width(plan.pass, Buf::Features);
                    x = b.picked.addresses().f;
                    let args = rows.ptr(b.features.ptr).int(width).ptr(x);
                    self.push(steps.clone(), "strict_pick", (n, 1), 256, args)?;
                }
                for (slot, out) in outs {
                    self.project(steps.clone(), self.weights.blocks(*slot)?, x, n, self.at(*out))?;
                }
            }
            Op::QkNormRope { q_norm, k_norm, eps, rope } => {
                if g.head_dim != 128 {
                    return Err(self.no_kernel(plan, i, format!("heads of {}", g.head_dim)));
                }
                let rope = match rope {
                    None => 0,
                    Some(RopePairs::Interleaved) => 1,
                    Some(RopePairs::Halves) => 2,
                };
                let q = q_norm.map(|weight| (Buf::Q, weight, g.heads));
                for (buf, weight, heads) in q.into_iter().chain([(Buf::K, *k_norm, g.kv_heads)]) {
                    let args =
                        Args::default().ptr(b.rows.ptr).ptr(self.at(buf)).ptr(self.weights.vector(weight)?);
                    let args = args.float(*eps).int(rope).ptr(b.angles(plan.pass));
                    self.push(steps.clone(), "strict_qk", (n, heads), 32, args)?;
                }
            }
            Op::Store { cache } => {
                let args = rows.ptr(self.at(Buf::K)).ptr(self.at(Buf::V)).cache(&self.kv.cache(*cache));
                self.push(steps, "strict_store", (n, 1), 256, args)?;
            }
            Op::Attend { cache, mask } => {
                let gated = matches!(next, Some(Op::Gate));
                let (width, span) = (g.q_width(), self.key.splits);
                // As many rows at a time as the scratch has room for.
                let most = (b.scratch_bytes / (g.heads * span * 4)).max(1);
                for first in (0..n).step_by(most) {
                    let at = |address: u64| address + (first * width * 4) as u64;
                    let rows = b.rows.ptr + (first * crate::buffers::ROW_BYTES) as u64;
                    let args = Args::default().ptr(rows).ptr(at(self.at(Buf::Q)));
                    let args = args.cache(&self.kv.cache(*cache)).int(usize::from(*mask == Mask::Block));
                    let args = args.float(g.score_scale()).ptr(if gated { at(self.at(Buf::G)) } else { 0 });
                    let args = args.ptr(b.scratch.ptr).int(span).ptr(at(self.at(Buf::A)));
                    let steps = i..i + 1 + usize::from(gated);
                    self.push(steps, "strict_attend", (g.heads, (n - first).min(most)), 128, args)?;
                }
                return Ok(1 + usize::from(gated));
            }
            Op::Tail { post, next } => {
                let (weight, eps) =
                    post.map_or(Ok((0, 0.0)), |(slot, eps)| self.weights.vector(slot).map(|v| (v, eps)))?;
                let args = Args::default().ptr(self.at(Buf::P)).ptr(weight).float(eps).ptr(b.x.ptr);
                let args =
                    args.ptr(self.weights.vector(next.0)?).float(next.1).int(hidden).ptr(self.at(Buf::H));
                self.push(steps, "strict_tail", (n, 1), 32, args)?;
            }
            Op::Capture { index } => {
                let features = b.features.ptr + (index * hidden * 4) as u64;
                let args = rows.ptr(b.x.ptr).int(hidden).ptr(features);
                let args = args.int(self.model.plans.width(plan.pass, Buf::Features));
                self.push(steps, "strict_capture", (n, 1), 256, args)?;
            }
            Op::GateUp { gate, up } => {
                let (gate, up, h) = (self.weights.blocks(*gate)?, self.weights.blocks(*up)?, self.at(Buf::H));
                self.project(steps.clone(), gate, h, n, b.raw.gate.ptr)?;
                self.project(steps.clone(), up, h, n, b.raw.up.ptr)?;
                let all = n * gate.rows;
                let args =
                    Args::default().ptr(b.raw.gate.ptr).ptr(b.raw.up.ptr).long(all).ptr(self.at(Buf::F));
                self.push(steps, "strict_silu_mul", (all.div_ceil(256), 1), 256, args)?;
            }
            Op::Head { weight } => {
                let (m, asked) = (self.weights.blocks(*weight)?, self.key.logits);
                if asked > 0 {
                    let x = b.picked.addresses().f;
                    let args = rows.ptr(self.at(Buf::H)).int(m.cols).ptr(x);
                    self.push(steps.clone(), "strict_gather", (n, 1), 256, args)?;
                    self.project(steps, m, x, asked, b.logits.ptr)?;
                }
            }
            Op::ScaleCap { scale, cap } => {
                let all = self.key.logits * self.model.geometry().vocab;
                if all > 0 {
                    let args = Args::default().ptr(b.logits.ptr).long(all).float(*scale);
                    let args = args.float(cap.unwrap_or(0.0));
                    self.push(steps, "strict_scale_cap", (all.div_ceil(256), 1), 256, args)?;
                }
            }
            Op::Gate => return Err(self.no_kernel(plan, i, "a gate that stands alone".into())),
        }
        Ok(1)
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
