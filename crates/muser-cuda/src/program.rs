//! A pass as launches: core's plan, step by step, with the neighbours that one kernel serves.

use crate::attention::{Attend, row_parts, shares, splits};
use crate::buffers::{Act, Buffers};
use crate::chain::COUNTERS;
use crate::gpu::Card;
use crate::kv::Kv;
use crate::launch::{Activation, Args, Halves, Left, Planes};
use crate::many::{Gemm, Out, SLOTS};
use crate::product::{ALONE, GROUP, HEAD_PLANES, MOST_NARROW, MOST_PLANES, SUM_PLANES};
use crate::stream::Rows;
use crate::weights::{Layout, Matrix, TILE_ROWS, Weights, products};
use muser_core::{Buf, DeviceError, Model, Op, Pass, Plan};
use std::collections::HashMap;
use std::ops::Range;

/// Elements of a row that norms take at most: eight a thread.
pub(crate) const MOST_HIDDEN: usize = 8192;
/// Rows up to which weights are multiplied as they stream by; for more they are widened to f16 first.
pub(crate) const SMALL: usize = 32;
/// One launch.
pub(crate) struct Node {
    pub steps: Range<usize>,
    /// The kernel by which it is found when it is launched.
    pub name: String,
    pub file: &'static str,
    pub work: Work,
    /// What it leaves in which buffer, where that is not the buffer's f32 rows.
    pub leaves: Vec<(Buf, Left)>,
}

pub(crate) enum Work {
    Kernel {
        grid: (u32, u32, u32),
        block: u32,
        shared: u32,
        args: Args,
    },
    /// A matrix to f16, beside what is multiplied meanwhile.
    Widen {
        slot: usize,
        blocks: u32,
        args: Args,
    },
    Gemm(Gemm),
}

/// What decides a program: equal keys run the same launches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub pass: Pass,
    pub rows: usize,
    pub logits: usize,
    /// Blocks among which the keys of a row are split in a full layer, or chunks of these keys.
    pub splits: usize,
    /// A row's bits do not depend on the rows beside it: products as for [`GROUP`](crate::product::GROUP) rows, keys split by the row's own depth.
    pub even: bool,
    /// Blocks of rows of which each reads a sequence's keys once, where warpgroups do.
    pub blocks: Option<usize>,
}

impl Key {
    /// `blocks`: those of the rows ([`row_blocks`](crate::attention::row_blocks)), where warpgroups can read the keys.
    pub fn new(
        pass: Pass,
        rows: usize,
        logits: usize,
        depth: usize,
        even: bool,
        blocks: Option<usize>,
    ) -> Self {
        let blocks = blocks.filter(|blocks| !even && shares(rows, *blocks));
        // Of the target's two KV heads; where there are more, a launch has less.
        let splits = if rows > SMALL {
            row_parts(rows, depth, 2, blocks)
        } else {
            splits(depth, even, blocks.is_some())
        };
        Key { pass, rows, logits, splits, even, blocks }
    }
}

