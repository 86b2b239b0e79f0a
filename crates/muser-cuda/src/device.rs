//! The device: loads a model onto a card, keeps sequences, runs passes as graphs of launches.

mod observe;

use crate::answers::Answers;
use crate::attention::{WIDE_ROWS, parts, row_blocks};
use crate::buffers::Buffers;
use crate::chain::{self, Lease};
use crate::describe;
use crate::fit::{self, Need};
use crate::gpu::{Card, Gpu, failed};
use crate::kv::{Kv, SPARED};
use crate::largest::Search;
use crate::program::{Compiler, Key, Node, SMALL, Work};
use crate::strict;
use crate::weights::{self, Weights};
use cudarc::driver::{CudaGraph, sys};
use muser_core::device::check_rows;
use muser_core::sample::TokenMask;
use muser_core::{
    Buf, Device, DeviceError, DeviceInfo, KvType, Lane, Largest, Limits, Model, Observer, Pass, Route, Row,
    SeqId,
};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// How to use a card.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Arithmetic.
    pub lane: Lane,
    /// Which card, as the driver counts them.
    pub index: usize,
    /// Rows that one pass takes at most; none: as many as the card has memory to spare for.
    pub max_rows: Option<usize>,
    /// Storage of keys and values; the serving lane has f16 and q8_0, the strict lane f16.
    pub kv: KvType,
    /// Serving lane: a row's bits do not depend on the other rows of its pass, up to 32; a pass of few rows takes longer.
    pub batch_invariant: bool,
    /// Sequences that will be open, and positions of each: said is what fits beside them, where the model does not.
    pub wanted: (usize, usize),
    /// Folder that keeps compiled kernels; none compiles them at every start.
    pub cache: Option<PathBuf>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions {
            lane: Lane::Serving,
            index: 0,
            max_rows: None,
            kv: KvType::F16,
            batch_invariant: false,
            wanted: (1, 4096),
            cache: default_cache(),
        }
    }
}

/// `$XDG_CACHE_HOME/muser/cuda`, or `~/.cache/muser/cuda`.
fn default_cache() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(base.join("muser").join("cuda"))
}

struct Program {
    nodes: Vec<Node>,
    /// Small passes are one submission.
    graph: Option<CudaGraph>,
}

// SAFETY: a graph must not be used by two threads at once; the device owns it and every use takes `&mut self`.
unsafe impl Send for Program {}

/// One NVIDIA card with one model.
pub struct CudaDevice {
    programs: HashMap<Key, Program>,
    kv: Kv,
    buffers: Buffers,
    weights: Weights,
    model: Arc<Model>,
    gpu: Gpu,
    options: CudaOptions,
    max_rows: usize,
    asked: usize,
    answers: Answers,
    search: Search,
    _lease: Option<Lease>,
}

/// Refuses types of keys and values that a lane has no kernels for.
pub(crate) fn check_kv(lane: Lane, kv: KvType) -> Result<(), DeviceError> {
    let why = match (lane, kv) {
        (_, KvType::F16) | (Lane::Serving, KvType::Q8_0) => return Ok(()),
        (Lane::Strict, _) => "the strict lane keeps keys and values in f16; use --kv f16",
        (Lane::Serving, _) => "the CUDA device keeps keys and values in f16 or q8_0; use one of these",
    };
    Err(DeviceError::Backend(why.into()))
}

/// Rows of a pass where no number is asked for and memory is short.
pub(crate) const FEW_ROWS: usize = 512;

/// Rows of a pass where no number is asked for: the serving lane's prefill gains up to 2,048, if their buffers are a 30th of the card's
/// memory at most. What is free of it does not matter: runs on one card are to have the same bits.
fn usual_rows(model: &Model, lane: Lane, total: u64) -> usize {
    const MANY: usize = 2048;
    let spare = lane == Lane::Serving && Buffers::bytes(model, lane, MANY) <= total / 30;
    if spare { MANY } else { FEW_ROWS }
}

/// Programs that are kept; shapes beyond that are compiled again.
const MOST_PROGRAMS: usize = 256;

