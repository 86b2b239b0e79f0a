//! The tools of a request, and what type an argument has by a tool's JSON schema.

use serde_json::Value;
use std::sync::Arc;

/// How deep references and alternatives of a schema are followed.
const MAX_DEPTH: usize = 16;

/// Names and parameter schemas of the offered tools.
#[derive(Clone, Default)]
pub(crate) struct Tools(Arc<Vec<(String, Value)>>);

/// JSON types that a schema allows, as bits.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Types(u8);

impl Types {
    const STRING: Types = Types(1);
    const INTEGER: Types = Types(2);
    const NUMBER: Types = Types(4);
    const BOOLEAN: Types = Types(8);
    const NULL: Types = Types(16);
    const OBJECT: Types = Types(32);
    const ARRAY: Types = Types(64);

    fn named(name: &str) -> Types {
        match name {
            "string" => Types::STRING,
            "integer" => Types::INTEGER,
            "number" => Types::NUMBER,
            "boolean" => Types::BOOLEAN,
            "null" => Types::NULL,
            "object" => Types::OBJECT,
            "array" => Types::ARRAY,
            _ => Types::default(),
        }
    }

    fn of(value: &Value) -> Types {
        match value {
            Value::String(_) => Types::STRING,
            Value::Number(n) if n.is_f64() => Types::NUMBER,
            Value::Number(_) => Types::INTEGER,
            Value::Bool(_) => Types::BOOLEAN,
            Value::Null => Types::NULL,
            Value::Object(_) => Types::OBJECT,
            Value::Array(_) => Types::ARRAY,
        }
    }

    fn or(self, other: Types) -> Types {
        Types(self.0 | other.0)
    }

    fn has(self, other: Types) -> bool {
        self.0 & other.0 != 0
    }

    /// Only a string is allowed: the text is the value, and may be streamed.
    pub(crate) fn is_string(self) -> bool {
        self == Types::STRING
    }
}

impl Tools {
    pub(crate) fn new(tools: Option<&Value>) -> Self {
        let all = tools.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let function = |tool: &Value| {
            let f = tool.get("function").unwrap_or(tool);
            let schema = f.get("parameters").or(f.get("input_schema")).cloned().unwrap_or(Value::Null);
            Some((f.get("name")?.as_str()?.to_string(), schema))
        };
        Tools(Arc::new(all.iter().filter_map(function).collect()))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn exact(&self, name: &str) -> Option<&str> {
        self.0.iter().map(|(n, _)| n.as_str()).find(|n| *n == name)
    }

    /// The offered tool that a written name means: itself; a doubled namespace (`read.read` for `read`); a name without its
    /// namespace, or with one too many; a name with other separators or letter case; where just one tool fits.
    pub(crate) fn resolve(&self, name: &str) -> Option<&str> {
        let name = name.trim().trim_matches('"');
        let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_string();
        self.exact(name)
            .or_else(|| {
                self.only(|offered| offered == last(name) || (!name.contains('.') && last(offered) == name))
            })
            .or_else(|| self.only(|offered| plain(offered) == plain(name)))
    }

    fn only(&self, fits: impl Fn(&str) -> bool) -> Option<&str> {
        let mut all = self.0.iter().map(|(name, _)| name.as_str()).filter(|name| fits(name));
        all.next().filter(|_| all.next().is_none())
    }

    /// Types that the schema of `tool` allows for `parameter`; none known means any.
    pub(crate) fn types(&self, tool: &str, parameter: &str) -> Option<Types> {
        let (_, schema) = self.0.iter().find(|(n, _)| n == tool)?;
        let property = schema.get("properties")?.get(parameter)?;
        let types = types_of(schema, property, 0);
        (types != Types::default()).then_some(types)
    }
}

/// A name without what models confuse in names.
fn plain(name: &str) -> String {
    name.chars().map(|c| if c.is_alphanumeric() { c.to_ascii_lowercase() } else { '_' }).collect()
}

fn types_of(root: &Value, schema: &Value, depth: usize) -> Types {
    if depth > MAX_DEPTH {
        return Types::default();
    }
    if let Some(target) =
        schema.get("$ref").and_then(Value::as_str).and_then(|r| root.pointer(r.strip_prefix('#')?))
    {
        return types_of(root, target, depth + 1);
    }
    match schema.get("type") {
        Some(Value::String(name)) => return Types::named(name),
        Some(Value::Array(names)) => {
            return names
                .iter()
                .filter_map(Value::as_str)
                .map(Types::named)
                .fold(Types::default(), Types::or);
        }
        _ => {}
    }
    let values = schema.get("enum").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let constant = schema.get("const");
    let mut types = values.iter().chain(constant).map(Types::of).fold(Types::default(), Types::or);
    for key in ["anyOf", "oneOf", "allOf"] {
        let branches = schema.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        types = branches.iter().map(|s| types_of(root, s, depth + 1)).fold(types, Types::or);
    }
    if types == Types::default() && schema.get("properties").is_some() {
        types = Types::OBJECT;
    }
    types
}

/// The JSON text of a parameter's value. A string stays as it is written; anything else is JSON where it parses to an
/// allowed type, digit by digit as it was written, and a string where it does not.
pub(crate) fn json_of(text: &str, types: Option<Types>) -> String {
    let as_string = || Value::from(text).to_string();
    if types.is_some_and(Types::is_string) {
        return as_string();
    }
    let trimmed = text.trim();
    let written = match trimmed {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    let Ok(value) = serde_json::from_str::<Value>(written) else { return as_string() };
    let found = Types::of(&value);
    let Some(types) = types else {
        // Without a schema a quoted word is what was written, quotes and all.
        return if found == Types::STRING { as_string() } else { written.to_string() };
    };
    let numeric = Types::INTEGER.or(Types::NUMBER);
    if numeric.has(found) && types.has(numeric) {
        let whole = value.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 9e15);
        return match whole {
            Some(f) if found == Types::NUMBER && !types.has(Types::NUMBER) => (f as i64).to_string(),
            _ => written.to_string(),
        };
    }
    // Templates write an absent value as null, whatever the schema says.
    let absent = found == Types::NULL && !types.has(Types::STRING);
    if found != Types::STRING && (types.has(found) || absent) { written.to_string() } else { as_string() }
}
