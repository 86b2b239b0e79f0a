//! The launches of a pass as routes, for people; no card is needed.

use crate::attention::{WIDE_ROWS, parts};
use crate::buffers::Buffers;
use crate::chain::{CHAIN_ROOM, CHAIN_ROOM_TWO};
use crate::device::{check_kv, compile, key};
use crate::gpu::Card;
use crate::kv::Kv;
use crate::product::GROUP;
use crate::program::{Node, SMALL};
use crate::stream::{MOST_ROWS, MOST_WIDE, STREAM_ROOM};
use crate::weights::Weights;
use muser_core::{DeviceError, KvType, Lane, Model, Pass, Route};

/// Lists passes of a model for one card; nothing is loaded.
pub struct Describer<'a> {
    model: &'a Model,
    lane: Lane,
    even: bool,
    card: Card,
    weights: Weights,
    kv: Kv,
    buffers: Buffers,
}

impl<'a> Describer<'a> {
    /// For card `index` of this machine; where it has none or none is named, for an H200. `batch_invariant` as in
    /// [`crate::CudaOptions`].
    pub fn new(
        model: &'a Model,
        lane: Lane,
        batch_invariant: bool,
        index: Option<usize>,
        max_rows: usize,
        kv: KvType,
    ) -> Result<Self, DeviceError> {
        check_kv(lane, kv)?;
        Ok(Describer {
            model,
            lane,
            even: batch_invariant,
            card: index.and_then(Card::find).unwrap_or_else(Card::h200),
            weights: Weights::described(model, lane),
            kv: Kv::new(None, &model.plans.caches, (lane, kv), max_rows)?,
            buffers: Buffers::new(None, model, lane, max_rows, parts(model, batch_invariant))?,
        })
    }

    /// The card's name.
    pub fn card(&self) -> &str {
        &self.card.name
    }

    /// The kernels that a pass over `rows` rows at depth `depth` launches, in order.
    pub fn routes(&self, pass: Pass, rows: usize, depth: usize) -> Result<Vec<Route>, DeviceError> {
        let blocks = self.kv.is_shared(&self.card).then_some(rows.div_ceil(WIDE_ROWS));
        let key = key(self.lane, self.even, pass, rows, asked(pass, rows), depth, blocks);
        let nodes = compile(&self.card, self.model, &self.weights, &self.kv, &self.buffers, self.lane, key)?;
        Ok(routes(&nodes, self.lane))
    }
}

/// Rows that ask for logits: one of a chunk, all of a group, the masks of a block.
pub(crate) fn asked(pass: Pass, rows: usize) -> usize {
    match pass {
        Pass::Target if rows > GROUP => 1,
        Pass::Target => rows,
        Pass::Draft => rows.saturating_sub(1).clamp(1, SMALL),
        Pass::Inject => 0,
    }
}

/// A route for each run of launches that serve the same steps.
pub(crate) fn routes(nodes: &[Node], lane: Lane) -> Vec<Route> {
    nodes.chunk_by(|a, b| a.steps == b.steps).map(|group| route(group, lane)).collect()
}

