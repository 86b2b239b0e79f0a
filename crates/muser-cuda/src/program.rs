//! A pass as launches: core's plan, step by step, with the neighbours that one kernel serves.

use crate::buffers::Buffers;
use crate::gpu::Gpu;
use crate::kv::Kv;
use crate::launch::{Activation, Args, Matvec};
use crate::weights::{Layout, Matrix, Weights};
use cudarc::driver::CudaFunction;
use muser_core::{Buf, DeviceError, Mask, Model, Op, Pass, Plan, RopePairs, Slot};
use std::ops::Range;

/// Rows up to which weights are multiplied as int8 while they stream by; more rows go to tensor cores.
pub(crate) const SMALL: usize = 8;

/// One launch.
pub(crate) struct Node {
    pub steps: Range<usize>,
    pub name: String,
    pub file: &'static str,
    pub work: Work,
}

pub(crate) enum Work {
    Kernel { kernel: CudaFunction, grid: (u32, u32, u32), block: u32, shared: u32, args: Args },
    Gemm { w: u64, x: u64, out: u64, m: usize, n: usize, k: usize, stride: usize },
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
        let splits = if rows > SMALL { 0 } else { (depth / 512).next_power_of_two().clamp(4, 64) };
        Key { pass, rows, logits, splits }
    }
}

/// Blocks among which a window's keys are split at most.
const WINDOW_SPLITS: usize = 16;

/// Longest activation row that a block keeps in shared memory: int8, scales and sums fit the 48 KB that need no consent.
const SHARED_COLUMNS: usize = 34_816;

/// Shared memory of a product with `n` activation rows of `cols`.
fn staged(layout: Layout, cols: usize, n: usize) -> u32 {
    let quantised = !matches!(layout, Layout::F32 | Layout::F16 | Layout::BF16);
    if n == 1 && quantised && cols <= SHARED_COLUMNS { (cols + cols / 8 + cols / 4) as u32 } else { 0 }
}

pub(crate) struct Compiler<'a> {
    pub gpu: &'a Gpu,
    pub model: &'a Model,
    pub weights: &'a Weights,
    pub kv: &'a Kv,
    pub buffers: &'a Buffers,
    pub key: Key,
    /// Dynamic shared memory of the next launch.
    shared: u32,
    nodes: Vec<Node>,
}

impl<'a> Compiler<'a> {
    pub fn new(
        gpu: &'a Gpu,
        model: &'a Model,
        weights: &'a Weights,
        kv: &'a Kv,
        buffers: &'a Buffers,
        key: Key,
    ) -> Self {
        Compiler { gpu, model, weights, kv, buffers, key, shared: 0, nodes: vec![] }
    }

    fn large(&self) -> bool {
        self.key.rows > SMALL && self.gpu.has_blas()
    }

    fn matrix(&self, slot: Slot) -> Result<Matrix, DeviceError> {
        self.weights
            .matrices
            .get(&slot)
            .copied()
            .ok_or_else(|| DeviceError::Backend(format!("{slot} is not on the card")))
    }

