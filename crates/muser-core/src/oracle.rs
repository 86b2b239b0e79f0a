//! The f32 reference: a [`Device`] in naive loops, without SIMD, threads or fused steps. It follows the strict contract, so
//! a strict lane must give its bits; with f32 KV it is the engine's own ground truth against other implementations.

mod attend;
mod state;

use crate::device::{Device, DeviceError, DeviceInfo, Lane, Observer, Route, Row, SeqId};
use crate::geometry::{KvType, RopePairs};
use crate::model::Model;
use crate::plan::{Buf, Op, Pass, Slot};
use crate::rotary::Rotary;
use crate::strict;
use state::Sequence;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The reference device.
pub struct Reference {
    model: Arc<Model>,
    kv: KvType,
    max_rows: usize,
    sequences: HashMap<SeqId, Sequence>,
    next: u32,
    bufs: HashMap<Buf, Vec<f32>>,
    logit_rows: usize,
}

impl Reference {
    /// The strict contract has `kv` [`KvType::F16`].
    pub fn new(model: Arc<Model>, kv: KvType, max_rows: usize) -> Self {
        Reference {
            model,
            kv,
            max_rows,
            sequences: HashMap::new(),
            next: 0,
            bufs: HashMap::new(),
            logit_rows: 0,
        }
    }

    /// `weight` (row-major, dequantised row by row) times every row of `input`.
    fn multiply(&self, weight: Slot, input: &[f32]) -> Result<Vec<f32>, DeviceError> {
        let t = self.model.tensor(weight)?;
        let rows = input.len() / t.cols;
        let mut out = vec![0.0; rows * t.rows];
        let mut row = vec![0.0; t.cols];
        for (r, blocks) in t.data.chunks_exact(t.row_bytes()).enumerate() {
            muser_format::dequantize(t.dtype, blocks, &mut row).map_err(crate::ModelError::from)?;
            for (i, x) in input.chunks_exact(t.cols).enumerate() {
                let y = strict::dot(&row, x);
                // A factor of 1 leaves the bits alone; multiplying only where a file has one keeps that visible.
                out[i * t.rows + r] = if t.scale == 1.0 { y } else { y * t.scale };
            }
        }
        Ok(out)
    }

    fn vector(&self, slot: Slot) -> Result<Vec<f32>, DeviceError> {
        Ok(self.model.tensor(slot)?.to_f32()?)
    }

    fn take(&mut self, buf: Buf) -> Vec<f32> {
        self.bufs.remove(&buf).unwrap_or_default()
    }

