//! One pass over a batch of rows.

use super::CpuDevice;
use crate::activations::Prepared;
use crate::arena::Pages;
use crate::kernels::attend::{self, Attention, Span};
use crate::kernels::matmul::{self, Context};
use crate::kernels::rows;
use crate::kv::Cache;
use crate::math::{Gate, ScaleCap};
use crate::program::{Work, wanted};
use crate::shared::SharedMut;
use crate::simd::dispatch;
use crate::strict;
use crate::weights::Matrix;
use muser_core::strict::rms_factor;
use muser_core::{Buf, DeviceError, Lane, Mask, ModelError, Observer, Pass, Row, Slot};
use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

/// What all stages of a pass share.
struct Batch<'a> {
    pass: Pass,
    rows: &'a [Row],
    spans: Vec<Span>,
    /// Cosines and sines of each row's position.
    angles: Vec<(f32, f32)>,
}

impl CpuDevice {
    pub(super) fn run_pass(
        &mut self,
        pass: Pass,
        rows: &[Row],
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<(), DeviceError> {
        let model = self.model.clone();
        muser_core::device::check_rows(&model, pass, rows, self.max_rows, |seq| {
            self.sequences.get(&seq).map(|s| s.context)
        })?;
        let stages = self
            .programs
            .get(&pass)
            .cloned()
            .ok_or_else(|| DeviceError::Backend("this model has no drafter: give one to draft".into()))?;
        let mut spans: Vec<Span> = vec![];
        for (i, row) in rows.iter().enumerate() {
            match spans.last_mut() {
                Some(span) if span.seq == row.seq => span.rows.end = i + 1,
                _ => spans.push(Span { seq: row.seq, rows: i..i + 1 }),
            }
            if let Some(sequence) = self.sequences.get_mut(&row.seq) {
                sequence.grow(row.pos as usize + 1)?;
            }
        }
        let angles = self.angles(pass, rows);
        let batch = Batch { pass, rows, spans, angles };
        self.logit_rows = 0;
        for stage in &stages {
            let start = Instant::now();
            self.stage(&batch, &stage.work)?;
            if let Some(observer) = observer.as_deref_mut() {
                let seconds = start.elapsed().as_secs_f64();
                let mut read = |buf| self.read(&batch, buf);
                observer.after(stage.steps.clone(), seconds, &mut read);
            }
        }
        Ok(())
    }

    /// A buffer's rows, as an observer sees them.
    fn read(&self, batch: &Batch<'_>, buf: Buf) -> Vec<f32> {
        let width = self.model.plans.width(batch.pass, buf);
        let all = self.bufs.get(&buf).map_or(&[][..], |b| b);
        let rows = match buf {
            Buf::Features => all.len() / width.max(1),
            Buf::Logits => self.logit_rows,
            _ => batch.rows.len(),
        };
        all[..(rows * width).min(all.len())].to_vec()
    }

    fn angles(&self, pass: Pass, rows: &[Row]) -> Vec<(f32, f32)> {
        let Some(plan) = self.model.plans.get(pass) else { return vec![] };
        let pairs = plan.geometry.head_dim / 2;
        let mut angles = vec![(1.0, 0.0); rows.len() * pairs];
        let shared = SharedMut::new(&mut angles);
        self.pool.run(rows.len(), |r| {
            // SAFETY: each row has its own angles.
            let to = unsafe { shared.part(r * pairs, pairs) };
            for (i, to) in to.iter_mut().enumerate() {
                *to = plan.rotary.at(rows[r].pos, i);
            }
        });
        angles
    }

    /// A buffer of `rows` rows, taken out so that a stage may write it.
    pub(super) fn take(&mut self, pass: Pass, buf: Buf, rows: usize) -> Pages<f32> {
        let mut data = self.bufs.remove(&buf).unwrap_or_default();
        data.grow(rows * self.model.plans.width(pass, buf));
        data
    }

    fn context(&self) -> Context<'_> {
        Context { pool: &self.pool, isa: self.isa, arena: &self.arena, model: &self.model }
    }

    fn vector(&self, slot: Slot) -> Result<&[f32], DeviceError> {
        self.vectors.get(&slot).map(Vec::as_slice).ok_or_else(|| missing(slot))
    }

