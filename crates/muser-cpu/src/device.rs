//! The device: loads a model, keeps sequences, runs passes.

mod run;

use crate::activations::Prepared;
use crate::arena::{Arena, Pages, available_memory};
use crate::isa::{Isa, default_threads};
use crate::kv::Sequence;
use crate::pool::Pool;
use crate::program::{Stage, compile, routes};
use crate::shared::SharedMut;
use crate::weights::{Matrix, pack_matrix};
use muser_core::device::{argmax, kept_rows};
use muser_core::{
    Buf, Device, DeviceError, DeviceInfo, KvType, Lane, Model, Observer, Pass, Route, Row, SeqId, Slot,
};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// How a device is set up.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Arithmetic.
    pub lane: Lane,
    /// Threads; by default one a physical core.
    pub threads: Option<usize>,
    /// Instructions; by default the best that the processor has.
    pub isa: Option<Isa>,
    /// Rows that one pass takes at most.
    pub max_rows: usize,
    /// Storage of keys and values: f16 or q8_0.
    pub kv: KvType,
    /// Leave weights in the mapped file and pack each panel at every use: starts at once and takes no memory, but
    /// decodes many times slower.
    pub mapped: bool,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions {
            lane: Lane::Serving,
            threads: None,
            isa: None,
            max_rows: 512,
            kv: KvType::F16,
            mapped: false,
        }
    }
}

/// A model on the CPU.
pub struct CpuDevice {
    model: Arc<Model>,
    lane: Lane,
    kv: KvType,
    max_rows: usize,
    isa: Isa,
    pool: Pool,
    arena: Arena,
    matrices: HashMap<Slot, Matrix>,
    vectors: HashMap<Slot, Vec<f32>>,
    programs: HashMap<Pass, Vec<Stage>>,
    sequences: HashMap<SeqId, Sequence>,
    next: u32,
    bufs: HashMap<Buf, Pages<f32>>,
    prepared: Prepared,
    logit_rows: usize,
}

impl CpuDevice {
    /// Loads all weights that the model's plans name. `progress` is told bytes done and in all.
    pub fn load(
        model: Arc<Model>,
        options: &CpuOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CpuDevice, DeviceError> {
        let isa = options.isa.unwrap_or_else(Isa::best);
        if !isa.available() {
            return Err(DeviceError::Backend(format!(
                "this processor has no {isa}; the best that it has is {}: choose that, or leave the choice open",
                Isa::best()
            )));
        }
        match (options.lane, options.kv) {
            (_, KvType::F16) | (Lane::Serving, KvType::Q8_0) => {}
            (Lane::Strict, _) => {
                return Err(DeviceError::Backend(
                    "the strict lane keeps keys and values in f16: choose that".into(),
                ));
            }
            (_, other) => {
                return Err(DeviceError::Backend(format!(
                    "the CPU keeps keys and values in f16 or q8_0, not {other:?}"
                )));
            }
        }
        let threads = options.threads.unwrap_or_else(default_threads).clamp(1, 1024);
        let pool = Pool::new(threads).map_err(|e| {
            DeviceError::Backend(format!("cannot start {threads} threads: {e}; ask for fewer"))
        })?;
        let mut device = CpuDevice {
            lane: options.lane,
            kv: options.kv,
            max_rows: options.max_rows.max(1),
            isa,
            pool,
            arena: Arena::new(0).map_err(memory_map)?,
            matrices: HashMap::new(),
            vectors: HashMap::new(),
            programs: HashMap::new(),
            sequences: HashMap::new(),
            next: 0,
            bufs: HashMap::new(),
            prepared: Prepared::default(),
            logit_rows: 0,
            model,
        };
        for pass in [Pass::Target, Pass::Inject, Pass::Draft] {
            if let Some(plan) = device.model.plans.get(pass) {
                device.programs.insert(pass, compile(plan));
            }
        }
        device.load_vectors()?;
        device.load_matrices(options.mapped, progress)?;
        Ok(device)
    }

    fn load_vectors(&mut self) -> Result<(), DeviceError> {
        for pass in [Pass::Target, Pass::Inject, Pass::Draft] {
            let Some(plan) = self.model.plans.get(pass) else { continue };
            for slot in plan.steps.iter().flat_map(|s| s.op.vectors()) {
                if !self.vectors.contains_key(&slot) {
                    self.vectors.insert(slot, self.model.tensor(slot)?.to_f32()?);
                }
            }
        }
        Ok(())
    }

    /// Places every matrix in the arena and packs it; the strict lane and the mapped mode read the file instead.
    fn load_matrices(&mut self, mapped: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<(), DeviceError> {
        let packed = !mapped && self.lane == Lane::Serving;
        let mut total = 0;
        let mut order = vec![];
        for pass in [Pass::Target, Pass::Inject, Pass::Draft] {
            let Some(plan) = self.model.plans.get(pass) else { continue };
            for slot in plan.steps.iter().flat_map(|s| s.op.matrices()) {
                if self.matrices.contains_key(&slot) {
                    continue;
                }
                let mut matrix = Matrix::new(slot, &self.model.tensor(slot)?, self.pool.threads());
                if packed {
                    matrix.at = Some(total);
                    total += matrix.bytes().next_multiple_of(64);
                }
                order.push(slot);
                self.matrices.insert(slot, matrix);
            }
        }
        if !packed {
            return Ok(());
        }
        if let Some(have) = available_memory().filter(|have| (total as u64) > *have) {
            return Err(DeviceError::Memory {
                what: "the packed weights".into(),
                need: total as u64,
                have,
                mend: "use a smaller quantisation, or the mapped mode, which packs nothing".into(),
            });
        }
        self.arena = Arena::new(total).map_err(memory_map)?;
        let mut done = 0;
        for slot in &order {
            let matrix = &self.matrices[slot];
            let to = &mut self.arena.bytes_mut()[matrix.at.unwrap_or(0)..][..matrix.bytes()];
            pack_matrix(&self.pool, &self.model, matrix, to)?;
            done += matrix.bytes() as u64;
            progress(done, total as u64);
        }
        Ok(())
    }

    /// Threads that it runs on.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Instructions that it uses.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    fn sequence(&self, seq: SeqId) -> Result<&Sequence, DeviceError> {
        self.sequences.get(&seq).ok_or(DeviceError::NoSequence(seq.0))
    }
}

fn memory_map(e: std::io::Error) -> DeviceError {
    DeviceError::Backend(format!("the system gives no memory for weights: {e}"))
}

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        let packed: usize = self.matrices.values().filter(|m| m.at.is_some()).map(Matrix::bytes).sum();
        DeviceInfo {
            kind: "cpu".into(),
            name: format!("{}, {}, {} threads", crate::isa::features().model, self.isa, self.pool.threads()),
            lane: self.lane,
            max_rows: self.max_rows,
            step_rows: self.max_rows,
            weight_bytes: packed as u64,
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
        self.sequence(seq)?.save(len)
    }

