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
