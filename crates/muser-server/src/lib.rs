//! The HTTP server: OpenAI's, Anthropic's, llama.cpp's and Ollama's routes over one engine.

pub mod app;
pub mod constrain;
pub mod error;
mod fields;
pub mod generate;
pub mod intake;
pub mod metrics;
pub mod post;
pub mod request;
pub mod routes;
pub mod saved;
pub mod serve;
pub mod slots;
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

impl ModelDetails {
    /// Reads a model file's table of tensors. `context` is the model's.
    pub fn from_gguf(file: &muser_format::Gguf, context: usize) -> Self {
        let written = std::fs::metadata(file.path()).and_then(|m| m.modified()).ok();
        let since = written.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
        // The type in which most bytes are stored.
        let mut types: Vec<(String, u64)> = vec![];
        for tensor in file.tensors() {
            let name = tensor.dtype.name();
            match types.iter_mut().find(|(known, _)| known == name) {
                Some((_, bytes)) => *bytes += tensor.byte_len(),
                None => types.push((name.to_string(), tensor.byte_len())),
            }
        }
        ModelDetails {
            created: since.map_or(0, |d| d.as_secs()),
            context,
            bytes: file.file_bytes(),
            parameters: file.tensors().iter().map(|t| t.dims.iter().product::<u64>()).sum(),
            path: file.path().display().to_string(),
            quantization: types
                .into_iter()
                .max_by_key(|(_, bytes)| *bytes)
                .map(|(name, _)| name)
                .unwrap_or_default(),
        }
    }
}
