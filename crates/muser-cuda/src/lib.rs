//! The CUDA device: NVIDIA cards of compute capability 8.0 and later.
//!
//! Driver, NVRTC and cuBLAS are loaded when a card is opened, so a binary with this crate runs without them. Kernels are
//! the .cu files under kernels/; NVRTC compiles them for the card at the first start.

mod answers;
mod attention;
mod buffers;
mod chain;
mod describe;
mod device;
mod few;
mod fit;
mod gpu;
mod kv;
mod largest;
mod launch;
mod many;
mod nvrtc;
mod panels;
mod probe;
mod product;
mod program;
mod sources;
mod stream;
mod strict;
mod upload;
mod weights;

pub use describe::Describer;
pub use device::{CudaDevice, CudaOptions};
pub use gpu::is_available;