    fn vector(&self, slot: Slot) -> Result<u64, DeviceError> {
        self.weights
            .vectors
            .get(&slot)
            .copied()
            .ok_or_else(|| DeviceError::Backend(format!("{slot} is not on the card")))
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
        let kernel = self.gpu.kernel(name)?;
        let shared = self.shared;
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        let work = Work::Kernel { kernel, grid, block: block as u32, shared, args };
        self.nodes.push(Node { steps, name: name.to_string(), file, work });
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
        let halves = usize::from(self.large());
        let hidden = plan.geometry.hidden;
        const NORM: &str = "src/kernels/norm.cu";
        match op {
            Op::Embed { table, norm_eps } => {
                let t = self.matrix(*table)?;
                let args = Args::default().ptr(b.rows.ptr).ptr(t.ptr).int(t.layout as usize).int(hidden);
                let args = args.float(norm_eps.unwrap_or(-1.0)).ptr(b.x.ptr);
                self.push(i..i + 1, NORM, "embed", (n, 1, 1), 1024, args)?;
                Ok(1)
            }
            Op::Norm { from, weight, eps, to: _ } => {
                let from = if *from == Buf::P { b.p.ptr } else { b.x.ptr };
                let args = Args::default().ptr(from).ptr(self.vector(*weight)?).int(hidden).float(*eps);
                let args = args.activation(&b.h.addresses()).int(halves);
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
                        let args = Args::default()
                            .ptr(b.rows.ptr)
                            .ptr(b.features.ptr)
                            .int(width)
                            .activation(&x)
                            .int(halves);
                        self.push(i..i + 1, NORM, "pick_features", (n, 1, 1), 1024, args)?;
                        x
                    }
                    other => return Err(self.no_kernel(plan, i, format!("a product that reads {other:?}"))),
                };
                let mut segments = vec![];
                for (slot, out) in outs {
                    let m = self.matrix(*slot)?;
                    segments.push((m, b.output(*out), m.rows));
                }
                self.multiply(i..i + 1, segments, x, n, (1.0, 0.0), false)?;
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
                let q_norm = q_norm.map_or(Ok(0), |s| self.vector(s))?;
                let rope = match rope {
                    None => 0,
                    Some(RopePairs::Interleaved) => 1,
                    Some(RopePairs::Halves) => 2,
                };
                let args = Args::default().ptr(b.rows.ptr).ptr(b.q.ptr).ptr(b.k.ptr).ptr(b.v.ptr).int(heads);
                let args = args.ptr(q_norm).ptr(self.vector(*k_norm)?).float(*eps).int(rope);
                let args = args.ptr(b.angles(plan.pass)).cache(&self.kv.cache(*cache)).ptr(b.q16.ptr);
                let grid = (n, heads + 2 * g.kv_heads, 1);
                self.push(i..i + 2, "src/kernels/attend.cu", "qk_norm_rope_store", grid, 32, args)?;
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
                let (weight, eps) = post.map_or(Ok((0, 0.0)), |(s, eps)| self.vector(s).map(|v| (v, eps)))?;
                let args = Args::default().ptr(b.p.ptr).ptr(weight).float(eps).ptr(b.x.ptr);
                let args = args.ptr(self.vector(after.0)?).float(after.1).int(hidden);
                let args = args.activation(&b.h.addresses()).int(halves).ptr(b.rows.ptr);
                let features = capture.map_or(0, |index| b.features.ptr + (index * hidden * 4) as u64);
                let args = args.ptr(features).int(self.model.plans.width(plan.pass, Buf::Features));
                let steps = i..i + 1 + usize::from(capture.is_some());
                self.push(steps.clone(), NORM, "tail", (n, 1, 1), 1024, args)?;
                Ok(steps.len())
            }
            Op::GateUp { gate, up } => {
                let (gate, up) = (self.matrix(*gate)?, self.matrix(*up)?);
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
                    let m = self.matrix(*weight)?;
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
            device: self.gpu.name.clone(),
            mend: "use --device cpu".into(),
        }
    }

    /// Products with the same `n` activation rows. `cap` is (factor, soft cap) on the results; `gather` takes the batch's rows
    /// that ask for logits instead of the first `n`.
    fn multiply(
        &mut self,
        steps: Range<usize>,
        segments: Vec<(Matrix, u64, usize)>,
        x: Activation,
        n: usize,
        cap: (f32, f32),
        gather: bool,
    ) -> Result<(), DeviceError> {
        const FILE: &str = "src/kernels/matvec.cu";
        let cols = segments.first().map_or(0, |s| s.0.cols);
        if n > SMALL && self.gpu.has_blas() {
            for (m, out, _) in segments {
                self.gemm(steps.clone(), m, x.h, out, n)?;
            }
            return Ok(());
        }
        // One launch for each layout: neighbours of one layout share it.
        let mut layouts: Vec<_> = segments.iter().map(|s| s.0.layout).collect();
        layouts.sort_by_key(|l| *l as i32);
        layouts.dedup();
        for layout in layouts {
            let same: Vec<_> = segments.iter().filter(|s| s.0.layout == layout).collect();
            let rows: usize = same.iter().map(|s| s.0.rows).sum();
            for first in (0..n).step_by(8) {
                let count = (n - first).min(8);
                let shifted =
                    same.iter().map(|(m, out, stride)| (*m, out + (first * stride * 4) as u64, *stride));
                let m = Matvec {
                    segments: shifted.collect(),
                    cols,
                    n: count,
                    first,
                    x_stride: cols,
                    mul: cap.0,
                    cap: cap.1,
                    batch: self.key.rows,
                    gather: if gather { self.buffers.rows.ptr } else { 0 },
                };
                let x = if gather { x } else { x.at_row(first, cols) };
                let name = format!("matvec_{}_{}", layout.name(), count.next_power_of_two());
                let args = Args::default().matvec(&m).activation(&x);
                self.shared = staged(layout, cols, count);
                self.push(steps.clone(), FILE, &name, (rows.div_ceil(16), 1, 1), 256, args)?;
                self.shared = 0;
            }
        }
        Ok(())
    }

    /// One product on many rows: a piece of the weight at a time is widened to f16 and multiplied on tensor cores.
    fn gemm(
        &mut self,
        steps: Range<usize>,
        m: Matrix,
        x: u64,
        out: u64,
        n: usize,
    ) -> Result<(), DeviceError> {
        let scratch = &self.buffers.scratch;
        self.widen(steps.clone(), m, m.ptr, m.rows)?;
        let work = Work::Gemm { w: scratch.ptr, x, out, m: m.rows, n, k: m.cols, stride: m.rows };
        self.nodes.push(Node { steps, name: "gemm-f16 (cuBLAS)".into(), file: "src/gpu.rs", work });
        Ok(())
    }

    /// `rows` rows of a matrix from address `at` on, as f16 into the scratch.
    fn widen(&mut self, steps: Range<usize>, m: Matrix, at: u64, rows: usize) -> Result<(), DeviceError> {
        let args = Args::default().ptr(at).int(m.cols).float(m.scale).ptr(self.buffers.scratch.ptr);
        let grid = ((m.cols / m.layout.chunk()).div_ceil(256), rows, 1);
        let name = format!("to_half_{}", m.layout.name());
        self.push(steps, "src/kernels/matvec.cu", &name, grid, 256, args)
    }

    fn gate_up(&mut self, steps: Range<usize>, gate: Matrix, up: Matrix) -> Result<(), DeviceError> {
        let b = self.buffers;
        let (n, ff) = (self.key.rows, gate.rows);
        let (h, f) = (b.h.addresses(), b.f.addresses());
        if self.large() {
            self.gemm(steps.clone(), gate, h.h, b.gate.ptr, n)?;
            self.gemm(steps.clone(), up, h.h, b.up.ptr, n)?;
            let args = Args::default().ptr(b.gate.ptr).ptr(b.up.ptr).ptr(f.f).ptr(f.h).long(n * ff);
            return self.push(
                steps,
                "src/kernels/norm.cu",
                "silu_mul",
                ((n * ff).div_ceil(1024), 1, 1),
                256,
                args,
            );
        }
        if gate.layout != up.layout {
            self.multiply(
                steps.clone(),
                vec![(gate, b.gate.ptr, ff), (up, b.up.ptr, ff)],
                h,
                n,
                (1.0, 0.0),
                false,
            )?;
            let args = Args::default().ptr(b.gate.ptr).ptr(b.up.ptr).long(n * ff).activation(&f);
            let grid = ((n * ff).div_ceil(1024), 1, 1);
            return self.push(steps, "src/kernels/norm.cu", "silu_quantize", grid, 1024, args);
        }
        for first in (0..n).step_by(8) {
            let count = (n - first).min(8);
            let m = Matvec {
                segments: vec![(gate, 0, ff), (up, 0, ff)],
                cols: gate.cols,
                n: count,
                first: 0,
                x_stride: gate.cols,
                mul: 1.0,
                cap: 0.0,
                batch: n,
                gather: 0,
            };
            let (x, out) = (h.at_row(first, gate.cols), f.at_row(first, ff));
            let name = format!("gate_up_{}_{}", gate.layout.name(), count.next_power_of_two());
            let args = Args::default().matvec(&m).activation(&x).activation(&out);
            self.shared = staged(gate.layout, gate.cols, count);
            self.push(steps.clone(), "src/kernels/matvec.cu", &name, (ff / 32, 1, 1), 256, args)?;
            self.shared = 0;
        }
        Ok(())
    }

    fn head(&mut self, steps: Range<usize>, m: Matrix, mul: f32, cap: f32) -> Result<(), DeviceError> {
        let b = self.buffers;
        let (n, logits) = (self.key.logits, b.logits.ptr);
        let out = vec![(m, logits, m.rows)];
        if !self.large() && (n <= SMALL || !self.gpu.has_blas()) {
            return self.multiply(steps, out, b.h.addresses(), n, (mul, cap), true);
        }
        // Rows that ask, in the order of their logits.
        let picked = b.picked.addresses();
        let many = n > SMALL;
        let args = Args::default().ptr(b.rows.ptr).ptr(b.h.addresses().f).int(m.cols).activation(&picked);
        let args = args.int(usize::from(many));
        self.push(steps.clone(), "src/kernels/norm.cu", "gather", (self.key.rows, 1, 1), 1024, args)?;
        if !many {
            return self.multiply(steps, out, picked, n, (mul, cap), false);
        }
        // Pieces of the head that fit the scratch, each into its columns of the logits.
        let most = (b.scratch_bytes / (m.cols * 2)).max(1);
        for first in (0..m.rows).step_by(most) {
            let rows = (m.rows - first).min(most);
            let at = m.ptr + (first * m.layout.row_bytes(m.cols)) as u64;
            self.widen(steps.clone(), m, at, rows)?;
            let out = logits + (first * 4) as u64;
            let work =
                Work::Gemm { w: b.scratch.ptr, x: picked.h, out, m: rows, n, k: m.cols, stride: m.rows };
            self.nodes.push(Node {
                steps: steps.clone(),
                name: "gemm-f16 (cuBLAS)".into(),
                file: "src/gpu.rs",
                work,
            });
        }
        let all = n * m.rows;
        let args = Args::default().ptr(logits).long(all).float(mul).float(cap);
        self.push(steps, "src/kernels/norm.cu", "scale_cap", (all.div_ceil(256), 1, 1), 256, args)
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
        let gate = if gated { b.g.ptr } else { 0 };
        let a = b.a.addresses();
        if self.large() {
            let args =
                Args::default().ptr(b.rows.ptr).int(n).ptr(b.q16.ptr).int(heads).cache(&cache).int(block);
            let args = args.float(g.score_scale()).ptr(gate).activation(&a);
            return self.push(steps, FILE, "attend_rows", (n.div_ceil(4), g.kv_heads, 1), 128, args);
        }
        let splits =
            if cache.window > 0 { self.key.splits.clamp(1, WINDOW_SPLITS) } else { self.key.splits.max(1) };
        for first in (0..n).step_by(SMALL) {
            let count = (n - first).min(SMALL);
            let rows = b.rows.ptr + (first * crate::buffers::ROW_BYTES) as u64;
            let q16 = b.q16.ptr + (first * width * 2) as u64;
            let args = Args::default().ptr(rows).ptr(q16).int(heads).cache(&cache).int(block);
            let args = args.float(g.score_scale()).ptr(b.partial.ptr);
            self.push(steps.clone(), FILE, "attend_split", (splits, g.kv_heads, count), 128, args)?;
            let gate = if gated { gate + (first * width * 4) as u64 } else { 0 };
            let args =
                Args::default().ptr(b.partial.ptr).int(heads).int(g.kv_heads).int(splits * 4).ptr(gate);
            let args = args.activation(&a.at_row(first, width));
            self.push(steps.clone(), FILE, "attend_join", (heads, count, 1), 128, args)?;
        }
        Ok(())
    }
}