    fn matrix(&self, slot: Slot) -> Result<&Matrix, DeviceError> {
        self.matrices.get(&slot).ok_or_else(|| missing(slot))
    }

    /// `weights` times the rows of `from` that `picks` names, into buffers of `picks.len()` rows.
    fn multiply(
        &mut self,
        batch: &Batch<'_>,
        from: Buf,
        picks: &[usize],
        outs: &[(Slot, Buf)],
    ) -> Result<(), DeviceError> {
        let mut results: Vec<Pages<f32>> =
            outs.iter().map(|(_, buf)| self.take(batch.pass, *buf, picks.len())).collect();
        let cols = self.model.plans.width(batch.pass, from);
        let mut prepared = std::mem::take(&mut self.prepared);
        let done = (|| {
            let input = self.bufs.get(&from).map_or(&[][..], |b| b);
            if self.lane == Lane::Strict {
                let gathered: Vec<f32> =
                    picks.iter().flat_map(|p| &input[p * cols..][..cols]).copied().collect();
                let mut jobs: Vec<strict::Job<'_>> = outs
                    .iter()
                    .zip(&mut results)
                    .map(|((slot, _), out)| strict::Job { slot: *slot, out })
                    .collect();
                return Ok(strict::project(self.context(), &gathered, &mut jobs)?);
            }
            let matrices = outs.iter().map(|(slot, _)| self.matrix(*slot)).collect::<Result<Vec<_>, _>>()?;
            self.prepare(&mut prepared, input, cols, picks, &matrices);
            let mut jobs: Vec<(&Matrix, &mut [f32])> =
                matrices.into_iter().zip(results.iter_mut().map(|result| &mut **result)).collect();
            Ok(matmul::project(self.context(), &prepared, &mut jobs)?)
        })();
        self.prepared = prepared;
        outs.iter().zip(results).for_each(|((_, buf), result)| {
            self.bufs.insert(*buf, result);
        });
        done
    }

    fn prepare(&self, to: &mut Prepared, input: &[f32], cols: usize, picks: &[usize], matrices: &[&Matrix]) {
        let wanted = wanted(self.isa, picks.len(), matrices.iter().map(|m| m.form));
        to.fill(&self.pool, self.isa, input, cols, picks, &wanted);
    }

    /// Calls `f(row, part of `buf` of that row)` for every row, on all threads.
    fn each_row(&self, data: &mut [f32], width: usize, rows: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        let shared = SharedMut::new(data);
        self.pool.run(rows, |r| {
            // SAFETY: each unit has its own row.
            f(r, unsafe { shared.part(r * width, width) });
        });
    }

