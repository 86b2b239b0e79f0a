//! Reading safetensors checkpoints: one file, or the files that an `index.json` names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

pub use safetensors::Dtype as SafeDtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use crate::bytes::Bytes;
use crate::{DType, FormatError, dequantize};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Longest header that is parsed: the limit of the reference implementation.
const MAX_HEADER: u64 = 100_000_000;

/// A safetensors checkpoint, mapped into memory, tensors found by name.
pub struct Safetensors {
    shards: Vec<Shard>,
    tensors: BTreeMap<String, usize>,
}

struct Shard {
    bytes: Bytes,
    /// Where the data begin; all offsets count from here.
    data_start: usize,
    header: Metadata,
}

/// One tensor: little-endian elements in C order, at no particular alignment.
#[derive(Clone, Copy, Debug)]
pub struct SafeTensor<'a> {
    /// Element type.
    pub dtype: SafeDtype,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// The elements.
    pub data: &'a [u8],
}

/// What is used of an index file.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Safetensors {
    /// Opens a `.safetensors` file, an `.index.json`, or a folder that holds `model.safetensors.index.json` or
    /// `model.safetensors`.
    ///
    /// # Errors
    /// A file that can't be opened or is not sound; an index that names a file outside its folder, or a tensor that
    /// its file does not hold.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        if path.is_dir() {
            let index = path.join(INDEX);
            return if index.exists() {
                Self::open_index(&index)
            } else {
                Self::open_file(&path.join(SINGLE))
            };
        }
        match path.extension() {
            Some(extension) if extension == "json" => Self::open_index(path),
            _ => Self::open_file(path),
        }
    }

    /// Reads a file that is in memory already.
    ///
    /// # Errors
    /// The bytes are not a sound safetensors file.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, FormatError> {
        Ok(Self::single(Shard::new(Path::new("<memory>"), Bytes::Owned(bytes))?))
    }

    fn open_file(path: &Path) -> Result<Self, FormatError> {
        Ok(Self::single(Shard::new(path, Bytes::map(path)?)?))
    }

    fn single(shard: Shard) -> Self {
        let tensors = shard.header.offset_keys().into_iter().map(|name| (name, 0)).collect();
        Self { shards: vec![shard], tensors }
    }

    fn open_index(path: &Path) -> Result<Self, FormatError> {
        let refuse = |problem: String| FormatError::Safetensors { file: path.display().to_string(), problem };
        let index = Bytes::map(path)?;
        let index: Index =
            serde_json::from_slice(&index).map_err(|error| refuse(format!("no weight_map: {error}")))?;
        let files: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
        let mut shards = Vec::with_capacity(files.len());
        for file in &files {
            // An index may only name files beside it.
            let mut components = Path::new(file).components();
            if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
                return Err(refuse(format!("it names {file:?}, which is not a file in the same folder")));
            }
            let path = path.with_file_name(file);
            shards.push(Shard::new(&path, Bytes::map(&path)?)?);
        }
        let mut tensors = BTreeMap::new();
        for (name, file) in &index.weight_map {
            let shard = files
                .iter()
                .position(|other| other == file)
                .filter(|&at| shards[at].header.info(name).is_some());
            let shard = shard
                .ok_or_else(|| refuse(format!("it says that {file} holds {name:?}, which is not there")))?;
            tensors.insert(name.clone(), shard);
        }
        Ok(Self { shards, tensors })
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<SafeTensor<'_>> {
        let shard = &self.shards[*self.tensors.get(name)?];
        let TensorInfo { dtype, shape, data_offsets: (start, end) } = shard.header.info(name)?;
        let data = shard.bytes.get(shard.data_start..)?.get(*start..*end)?;
        Some(SafeTensor { dtype: *dtype, shape, data })
    }
}

impl Shard {
    fn new(path: &Path, bytes: Bytes) -> Result<Self, FormatError> {
        let refuse = |problem: String| FormatError::Safetensors { file: path.display().to_string(), problem };
        let size = bytes.len() as u64;
        let Some((length, rest)) = bytes.split_first_chunk() else {
            return Err(refuse(format!(
                "it has {size} bytes, less than the length of a header: download it again"
            )));
        };
        let length = u64::from_le_bytes(*length);
        let header = match usize::try_from(length) {
            Ok(length) if length as u64 <= MAX_HEADER => rest.get(..length),
            _ => None,
        };
        let header = header.ok_or_else(|| {
            refuse(format!(
                "its header should take {length} bytes at offset 8, but the file has {size} (at most {MAX_HEADER} are \
                 read): it is truncated or no safetensors file: download it again"
            ))
        })?;
        let data_start = 8 + header.len();
        // Deserializing checks that the tensors follow each other without gaps and have the sizes of their shapes.
        let header: Metadata = serde_json::from_slice(header)
            .map_err(|error| refuse(format!("its header can't be read: {error}: download it again")))?;
        let (need, have) = (header.data_len(), bytes.len() - data_start);
        if need != have {
            return Err(refuse(format!(
                "its tensors take {need} bytes at offset {data_start}, but {have} are there (file size {size}): the \
                 file is truncated or damaged: download it again"
            )));
        }
        Ok(Self { bytes, data_start, header })
    }
}

impl SafeTensor<'_> {
    /// The values, exactly, of an F32, F16 or BF16 tensor; `None` for other types.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        let dtype = match self.dtype {
            SafeDtype::F32 => DType::F32,
            SafeDtype::F16 => DType::F16,
            SafeDtype::BF16 => DType::BF16,
            _ => return None,
        };
        let mut values = vec![0.0; self.data.len() / dtype.block_bytes()];
        dequantize(dtype, self.data, &mut values).ok()?;
        Some(values)
    }
}
