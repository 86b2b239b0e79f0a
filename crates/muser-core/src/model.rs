//! A model's shape and weights, wherever they come from: GGUF files, a drafter's safetensors, or random blocks for benchmarks.

mod assistant;
mod gguf;
mod synthetic;

pub use gguf::{find_drafter, open};
pub use synthetic::{QuantMix, Synthetic, muse_glimmer_30b, muse_glimmer_30b_drafter};

use crate::geometry::{DraftSpec, Geometry};
use crate::plan::{Kind, Net, Pass, Plans, Slot};
use muser_format::{DType, FormatError};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use thiserror::Error;

/// A weight as it stands in its file: `rows` outputs of `cols` inputs, row-major blocks. Vectors have one row.
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    /// Block type.
    pub dtype: DType,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `rows * dtype.row_bytes(cols)` bytes.
    pub data: &'a [u8],
    /// Factor on every output of the matrix, applied after the dot product; 1 except where an NVFP4 file keeps one
    /// global scale a tensor (`NAME.scale`).
    pub scale: f32,
}

impl TensorView<'_> {
    /// All values as f32, each operation of the block formula rounded once.
    /// [`TensorView::scale`] is not among them.
    pub fn to_f32(&self) -> Result<Vec<f32>, ModelError> {
        let mut out = vec![0.0; self.rows * self.cols];
        muser_format::dequantize(self.dtype, self.data, &mut out)?;
        Ok(out)
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.data.len() / self.rows.max(1)
    }
}

/// Where weights come from.
pub trait Weights: Send + Sync {
    /// The weight of a slot, or none if the source lacks it.
    fn get(&self, slot: Slot) -> Option<TensorView<'_>>;
}

/// A drafter's shape, what it captures, and its weights.
type Drafter = (Geometry, DraftSpec, Box<dyn Weights>);

/// A model ready to be loaded by a device: every weight that its plans name is present, with the right shape.
pub struct Model {
    /// Plans of the target and, with a drafter, of the drafter.
    pub plans: Plans,
    /// Shape and type of every weight of the plans.
    pub slots: HashMap<Slot, (DType, usize, usize)>,
    weights: Vec<Arc<dyn Weights>>,
}

/// What is wrong with a model's files.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ModelError {
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("{path}: architecture is {found:?}, muser runs {expected:?}; {mend}")]
    Architecture { path: PathBuf, found: String, expected: &'static str, mend: String },
    #[error("{path}: key {key}: {why}")]
    Key { path: PathBuf, key: String, why: String },
    #[error("tensor {name} is missing: {mend}")]
    Missing { name: String, mend: &'static str },
    #[error("tensor {name} is {rows} x {cols}, but {why} asks for {want_rows} x {want_cols}")]
    Shape { name: String, rows: usize, cols: usize, want_rows: usize, want_cols: usize, why: &'static str },
    #[error("the drafter does not fit the target: {0}")]
    DraftMismatch(String),
}

impl Model {
    /// Joins shapes and weights, and checks that every weight of the plans is there.
    pub fn new(
        target: Geometry,
        weights: Box<dyn Weights>,
        draft: Option<Drafter>,
    ) -> Result<Self, ModelError> {
        let plans = Plans::new(&target, draft.as_ref().map(|(g, s, _)| (g, s)));
        let mut all: Vec<Arc<dyn Weights>> = vec![weights.into()];
        all.extend(draft.map(|(_, _, w)| w.into()));
        let mut model = Model { plans, slots: HashMap::new(), weights: all };
        model.check()?;
        Ok(model)
    }

    /// The weight of a slot. `Model::new` has made sure that slots of the plans exist.
    pub fn tensor(&self, slot: Slot) -> Result<TensorView<'_>, ModelError> {
        let source = self.weights.get(if slot.net == Net::Target { 0 } else { 1 });
        source.and_then(|w| w.get(slot)).ok_or_else(|| ModelError::Missing {
            name: slot.to_string(),
            mend: "the file is incomplete or not of this architecture; convert or download it again",
        })
    }

    /// The target's shape.
    pub fn geometry(&self) -> &Geometry {
        &self.plans.target.geometry
    }

    /// Bytes of all weights that the plans multiply or look up.
    pub fn weight_bytes(&self) -> u64 {
        self.slots.values().map(|(t, rows, cols)| *rows as u64 * t.row_bytes(*cols).unwrap_or(0) as u64).sum()
    }

    fn check(&mut self) -> Result<(), ModelError> {
        let mut slots = HashMap::new();
        for (slot, rows, cols) in weights(&self.plans) {
            let t = self.tensor(slot)?;
            if (t.rows, t.cols) != (rows, cols) {
                return Err(ModelError::Shape {
                    name: slot.to_string(),
                    rows: t.rows,
                    cols: t.cols,
                    want_rows: rows,
                    want_cols: cols,
                    why: "the geometry in the file's metadata",
                });
            }
            slots.insert(slot, (t.dtype, rows, cols));
        }
        self.slots = slots;
        Ok(())
    }

    /// The model as two devices run it together ([`Plans::split`]): each part has the weights and caches of its own steps alone.
    pub fn split(&self, layer: usize) -> Option<[Model; 2]> {
        let part = |plans: Plans| {
            let shape = |(slot, ..): (Slot, _, _)| self.slots.get(&slot).map(|shape| (slot, *shape));
            let slots = weights(&plans).into_iter().filter_map(shape).collect();
            Model { plans, slots, weights: self.weights.clone() }
        };
        self.plans.split(layer).map(|parts| parts.map(part))
    }
}

/// Slots of all plans with the shapes that they demand.
fn weights(plans: &Plans) -> Vec<(Slot, usize, usize)> {
    let passes = [Pass::Target, Pass::Inject, Pass::Draft];
    let all = passes.into_iter().filter_map(|pass| plans.get(pass));
    all.flat_map(|plan| plan.steps.iter().flat_map(|step| shapes(plans, plan.pass, &step.op))).collect()
}

/// Slots of an operation with the shape that the plan's geometry demands.
fn shapes(plans: &Plans, pass: Pass, op: &crate::plan::Op) -> Vec<(Slot, usize, usize)> {
    use crate::plan::{Buf, Op};
    let width = |buf| plans.width(pass, buf);
    let mut all = match op {
        Op::Embed { table, .. } => vec![(*table, plans.target.geometry.vocab, width(Buf::X))],
        Op::Project { from, outs } => outs.iter().map(|(s, out)| (*s, width(*out), width(*from))).collect(),
        Op::GateUp { gate, up } => [gate, up].map(|s| (*s, width(Buf::F), width(Buf::H))).to_vec(),
        Op::Head { weight } => vec![(*weight, plans.target.geometry.vocab, width(Buf::H))],
        _ => vec![],
    };
    for slot in op.vectors() {
        let per_head = matches!(slot.kind, Kind::AttnQNorm | Kind::AttnKNorm);
        let cols = if per_head { plans.get(pass).map_or(0, |p| p.geometry.head_dim) } else { width(Buf::X) };
        all.push((slot, 1, cols));
    }
    all
}