pub(crate) struct Compiler<'a> {
    pub card: &'a Card,
    pub model: &'a Model,
    pub weights: &'a Weights,
    pub kv: &'a Kv,
    pub buffers: &'a Buffers,
    pub key: Key,
    /// Layouts of each program of kernels/project.cu.
    pub programs: Vec<Vec<Layout>>,
    /// What the launches so far left.
    left: HashMap<Buf, Left>,
    pub(crate) nodes: Vec<Node>,
    /// Where the next matrix is widened.
    pub(crate) slot: usize,
    /// [`Rows::arranged`] of F.
    pub(crate) arranged: Option<usize>,
    /// Whether warpgroups multiply more rows than [`GROUP`] as they do many.
    wide: bool,
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
        let (programs, left) = (products(model), HashMap::new());
        let wide = card.room.wide && !key.even;
        Compiler {
            card,
            model,
            weights,
            kv,
            buffers,
            key,
            programs,
            left,
            nodes: vec![],
            slot: 0,
            arranged: None,
            wide,
        }
    }

    pub(crate) fn large(&self) -> bool {
        self.many(self.key.rows)
    }

    /// Whether so many rows are multiplied as many are.
    fn many(&self, rows: usize) -> bool {
        rows > if self.wide { GROUP } else { SMALL }
    }

    pub(crate) fn push(
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
    pub(crate) fn push_shared(
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
        // A part of a model begins with what the other part left.
        self.left.insert(Buf::P, Left::Planes(Planes::one(self.buffers.raw.p.ptr)));
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
        if hidden > MOST_HIDDEN {
            return Err(self.no_kernel(plan, i, format!("rows of {hidden} elements")));
        }
        const NORM: &str = "src/kernels/norm.cu";
        match op {
            Op::Embed { table, norm_eps } => {
                let t = self.weights.matrix(*table)?;
                let args = Args::default().ptr(b.rows.ptr).ptr(t.ptr).int(t.layout as usize).float(t.scale);
                let args = args.int(hidden).float(norm_eps.unwrap_or(-1.0)).ptr(b.x.ptr);
                let counters = b
                    .counters
                    .as_ref()
                    .map_or((0, 0), |c| (c.ptr, self.model.geometry().layers.len() * COUNTERS));
                let args = args.ptr(counters.0).int(counters.1);
                self.push(i..i + 1, NORM, "embed", (n, 1, 1), 1024, args)?;
                Ok(1)
            }
            Op::Norm { from, weight, eps, to: _ } => {
                let from = if *from == Buf::P { self.left(Buf::P) } else { Planes::one(b.x.ptr) };
                let args =
                    Args::default().planes(&from).ptr(self.weights.vector(*weight)?).int(hidden).float(*eps);
                let args = args.activation(&self.activation(&b.h));
                self.push(i..i + 1, NORM, "rms_norm", (n, 1, 1), 1024, args)?;
                self.leave_activation(Buf::H, &self.activation(&b.h), hidden);
                Ok(1)
            }
            Op::Project { from, outs } => {
                let x = match from {
                    Buf::H => self.activation(&b.h),
                    Buf::A => self.activation(&b.a),
                    Buf::F => self.activation(&b.f),
                    Buf::Features => {
                        let width = self.model.plans.width(plan.pass, Buf::Features);
                        let x = self.activation(&b.picked);
                        let args =
                            Args::default().ptr(b.rows.ptr).ptr(b.features.ptr).int(width).activation(&x);
                        self.push(i..i + 1, NORM, "pick_features", (n, 1, 1), 1024, args)?;
                        x
                    }
                    other => return Err(self.no_kernel(plan, i, format!("a product that reads {other:?}"))),
                };
                if *from == Buf::A
                    && let Some(count) = self.chain(i, plan)?
                {
                    return Ok(count);
                }
                let matrix = |(slot, out): &(_, Buf)| self.weights.matrix(*slot).map(|m| (m, *out));
                let outs = outs.iter().map(matrix).collect::<Result<Vec<_>, _>>()?;
                if self.large() {
                    let arranged = self.arranged.filter(|_| *from == Buf::F);
                    self.project_many(i..i + 1, &outs, Rows { at: x.h, arranged })?;
                    return Ok(1);
                }
                let parts: Vec<_> = outs.iter().map(|(m, out)| (*m, b.raw(*out).ptr)).collect();
                let most = if matches!(outs.as_slice(), [(_, Buf::P)]) { SUM_PLANES } else { MOST_PLANES };
                let planes = self.multiply(i..i + 1, &parts, x, n, most)?;
                let left: Vec<_> =
                    outs.iter().zip(planes).map(|((_, out), p)| (*out, Left::Planes(p))).collect();
                self.leave(&left);
                Ok(1)
            }
            Op::QkNormRope { .. } => self.norm_rope_store(i, plan),
            Op::Attend { .. } if !self.large() => {
                Err(self.no_kernel(plan, i, "attention that follows no store of its keys".into()))
            }
            Op::Attend { cache, mask } => {
                let gated = matches!(next, Some(Op::Gate));
                let steps = i..i + 1 + usize::from(gated);
                self.attend(steps.clone(), Attend { cache: *cache, mask: *mask, gated }, plan)?;
                Ok(steps.len())
            }
            Op::Tail { post, next: after } => {
                let capture = match next {
                    Some(Op::Capture { index }) => Some(*index),
                    _ => None,
                };
                let (weight, eps) =
                    post.map_or(Ok((0, 0.0)), |(s, eps)| self.weights.vector(s).map(|v| (v, eps)))?;
                let p = self.left(Buf::P);
                // A block of 1,024 threads a row is faster where all rows have one at once.
                let many = self.large() && n > 2 * self.card.room.processors;
                let args = if many { Args::default().ptr(p.ptr) } else { Args::default().planes(&p) };
                let args = args.ptr(weight).float(eps).ptr(b.x.ptr);
                let args = args.ptr(self.weights.vector(after.0)?).float(after.1).int(hidden);
                let h = self.activation(&b.h);
                let args = if many { args.ptr(h.h) } else { args.activation(&h) };
                let features = capture.map_or(0, |index| b.features.ptr + (index * hidden * 4) as u64);
                let args = args.ptr(b.rows.ptr).ptr(features);
                let args = args.int(self.model.plans.width(plan.pass, Buf::Features));
                let steps = i..i + 1 + usize::from(capture.is_some());
                let (name, threads) =
                    if many { ("tail_rows", 256) } else { ("tail", hidden.div_ceil(8).next_multiple_of(32)) };
                self.push(steps.clone(), NORM, name, (n, 1, 1), threads, args)?;
                self.leave_activation(Buf::H, &h, hidden);
                Ok(steps.len())
            }
            Op::GateUp { gate, up } => {
                let (gate, up) = (self.weights.matrix(*gate)?, self.weights.matrix(*up)?);
                if self.large() {
                    self.gate_up_many(i..i + 1, gate, up)?;
                } else {
                    self.gate_up(i..i + 1, gate, up)?;
                }
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

    pub(crate) fn no_kernel(&self, plan: &Plan, i: usize, why: String) -> DeviceError {
        DeviceError::NoKernel {
            step: plan.steps[i].name.clone(),
            why,
            device: self.card.name.clone(),
            mend: "use --device cpu".into(),
        }
    }

    /// Planes that a launch before left in a buffer; nothing where none did.
    pub(crate) fn left(&self, buf: Buf) -> Planes {
        match self.left.get(&buf) {
            Some(Left::Planes(planes)) => *planes,
            _ => Planes::default(),
        }
    }

    /// The same in a pass of many rows.
    pub(crate) fn halves(&self, buf: Buf) -> Halves {
        match self.left.get(&buf) {
            Some(Left::Halves(halves)) => *halves,
            _ => Halves::default(),
        }
    }

    /// Notes what the last launch left.
    pub(crate) fn leave(&mut self, left: &[(Buf, Left)]) {
        self.left.extend(left.iter().copied());
        if let Some(node) = self.nodes.last_mut() {
            node.leaves = left.to_vec();
        }
    }

    /// What a pass writes and reads of an activation: many rows f16 alone, groups tiles.
    pub(crate) fn activation(&self, act: &Act) -> Activation {
        self.activation_of(act, self.key.rows)
    }

    /// The same of so many rows.
    fn activation_of(&self, act: &Act, rows: usize) -> Activation {
        let a = act.addresses();
        if self.many(rows) {
            a.halves()
        } else if rows > ALONE || self.key.even {
            let wide = self.card.room.wide && (rows > MOST_NARROW || self.key.even);
            Activation { wide, ..a.tiles() }
        } else {
            a.rows()
        }
    }

    /// Notes as what the last launch left an activation, `width` elements a row.
    pub(crate) fn leave_activation(&mut self, buf: Buf, a: &Activation, width: usize) {
        if a.t != 0 {
            self.leave(&[(buf, Left::Tiles(a.t, a.wide))]);
        } else if a.f == 0 {
            self.leave(&[(buf, Left::Halves(Halves::rows(a.h, width)))]);
        }
    }

    fn head(&mut self, steps: Range<usize>, m: Matrix, mul: f32, cap: f32) -> Result<(), DeviceError> {
        let b = self.buffers;
        let (n, logits) = (self.key.logits, b.logits.ptr);
        const NORM: &str = "src/kernels/norm.cu";
        let mut x = self.activation(&b.h);
        if n < self.key.rows || self.large() && !self.many(n) {
            // Rows that ask, in the order of their logits.
            let args = Args::default().ptr(b.rows.ptr).activation(&x).int(m.cols);
            x = self.activation_of(&b.picked, n);
            self.push(steps.clone(), NORM, "gather", (self.key.rows, 1, 1), 1024, args.activation(&x))?;
        }
        let mut left = Planes::one(logits);
        if !self.many(n) {
            left = self.multiply(steps.clone(), &[(m, b.head.ptr)], x, n, HEAD_PLANES)?[0];
        } else {
            // Pieces of the head that fit a slot, each into its columns of the logits.
            let most = (b.scratch_bytes / SLOTS / (m.cols * 2) / TILE_ROWS * TILE_ROWS).max(TILE_ROWS);
            let firsts = (0..m.rows).step_by(most);
            let parts: Vec<_> = firsts.map(|first| m.part(first, (m.rows - first).min(most))).collect();
            self.products(steps.clone(), &parts, x.h.into(), (n, m.rows), Out::F32(logits))?;
        }
        self.scale_cap(steps, &left, n * m.rows, mul, cap)
    }

    pub(crate) fn scale_cap(
        &mut self,
        steps: Range<usize>,
        left: &Planes,
        all: usize,
        mul: f32,
        cap: f32,
    ) -> Result<(), DeviceError> {
        let logits = self.buffers.logits.ptr;
        let args = Args::default().planes(left).long(all).float(mul).float(cap).ptr(logits);
        self.push(steps, "src/kernels/norm.cu", "scale_cap", (all.div_ceil(256), 1, 1), 256, args)
    }
}
