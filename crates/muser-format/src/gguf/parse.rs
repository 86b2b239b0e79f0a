//! The header of one GGUF file: counts, metadata, tensor table, and where each tensor's data lies.
//!
//! Layout: magic, version u32, tensor count u64, key count u64, keys, tensor table, padding to `general.alignment`,
//! data. Versions 2 and 3 are the same but for the byte order that version 3 may have.

use std::fmt::Arguments;

use super::cursor::Cursor;
use super::metadata::Metadata;
use super::value::ValueType;
use super::{Array, TensorInfo, Value};
use crate::{DType, FormatError};

/// Most dimensions of a tensor (ggml's GGML_MAX_DIMS).
const MAX_DIMS: u32 = 4;
/// Alignment of tensor data where the file does not state one.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
/// Least bytes of a key: length, one letter, type, one byte of value.
const MIN_KEY: u64 = 8 + 1 + 4 + 1;
/// Least bytes of a tensor: length, one letter, dimension count, one dimension, type, offset.
const MIN_TENSOR: u64 = 8 + 1 + 4 + 8 + 4 + 8;

pub(super) struct Header {
    pub(super) version: u32,
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
}

/// Reads and checks a whole header. `shard` is noted in each tensor.
pub(super) fn header(file: &str, bytes: &[u8], shard: usize) -> Result<Header, FormatError> {
    if !bytes.starts_with(b"GGUF") {
        return Err(FormatError::Magic { file: file.into(), found: bytes[..bytes.len().min(4)].to_vec() });
    }
    let mut cursor = Cursor::new(file, bytes);
    cursor.take(4, format_args!("the magic"))?;
    let version = cursor.u32(format_args!("the version"))?;
    match version {
        2 | 3 => {}
        _ if matches!(version.swap_bytes(), 1..=3) => {
            return Err(FormatError::BigEndian { file: file.into() });
        }
        _ => return Err(FormatError::Version { file: file.into(), found: version }),
    }
    let tensor_count = cursor.count(MIN_TENSOR, format_args!("the tensor table"))?;
    let key_count = cursor.count(MIN_KEY, format_args!("the metadata"))?;

    let mut entries = Vec::with_capacity(key_count);
    for number in 1..=key_count {
        let key = cursor.name(format_args!("metadata key {number} of {key_count}"))?;
        entries.push((key.to_owned(), value(&mut cursor, key)?));
    }
    let metadata = Metadata::new(file.into(), entries)?;
    let alignment = alignment(&metadata)?;

    // The first count was checked against a file that also had the metadata in it.
    let left = (bytes.len() - cursor.at()) as u64;
    if tensor_count as u64 * MIN_TENSOR > left {
        return Err(FormatError::Truncated {
            file: file.into(),
            what: format!("the table of {tensor_count} tensors"),
            offset: cursor.at() as u64,
            need: tensor_count as u64 * MIN_TENSOR,
            size: bytes.len() as u64,
        });
    }
    let mut tensors = Vec::with_capacity(tensor_count);
    for number in 1..=tensor_count {
        tensors.push(tensor(&mut cursor, file, shard, number, tensor_count)?);
    }
    place(file, bytes.len() as u64, cursor.at() as u64, alignment, &mut tensors)?;
    Ok(Header { version, metadata, tensors })
}

fn alignment(metadata: &Metadata) -> Result<u64, FormatError> {
    if metadata.get(ALIGNMENT_KEY).is_none() {
        return Ok(DEFAULT_ALIGNMENT);
    }
    metadata.typed(ALIGNMENT_KEY, "a power of two, at least 8, of type u32", |value| match *value {
        Value::U32(alignment) if is_alignment(alignment) => Some(u64::from(alignment)),
        _ => None,
    })
}

/// The specification asks for a multiple of 8, ggml for a power of two.
pub(super) fn is_alignment(alignment: u32) -> bool {
    alignment.is_power_of_two() && alignment >= 8
}

