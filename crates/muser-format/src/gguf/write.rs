//! Writing GGUF files: a header first, then the tensors one after the other, so that a model larger than memory can be
//! written.

use std::io::{self, Read, Write};

use super::cursor::MAX_NAME;
use super::parse::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, data_bytes, is_alignment};
use super::{Array, Value};
use crate::{DType, FormatError};

/// The version that is written.
const VERSION: u32 = 3;

/// The header of a GGUF file to be: metadata and the table of tensors, in the order in which they are added.
#[derive(Default)]
pub struct GgufWriter {
    entries: Vec<(String, Value)>,
    tensors: Vec<Planned>,
}

struct Planned {
    name: String,
    dtype: DType,
    dims: Vec<u64>,
    bytes: u64,
}

/// A GGUF file whose header is written and which waits for the data of its tensors.
pub struct GgufData<W> {
    out: W,
    alignment: u64,
    tensors: std::vec::IntoIter<Planned>,
}

impl GgufWriter {
    /// An empty header.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metadata key. `general.alignment` sets the alignment of the data.
    ///
    /// # Errors
    /// The key is there already, its name is empty or too long, or the alignment is not a power of two of at least 8.
    pub fn set(&mut self, key: &str, value: Value) -> Result<&mut Self, FormatError> {
        let refuse =
            |problem: &str| FormatError::Unwritable { what: format!("key {key:?}"), problem: problem.into() };
        check_name(key).map_err(refuse)?;
        if self.entries.iter().any(|(other, _)| other == key) {
            return Err(refuse("it is there already"));
        }
        if key == ALIGNMENT_KEY && !matches!(value, Value::U32(alignment) if is_alignment(alignment)) {
            return Err(refuse("it must be a u32, a power of two, at least 8"));
        }
        self.entries.push((key.into(), value));
        Ok(self)
    }

    /// Adds a tensor; `dims` in ggml's order, columns first.
    ///
    /// # Errors
    /// The name is there already, empty or too long, or the shape is not one that a reader accepts.
    pub fn tensor(&mut self, name: &str, dtype: DType, dims: &[u64]) -> Result<&mut Self, FormatError> {
        let refuse = |problem: &str| FormatError::Unwritable {
            what: format!("tensor {name:?}"),
            problem: problem.into(),
        };
        check_name(name).map_err(refuse)?;
        if self.tensors.iter().any(|other| other.name == name) {
            return Err(refuse("it is there already"));
        }
        let bytes = data_bytes(dtype, dims).map_err(|problem| refuse(&problem))?;
        self.tensors.push(Planned { name: name.into(), dtype, dims: dims.into(), bytes });
        Ok(self)
    }

    /// Writes the header and waits for the data of the tensors.
    ///
    /// # Errors
    /// Writing fails, or the file would be too large.
    pub fn start<W: Write>(self, mut out: W) -> Result<GgufData<W>, FormatError> {
        let alignment = self.entries.iter().find_map(|(key, value)| match value {
            Value::U32(alignment) if key == ALIGNMENT_KEY => Some(u64::from(*alignment)),
            _ => None,
        });
        let alignment = alignment.unwrap_or(DEFAULT_ALIGNMENT);
        let mut header = Vec::new();
        header.extend(b"GGUF");
        header.extend(VERSION.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            push_str(&mut header, key);
            push_value(&mut header, value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            push_str(&mut header, &tensor.name);
            header.extend((tensor.dims.len() as u32).to_le_bytes());
            header.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            header.extend(tensor.dtype.ggml_id().to_le_bytes());
            header.extend(offset.to_le_bytes());
            let end =
                offset.checked_add(tensor.bytes).and_then(|end| end.checked_next_multiple_of(alignment));
            offset = end.ok_or_else(|| FormatError::Unwritable {
                what: format!("tensor {:?}", tensor.name),
                problem: "the file would be too large".into(),
            })?;
        }
        out.write_all(&header).map_err(FormatError::Write)?;
        pad(&mut out, header.len() as u64, alignment)?;
        Ok(GgufData { out, alignment, tensors: self.tensors.into_iter() })
    }
}

impl<W: Write> GgufData<W> {
    /// Writes the data of the next tensor of the table, which must be `name`.
    ///
    /// # Errors
    /// Another tensor is next, the data have another length, or writing fails.
    pub fn write(&mut self, name: &str, data: &[u8]) -> Result<&mut Self, FormatError> {
        let refuse = |problem: String| FormatError::Unwritable { what: format!("tensor {name:?}"), problem };
        let next = self.tensors.next().ok_or_else(|| refuse("all tensors are written already".into()))?;
        if next.name != name {
            return Err(refuse(format!("tensor {:?} is next", next.name)));
        }
        if next.bytes != data.len() as u64 {
            return Err(refuse(format!("it takes {} bytes, but {} are given", next.bytes, data.len())));
        }
        self.out.write_all(data).map_err(FormatError::Write)?;
        pad(&mut self.out, next.bytes, self.alignment)?;
        Ok(self)
    }

