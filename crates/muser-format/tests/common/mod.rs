//! Building GGUF bytes field by field, apart from the crate's own writer.
#![allow(dead_code, reason = "each test file uses a part of it")]

use muser_format::{Array, Value};

/// A GGUF file whose counts may be wrong.
pub struct Raw {
    pub version: u32,
    pub key_count: Option<u64>,
    pub tensor_count: Option<u64>,
    pub keys: Vec<Vec<u8>>,
    pub tensors: Vec<Vec<u8>>,
    pub data: Vec<u8>,
}

impl Default for Raw {
    fn default() -> Self {
        Self { version: 3, key_count: None, tensor_count: None, keys: vec![], tensors: vec![], data: vec![] }
    }
}

impl Raw {
    /// The bytes; data start at a multiple of 64.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        bytes.extend(self.keys.concat());
        bytes.extend(self.tensors.concat());
        if !self.data.is_empty() {
            bytes.resize(bytes.len().next_multiple_of(64), 0);
        }
        bytes.extend(&self.data);
        bytes
    }
}

/// A length and the text.
pub fn raw_str(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A value of every type, with keys that name them.
pub fn one_of_each() -> Vec<(String, Value)> {
    let text = |text: &str| text.to_string();
    let values = [
        Value::U8(200),
        Value::I8(-100),
        Value::U16(60_000),
        Value::I16(-30_000),
        Value::U32(4_000_000_000),
        Value::I32(-2_000_000_000),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F32(0.1),
        Value::F64(0.1),
        Value::Bool(true),
        Value::Str(text("grüße")),
        Value::Array(Array::U8(vec![1, 255])),
        Value::Array(Array::I8(vec![1, -1])),
        Value::Array(Array::U16(vec![1, 65_535])),
        Value::Array(Array::I16(vec![1, -1])),
        Value::Array(Array::U32(vec![1, u32::MAX])),
        Value::Array(Array::I32(vec![1, -1])),
        Value::Array(Array::U64(vec![1, u64::MAX])),
        Value::Array(Array::I64(vec![1, -1])),
        Value::Array(Array::F32(vec![1.0, -0.0])),
        Value::Array(Array::F64(vec![])),
        Value::Array(Array::Bool(vec![true, false])),
        Value::Array(Array::Str(vec![text("a"), text(""), text("ß")])),
    ];
    values.into_iter().map(|value| (format!("a {}", value.type_name()), value)).collect()
}
