//! What a step must move and compute: the numbers that limits and shares are worked out from.

use crate::geometry::KvType;
use crate::model::Model;
use crate::plan::{Buf, Mask, Op, Pass, Step};
use std::ops::AddAssign;

/// A batch, as far as its cost goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Rows of the pass.
    pub rows: usize,
    /// Sequences that they belong to, in equal shares.
    pub sequences: usize,
    /// Positions in each sequence's cache before the pass.
    pub depth: usize,
    /// Rows that ask for logits.
    pub logits: usize,
    /// Type of keys and values in the cache.
    pub kv: KvType,
}

/// Bytes and operations of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Weights, read once for all rows.
    pub weight_bytes: u64,
    /// Keys and values read or written, once for each sequence.
    pub cache_bytes: u64,
    /// Activations read and written, as f32 rows (a fused kernel moves fewer).
    pub row_bytes: u64,
    /// Multiplications and additions of matrices and of attention; one an element for everything else.
    pub operations: u64,
}

impl Cost {
    /// What comes from memory: weights and cache. Activations stay in a processor's caches.
    pub fn memory_bytes(&self) -> u64 {
        self.weight_bytes + self.cache_bytes
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.weight_bytes += other.weight_bytes;
        self.cache_bytes += other.cache_bytes;
        self.row_bytes += other.row_bytes;
        self.operations += other.operations;
    }
}

/// The cost of a step of a pass.
pub fn cost(model: &Model, pass: Pass, step: &Step, batch: Batch) -> Cost {
    let op = &step.op;
    let width = |buf: Buf| model.plans.width(pass, buf) as u64;
    let rows =
        if matches!(op, Op::Head { .. } | Op::ScaleCap { .. }) { batch.logits } else { batch.rows } as u64;
    let elements: u64 = op.reads().into_iter().chain(op.writes()).map(|buf| width(buf) * rows).sum();
    let mut cost = Cost { row_bytes: 4 * elements, operations: elements, ..Cost::default() };

    let matrices = op.matrices();
    if !matrices.is_empty() {
        cost.operations = 0;
    }
    for slot in matrices.iter().chain(&op.vectors()) {
        let Some((dtype, outputs, inputs)) = model.slots.get(slot) else { continue };
        cost.weight_bytes += *outputs as u64 * dtype.row_bytes(*inputs).unwrap_or(0) as u64;
        if matrices.contains(slot) {
            cost.operations += 2 * *outputs as u64 * *inputs as u64 * rows;
        }
    }
    match op {
        Op::Embed { table, .. } => {
            let bytes =
                model.slots.get(table).and_then(|(dtype, _, cols)| dtype.row_bytes(*cols)).unwrap_or(0);
            cost.weight_bytes = bytes as u64 * rows;
        }
        Op::Store { cache } => {
            let spec = model.plans.caches[*cache];
            cost.cache_bytes = kv_bytes(batch.kv, 2 * spec.kv_heads * spec.head_dim) * rows;
        }
        Op::Attend { cache, mask } => {
            let spec = model.plans.caches[*cache];
            let each = batch.rows / batch.sequences.max(1);
            let visible = |row: usize| {
                let end = if *mask == Mask::Block { batch.depth + each } else { batch.depth + row + 1 };
                let first = spec.window.map_or(0, |window| (batch.depth + row + 1).saturating_sub(window));
                end - first
            };
            // The union over the sequence's rows: from the first key of the first row to the last row itself.
            let touched =
                batch.depth + each - (batch.depth + 1).saturating_sub(spec.window.unwrap_or(usize::MAX));
            cost.cache_bytes =
                kv_bytes(batch.kv, 2 * spec.kv_heads * spec.head_dim) * (touched * batch.sequences) as u64;
            let keys: u64 = (0..each).map(|row| visible(row) as u64).sum();
            cost.operations = 4 * width(Buf::Q) * keys * batch.sequences as u64;
        }
        _ => {}
    }
    cost
}

/// Bytes of `elements` cached numbers.
pub fn kv_bytes(kv: KvType, elements: usize) -> u64 {
    let elements = elements as u64;
    match kv {
        KvType::F32 => 4 * elements,
        KvType::F16 => 2 * elements,
        KvType::Q8_0 => elements + 2 * elements.div_ceil(32),
    }
}

/// Bytes of the caches of one sequence of `context` positions, with room for `max_rows` rows in the rings.
pub fn cache_bytes(model: &Model, kv: KvType, context: usize, max_rows: usize) -> u64 {
    let positions = |window: Option<usize>| window.map_or(context, |w| (w + max_rows).min(context));
    let bytes = |spec: &crate::CacheSpec| {
        kv_bytes(kv, 2 * spec.kv_heads * spec.head_dim) * positions(spec.window) as u64
    };
    model.plans.caches.iter().map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::LayerKind;
    use crate::model::{QuantMix, Synthetic, muse_glimmer_30b};
    use crate::plan::{Net, Plan};

    fn model() -> Model {
        let geometry = muse_glimmer_30b(52);
        let weights = Synthetic::shapes(Net::Target, geometry.clone(), 0, QuantMix::Q4KM);
        Model::new(geometry, Box::new(weights), None).unwrap()
    }

    fn total(model: &Model, plan: &Plan, batch: Batch) -> Cost {
        plan.steps.iter().fold(Cost::default(), |mut sum, step| {
            sum += cost(model, plan.pass, step, batch);
            sum
        })
    }

    #[test]
    fn one_token_of_the_release_reads_16_gigabytes() {
        // The released checkpoint has 27.85 G parameters, of which one step multiplies all but the embedding's 1.345 G
        // (model card); its Q4_K_M file has 16.9 GB.
        let model = model();
        let batch = Batch { rows: 1, sequences: 1, depth: 0, logits: 1, kv: KvType::F16 };
        let one = total(&model, &model.plans.target, batch);
        assert!((16.0e9..16.3e9).contains(&(one.weight_bytes as f64)), "{one:?}");
        assert!((53.0e9..53.3e9).contains(&(one.operations as f64)), "{one:?}");
        let chunk = total(&model, &model.plans.target, Batch { rows: 512, ..batch });
        let embeddings = 511 * 6656 / 256 * 144;
        assert_eq!(chunk.weight_bytes, one.weight_bytes + embeddings);
    }

    #[test]
    fn caches_of_131072_positions_need_under_2_gigabytes() {
        let bytes = cache_bytes(&model(), KvType::F16, 131_072, 512);
        // 13 planes and 39 rings, 2 KV heads x 128 x (K and V) x 2 bytes = 1 KiB a position.
        assert_eq!(bytes, 1024 * (13 * 131_072 + 39 * (2048 + 512)));
    }

    #[test]
    fn attention_counts_the_window_and_the_plane() {
        let model = model();
        let batch = Batch { rows: 4, sequences: 1, depth: 10_000, logits: 4, kv: KvType::F16 };
        for step in &model.plans.target.steps {
            let (Op::Attend { .. }, Some(layer)) = (&step.op, step.layer) else { continue };
            let cost = cost(&model, Pass::Target, step, batch);
            let (keys, touched) = match model.geometry().layers[layer] {
                LayerKind::Local => (4 * 2048, 2048 + 3),
                LayerKind::Full => (4 * 10_000 + 10, 10_004),
            };
            assert_eq!((cost.operations, cost.cache_bytes), (4 * 4096 * keys, 1024 * touched), "{layer}");
        }
    }
}
