//! GGUF and safetensors containers, and the exact block codecs of every ggml weight type.
//!
//! Everything read here comes from outside: sizes are checked in 64 bits, a count is compared with the bytes that
//! are left before anything is reserved for it, and each refusal names the file, the place and the mend.

mod block;
mod bytes;
mod error;
mod gguf;
mod safetensors;

pub use block::{DType, E2M1_DOUBLED, dequantize, iq_grid};
pub use error::FormatError;
pub use gguf::{Array, Gguf, GgufData, GgufWriter, Tensor, TensorInfo, Value};
pub use safetensors::{SafeDtype, SafeTensor, Safetensors};