impl CudaDevice {
    /// Loads a model; `progress` gets bytes done and in all.
    pub fn load(
        model: Arc<Model>,
        options: &CudaOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, DeviceError> {
        check_kv(options.lane, options.kv)?;
        let (types, products) = (weights::types(&model), weights::products(&model));
        let chained = if options.batch_invariant { None } else { chain::layouts(&model) };
        let gpu = Gpu::open(options, &types, &products, chained.as_deref())?;
        let (have, total) = gpu.memory()?;
        let max_rows = options.max_rows.unwrap_or_else(|| usual_rows(&model, options.lane, total));
        let options = &CudaOptions { max_rows: Some(max_rows), ..options.clone() };
        let need = Need::of(&model, options, 0, 0)?.while_loading();
        if need > have {
            let fits = fit::layers(&model, options, options.wanted, |need| need.in_all() <= have)?;
            return Err(DeviceError::Memory {
                what: format!("the model on {} ({total} bytes)", gpu.card.name),
                need,
                have,
                mend: fit::told(fits, options.wanted)
                    + "free the card, choose a smaller quantisation, or use --device cpu",
            });
        }
        let weights = Weights::load(&gpu, &model, options.lane, progress)?;
        let even = options.batch_invariant;
        let mut buffers = Buffers::new(Some(&gpu), &model, options.lane, max_rows, parts(&model, even))?;
        let answers = Answers::new(&gpu, max_rows, model.geometry().vocab)?;
        let search = Search::new(&gpu, max_rows, model.geometry().vocab)?;
        let lease = chained.and_then(|_| Lease::take(options.index));
        if lease.is_none() {
            buffers.counters = None;
        }
        let types = (options.lane, options.kv);
        let kv = Kv::new(Some(&gpu), &model.plans.caches, types, max_rows)?;
        // What the main stream cleared, the side stream may write next.
        gpu.synchronize()?;
        Ok(CudaDevice {
            programs: HashMap::new(),
            kv,
            buffers,
            weights,
            model,
            gpu,
            options: options.clone(),
            max_rows,
            asked: 0,
            answers,
            search,
            _lease: lease,
        })
    }

    fn compile(&self, key: Key) -> Result<Vec<Node>, DeviceError> {
        let (card, model) = (&self.gpu.card, &self.model);
        compile(card, model, &self.weights, &self.kv, &self.buffers, self.options.lane, key)
    }

    fn submit(&self, node: &Node) -> Result<(), DeviceError> {
        match &node.work {
            Work::Kernel { grid, block, shared, args } => {
                self.gpu.launch(self.gpu.kernel(&node.name)?, *grid, *block, *shared, &args.0)
            }
            Work::Widen { slot, blocks, args } => {
                self.gpu.widen(*slot, self.gpu.kernel(&node.name)?, *blocks, &args.0)
            }
            Work::Gemm(gemm) => self.gpu.gemm(gemm),
        }
    }

    /// Compiles and captures what is not there yet.
    fn prepare(&mut self, key: Key) -> Result<(), DeviceError> {
        if self.programs.contains_key(&key) {
            return Ok(());
        }
        if self.programs.len() >= MOST_PROGRAMS {
            self.programs.clear();
        }
        let nodes = self.compile(key)?;
        // What is widened beside others is not captured.
        let few = key.rows <= SMALL && nodes.iter().all(|node| matches!(node.work, Work::Kernel { .. }));
        let graph = if few { self.capture(&nodes)? } else { None };
        self.programs.insert(key, Program { nodes, graph });
        Ok(())
    }

    fn capture(&self, nodes: &[Node]) -> Result<Option<CudaGraph>, DeviceError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.gpu.stream.begin_capture(mode).map_err(failed("begin a capture"))?;
        let submitted = nodes.iter().try_for_each(|node| self.submit(node));
        let graph =
            self.gpu.stream.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(failed("end a capture"));
        submitted?;
        graph
    }

    fn upload_rows(&mut self, rows: &[Row]) -> Result<(), DeviceError> {
        let mut logit = 0i32;
        let blocks = row_blocks(rows);
        let mut bytes = Vec::with_capacity(rows.len() * crate::buffers::ROW_BYTES);
        for (i, row) in rows.iter().enumerate() {
            let slot = self.kv.get(row.seq).ok_or(DeviceError::NoSequence(row.seq.0))?.slot as u32;
            // Rows of a sequence stand together, so its last row here is the last of the run.
            let run = rows[i..].iter().take_while(|r| r.seq == row.seq).count();
            let end = row.pos + run as u32 - 1;
            let before = rows[..i].iter().rev().take_while(|r| r.seq == row.seq).count();
            let begin = row.pos - before as u32;
            let asks = if row.logits { logit } else { -1 };
            let block = blocks.get(i).copied().unwrap_or(0);
            logit += i32::from(row.logits);
            for word in [row.token, row.pos, slot, row.feature, asks as u32, end, begin, block] {
                bytes.extend(word.to_le_bytes());
            }
        }
        self.gpu.upload(&mut self.buffers.rows, 0, &bytes)
    }

