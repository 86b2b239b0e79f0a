//! GGUF and safetensors containers, and the exact block codecs of every ggml weight type.