fn route(group: &[Node], lane: Lane) -> Route {
    let mut names: Vec<(&str, usize)> = vec![];
    for node in group {
        match names.iter_mut().find(|(name, _)| *name == node.name) {
            Some((_, count)) => *count += 1,
            None => names.push((&node.name, 1)),
        }
    }
    let counted = |(name, count): &(&str, usize)| match count {
        1 => name.to_string(),
        n => format!("{n} {name}"),
    };
    let kernel = names.iter().map(counted).collect::<Vec<_>>().join(" + ");
    let starts = |what: &'static str| group.iter().find(|n| n.name.starts_with(what));
    let ways = [
        (
            starts("chain"),
            "chain: a layer's products, norms and SiLU behind attention in one launch",
            format!(
                "one or two rows, matrices of at most two layouts, {CHAIN_ROOM} KB of shared memory beside activations (two rows: {CHAIN_ROOM_TWO} KB, no quants of 8 bits)"
            ),
        ),
        (
            starts("project"),
            "project: tensor cores straight from the quants",
            format!("at most {SMALL} rows, {GROUP} where warpgroups multiply more"),
        ),
        (
            starts("stream"),
            "stream + join: the same for more rows; stream_wide by warpgroups",
            format!(
                "at most {MOST_ROWS} rows, {STREAM_ROOM} KB of shared memory, quants of at most 6 bits; by warpgroups {MOST_WIDE} rows, of Q8_0 half, of f16 a third"
            ),
        ),
        (starts("widen"), "widen + gemm-f16: to f16, then cuBLAS", "else".to_string()),
    ];
    let product = ways.iter().find_map(|(node, ..)| *node);
    let ladder = match product {
        None => vec![(kernel.clone(), "the only one for this lane".to_string(), true)],
        Some(_) => {
            let rung = |(node, other, condition): &(Option<&Node>, &str, String)| {
                let name = if node.is_some() { kernel.clone() } else { other.to_string() };
                (name, condition.clone(), node.is_some())
            };
            ways.iter().map(rung).collect()
        }
    };
    Route {
        steps: group[0].steps.clone(),
        kernel,
        library: if lane == Lane::Serving { "muser-cuda S" } else { "muser-cuda X" },
        file: product.unwrap_or(&group[0]).file,
        ladder,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain;
    use crate::program::Work;
    use crate::sources::sources;
    use crate::weights::{products, types};
    use muser_core::Net;
    use muser_core::model::{QuantMix, Synthetic, muse_glimmer_30b, muse_glimmer_30b_drafter};
    use std::collections::HashSet;

    /// Kernels of a decode step with their blocks across columns and slices, or parts of keys.
    fn launches(passes: &Describer<'_>, rows: usize, depth: usize) -> Vec<(String, u32, u32)> {
        let key =
            key(Lane::Serving, passes.even, Pass::Target, rows, rows, depth, Some(rows.div_ceil(WIDE_ROWS)));
        let (card, lane) = (&passes.card, Lane::Serving);
        let nodes =
            compile(card, passes.model, &passes.weights, &passes.kv, &passes.buffers, lane, key).unwrap();
        let of_rows = |node: &&Node| node.name.starts_with("project") || node.name.starts_with("attend");
        let shape = |node: &Node| match &node.work {
            Work::Kernel { grid, .. } if node.name == "attend_join" => (node.name.clone(), 0, grid.0),
            Work::Kernel { grid, .. } => (node.name.clone(), grid.0, grid.1),
            _ => panic!("{} takes many rows", node.name),
        };
        let mut all: Vec<_> = nodes.iter().filter(of_rows).map(shape).collect();
        // Rows beyond a product's columns are multiplied by the same launch once more.
        all.dedup();
        all
    }

    #[test]
    fn batch_invariant_rows_take_the_same_kernels_alone_and_in_groups() {
        let geometry = muse_glimmer_30b(4);
        let weights = Synthetic::shapes(Net::Target, geometry.clone(), 0, QuantMix::Q4KM);
        let model = Model::new(geometry, Box::new(weights), None).unwrap();
        let even = Describer::new(&model, Lane::Serving, true, None, 512, KvType::F16).unwrap();
        for depth in [1, 200, 3000, 131_072] {
            let alone = launches(&even, 1, depth);
            assert!(alone.iter().any(|(name, ..)| name.ends_with("_16")), "{alone:?}");
            for rows in 2..=SMALL {
                assert_eq!(launches(&even, rows, depth), alone, "{rows} rows at depth {depth}");
            }
        }
        let usual = Describer::new(&model, Lane::Serving, false, None, 512, KvType::F16).unwrap();
        assert_ne!(launches(&usual, 1, 3000), launches(&usual, 16, 3000));
    }

    #[test]
    fn rows_of_a_sequence_read_its_keys_together_where_that_pays() {
        let geometry = muse_glimmer_30b(4);
        let weights = Synthetic::shapes(Net::Target, geometry.clone(), 0, QuantMix::Q4KM);
        let model = Model::new(geometry, Box::new(weights), None).unwrap();
        for (kv, even) in [(KvType::F16, false), (KvType::F16, true), (KvType::Q8_0, false)] {
            let d = Describer::new(&model, Lane::Serving, even, None, 64, kv).unwrap();
            // How often, of three local layers and one that sees all.
            let together = |rows, depth| {
                let kernels = d.routes(Pass::Target, rows, depth).unwrap();
                kernels.iter().filter(|route| route.kernel.contains("attend_wide")).count()
            };
            let found = [(1, 131_072), (4, 8000), (16, 8000), (4, 40_000), (16, 9000), (17, 1), (64, 9000)]
                .map(|(rows, depth)| together(rows, depth));
            let want = if kv == KvType::F16 && !even { [0, 0, 0, 1, 1, 4, 4] } else { [0; 7] };
            assert_eq!(found, want, "{kv:?}, {even}");
        }
    }

    /// Every kernel that a pass launches is compiled, and groups have no programs that none launches.
    #[test]
    fn kernels_are_compiled_that_passes_launch() {
        for (mix, even) in [("q4_k_m", false), ("q4_k_m", true), ("q8_0", false), ("nvfp4", false)] {
            let (g, (dg, spec)) = (muse_glimmer_30b(52), muse_glimmer_30b_drafter(52));
            let mix = QuantMix::from_name(mix).unwrap();
            let target = Synthetic::shapes(Net::Target, g.clone(), 0, mix);
            let draft = Synthetic::shapes(Net::Draft, dg.clone(), spec.target_layers.len(), mix);
            let model = Model::new(g, Box::new(target), Some((dg, spec, Box::new(draft)))).unwrap();
            let d = Describer::new(&model, Lane::Serving, even, None, 64, KvType::F16).unwrap();
            let chained = chain::layouts(&model).filter(|_| !even);
            let (types, products) = (types(&model), products(&model));
            let programs =
                sources(&types, &products, chained.as_deref(), Lane::Serving, KvType::F16, d.card.room);
            let compiled: HashSet<String> =
                programs.into_iter().flat_map(|source| source.kernels).map(|(_, name)| name).collect();
            let mut launched = HashSet::new();
            for (pass, rows) in (1..=40).map(|n| (Pass::Target, n)).chain([
                (Pass::Draft, 16),
                (Pass::Inject, 1),
                (Pass::Inject, 4),
            ]) {
                let key =
                    key(d.lane, d.even, pass, rows, asked(pass, rows), 9000, Some(rows.div_ceil(WIDE_ROWS)));
                let nodes = compile(&d.card, &model, &d.weights, &d.kv, &d.buffers, d.lane, key).unwrap();
                launched.extend(nodes.into_iter().map(|node| node.name));
            }
            // The head of two rows of which one asks is a product of its own, by the program for its layout alone.
            let key = key(d.lane, d.even, Pass::Target, 2, 1, 9000, Some(1));
            let nodes = compile(&d.card, &model, &d.weights, &d.kv, &d.buffers, d.lane, key).unwrap();
            let head = nodes.iter().rfind(|node| node.name.starts_with("project")).unwrap();
            assert!(mix != QuantMix::Q4KM || even || head.name == "project_q6_k_1", "{}", head.name);
            // One and two rows are chains where rings have room.
            for (kernel, chained) in
                [("chain_q4_k_q6_k_1", true), ("chain_q4_k_q6_k_2", true), ("chain_q8_0_2", false)]
            {
                let expected = chained && mix == QuantMix::Q4KM && !even;
                assert_eq!(launched.contains(kernel), expected, "{mix:?}, {even}: {kernel}");
            }
            let missing: Vec<_> =
                launched.difference(&compiled).filter(|name| !name.starts_with("gemm")).collect();
            assert!(missing.is_empty(), "{mix:?}: {missing:?}");
            // Groups have the program for both layouts.
            assert!(!compiled.contains("project_q4_k_16") && !compiled.contains("project_q6_k_4"));
        }
    }
}
