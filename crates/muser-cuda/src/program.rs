//! A pass as launches: core's plan, step by step, with the neighbours that one kernel serves.

use crate::buffers::{Buffers, MOST_PARTS};
use crate::gpu::Card;
use crate::kv::Kv;
use crate::launch::{Activation, Args, Planes};
use crate::product::{GROUP, HEAD_PLANES, MOST_PLANES, Product, Segment, Shape};
use crate::weights::{Matrix, TILE_COLS, TILE_ROWS, Weights};
use muser_core::{Buf, DeviceError, Mask, Model, Op, Pass, Plan, RopePairs};
use std::collections::HashMap;
use std::ops::Range;

const PROJECT: &str = "src/kernels/project.cu";

/// Rows up to which weights are multiplied as they stream by; for more they are widened to f16 first.
pub(crate) const SMALL: usize = 32;
/// Rows whose attention is one launch, where keys are split.
pub(crate) const ATTEND: usize = 16;

/// One launch.
pub(crate) struct Node {
    pub steps: Range<usize>,
    /// The kernel by which it is found when it is launched.
    pub name: String,
    pub file: &'static str,
    pub work: Work,
    /// What a product leaves in which buffer.
    pub leaves: Vec<(Buf, Planes)>,
}

pub(crate) enum Work {
    Kernel { grid: (u32, u32, u32), block: u32, shared: u32, args: Args },
    Gemm { w: u64, x: u64, out: u64, m: usize, n: usize, k: usize, stride: usize, factor: f32 },
}

/// What decides a program: equal keys run the same launches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub pass: Pass,
    pub rows: usize,
    pub logits: usize,
    /// Blocks among which the keys of a full layer are split.
    pub splits: usize,
}

impl Key {
    /// Splits grow with depth: enough warps to keep memory busy, few enough that joining stays short.
    pub fn new(pass: Pass, rows: usize, logits: usize, depth: usize) -> Self {
        let splits = if rows > SMALL { 0 } else { (depth / 256).next_power_of_two().clamp(2, MOST_PARTS) };
        Key { pass, rows, logits, splits }
    }
}

/// Blocks among which a window's keys are split at most.
const WINDOW_SPLITS: usize = 16;

pub(crate) struct Compiler<'a> {
    pub card: &'a Card,
    pub model: &'a Model,
    pub weights: &'a Weights,
    pub kv: &'a Kv,
    pub buffers: &'a Buffers,
    pub key: Key,
    /// What the products so far left.
    planes: HashMap<Buf, Planes>,
    nodes: Vec<Node>,
}

impl<'a> Compiler<'a> {
    pub fn new(
        card: &'a Card,
        model: &'a Model,
        weights: &'a Weights,
        kv: &'a Kv,
        buffers: &'a Buffers,
        key: Key,
    ) -> Self {
        Compiler { card, model, weights, kv, buffers, key, planes: HashMap::new(), nodes: vec![] }
    }

    fn large(&self) -> bool {
        self.key.rows > SMALL
    }

    fn push(
        &mut self,
        steps: Range<usize>,
        file: &'static str,
        name: &str,
        grid: (usize, usize, usize),
        block: usize,
        args: Args,
    ) -> Result<(), DeviceError> {
        self.push_shared(steps, file, name, grid, (block, 0), args)
    }

