//! The HTTP server: OpenAI's, Anthropic's, llama.cpp's and Ollama's routes over one engine.

pub mod app;
pub mod constrain;
pub mod error;
mod fields;
pub mod generate;
pub mod metrics;
pub mod request;
pub mod routes;
pub mod slots;
mod stop;
mod stream;
pub mod text;

/// What a model's file says of itself.
#[derive(Clone, Debug, Default)]
pub struct ModelDetails {
    /// When the file was written, in seconds since 1970.
    pub created: u64,
    /// The context that the model was made for.
    pub context: usize,
    /// Bytes of the file.
    pub bytes: u64,
    /// Weights.
    pub parameters: u64,
    /// The file's path, for `/props`.
    pub path: String,
    /// `Q4_K_M` and the like, where the file says so.
    pub quantization: String,
}