/// One row of the tensor table; `offset` is still relative to the data section.
fn tensor(
    cursor: &mut Cursor<'_>,
    file: &str,
    shard: usize,
    number: usize,
    count: usize,
) -> Result<TensorInfo, FormatError> {
    let name = cursor.name(format_args!("name of tensor {number} of {count}"))?;
    let refuse = |problem: String| FormatError::Tensor { file: file.into(), tensor: name.into(), problem };
    let dim_count = cursor.u32(format_args!("dimension count of tensor {name:?}"))?;
    if dim_count > MAX_DIMS {
        return Err(refuse(dim_count_problem(dim_count as usize)));
    }
    let mut dims = Vec::with_capacity(dim_count as usize);
    for _ in 0..dim_count {
        dims.push(cursor.u64(format_args!("dimensions of tensor {name:?}"))?);
    }
    let id = cursor.u32(format_args!("type of tensor {name:?}"))?;
    let dtype = DType::from_ggml(id).ok_or_else(|| {
        refuse(format!("ggml type {id} is not one that is read: use a model of another type"))
    })?;
    let bytes = data_bytes(dtype, &dims).map_err(refuse)?;
    let offset = cursor.u64(format_args!("offset of tensor {name:?}"))?;
    Ok(TensorInfo { name: name.to_owned(), dtype, dims, shard, offset, bytes })
}

fn dim_count_problem(count: usize) -> String {
    format!("it has {count} dimensions; 1 to {MAX_DIMS} are possible")
}

/// Length of a tensor's data, or what is wrong with its shape.
pub(super) fn data_bytes(dtype: DType, dims: &[u64]) -> Result<u64, String> {
    if dims.contains(&0) {
        return Err(format!("its shape {dims:?} has a dimension of zero"));
    }
    let too_large = || format!("its shape {dims:?} is too large for {} data", dtype.name());
    let [cols, outer @ ..] = dims else {
        return Err(dim_count_problem(0));
    };
    if dims.len() > MAX_DIMS as usize {
        return Err(dim_count_problem(dims.len()));
    }
    let cols = usize::try_from(*cols).map_err(|_| too_large())?;
    if !cols.is_multiple_of(dtype.block_len()) {
        let (name, block) = (dtype.name(), dtype.block_len());
        return Err(format!("rows of {cols} values are not whole {name} blocks of {block}"));
    }
    let row = dtype.row_bytes(cols).ok_or_else(too_large)? as u64;
    let bytes = outer.iter().try_fold(row, |bytes, &dim| bytes.checked_mul(dim)).ok_or_else(too_large)?;
    // Lengths and counts are used as usize and isize from here on.
    isize::try_from(bytes).map_err(|_| too_large())?;
    outer.iter().try_fold(cols as u64, |values, &dim| values.checked_mul(dim)).ok_or_else(too_large)?;
    Ok(bytes)
}

/// Turns offsets into places in the file, and refuses data that is misaligned, out of range or shared.
fn place(
    file: &str,
    size: u64,
    header_end: u64,
    alignment: u64,
    tensors: &mut [TensorInfo],
) -> Result<(), FormatError> {
    let start = header_end.checked_next_multiple_of(alignment);
    for info in &mut *tensors {
        let offset = start.and_then(|start| start.checked_add(info.offset));
        let range = offset.and_then(|offset| Some((offset, offset.checked_add(info.bytes)?)));
        match range {
            Some((offset, end)) if end <= size => {
                if !info.offset.is_multiple_of(alignment) {
                    let problem = format!("its offset {} is not a multiple of {alignment}", info.offset);
                    return Err(FormatError::Tensor {
                        file: file.into(),
                        tensor: info.name.clone(),
                        problem,
                    });
                }
                info.offset = offset;
            }
            _ => {
                return Err(FormatError::TensorRange {
                    file: file.into(),
                    tensor: info.name.clone(),
                    offset: offset.unwrap_or(u64::MAX),
                    bytes: info.bytes,
                    size,
                });
            }
        }
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|info| info.offset);
    for pair in order.windows(2) {
        // No overflow: both ends were just found inside the file.
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            let problem = format!(
                "its data at offset {} overlaps that of tensor {:?} ({} bytes at offset {}; the file has {size} bytes)",
                pair[1].offset, pair[0].name, pair[0].bytes, pair[0].offset
            );
            return Err(FormatError::Tensor { file: file.into(), tensor: pair[1].name.clone(), problem });
        }
    }
    Ok(())
}

