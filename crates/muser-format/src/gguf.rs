//! GGUF files: opening, looking things up, and (in `write`) writing.

mod cursor;
mod metadata;
mod names;
mod parse;
mod split;
mod value;
mod write;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

pub use value::{Array, Value};
pub use write::{GgufData, GgufWriter};

use crate::bytes::Bytes;
use crate::{DType, FormatError};
use metadata::Metadata;
use names::NameIndex;

/// A GGUF model: one file or all parts of a split one, mapped into memory. The whole header has been checked: every
/// tensor lies inside its file, apart from all others.
pub struct Gguf {
    path: PathBuf,
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: NameIndex,
    shards: Vec<Bytes>,
}

/// One row of the tensor table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Unique name, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// Type of its blocks.
    pub dtype: DType,
    /// One to four dimensions in ggml's order: `dims[0]` is the contiguous one, the columns. None is zero.
    pub dims: Vec<u64>,
    shard: usize,
    /// Start of the data in its shard.
    offset: u64,
    /// Length of the data.
    bytes: u64,
}

/// A tensor with its data: `rows()` rows of `dtype.row_bytes(cols())` bytes, no gaps, at no particular alignment in
/// memory.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Name, type and shape.
    pub info: &'a TensorInfo,
    /// The blocks.
    pub data: &'a [u8],
}

impl TensorInfo {
    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.dims[0] as usize
    }

    /// Number of rows: the product of all dimensions after the first.
    pub fn rows(&self) -> usize {
        self.dims[1..].iter().product::<u64>() as usize
    }

    /// Bytes of its data.
    pub fn byte_len(&self) -> u64 {
        self.bytes
    }
}

impl Tensor<'_> {
    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.info.cols()
    }

    /// Number of rows: the product of all dimensions after the first.
    pub fn rows(&self) -> usize {
        self.info.rows()
    }
}

impl Gguf {
    /// Opens a model. Any part of a split model (`NAME-00001-of-0000N.gguf`) opens all of it; the metadata are those
    /// of the first part.
    ///
    /// # Errors
    /// A file or part that can't be opened or is no sound GGUF file of version 2 or 3.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let bytes = Bytes::map(path)?;
        let header = parse::header(&path.display().to_string(), &bytes, 0)?;
        let count = split::part_count(&header.metadata)?;
        if count == 1 {
            return Self::assemble(path, vec![(header, bytes)]);
        }
        let paths = split::part_paths(path, count)?;
        let mut parts = Vec::new();
        for (shard, part) in paths.iter().enumerate() {
            let bytes = Bytes::map(part).map_err(|refused| match refused {
                FormatError::Open { error, .. } if error.kind() == ErrorKind::NotFound => {
                    split::missing(path, part, shard + 1, paths.len())
                }
                other => other,
            })?;
            let header = parse::header(&part.display().to_string(), &bytes, shard)?;
            split::check_part(&header.metadata, part, shard as u64 + 1, count)?;
            parts.push((header, bytes));
        }
        Self::assemble(path, parts)
    }

    /// Reads a model of one file that is in memory already.
    ///
    /// # Errors
    /// As [`Gguf::open`]; a part of a split model is refused.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, FormatError> {
        let path = Path::new("<memory>");
        let bytes = Bytes::Owned(bytes);
        let header = parse::header(&path.display().to_string(), &bytes, 0)?;
        match split::part_count(&header.metadata)? {
            1 => Self::assemble(path, vec![(header, bytes)]),
            count => Err(FormatError::Split {
                file: path.display().to_string(),
                problem: format!("this is one of {count} parts of a split model: open it by its path"),
            }),
        }
    }

    fn assemble(path: &Path, parts: Vec<(parse::Header, Bytes)>) -> Result<Self, FormatError> {
        let mut shards = Vec::with_capacity(parts.len());
        let mut tensors = Vec::new();
        let mut first = None;
        for (header, bytes) in parts {
            tensors.extend(header.tensors);
            shards.push(bytes);
            first.get_or_insert((header.version, header.metadata));
        }
        let Some((version, metadata)) = first else { unreachable!("a model has a first part") };
        split::check_tensors(&metadata, path, tensors.len())?;
        let by_name = NameIndex::new(&tensors, |info| &info.name).map_err(|at| FormatError::Tensor {
            file: path.display().to_string(),
            tensor: tensors[at].name.clone(),
            problem: "two tensors have this name".into(),
        })?;
        Ok(Self { path: path.to_owned(), version, metadata, tensors, by_name, shards })
    }

    /// The GGUF version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The path that was opened; `<memory>` for bytes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|bytes| bytes.len() as u64).sum()
    }

    /// The bytes of each file, in the order of the parts.
    pub fn files(&self) -> impl Iterator<Item = &[u8]> {
        self.shards.iter().map(|bytes| &**bytes)
    }

    /// The architecture, `general.architecture`.
    ///
    /// # Errors
    /// The key is missing or not text.
    pub fn arch(&self) -> Result<&str, FormatError> {
        self.str("general.architecture")
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// All metadata in the order of the file.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.metadata.iter()
    }

    /// The tensor table in the order of the file, part after part.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let info = &self.tensors[self.by_name.find(&self.tensors, |info| &info.name, name)?];
        // The header check found the range inside the shard.
        let start = info.offset as usize;
        let data = &self.shards[info.shard][start..start + info.bytes as usize];
        Some(Tensor { info, data })
    }

    /// An integer key, stored in any width, that fits u32.
    ///
    /// # Errors
    /// The key is missing, not an integer, or out of range.
    pub fn u32(&self, key: &str) -> Result<u32, FormatError> {
        self.metadata.typed(key, "an integer that fits u32", |value| value.as_integer()?.try_into().ok())
    }

    /// An integer key, stored in any width, that fits u64.
    ///
    /// # Errors
    /// The key is missing, not an integer, or negative.
    pub fn u64(&self, key: &str) -> Result<u64, FormatError> {
        self.metadata.u64(key)
    }

    /// A float key, stored as f32 or f64 (then rounded).
    ///
    /// # Errors
    /// The key is missing or not a float.
    pub fn f32(&self, key: &str) -> Result<f32, FormatError> {
        self.metadata.typed(key, "a float", |value| value.as_f64().map(|number| number as f32))
    }

    /// A text key.
    ///
    /// # Errors
    /// The key is missing or not text.
    pub fn str(&self, key: &str) -> Result<&str, FormatError> {
        self.metadata.typed(key, "a string", Value::as_str)
    }

    /// A truth value.
    ///
    /// # Errors
    /// The key is missing or not a bool.
    pub fn bool(&self, key: &str) -> Result<bool, FormatError> {
        self.metadata.typed(key, "a bool", Value::as_bool)
    }
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gguf")
            .field("path", &self.path)
            .field("version", &self.version)
            .field("tensors", &self.tensors.len())
            .field("parts", &self.shards.len())
            .finish_non_exhaustive()
    }
}
