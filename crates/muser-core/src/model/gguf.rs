//! Reading a model from GGUF files.
