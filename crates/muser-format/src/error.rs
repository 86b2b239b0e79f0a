//! What can be wrong with a model file, and the mend.

use std::io;
use std::path::PathBuf;

use crate::DType;

/// A refused file, key, tensor or buffer. `file` is the path as it was given, `<memory>` for bytes.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The file can't be opened or mapped.
    #[error("cannot open {}: {error}; check the path and who may read it", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Writing failed.
    #[error("cannot write the GGUF file: {0}")]
    Write(io::Error),
    /// Something that can't stand in a GGUF file, or data in another order than the table's.
    #[error("cannot write {what}: {problem}")]
    Unwritable {
        /// The key or tensor.
        what: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A safetensors file or its index is unsound.
    #[error("{file}: {problem}")]
    Safetensors {
        /// The file.
        file: String,
        /// What is wrong, and the mend.
        problem: String,
    },
    /// The first four bytes are not "GGUF".
    #[error(
        "{file} is not a GGUF file: it starts with \"{}\" instead of \"GGUF\"; give the path of a .gguf model",
        found.escape_ascii()
    )]
    Magic {
        /// The file.
        file: String,
        /// Its first bytes, at most four.
        found: Vec<u8>,
    },
    /// The file was written in big-endian order.
    #[error("{file} is a big-endian GGUF file; only little-endian files are read: get or convert to that")]
    BigEndian {
        /// The file.
        file: String,
    },
    /// A GGUF version other than 2 and 3.
    #[error(
        "{file} has GGUF version {found}; versions 2 and 3 are read: convert the model with a current tool"
    )]
    Version {
        /// The file.
        file: String,
        /// The version it states.
        found: u32,
    },
    /// The header needs bytes that the file does not have.
    #[error(
        "{file}: {what} at offset {offset} needs {need} bytes, but the file ends after {size} bytes: \
         the file is truncated: download it again"
    )]
    Truncated {
        /// The file.
        file: String,
        /// What was being read.
        what: String,
        /// Where it starts.
        offset: u64,
        /// Its length, at least.
        need: u64,
        /// Length of the file.
        size: u64,
    },
    /// A field holds something that the format does not allow.
    #[error("{file}: {what}: {problem}; the file is damaged: download or convert it again")]
    Invalid {
        /// The file.
        file: String,
        /// The field.
        what: String,
        /// What is wrong with it, with its offset where one helps.
        problem: String,
    },
    /// A tensor whose name, shape, type or place can't be used.
    #[error("{file}: tensor {tensor:?}: {problem}; convert or download the file again")]
    Tensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor's data reaches beyond the file.
    #[error(
        "{file}: tensor {tensor:?} takes {bytes} bytes at offset {offset}, but the file has {size} bytes: \
         the file is truncated: download it again"
    )]
    TensorRange {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Start of its data in the file.
        offset: u64,
        /// Length of its data.
        bytes: u64,
        /// Length of the file.
        size: u64,
    },
    /// A metadata key that is needed and not there.
    #[error(
        "{file}: metadata key {key:?} ({expected}) is missing; convert the model again with a current tool"
    )]
    MissingKey {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The type that is expected under it.
        expected: &'static str,
    },
    /// A metadata key with a value of another type, or out of range.
    #[error("{file}: metadata key {key:?} should be {expected}, but is {found}; convert the model again")]
    KeyType {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The type that is expected.
        expected: &'static str,
        /// The type found, with the value where it is a number.
        found: String,
    },
    /// A split model whose parts don't fit together.
    #[error("{file}: {problem}")]
    Split {
        /// The file.
        file: String,
        /// What is wrong, and the mend.
        problem: String,
    },
    /// A buffer that is not whole blocks, or an output of another length.
    #[error(
        "{dtype:?}: {bytes} bytes hold {} blocks of {} values, but the output holds {values} values",
        *bytes as f64 / dtype.block_bytes() as f64,
        dtype.block_len()
    )]
    BlockLength {
        /// The block type.
        dtype: DType,
        /// Bytes given.
        bytes: usize,
        /// Length of the output.
        values: usize,
    },
}