    fn restore(&mut self, seq: SeqId, len: usize, state: &[u8]) -> Result<(), DeviceError> {
        self.sequences.get_mut(&seq).ok_or(DeviceError::NoSequence(seq.0))?.restore(len, state)
    }

    fn run(
        &mut self,
        pass: Pass,
        rows: &[Row],
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), DeviceError> {
        self.run_pass(pass, rows, observer)
    }

    fn logits(&mut self, index: usize) -> Result<&[f32], DeviceError> {
        let n = self.model.geometry().vocab;
        let row = self.bufs.get(&Buf::Logits).filter(|_| index < self.logit_rows);
        row.and_then(|l| l.get(index * n..(index + 1) * n))
            .ok_or(DeviceError::BadRow { row: index, why: "did not ask for logits in the last pass".into() })
    }

    fn best(&mut self) -> Result<Vec<u32>, DeviceError> {
        let n = self.model.geometry().vocab;
        let logits = self.bufs.get(&Buf::Logits).map_or(&[][..], |l| &l[..self.logit_rows * n]);
        let mut best = vec![0; self.logit_rows];
        let shared = SharedMut::new(&mut best);
        self.pool.run(self.logit_rows, |r| {
            // SAFETY: each unit has its own row.
            let best = unsafe { shared.part(r, 1) };
            best[0] = argmax(&logits[r * n..][..n]);
        });
        Ok(best)
    }

    fn fetch(&mut self, buf: Buf, rows: Range<usize>) -> Result<Vec<f32>, DeviceError> {
        let width = self.model.plans.width(Pass::Target, buf);
        kept_rows(self.bufs.get(&buf).map(|held| &held[..]), buf, rows, width)
    }

    fn place(&mut self, buf: Buf, first: usize, values: &[f32]) -> Result<(), DeviceError> {
        let width = self.model.plans.width(Pass::Target, buf);
        let mut data = self.take(Pass::Target, buf, first + values.len() / width.max(1));
        data[first * width..][..values.len()].copy_from_slice(values);
        self.bufs.insert(buf, data);
        Ok(())
    }

    fn routes(&self, pass: Pass, rows: usize, _depth: usize) -> Vec<Route> {
        let stages = self.programs.get(&pass).map_or(&[][..], |s| s);
        routes(&self.model, pass, stages, rows, self.lane, self.isa)
    }
}
