//! The launches of a pass as routes, for people; no card is needed.

use crate::buffers::Buffers;
use crate::device::{compile, key};
use crate::gpu::Card;
use crate::kv::Kv;
use crate::program::{Node, SMALL};
use crate::weights::Weights;
use muser_core::{DeviceError, Lane, Model, Pass, Route};

/// Lists passes of a model for one card; nothing is loaded.
pub struct Describer<'a> {
    model: &'a Model,
    lane: Lane,
    card: Card,
    weights: Weights,
    kv: Kv,
    buffers: Buffers,
}

impl<'a> Describer<'a> {
    /// For card `index` of this machine; where it has none or none is named, for an H200.
    pub fn new(
        model: &'a Model,
        lane: Lane,
        index: Option<usize>,
        max_rows: usize,
    ) -> Result<Self, DeviceError> {
        Ok(Describer {
            model,
            lane,
            card: index.and_then(Card::find).unwrap_or_else(Card::h200),
            weights: Weights::described(model, lane),
            kv: Kv::new(None, &model.plans.caches, max_rows)?,
            buffers: Buffers::new(None, model, max_rows)?,
        })
    }

    /// The card's name.
    pub fn card(&self) -> &str {
        &self.card.name
    }

    /// The kernels that a pass over `rows` rows at depth `depth` launches, in order.
    pub fn routes(&self, pass: Pass, rows: usize, depth: usize) -> Result<Vec<Route>, DeviceError> {
        let key = key(self.lane, pass, rows, rows.min(SMALL), depth);
        let nodes = compile(&self.card, self.model, &self.weights, &self.kv, &self.buffers, self.lane, key)?;
        Ok(routes(&nodes, self.lane, rows))
    }
}

/// A route for each run of launches that serve the same steps.
pub(crate) fn routes(nodes: &[Node], lane: Lane, rows: usize) -> Vec<Route> {
    let route = |group: &[Node]| {
        let names: Vec<&str> = group.iter().map(|n| n.name.as_str()).collect();
        let small = rows <= SMALL;
        let ladder = vec![
            ("tensor cores straight from the quants".to_string(), format!("at most {SMALL} rows"), small),
            ("widened to f16, then cuBLAS".to_string(), format!("more than {SMALL} rows"), !small),
        ];
        Route {
            steps: group[0].steps.clone(),
            kernel: names.join(" + "),
            library: if lane == Lane::Serving { "muser-cuda S" } else { "muser-cuda X" },
            file: group[0].file,
            ladder: if lane == Lane::Serving && is_product(&group[0].name) { ladder } else { vec![] },
        }
    };
    nodes.chunk_by(|a, b| a.steps == b.steps).map(route).collect()
}

fn is_product(kernel: &str) -> bool {
    ["project", "widen", "gemm"].iter().any(|k| kernel.starts_with(k))
}
