//! The CPU device: packed weights, integer dot products, one kernel source for all instruction sets.

mod activations;
mod arena;
mod device;
mod forms;
mod isa;
mod kernels;
mod kv;
mod math;
mod plain;
mod pool;
pub mod probe;
mod program;
mod shared;
mod simd;
mod strict;
mod weights;

pub use device::{CpuDevice, CpuOptions};
pub use isa::{Features, Isa, features};

use muser_core::{Lane, Model, Pass, Route};

/// The kernels of a pass over `rows` rows with these instructions, which the processor at hand need not have; nothing is
/// loaded.
pub fn routes(model: &Model, pass: Pass, rows: usize, lane: Lane, isa: Isa) -> Vec<Route> {
    let stages = model.plans.get(pass).map(program::compile).unwrap_or_default();
    program::routes(model, pass, &stages, rows, lane, isa)
}