/// A type number and a value of that type.
fn value(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, FormatError> {
    let what = format_args!("metadata key {key:?}");
    Ok(match value_type(cursor, what)? {
        ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.array(what)?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array(what)?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array(what)?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array(what)?)),
        ValueType::U32 => Value::U32(u32::from_le_bytes(cursor.array(what)?)),
        ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array(what)?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array(what)?)),
        ValueType::Bool => {
            let byte = cursor.array(what)?;
            Value::Bool(bool_of(cursor, byte, what)?)
        }
        ValueType::Str => Value::Str(cursor.str(what)?.to_owned()),
        ValueType::Array => Value::Array(array(cursor, key)?),
        ValueType::U64 => Value::U64(u64::from_le_bytes(cursor.array(what)?)),
        ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array(what)?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array(what)?)),
    })
}

/// An element type, a count and as many elements.
fn array(cursor: &mut Cursor<'_>, key: &str) -> Result<Array, FormatError> {
    let what = format_args!("metadata key {key:?}");
    Ok(match value_type(cursor, what)? {
        ValueType::U8 => Array::U8(items(cursor, u8::from_le_bytes, what)?),
        ValueType::I8 => Array::I8(items(cursor, i8::from_le_bytes, what)?),
        ValueType::U16 => Array::U16(items(cursor, u16::from_le_bytes, what)?),
        ValueType::I16 => Array::I16(items(cursor, i16::from_le_bytes, what)?),
        ValueType::U32 => Array::U32(items(cursor, u32::from_le_bytes, what)?),
        ValueType::I32 => Array::I32(items(cursor, i32::from_le_bytes, what)?),
        ValueType::F32 => Array::F32(items(cursor, f32::from_le_bytes, what)?),
        ValueType::Bool => {
            let bytes = items(cursor, |byte: [u8; 1]| byte, what)?;
            Array::Bool(bytes.into_iter().map(|byte| bool_of(cursor, byte, what)).collect::<Result<_, _>>()?)
        }
        ValueType::Str => {
            let count = cursor.count(8, what)?;
            let mut strings = Vec::with_capacity(count);
            for number in 0..count {
                strings.push(cursor.str(format_args!("string {number} of metadata key {key:?}"))?.to_owned());
            }
            Array::Str(strings)
        }
        ValueType::Array => {
            return Err(cursor.invalid(what, "it is an array of arrays, which no known key is"));
        }
        ValueType::U64 => Array::U64(items(cursor, u64::from_le_bytes, what)?),
        ValueType::I64 => Array::I64(items(cursor, i64::from_le_bytes, what)?),
        ValueType::F64 => Array::F64(items(cursor, f64::from_le_bytes, what)?),
    })
}

/// A count and as many numbers of N bytes.
fn items<const N: usize, T>(
    cursor: &mut Cursor<'_>,
    decode: impl Fn([u8; N]) -> T,
    what: Arguments<'_>,
) -> Result<Vec<T>, FormatError> {
    let count = cursor.count(N as u64, what)?;
    // `count` found that this many bytes are left, so the product is in range.
    let (chunks, _) = cursor.take((count * N) as u64, what)?.as_chunks::<N>();
    Ok(chunks.iter().map(|chunk| decode(*chunk)).collect())
}

fn bool_of(cursor: &Cursor<'_>, byte: [u8; 1], what: Arguments<'_>) -> Result<bool, FormatError> {
    match byte {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => {
            Err(cursor
                .invalid(what, format!("a bool is 0 or 1, not {other} (before offset {})", cursor.at())))
        }
    }
}

fn value_type(cursor: &mut Cursor<'_>, what: Arguments<'_>) -> Result<ValueType, FormatError> {
    let at = cursor.at();
    let id = cursor.u32(what)?;
    ValueType::from_id(id)
        .ok_or_else(|| cursor.invalid(what, format!("value type {id} at offset {at} is unknown")))
}