    fn step(&mut self, pass: Pass, op: &Op, rows: &[Row]) -> Result<(), DeviceError> {
        let model = self.model.clone();
        let width = |buf| model.plans.width(pass, buf);
        match op {
            Op::Embed { table, norm_eps } => {
                let (table, n) = (self.model.tensor(*table)?, width(Buf::X));
                let mut x = vec![0.0; rows.len() * n];
                for (row, x) in rows.iter().zip(x.chunks_exact_mut(n)) {
                    let at = row.token as usize * table.row_bytes();
                    let blocks = &table.data[at..at + table.row_bytes()];
                    muser_format::dequantize(table.dtype, blocks, x).map_err(crate::ModelError::from)?;
                    if let Some(eps) = norm_eps {
                        let factor = strict::rms_factor(x, *eps);
                        x.iter_mut().for_each(|v| *v *= factor);
                    }
                }
                self.bufs.insert(Buf::X, x);
            }
            Op::Norm { from, weight, eps, to } => {
                let out = norm(&self.bufs[from], &self.vector(*weight)?, *eps);
                self.bufs.insert(*to, out);
            }
            Op::Project { from, outs } => {
                // A drafter's context rows are picked out of the captured features.
                let picked = (*from == Buf::Features).then(|| {
                    let n = width(Buf::Features);
                    rows.iter()
                        .flat_map(|r| self.bufs[from][r.feature as usize * n..][..n].iter().copied())
                        .collect()
                });
                let input: &[f32] = picked.as_ref().unwrap_or_else(|| &self.bufs[from]);
                let results =
                    outs.iter().map(|(w, _)| self.multiply(*w, input)).collect::<Result<Vec<_>, _>>()?;
                for ((_, buf), result) in outs.iter().zip(results) {
                    self.bufs.insert(*buf, result);
                }
            }
            Op::QkNormRope { q_norm, k_norm, eps, rope } => {
                for (weight, buf) in q_norm.iter().map(|w| (*w, Buf::Q)).chain([(*k_norm, Buf::K)]) {
                    let weight = self.vector(weight)?;
                    let width = width(buf);
                    let mut data = norm(&self.take(buf), &weight, *eps);
                    if let Some((pairs, plan)) = rope.as_ref().zip(self.model.plans.get(pass)) {
                        for (row, heads) in rows.iter().zip(data.chunks_exact_mut(width)) {
                            heads
                                .chunks_exact_mut(weight.len())
                                .for_each(|head| rotate(head, row.pos, *pairs, &plan.rotary));
                        }
                    }
                    self.bufs.insert(buf, data);
                }
            }
            Op::Store { cache } => {
                let (k, v) = (self.take(Buf::K), self.take(Buf::V));
                let n = width(Buf::K);
                for (i, row) in rows.iter().enumerate() {
                    let sequence =
                        self.sequences.get_mut(&row.seq).ok_or(DeviceError::NoSequence(row.seq.0))?;
                    sequence.caches[*cache].store(row.pos, &k[i * n..][..n], &v[i * n..][..n]);
                }
                self.bufs.insert(Buf::K, k);
                self.bufs.insert(Buf::V, v);
            }
            Op::Attend { cache, mask } => {
                let spec = self.model.plans.caches[*cache];
                let scale = self.model.plans.get(pass).map_or(1.0, |p| p.geometry.score_scale());
                let n = width(Buf::Q);
                let mut out = Vec::with_capacity(rows.len() * n);
                for (row, q) in rows.iter().zip(self.bufs[&Buf::Q].chunks_exact(n)) {
                    let visible = attend::visible(*mask, spec.window, row, rows);
                    let cache = &self.sequences[&row.seq].caches[*cache];
                    out.extend(attend::attend(q, cache, &spec, visible, scale));
                }
                self.bufs.insert(Buf::A, out);
            }
            Op::Gate => {
                let gate = self.take(Buf::G);
                let a = self.bufs.entry(Buf::A).or_default();
                a.iter_mut().zip(&gate).for_each(|(a, g)| *a *= strict::sigmoid(*g));
                self.bufs.insert(Buf::G, gate);
            }
            Op::Tail { post, next } => {
                let mut p = self.take(Buf::P);
                if let Some((weight, eps)) = post {
                    p = norm(&p, &self.vector(*weight)?, *eps);
                }
                let next_weight = self.vector(next.0)?;
                let x = self.bufs.entry(Buf::X).or_default();
                x.iter_mut().zip(&p).for_each(|(x, p)| *x += p);
                let h = norm(x, &next_weight, next.1);
                self.bufs.insert(Buf::H, h);
                self.bufs.insert(Buf::P, p);
            }
            Op::Capture { index } => {
                let (n, all) = (width(Buf::X), width(Buf::Features));
                let mut features = self.take(Buf::Features);
                features.resize(2 * self.max_rows * all, 0.0);
                for (row, x) in rows.iter().zip(self.bufs[&Buf::X].chunks_exact(n)) {
                    features[row.feature as usize * all + index * n..][..n].copy_from_slice(x);
                }
                self.bufs.insert(Buf::Features, features);
            }
            Op::GateUp { gate, up } => {
                let h = &self.bufs[&Buf::H];
                let (g, u) = (self.multiply(*gate, h)?, self.multiply(*up, h)?);
                self.bufs.insert(Buf::F, g.iter().zip(&u).map(|(g, u)| strict::silu(*g) * u).collect());
            }
            Op::Head { weight } => {
                let n = width(Buf::H);
                let wanted =
                    rows.iter().zip(self.bufs[&Buf::H].chunks_exact(n)).filter(|(row, _)| row.logits);
                let h: Vec<f32> = wanted.flat_map(|(_, h)| h.iter().copied()).collect();
                let logits = self.multiply(*weight, &h)?;
                self.logit_rows = h.len() / n;
                self.bufs.insert(Buf::Logits, logits);
            }
            Op::ScaleCap { scale, cap } => {
                let logits = self.bufs.entry(Buf::Logits).or_default();
                logits.iter_mut().for_each(|l| *l = strict::scale_cap(*l, *scale, *cap));
            }
        }
        Ok(())
    }
}

/// RMS norm of every row of `x` (rows as long as `weight`).
fn norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let factor = strict::rms_factor(row, eps);
        out.extend(row.iter().zip(weight).map(|(v, w)| v * factor * w));
    }
    out
}