    /// `block` is threads and bytes of dynamic shared memory.
    fn push_shared(
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

    /// All launches of the plan, in order.
    pub fn compile(mut self, plan: &Plan) -> Result<Vec<Node>, DeviceError> {
        let mut i = 0;
        while i < plan.steps.len() {
            let next = plan.steps.get(i + 1).map(|s| &s.op);
            i += self.step(i, &plan.steps[i].op, next, plan)?;
        }
        Ok(self.nodes)
    }

    /// Compiles the step at `i`; returns how many steps it served.
    fn step(&mut self, i: usize, op: &Op, next: Option<&Op>, plan: &Plan) -> Result<usize, DeviceError> {
        let b = self.buffers;
        let n = self.key.rows;
        let hidden = plan.geometry.hidden;
        const NORM: &str = "src/kernels/norm.cu";
        match op {
            Op::Embed { table, norm_eps } => {
                let t = self.weights.matrix(*table)?;
                let args = Args::default().ptr(b.rows.ptr).ptr(t.ptr).int(t.layout as usize).float(t.scale);
                let args = args.int(hidden).float(norm_eps.unwrap_or(-1.0)).ptr(b.x.ptr);
                self.push(i..i + 1, NORM, "embed", (n, 1, 1), 1024, args)?;
                Ok(1)
            }
            Op::Norm { from, weight, eps, to: _ } => {
                let from = if *from == Buf::P { self.left(Buf::P) } else { Planes::one(b.x.ptr) };
                let args =
                    Args::default().planes(&from).ptr(self.weights.vector(*weight)?).int(hidden).float(*eps);
                let args = args.activation(&b.h.addresses());
                self.push(i..i + 1, NORM, "rms_norm", (n, 1, 1), 1024, args)?;
                Ok(1)
            }
            Op::Project { from, outs } => {
                let x = match from {
                    Buf::H => b.h.addresses(),
                    Buf::A => b.a.addresses(),
                    Buf::F => b.f.addresses(),
                    Buf::Features => {
                        let width = self.model.plans.width(plan.pass, Buf::Features);
                        let x = b.picked.addresses();
                        let args =
                            Args::default().ptr(b.rows.ptr).ptr(b.features.ptr).int(width).activation(&x);
                        self.push(i..i + 1, NORM, "pick_features", (n, 1, 1), 1024, args)?;
                        x
                    }
                    other => return Err(self.no_kernel(plan, i, format!("a product that reads {other:?}"))),
                };
                let mut parts = vec![];
                for (slot, out) in outs {
                    parts.push((self.weights.matrix(*slot)?, b.raw(*out).ptr));
                }
                let planes = self.multiply(i..i + 1, &parts, x, n, MOST_PLANES)?;
                let left: Vec<_> = outs.iter().map(|(_, out)| *out).zip(planes).collect();
                self.planes.extend(left.iter().copied());
                if let Some(node) = self.nodes.last_mut() {
                    node.leaves = left;
                }
                Ok(1)
            }
            Op::QkNormRope { q_norm, k_norm, eps, rope } => {
                let Some(Op::Store { cache }) = next else {
                    return Err(self.no_kernel(plan, i, "QK-norm that no store follows".into()));
                };
                let g = &plan.geometry;
                if g.head_dim != 128 || g.heads / g.kv_heads > 16 {
                    return Err(self.no_kernel(
                        plan,
                        i,
                        format!("{} heads of {} on {} KV heads", g.heads, g.head_dim, g.kv_heads),
                    ));
                }
                let heads = if q_norm.is_some() { g.heads } else { 0 };
                let q_norm = q_norm.map_or(Ok(0), |s| self.weights.vector(s))?;
                let rope = match rope {
                    None => 0,
                    Some(RopePairs::Interleaved) => 1,
                    Some(RopePairs::Halves) => 2,
                };
                let args =
                    Args::default().ptr(b.rows.ptr).planes(&self.left(Buf::Q)).planes(&self.left(Buf::K));
                let args = args.planes(&self.left(Buf::V)).ptr(b.q.ptr).ptr(b.k.ptr).int(heads);
                let args = args.ptr(q_norm).ptr(self.weights.vector(*k_norm)?).float(*eps).int(rope);
                let args = args.ptr(b.angles(plan.pass)).cache(&self.kv.cache(*cache)).ptr(b.q16.ptr);
                let grid = (n, (heads + 2 * g.kv_heads).div_ceil(4), 1);
                self.push(i..i + 2, "src/kernels/attend.cu", "qk_norm_rope_store", grid, 128, args)?;
                Ok(2)
            }
            Op::Attend { cache, mask } => {
                let gated = matches!(next, Some(Op::Gate));
                let steps = i..i + 1 + usize::from(gated);
                self.attend(steps.clone(), *cache, *mask, gated, plan)?;
                Ok(steps.len())
            }
            Op::Tail { post, next: after } => {
                let capture = match next {
                    Some(Op::Capture { index }) => Some(*index),
                    _ => None,
                };
                let (weight, eps) =
                    post.map_or(Ok((0, 0.0)), |(s, eps)| self.weights.vector(s).map(|v| (v, eps)))?;
                let args = Args::default().planes(&self.left(Buf::P)).ptr(weight).float(eps).ptr(b.x.ptr);
                let args = args.ptr(self.weights.vector(after.0)?).float(after.1).int(hidden);
                let args = args.activation(&b.h.addresses()).ptr(b.rows.ptr);
                let features = capture.map_or(0, |index| b.features.ptr + (index * hidden * 4) as u64);
                let args = args.ptr(features).int(self.model.plans.width(plan.pass, Buf::Features));
                let steps = i..i + 1 + usize::from(capture.is_some());
                self.push(steps.clone(), NORM, "tail", (n, 1, 1), 1024, args)?;
                Ok(steps.len())
            }
            Op::GateUp { gate, up } => {
                let (gate, up) = (self.weights.matrix(*gate)?, self.weights.matrix(*up)?);
                self.gate_up(i..i + 1, gate, up)?;
                Ok(1)
            }
            Op::Head { weight } => {
                let capped = match next {
                    Some(Op::ScaleCap { scale, cap }) => Some((*scale, cap.unwrap_or(0.0))),
                    _ => None,
                };
                let steps = i..i + 1 + usize::from(capped.is_some());
                if self.key.logits > 0 {
                    let m = self.weights.matrix(*weight)?;
                    let (mul, cap) = capped.unwrap_or((1.0, 0.0));
                    self.head(steps.clone(), m, mul, cap)?;
                }
                Ok(steps.len())
            }
            Op::Store { .. } | Op::Gate | Op::Capture { .. } | Op::ScaleCap { .. } => {
                Err(self.no_kernel(plan, i, "a step that stands alone".into()))
            }
        }
    }

    fn no_kernel(&self, plan: &Plan, i: usize, why: String) -> DeviceError {
        DeviceError::NoKernel {
            step: plan.steps[i].name.clone(),
            why,
            device: self.card.name.clone(),
            mend: "use --device cpu".into(),
        }
    }

    /// What the product before left in a buffer; nothing where none did.
    fn left(&self, buf: Buf) -> Planes {
        self.planes.get(&buf).copied().unwrap_or_default()
    }

    /// Products with the same `n` activation rows, each to its address; returns the planes that each leaves, at most `most`.
    fn multiply(
        &mut self,
        steps: Range<usize>,
        parts: &[(Matrix, u64)],
        x: Activation,
        n: usize,
        most: usize,
    ) -> Result<Vec<Planes>, DeviceError> {
        if n > SMALL {
            for (m, out) in parts {
                self.gemm(steps.clone(), *m, x.h, *out, n)?;
            }
            return Ok(parts.iter().map(|(_, out)| Planes::one(*out)).collect());
        }
        // One launch for each layout and group of rows: neighbours of one layout share it.
        let mut layouts: Vec<_> = parts.iter().map(|p| p.0.layout).collect();
        layouts.sort_by_key(|l| *l as i32);
        layouts.dedup();
        let mut left = vec![Planes::default(); parts.len()];
        for layout in layouts {
            let same: Vec<usize> = (0..parts.len()).filter(|i| parts[*i].0.layout == layout).collect();
            let cols = parts[same[0]].0.cols;
            let tiles = same.iter().map(|i| parts[*i].0.tiles()).sum();
            let shape = Shape::of(self.card.room, layout, n, cols, tiles, most);
            let shape = shape.ok_or_else(|| {
                DeviceError::Backend(format!(
                    "a product of {cols} columns does not fit the shared memory of {}; use --device cpu",
                    self.card.name
                ))
            })?;
            for i in &same {
                let (m, out) = parts[*i];
                left[*i] = Planes { ptr: out, stride: n * m.rows, count: shape.planes() };
            }
            for first in (0..n).step_by(shape.columns.min(GROUP)) {
                let segment = |i: &usize| {
                    let matrix = parts[*i].0;
                    Segment { matrix, out: left[*i].from(first * matrix.rows), stride: matrix.rows }
                };
                let product = Product {
                    segments: same.iter().map(segment).collect(),
                    cols,
                    n: (n - first).min(shape.columns),
                    slices: shape.slices,
                };
                let args = Args::default().product(&product).ptr(x.at_row(first, cols).h).int(cols);
                let name = format!("project_{}_{}", layout.name(), shape.columns);
                let grid = (shape.blocks, shape.slices, 1);
                self.push_shared(steps.clone(), PROJECT, &name, grid, (shape.threads(), shape.shared), args)?;
            }
        }
        Ok(left)
    }

    /// One product on many rows: the matrix is widened to f16 and multiplied on tensor cores.
    fn gemm(
        &mut self,
        steps: Range<usize>,
        m: Matrix,
        x: u64,
        out: u64,
        n: usize,
    ) -> Result<(), DeviceError> {
        self.gemm_into(steps, m, x, out, (n, m.rows))
    }

    /// The same into rows that are `stride` elements apart.
    fn gemm_into(
        &mut self,
        steps: Range<usize>,
        m: Matrix,
        x: u64,
        out: u64,
        (n, stride): (usize, usize),
    ) -> Result<(), DeviceError> {
        let w = self.buffers.scratch.ptr;
        let args = Args::default().ptr(m.ptr).int(m.rows).int(m.cols).ptr(w);
        let grid = ((m.tiles() * m.cols.div_ceil(TILE_COLS) * 128).div_ceil(256), 1, 1);
        self.push(steps.clone(), PROJECT, &format!("widen_{}", m.layout.name()), grid, 256, args)?;
        let work = Work::Gemm { w, x, out, m: m.rows, n, k: m.cols, stride, factor: m.scale };
        let name = "gemm-f16 (cuBLAS)".to_string();
        self.nodes.push(Node { steps, name, file: "src/gpu.rs", work, leaves: vec![] });
        Ok(())
    }

    fn gate_up(&mut self, steps: Range<usize>, gate: Matrix, up: Matrix) -> Result<(), DeviceError> {
        let b = self.buffers;
        let (n, ff) = (self.key.rows, gate.rows);
        let parts = [(gate, b.raw.gate.ptr), (up, b.raw.up.ptr)];
        let left = self.multiply(steps.clone(), &parts, b.h.addresses(), n, MOST_PLANES)?;
        let args = Args::default().planes(&left[0]).planes(&left[1]).long(n * ff);
        let args = args.activation(&b.f.addresses());
        self.push(steps, "src/kernels/norm.cu", "silu_mul", ((n * ff).div_ceil(1024), 1, 1), 256, args)
    }

    fn head(&mut self, steps: Range<usize>, m: Matrix, mul: f32, cap: f32) -> Result<(), DeviceError> {
        let b = self.buffers;
        let (n, logits) = (self.key.logits, b.logits.ptr);
        const NORM: &str = "src/kernels/norm.cu";
        let mut x = b.h.addresses();
        if n < self.key.rows {
            // Rows that ask, in the order of their logits.
            let args = Args::default().ptr(b.rows.ptr).ptr(x.h).int(m.cols);
            x = b.picked.addresses();
            self.push(steps.clone(), NORM, "gather", (self.key.rows, 1, 1), 1024, args.ptr(x.h))?;
        }
        let mut left = Planes::one(logits);
        if n <= SMALL {
            left = self.multiply(steps.clone(), &[(m, b.head.ptr)], x, n, HEAD_PLANES)?[0];
        } else {
            // Pieces of the head that fit the scratch, each into its columns of the logits.
            let most = (b.scratch_bytes / (m.cols * 2) / TILE_ROWS * TILE_ROWS).max(TILE_ROWS);
            for first in (0..m.rows).step_by(most) {
                let part = m.part(first, (m.rows - first).min(most));
                self.gemm_into(steps.clone(), part, x.h, logits + (first * 4) as u64, (n, m.rows))?;
            }
        }
        let all = n * m.rows;
        let args = Args::default().planes(&left).long(all).float(mul).float(cap).ptr(logits);
        self.push(steps, NORM, "scale_cap", (all.div_ceil(256), 1, 1), 256, args)
    }

    fn attend(
        &mut self,
        steps: Range<usize>,
        index: usize,
        mask: Mask,
        gated: bool,
        plan: &Plan,
    ) -> Result<(), DeviceError> {
        const FILE: &str = "src/kernels/attend.cu";
        let b = self.buffers;
        let g = &plan.geometry;
        let (n, heads, width) = (self.key.rows, g.heads, g.q_width());
        let cache = self.kv.cache(index);
        let block = usize::from(mask == Mask::Block);
        let gate = if gated { self.left(Buf::G) } else { Planes::default() };
        let a = b.a.addresses();
        if self.large() {
            let args =
                Args::default().ptr(b.rows.ptr).int(n).ptr(b.q16.ptr).int(heads).cache(&cache).int(block);
            let args = args.float(g.score_scale()).ptr(gate.ptr).activation(&a);
            return self.push(steps, FILE, "attend_rows", (n.div_ceil(8), g.kv_heads, 1), 256, args);
        }
        let splits =
            if cache.window > 0 { self.key.splits.clamp(1, WINDOW_SPLITS) } else { self.key.splits.max(1) };
        for first in (0..n).step_by(ATTEND) {
            let count = (n - first).min(ATTEND);
            let rows = b.rows.ptr + (first * crate::buffers::ROW_BYTES) as u64;
            let q16 = b.q16.ptr + (first * width * 2) as u64;
            let args = Args::default().ptr(rows).ptr(q16).int(heads).cache(&cache).int(block);
            let args = args.float(g.score_scale()).ptr(b.partial.ptr);
            self.push(steps.clone(), FILE, "attend_split", (splits, g.kv_heads, count), 128, args)?;
            let gate = gate.from(first * width);
            let args =
                Args::default().ptr(b.partial.ptr).int(heads).int(g.kv_heads).int(splits).planes(&gate);
            let args = args.activation(&a.at_row(first, width));
            self.push(steps.clone(), FILE, "attend_join", (heads, count, 1), 128, args)?;
        }
        Ok(())
    }
}