    fn check_asked(&self, index: usize) -> Result<(), DeviceError> {
        let why = || "did not ask for logits in the last pass".into();
        if index < self.asked { Ok(()) } else { Err(DeviceError::BadRow { row: index, why: why() }) }
    }

    fn observe(&mut self, key: Key, rows: usize, observer: &mut dyn Observer) -> Result<(), DeviceError> {
        let Some(program) = self.programs.remove(&key) else { return Ok(()) };
        let result = self.observe_nodes(&program.nodes, key, rows, observer);
        self.programs.insert(key, program);
        result
    }
}

/// What decides the program of a pass.
pub(crate) fn key(
    lane: Lane,
    even: bool,
    pass: Pass,
    rows: usize,
    logits: usize,
    depth: usize,
    blocks: Option<usize>,
) -> Key {
    match lane {
        Lane::Serving => Key::new(pass, rows, logits, depth, even, blocks),
        Lane::Strict => Key { pass, rows, logits, splits: strict::span(depth), even: true, blocks: None },
    }
}

/// The launches of a pass in order.
pub(crate) fn compile(
    card: &Card,
    model: &Model,
    weights: &Weights,
    kv: &Kv,
    buffers: &Buffers,
    lane: Lane,
    key: Key,
) -> Result<Vec<Node>, DeviceError> {
    let plan = model.plans.get(key.pass);
    let plan = plan.ok_or_else(|| DeviceError::Backend("this model has no drafter".into()))?;
    match lane {
        Lane::Serving => Compiler::new(card, model, weights, kv, buffers, key).compile(plan),
        Lane::Strict => strict::compile(card, model, weights, kv, buffers, key, plan),
    }
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: "cuda".into(),
            name: format!("{}, {} multiprocessors", self.gpu.card.name, self.gpu.card.room.processors),
            lane: self.options.lane,
            max_rows: self.max_rows,
            step_rows: if self.options.batch_invariant && self.options.lane == Lane::Serving {
                SMALL
            } else {
                self.max_rows
            },
            weight_bytes: self.weights.bytes,
        }
    }

    fn open(&mut self, context: usize) -> Result<SeqId, DeviceError> {
        let have = self.gpu.memory()?.0;
        self.kv.check(context, have, || {
            let (held, open) = self.kv.held();
            let wanted = (self.options.wanted.0.max(open + 1), context);
            let room = have + held + Need::of(&self.model, &self.options, 0, 0)?.weights;
            let fits = |need: Need| need.weights + need.caches + SPARED <= room;
            Ok(fit::told(fit::layers(&self.model, &self.options, wanted, fits)?, wanted))
        })?;
        self.kv.open(&self.gpu, context)
    }

    fn close(&mut self, seq: SeqId) {
        self.kv.close(seq);
    }

    fn copy(&mut self, from: SeqId, to: SeqId, len: usize) -> Result<(), DeviceError> {
        self.kv.copy(&self.gpu, from, to, len)
    }

    fn save(&mut self, seq: SeqId, len: usize) -> Result<Vec<u8>, DeviceError> {
        self.kv.save(&self.gpu, seq, len)
    }

    fn restore(&mut self, seq: SeqId, len: usize, state: &[u8]) -> Result<(), DeviceError> {
        self.kv.restore(&self.gpu, seq, len, state)
    }

    fn run(
        &mut self,
        pass: Pass,
        rows: &[Row],
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), DeviceError> {
        check_rows(&self.model, pass, rows, self.max_rows, |seq| self.kv.get(seq).map(|s| s.context))?;
        let asked = if pass == Pass::Inject { 0 } else { rows.iter().filter(|r| r.logits).count() };
        if self.buffers.fit_logits(&self.gpu, asked, self.model.geometry().vocab)? {
            self.programs.clear();
        }
        let depth = rows.iter().map(|r| r.pos as usize + 1).max().unwrap_or(1);
        let blocks = self.kv.is_shared(&self.gpu.card).then(|| row_blocks(rows).len());
        let key =
            key(self.options.lane, self.options.batch_invariant, pass, rows.len(), asked, depth, blocks);
        self.upload_rows(rows)?;
        self.prepare(key)?;
        if pass != Pass::Inject {
            self.asked = asked;
            self.answers.forget();
            self.search.forget();
        }
        if let Some(observer) = observer {
            return self.observe(key, rows.len(), observer);
        }
        let program = self
            .programs
            .get(&key)
            .ok_or_else(|| DeviceError::Backend("CUDA: a program went missing".into()))?;
        match &program.graph {
            Some(graph) => graph.launch().map_err(failed("launch a graph")),
            None => program.nodes.iter().try_for_each(|node| self.submit(node)),
        }
    }

    fn logits(&mut self, index: usize) -> Result<&[f32], DeviceError> {
        self.check_asked(index)?;
        self.answers.row(&self.gpu, &self.buffers.logits, index, self.asked)
    }

    fn largest(
        &mut self,
        index: usize,
        k: usize,
        mask: Option<&TokenMask>,
    ) -> Result<Option<Largest<'_>>, DeviceError> {
        self.check_asked(index)?;
        self.search.row(&self.gpu, &self.buffers.logits, (index, self.asked), k, mask)
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.gpu.synchronize()
    }

    fn best(&mut self) -> Result<Vec<u32>, DeviceError> {
        if self.asked == 0 {
            return Ok(vec![]);
        }
        self.answers.best(&self.gpu, &self.buffers.logits, self.asked)
    }

    fn limits(&mut self, _pass: Pass) -> Result<Vec<(usize, Option<Limits>)>, DeviceError> {
        crate::probe::limits(&self.gpu).map(|limits| vec![(0, Some(limits))])
    }

    fn place(&mut self, buf: Buf, first: usize, values: &[f32]) -> Result<(), DeviceError> {
        let at = first * self.model.plans.width(Pass::Target, buf) * 4;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.gpu.upload(self.buffers.handed(buf)?, at, &bytes)?;
        // As the embedding would, which another device has done.
        match &mut self.buffers.counters {
            Some(counters) if buf == Buf::X => {
                let zeros = vec![0; chain::COUNTERS * 4 * self.model.geometry().layers.len()];
                self.gpu.upload(counters, 0, &zeros)
            }
            _ => Ok(()),
        }
    }

    fn routes(&self, pass: Pass, rows: usize, depth: usize) -> Vec<Route> {
        let key = key(
            self.options.lane,
            self.options.batch_invariant,
            pass,
            rows,
            describe::asked(pass, rows),
            depth,
            self.kv.is_shared(&self.gpu.card).then_some(rows.div_ceil(WIDE_ROWS)),
        );
        self.compile(key).map(|nodes| describe::routes(&nodes, self.options.lane)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use muser_core::Net;
    use muser_core::model::{QuantMix, Synthetic, muse_glimmer_30b, muse_glimmer_30b_drafter};

    /// The release with its drafter, on an H200, an A100 of 80 GB and a card of 24 GB.
    #[test]
    fn long_passes_are_for_cards_with_memory_to_spare() {
        let (g, (dg, spec)) = (muse_glimmer_30b(52), muse_glimmer_30b_drafter(52));
        let target = Synthetic::shapes(Net::Target, g.clone(), 0, QuantMix::Q4KM);
        let draft = Synthetic::shapes(Net::Draft, dg.clone(), spec.target_layers.len(), QuantMix::Q4KM);
        let model = Model::new(g, Box::new(target), Some((dg, spec, Box::new(draft)))).unwrap();
        let rows = |lane, gigabytes: u64| usual_rows(&model, lane, gigabytes << 30);
        assert_eq!([140, 80, 24].map(|total| rows(Lane::Serving, total)), [2048, 2048, 512]);
        assert_eq!(rows(Lane::Strict, 140), 512);
    }

    #[test]
    fn types_of_keys_and_values_without_kernels_are_refused() {
        let refusal = |lane, kv| check_kv(lane, kv).err().map(|e| e.to_string());
        assert_eq!(refusal(Lane::Serving, KvType::F16).or(refusal(Lane::Serving, KvType::Q8_0)), None);
        assert!(refusal(Lane::Strict, KvType::Q8_0).is_some_and(|why| why.contains("--kv f16")));
        assert!(refusal(Lane::Serving, KvType::F32).is_some_and(|why| why.contains("f16 or q8_0")));
    }
}