    fn stage(&mut self, batch: &Batch<'_>, work: &Work) -> Result<(), DeviceError> {
        let (pass, n) = (batch.pass, batch.rows.len());
        let isa = self.isa;
        match work {
            Work::Embed { table, norm_eps } => {
                let (model, width) = (self.model.clone(), self.model.plans.width(pass, Buf::X));
                let t = model.tensor(*table)?;
                let mut x = self.take(pass, Buf::X, n);
                let error = Mutex::new(None);
                self.each_row(&mut x, width, n, |r, x| {
                    let at = batch.rows[r].token as usize * t.row_bytes();
                    let blocks = &t.data[at..at + t.row_bytes()];
                    matmul::keep(
                        &error,
                        muser_format::dequantize(t.dtype, blocks, x).map_err(ModelError::from),
                    );
                    if let Some(eps) = norm_eps {
                        let factor = rms_factor(x, *eps);
                        x.iter_mut().for_each(|v| *v *= factor);
                    }
                });
                self.bufs.insert(Buf::X, x);
                matmul::outcome(error)?;
            }
            Work::Norm { from, weight, eps, to } => {
                let mut out = self.take(pass, *to, n);
                let weight_row = self.vector(*weight)?;
                let width = weight_row.len();
                let input = self.bufs.get(from).map_or(&[][..], |b| b);
                self.each_row(&mut out, width, n, |r, out| {
                    rows::norm(isa, &input[r * width..][..width], weight_row, *eps, out);
                });
                self.bufs.insert(*to, out);
            }
            Work::Project { from, outs } => {
                let picks: Vec<usize> = match from {
                    Buf::Features => batch.rows.iter().map(|r| r.feature as usize).collect(),
                    _ => (0..n).collect(),
                };
                // A feature row that was never captured is zeros.
                let held = self.take(pass, *from, picks.iter().max().map_or(0, |last| last + 1));
                self.bufs.insert(*from, held);
                self.multiply(batch, *from, &picks, outs)?;
            }
            Work::QkNormRope { q_norm, k_norm, eps, rope } => {
                for (weight, buf) in q_norm.iter().map(|w| (*w, Buf::Q)).chain([(*k_norm, Buf::K)]) {
                    let width = self.model.plans.width(pass, buf);
                    let mut data = self.take(pass, buf, n);
                    let weight = self.vector(weight)?;
                    let pairs = weight.len() / 2;
                    self.each_row(&mut data, width, n, |r, heads| {
                        let rope = rope.map(|p| (p, &batch.angles[r * pairs..][..pairs]));
                        rows::norm_rotate(isa, heads, weight, *eps, rope);
                    });
                    self.bufs.insert(buf, data);
                }
            }
            Work::Store { cache } => {
                let width = self.model.plans.width(pass, Buf::K);
                let empty = Pages::default();
                let (k, v) =
                    (self.bufs.get(&Buf::K).unwrap_or(&empty), self.bufs.get(&Buf::V).unwrap_or(&empty));
                for (i, row) in batch.rows.iter().enumerate() {
                    if let Some(sequence) = self.sequences.get_mut(&row.seq) {
                        let (k, v) = (&k[i * width..][..width], &v[i * width..][..width]);
                        sequence.caches[*cache].store(isa, row.pos as usize, k, v);
                    }
                }
            }
            Work::Attend { cache, mask, gate } => self.attend(batch, *cache, *mask, *gate)?,
            Work::Gate => {
                let width = self.model.plans.width(pass, Buf::A);
                let mut a = self.take(pass, Buf::A, n);
                let gate = self.bufs.get(&Buf::G).map_or(&[][..], |g| g);
                self.each_row(&mut a, width, n, |r, a| {
                    dispatch(isa, Gate { a, gate: &gate[r * width..][..width] });
                });
                self.bufs.insert(Buf::A, a);
            }
            Work::Tail { post, next } => {
                let (mut x, mut h) = (self.take(pass, Buf::X, n), self.take(pass, Buf::H, n));
                let post = post.map(|(slot, eps)| self.vector(slot).map(|w| (w, eps))).transpose()?;
                let next = (self.vector(next.0)?, next.1);
                let width = next.0.len();
                let p = self.bufs.get(&Buf::P).map_or(&[][..], |p| p);
                let shared = SharedMut::new(&mut h);
                self.each_row(&mut x, width, n, |r, x| {
                    // SAFETY: each unit has its own row.
                    let h = unsafe { shared.part(r * width, width) };
                    rows::tail(isa, &p[r * width..][..width], post, next, x, h);
                });
                self.bufs.insert(Buf::X, x);
                self.bufs.insert(Buf::H, h);
            }
            Work::Capture { index } => {
                let all = self.model.plans.width(pass, Buf::Features);
                let width = self.model.plans.width(pass, Buf::X);
                let last = batch.rows.iter().map(|r| r.feature as usize + 1).max().unwrap_or(0);
                let mut features = self.take(pass, Buf::Features, last);
                let x = self.bufs.get(&Buf::X).map_or(&[][..], |x| x);
                for (row, x) in batch.rows.iter().zip(x.chunks_exact(width)) {
                    features[row.feature as usize * all + index * width..][..width].copy_from_slice(x);
                }
                self.bufs.insert(Buf::Features, features);
            }
            Work::GateUp { gate, up } => self.gate_up(batch, *gate, *up)?,
            Work::Head { weight, cap } => {
                let picks: Vec<usize> = (0..n).filter(|i| batch.rows[*i].logits).collect();
                if !picks.is_empty() {
                    self.multiply(batch, Buf::H, &picks, &[(*weight, Buf::Logits)])?;
                }
                self.logit_rows = picks.len();
                if let Some((scale, cap)) = cap {
                    self.scale_cap(batch, *scale, *cap);
                }
            }
            Work::ScaleCap { scale, cap } => self.scale_cap(batch, *scale, *cap),
        }
        Ok(())
    }

