//! A request's JSON object, read field by field, so that every complaint names its field.

use crate::error::{ApiError, Kind};
use serde_json::{Map, Value};

/// Fields that are left to read.
#[derive(Debug)]
pub struct Fields {
    map: Map<String, Value>,
}

impl Fields {
    /// Parses a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let bad = |why: String| ApiError::new(Kind::Invalid, why);
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Fields { map }),
            Ok(_) => Err(bad("the body must be a JSON object, {\"messages\": ...} say".into())),
            Err(error) => Err(bad(format!("the body is not JSON: {error}; send one JSON object in UTF-8"))),
        }
    }

    /// Takes a field out; null counts as absent.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|v| !v.is_null())
    }

    /// Puts a field back.
    pub fn put(&mut self, name: &str, value: Value) {
        self.map.insert(name.into(), value);
    }

    fn typed<T>(
        &mut self,
        name: &str,
        what: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let wrong = || ApiError::field(name, format!("{name} must be {what}, not {}", short(&value)));
        read(&value).map(Some).ok_or_else(wrong)
    }

    /// A finite number.
    pub fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        self.typed(name, "a number", |v| v.as_f64().map(|x| x as f32).filter(|x| x.is_finite()))
    }

    /// A whole number, negative ones too.
    pub fn integer(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        let whole = |v: &Value| v.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 9e15).map(|x| x as i64);
        self.typed(name, "a whole number", |v| v.as_i64().or_else(|| whole(v)))
    }

    /// A number of things; 0 and up.
    pub fn count(&mut self, name: &str) -> Result<Option<usize>, ApiError> {
        let found = self.integer(name)?;
        let wrong = |n| ApiError::field(name, format!("{name} must not be negative, and is {n}"));
        found.map(|n| usize::try_from(n).map_err(|_| wrong(n))).transpose()
    }

    /// True or false.
    pub fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A string.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.typed(name, "a string", |v| v.as_str().map(str::to_string))
    }

    /// A string or an array of strings.
    pub fn strings(&mut self, name: &str) -> Result<Vec<String>, ApiError> {
        let read = |v: &Value| match v {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(all) => all.iter().map(|s| s.as_str().map(str::to_string)).collect(),
            _ => None,
        };
        Ok(self.typed(name, "a string or an array of strings", read)?.unwrap_or_default())
    }

    /// An object, to be read in turn.
    pub fn object(&mut self, name: &str) -> Result<Option<Fields>, ApiError> {
        self.typed(name, "an object", |v| v.as_object().map(|map| Fields { map: map.clone() }))
    }

    /// The object as it stands.
    pub fn into_map(self) -> Map<String, Value> {
        self.map
    }

    /// Passes over fields that are known and mean nothing here.
    pub fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.map.remove(*name)));
    }

    /// The end of reading: with `strict`, a field that nobody took is an error.
    pub fn finish(self, strict: bool) -> Result<(), ApiError> {
        match self.map.keys().next().filter(|_| strict) {
            Some(name) => Err(ApiError::field(name, format!("{name} is not a field that this server knows"))),
            None => Ok(()),
        }
    }
}

/// A value as it stands in an error message.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}