fn rotate(head: &mut [f32], pos: u32, pairs: RopePairs, rotary: &Rotary) {
    let half = head.len() / 2;
    for i in 0..half {
        let (a, b) = match pairs {
            RopePairs::Interleaved => (2 * i, 2 * i + 1),
            RopePairs::Halves => (i, i + half),
        };
        let (cos, sin) = rotary.at(pos, i);
        (head[a], head[b]) = strict::rotate(head[a], head[b], cos, sin);
    }
}

impl Device for Reference {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: "reference".into(),
            name: "f32 reference".into(),
            lane: Lane::Strict,
            max_rows: self.max_rows,
            step_rows: self.max_rows,
            weight_bytes: self.model.weight_bytes(),
        }
    }

    fn open(&mut self, context: usize) -> Result<SeqId, DeviceError> {
        let id = SeqId(self.next);
        self.next += 1;
        self.sequences.insert(id, Sequence::new(&self.model.plans.caches, self.kv, self.max_rows, context));
        Ok(id)
    }

    fn close(&mut self, seq: SeqId) {
        self.sequences.remove(&seq);
    }

    fn copy(&mut self, from: SeqId, to: SeqId, len: usize) -> Result<(), DeviceError> {
        let state = self.save(from, len)?;
        self.restore(to, len, &state)
    }

    fn save(&mut self, seq: SeqId, len: usize) -> Result<Vec<u8>, DeviceError> {
        Ok(self.sequences.get(&seq).ok_or(DeviceError::NoSequence(seq.0))?.save(len))
    }

    fn restore(&mut self, seq: SeqId, len: usize, state: &[u8]) -> Result<(), DeviceError> {
        self.sequences.get_mut(&seq).ok_or(DeviceError::NoSequence(seq.0))?.restore(len, state)
    }

    fn run(
        &mut self,
        pass: Pass,
        rows: &[Row],
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<(), DeviceError> {
        let model = self.model.clone();
        crate::device::check_rows(&model, pass, rows, self.max_rows, |seq| {
            self.sequences.get(&seq).map(|s| s.context)
        })?;
        let plan =
            model.plans.get(pass).ok_or_else(|| DeviceError::Backend("this model has no drafter".into()))?;
        for (i, step) in plan.steps.iter().enumerate() {
            let start = Instant::now();
            self.step(pass, &step.op, rows)?;
            if let Some(observer) = observer.as_deref_mut() {
                let bufs = &self.bufs;
                let mut read = |buf| bufs.get(&buf).cloned().unwrap_or_default();
                observer.after(i..i + 1, start.elapsed().as_secs_f64(), &mut read);
            }
        }
        Ok(())
    }

    fn logits(&mut self, index: usize) -> Result<&[f32], DeviceError> {
        let n = self.model.geometry().vocab;
        let row = self.bufs.get(&Buf::Logits).and_then(|l| l.get(index * n..(index + 1) * n));
        row.ok_or(DeviceError::BadRow { row: index, why: "did not ask for logits in the last pass".into() })
    }

    fn best(&mut self) -> Result<Vec<u32>, DeviceError> {
        let n = self.model.geometry().vocab;
        let logits = self.bufs.get(&Buf::Logits).map_or(&[][..], |l| l);
        Ok(logits.chunks_exact(n).map(crate::device::argmax).collect())
    }

    fn fetch(&mut self, buf: Buf, rows: Range<usize>) -> Result<Vec<f32>, DeviceError> {
        let width = self.model.plans.width(Pass::Target, buf);
        crate::device::kept_rows(self.bufs.get(&buf).map(Vec::as_slice), buf, rows, width)
    }

    fn place(&mut self, buf: Buf, first: usize, values: &[f32]) -> Result<(), DeviceError> {
        let width = self.model.plans.width(Pass::Target, buf);
        let data = self.bufs.entry(buf).or_default();
        // Features are kept; what another batch left of other buffers is gone.
        let kept =
            if buf == Buf::Features { 2 * self.max_rows * width } else { first * width + values.len() };
        data.resize(kept, 0.0);
        data[first * width..][..values.len()].copy_from_slice(values);
        Ok(())
    }

    fn routes(&self, pass: Pass, _rows: usize, _depth: usize) -> Vec<Route> {
        let steps = self.model.plans.get(pass).map_or(0, |p| p.steps.len());
        let route = |i| Route {
            steps: i..i + 1,
            kernel: "naive-f32".into(),
            library: "muser-core X",
            file: "src/oracle.rs",
            ladder: vec![("naive-f32".into(), "the only one".into(), true)],
        };
        (0..steps).map(route).collect()
    }
}