    fn scale_cap(&mut self, batch: &Batch<'_>, scale: f32, cap: Option<f32>) {
        // Pieces, so that one row of a large vocabulary is shared too.
        const PIECE: usize = 4096;
        let isa = self.isa;
        let mut logits = self.take(batch.pass, Buf::Logits, self.logit_rows);
        let len = self.logit_rows * self.model.geometry().vocab;
        let shared = SharedMut::new(&mut logits[..len]);
        self.pool.run(len.div_ceil(PIECE), |i| {
            // SAFETY: each unit has its own piece.
            let x = unsafe { shared.part(i * PIECE, PIECE.min(len - i * PIECE)) };
            dispatch(isa, ScaleCap { x, scale, cap });
        });
        self.bufs.insert(Buf::Logits, logits);
    }

    fn gate_up(&mut self, batch: &Batch<'_>, gate: Slot, up: Slot) -> Result<(), DeviceError> {
        let n = batch.rows.len();
        let cols = self.model.plans.width(batch.pass, Buf::H);
        let mut f = self.take(batch.pass, Buf::F, n);
        let picks: Vec<usize> = (0..n).collect();
        let mut prepared = std::mem::take(&mut self.prepared);
        let done = (|| {
            let input = self.bufs.get(&Buf::H).map_or(&[][..], |b| b);
            if self.lane == Lane::Strict {
                let mut u = vec![0.0; f.len()];
                let mut jobs =
                    [strict::Job { slot: gate, out: &mut f }, strict::Job { slot: up, out: &mut u }];
                strict::project(self.context(), &input[..n * cols], &mut jobs)?;
                let width = self.model.plans.width(batch.pass, Buf::F);
                let isa = self.isa;
                self.each_row(&mut f, width, n, |r, gate| {
                    dispatch(isa, crate::math::SiluMul { gate, up: &u[r * width..][..width] });
                });
                return Ok(());
            }
            let (gate, up) = (self.matrix(gate)?, self.matrix(up)?);
            self.prepare(&mut prepared, input, cols, &picks, &[gate, up]);
            Ok(matmul::gate_up(self.context(), &prepared, gate, up, &mut f)?)
        })();
        self.prepared = prepared;
        self.bufs.insert(Buf::F, f);
        done
    }

    fn attend(&mut self, batch: &Batch<'_>, cache: usize, mask: Mask, gate: bool) -> Result<(), DeviceError> {
        let mut out = self.take(batch.pass, Buf::A, batch.rows.len());
        let spec = self.model.plans.caches[cache];
        let Some(g) = self.model.plans.get(batch.pass).map(|p| &p.geometry) else { return Ok(()) };
        let visible: Vec<Range<usize>> = batch
            .spans
            .iter()
            .flat_map(|span| span.rows.clone().map(move |r| visible(batch.rows, span, r, spec.window, mask)))
            .collect();
        let caches: Vec<&Cache> = batch
            .spans
            .iter()
            .map(|span| self.sequence(span.seq).map(|s| &s.caches[cache]))
            .collect::<Result<_, _>>()?;
        let attention = Attention {
            head_dim: spec.head_dim,
            kv_heads: spec.kv_heads,
            group: g.heads / spec.kv_heads,
            scale: g.score_scale(),
            kv: self.kv,
            visible: &visible,
            q: self.bufs.get(&Buf::Q).map_or(&[][..], |q| q),
            gate: gate.then(|| self.bufs.get(&Buf::G).map_or(&[][..], |g| g)),
        };
        match self.lane {
            Lane::Serving => attend::attend(&self.pool, self.isa, attention, &batch.spans, &caches, &mut out),
            Lane::Strict => strict::attend(&self.pool, self.isa, attention, &batch.spans, &caches, &mut out),
        }
        self.bufs.insert(Buf::A, out);
        Ok(())
    }
}

/// Positions that row `r` of a span sees.
fn visible(rows: &[Row], span: &Span, r: usize, window: Option<usize>, mask: Mask) -> Range<usize> {
    let pos = rows[r].pos as usize;
    let last = match mask {
        Mask::Causal => pos,
        // A block's rows see one another, later ones too.
        Mask::Block => rows[span.rows.end - 1].pos as usize,
    };
    window.map_or(0, |w| (pos + 1).saturating_sub(w))..last + 1
}

fn missing(slot: Slot) -> DeviceError {
    DeviceError::Backend(format!("weight {slot} was not loaded"))
}