    /// Ends the file and gives the writer back, flushed.
    ///
    /// # Errors
    /// Tensors are missing, or flushing fails.
    pub fn finish(mut self) -> Result<W, FormatError> {
        if let Some(next) = self.tensors.next() {
            let problem = "its data were not written".into();
            return Err(FormatError::Unwritable { what: format!("tensor {:?}", next.name), problem });
        }
        self.out.flush().map_err(FormatError::Write)?;
        Ok(self.out)
    }
}

/// Zeros after `length` bytes, up to the next multiple of `alignment`.
fn pad(out: &mut impl Write, length: u64, alignment: u64) -> Result<(), FormatError> {
    let padding = length.next_multiple_of(alignment) - length;
    io::copy(&mut io::repeat(0).take(padding), out).map_err(FormatError::Write)?;
    Ok(())
}

fn check_name(name: &str) -> Result<(), &'static str> {
    match name.len() {
        1..=MAX_NAME => Ok(()),
        _ => Err("names have 1 to 65535 bytes"),
    }
}

fn push_str(header: &mut Vec<u8>, text: &str) {
    header.extend((text.len() as u64).to_le_bytes());
    header.extend(text.as_bytes());
}

/// The type number and the value.
fn push_value(header: &mut Vec<u8>, value: &Value) {
    header.extend(value.value_type().id().to_le_bytes());
    match value {
        Value::U8(v) => header.extend(v.to_le_bytes()),
        Value::I8(v) => header.extend(v.to_le_bytes()),
        Value::U16(v) => header.extend(v.to_le_bytes()),
        Value::I16(v) => header.extend(v.to_le_bytes()),
        Value::U32(v) => header.extend(v.to_le_bytes()),
        Value::I32(v) => header.extend(v.to_le_bytes()),
        Value::U64(v) => header.extend(v.to_le_bytes()),
        Value::I64(v) => header.extend(v.to_le_bytes()),
        Value::F32(v) => header.extend(v.to_le_bytes()),
        Value::F64(v) => header.extend(v.to_le_bytes()),
        Value::Bool(v) => header.push(u8::from(*v)),
        Value::Str(v) => push_str(header, v),
        Value::Array(array) => push_array(header, array),
    }
}

/// Element type, count and elements.
fn push_array(header: &mut Vec<u8>, array: &Array) {
    header.extend(array.element_type().id().to_le_bytes());
    header.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(items) => header.extend(items),
        Array::I8(items) => header.extend(items.iter().flat_map(|v| v.to_le_bytes())),
        Array::U16(items) => header.extend(items.iter().flat_map(|v| v.to_le_bytes())),
        Array::I16(items) => header.extend(items.iter().flat_map(|v| v.to_le_bytes())),
        Array::U32(items) => header.extend(items.iter().flat_map(|v| v.to_le_bytes())),
        Array::I32(items) => header.extend(items.iter().flat_map(|v| v.to_le_bytes())),
        Array::U64(items) => header.extend(items.iter().flat_map(|v| v.to_le_bytes())),
        Array::I64(items) => header.extend(items.iter().flat_map(|v| v.to_le_bytes())),
        Array::F32(items) => header.extend(items.iter().flat_map(|v| v.to_le_bytes())),
        Array::F64(items) => header.extend(items.iter().flat_map(|v| v.to_le_bytes())),
        Array::Bool(items) => header.extend(items.iter().map(|&v| u8::from(v))),
        Array::Str(items) => items.iter().for_each(|text| push_str(header, text)),
    }
}
