//! A pass as a list of kernels: what `muser kernels` prints and `muser trace` times.

use clap::ValueEnum;
use muser_core::cost::{Batch, Cost, cost};
use muser_core::{Buf, Model, Pass, Plan, Route, Slot};

/// Passes by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PassName {
    /// Tokens through the target: prefill, decode, a group, verification
    Target,
    /// Captured features into the drafter's cache
    Inject,
    /// A drafter's block
    Draft,
}

impl PassName {
    /// The plan's term.
    pub fn pass(self) -> Pass {
        match self {
            PassName::Target => Pass::Target,
            PassName::Inject => Pass::Inject,
            PassName::Draft => Pass::Draft,
        }
    }
}

/// One kernel with the same steps and weight types in one or more layers.
pub struct Entry {
    /// The plan's steps that it serves, joined.
    pub name: String,
    /// Stage of its first step.
    pub stage: &'static str,
    /// Layers where it stands; none for what stands outside them.
    pub layers: Vec<usize>,
    /// Block types of its matrices, each once.
    pub types: String,
    /// Buffers that it needs from kernels before.
    pub reads: Vec<Buf>,
    /// Buffers that it leaves.
    pub writes: Vec<Buf>,
    /// Bytes and operations of one of its calls.
    pub cost: Cost,
    /// Indices into the pass's routes, one a call.
    pub calls: Vec<usize>,
}

impl Entry {
    /// `x -> h`: what it reads and writes.
    pub fn flow(&self) -> String {
        let names = |bufs: &[Buf]| bufs.iter().map(|b| buf_name(*b)).collect::<Vec<_>>().join(", ");
        format!("{} -> {}", names(&self.reads), names(&self.writes))
    }
}

/// The pass's kernels in execution order; calls that differ only in their layer are one entry, at the place of the first.
pub fn entries(model: &Model, plan: &Plan, routes: &[Route], batch: Batch) -> Vec<Entry> {
    let mut all: Vec<Entry> = vec![];
    let mut names: Vec<String> = vec![];
    for (i, route) in routes.iter().enumerate() {
        let Some(entry) = one(model, plan, route, i, batch) else { continue };
        let alike = |e: &&mut Entry| {
            e.name == entry.name
                && e.types == entry.types
                && e.cost == entry.cost
                && routes[e.calls[0]].kernel == route.kernel
        };
        if let Some(known) = all.iter_mut().find(alike) {
            known.layers.extend(entry.layers);
            known.calls.push(i);
            continue;
        }
        if !names.contains(&entry.name) {
            names.push(entry.name.clone());
        }
        all.push(entry);
    }
    // Another layer's variant of a row belongs beside the first, not after the last layer's rows.
    let place = |e: &Entry| names.iter().position(|n| *n == e.name);
    let layered = all.iter().find(|e| !e.layers.is_empty()).map_or(usize::MAX, |e| e.calls[0]);
    let head = |e: &Entry| e.layers.is_empty() && e.calls[0] > layered;
    all.sort_by_key(|e| (head(e), place(e), e.calls[0]));
    all
}

fn one(model: &Model, plan: &Plan, route: &Route, index: usize, batch: Batch) -> Option<Entry> {
    let steps = plan.steps.get(route.steps.clone()).filter(|s| !s.is_empty())?;
    let (mut reads, mut writes, mut total) = (vec![], vec![], Cost::default());
    let mut types: Vec<&str> = vec![];
    for step in steps {
        for buf in step.op.reads() {
            if !writes.contains(&buf) && !reads.contains(&buf) {
                reads.push(buf);
            }
        }
        for buf in step.op.writes() {
            if !writes.contains(&buf) {
                writes.push(buf);
            }
        }
        let table = match &step.op {
            muser_core::Op::Embed { table, .. } => Some(*table),
            _ => None,
        };
        for slot in step.op.matrices().into_iter().chain(table) {
            let name = type_name(model, slot);
            if !types.contains(&name) {
                types.push(name);
            }
        }
        total += cost(model, plan.pass, step, batch);
    }
    Some(Entry {
        name: joined(&steps.iter().map(|s| s.name.as_str()).collect::<Vec<_>>()),
        stage: steps[0].stage,
        layers: steps[0].layer.into_iter().collect(),
        types: types.join(" "),
        reads,
        writes,
        cost: total,
        calls: vec![index],
    })
}

/// `attn.qk-norm+rope`, `attn.kv-store` -> `attn.qk-norm+rope kv-store`: a prefix that all share stands once.
fn joined(names: &[&str]) -> String {
    let Some((prefix, _)) = names.first().and_then(|n| n.split_once('.')) else { return names.join(" ") };
    let rest: Option<Vec<&str>> = names.iter().map(|n| n.strip_prefix(prefix)?.strip_prefix('.')).collect();
    rest.map_or_else(|| names.join(" "), |rest| format!("{prefix}.{}", rest.join(" ")))
}

fn type_name(model: &Model, slot: Slot) -> &'static str {
    model.slots.get(&slot).map_or("?", |(dtype, _, _)| dtype.name())
}

/// A buffer's short name, as in the design's tables.
pub fn buf_name(buf: Buf) -> &'static str {
    match buf {
        Buf::X => "x",
        Buf::H => "h",
        Buf::Q => "q",
        Buf::K => "k",
        Buf::V => "v",
        Buf::G => "g",
        Buf::A => "a",
        Buf::P => "p",
        Buf::F => "f",
        Buf::Features => "features",
        Buf::Logits => "logits",
    }
}
