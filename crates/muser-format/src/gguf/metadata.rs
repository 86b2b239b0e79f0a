//! The metadata of one file in its own order, found by key, with typed getters.

use super::Value;
use super::names::NameIndex;
use crate::FormatError;

/// Keys and values; keys are unique.
pub(super) struct Metadata {
    file: String,
    entries: Vec<(String, Value)>,
    index: NameIndex,
}

impl Metadata {
    pub(super) fn new(file: String, entries: Vec<(String, Value)>) -> Result<Self, FormatError> {
        let index = NameIndex::new(&entries, |(key, _)| key).map_err(|at| FormatError::Invalid {
            file: file.clone(),
            what: format!("metadata key {:?}", entries[at].0),
            problem: "the key stands there twice".into(),
        })?;
        Ok(Self { file, entries, index })
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let at = self.index.find(&self.entries, |(key, _)| key, key)?;
        Some(&self.entries[at].1)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of a key converted by `convert`; `expected` names what it should be.
    pub(super) fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, FormatError> {
        let value = self.get(key).ok_or_else(|| FormatError::MissingKey {
            file: self.file.clone(),
            key: key.into(),
            expected,
        })?;
        convert(value).ok_or_else(|| FormatError::KeyType {
            file: self.file.clone(),
            key: key.into(),
            expected,
            found: match value.as_integer() {
                Some(number) => format!("{number} ({})", value.type_name()),
                None => value.type_name(),
            },
        })
    }

    /// An integer of any stored width that fits u64.
    pub(super) fn u64(&self, key: &str) -> Result<u64, FormatError> {
        self.typed(key, "an unsigned integer", Value::as_u64)
    }
}
