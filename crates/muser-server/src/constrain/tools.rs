//! Calls of the offered tools as grammar rules.

use super::message::json_options;
use super::{MAX_GRAMMAR, check_schema};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::fmt::Write;

/// The value of a parameter whose text is free, with its closing tag.
pub(super) const TEXT_RULE: &str = "text[suffix=\"</atem:parameter>\\n\"]: /(?s:.*)/\n\
    ANY_NAME: /<atem:parameter name=\"[A-Za-z0-9_.\\-]{1,64}\">/\n";
const END: &str = "</atem:parameter>\n";
/// Up to this many required parameters may come in any order; more come in the schema's order.
const ANY_ORDER: usize = 5;

/// Schemas that are looked at to see whether a parameter may be a string.
const MAX_LOOKS: usize = 64;

/// A tool as the grammar needs it.
pub(super) struct Function<'a> {
    pub name: &'a str,
    parameters: Option<&'a Map<String, Value>>,
}

/// The functions of a list of tools in the template's form.
pub(super) fn functions(tools: Option<&Value>) -> Vec<Function<'_>> {
    let all = tools.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    all.iter().filter_map(read).collect()
}

fn read(tool: &Value) -> Option<Function<'_>> {
    let function = tool.get("function").unwrap_or(tool);
    Some(Function {
        name: function.get("name")?.as_str()?,
        parameters: function.get("parameters").and_then(Value::as_object),
    })
}

/// A Lark string literal.
fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

impl Function<'_> {
    /// How many parameters it has.
    pub(super) fn parameters(&self) -> usize {
        self.parameters.and_then(|p| p.get("properties")?.as_object()).map_or(0, Map::len)
    }

    /// Adds the rules `t{i}...` of this tool and gives its alternative of a message: header, body.
    pub(super) fn lark(&self, i: usize, typed: bool, rules: &mut String) -> String {
        let name = self.name;
        let mut recipients = vec![literal(&format!(" to={name}"))];
        if !name.contains('.') {
            // The system message offers the namespace `NAME.*`, so the model may double the name.
            recipients.push(literal(&format!(" to={name}.{name}")));
        }
        let open = literal(&format!("<atem:function_calls>\n<atem:invoke name=\"{name}\">\n"));
        let close = literal("</atem:invoke>\n</atem:function_calls>");
        let start = self.parameter_rules(i, typed, rules);
        format!("({}) <|message|> {open} {start} {close}", recipients.join(" | "))
    }

    /// Rules for the parameters in any order, each required one exactly once; the name of the first rule.
    fn parameter_rules(&self, i: usize, typed: bool, rules: &mut String) -> String {
        let empty = Map::new();
        let parameters = self.parameters.unwrap_or(&empty);
        let properties = parameters.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let listed = parameters.get("required").and_then(Value::as_array).into_iter().flatten();
        let listed: HashSet<&str> = listed.filter_map(Value::as_str).collect();
        let typed = typed && check_schema(&Value::Object(parameters.clone())).is_ok();
        let (mut required, mut optional) = (vec![], vec![]);
        for (n, (key, schema)) in properties.iter().enumerate() {
            if rules.len() > MAX_GRAMMAR {
                // Too long to be compiled already; without this, many parameters times many definitions fill the memory.
                break;
            }
            let rule = format!("t{i}p{n}");
            // Writing to a String cannot fail.
            let _ = writeln!(rules, "{rule}: {}", parameter(key, schema, parameters, typed));
            if listed.contains(key.as_str()) { required.push(rule) } else { optional.push(rule) }
        }
        let open_ended = parameters.get("additionalProperties").is_some_and(|a| *a != Value::Bool(false));
        if open_ended || properties.is_empty() && !parameters.contains_key("additionalProperties") {
            optional.push("(ANY_NAME text)".into());
        }
        let state = |seen: usize| format!("t{i}s{seen}");
        let n = required.len();
        let ordered = n > ANY_ORDER;
        let states = if ordered { n + 1 } else { 1 << n };
        for seen in 0..states {
            if rules.len() > MAX_GRAMMAR {
                break;
            }
            let mut alternatives: Vec<String> =
                optional.iter().map(|o| format!("{o} {}", state(seen))).collect();
            if seen + 1 == states {
                alternatives.push("\"\"".into());
            } else if ordered {
                alternatives.push(format!("{} {}", required[seen], state(seen + 1)));
            } else {
                let missing = (0..n).filter(|r| seen >> r & 1 == 0);
                alternatives.extend(missing.map(|r| format!("{} {}", required[r], state(seen | 1 << r))));
            }
            let _ = writeln!(rules, "{}: {}", state(seen), alternatives.join(" | "));
        }
        state(0)
    }
}

/// One parameter with its tags. A value's text is JSON, except that strings are written bare.
fn parameter(key: &str, schema: &Value, root: &Map<String, Value>, typed: bool) -> String {
    let open = literal(&format!("<atem:parameter name=\"{key}\">"));
    let strings = |values: &[Value]| -> Option<Vec<String>> {
        values.iter().map(|v| Some(literal(&format!("{}{END}", v.as_str()?)))).collect()
    };
    let fixed = match (schema.get("enum").and_then(Value::as_array), schema.get("const")) {
        (Some(values), _) if !values.is_empty() => strings(values),
        (_, Some(value)) => strings(std::slice::from_ref(value)),
        _ => None,
    };
    if let Some(values) = fixed {
        return format!("{open} ({})", values.join(" | "));
    }
    if !typed || may_be_string(schema, root, &mut { MAX_LOOKS }) {
        return format!("{open} text");
    }
    let mut schema = schema.clone();
    if let Some(map) = schema.as_object_mut() {
        for key in ["$defs", "definitions"] {
            root.get(key).map(|defs| map.insert(key.into(), defs.clone()));
        }
    }
    format!("{open} %json {} {}", json_options(schema), literal(END))
}

/// Whether a schema allows strings, as far as can be seen: no more than `looks` schemas are looked at, so that references
/// that lead to many others, or around, come to an end.
fn may_be_string(schema: &Value, root: &Map<String, Value>, looks: &mut usize) -> bool {
    let Some(map) = schema.as_object().filter(|_| *looks > 0) else { return true };
    *looks -= 1;
    let named = |name: &Value| name.as_str() == Some("string");
    match map.get("type") {
        Some(Value::Array(names)) => return names.iter().any(named),
        Some(name) => return named(name),
        None => {}
    }
    if let Some(path) = map.get("$ref").and_then(Value::as_str).and_then(|r| r.strip_prefix("#/")) {
        let mut at = path.split('/');
        let first = at.next().and_then(|key| root.get(key));
        let target = at.fold(first, |found, key| found.and_then(|f| f.get(key)));
        return target.is_none_or(|t| may_be_string(t, root, looks));
    }
    if let Some(values) = map.get("enum").and_then(Value::as_array) {
        return values.iter().any(Value::is_string);
    }
    let branches = ["anyOf", "oneOf"].iter().filter_map(|k| map.get(*k)?.as_array()).flatten();
    let mut branches = branches.peekable();
    let structured = ["properties", "items"].iter().any(|k| map.contains_key(*k));
    if branches.peek().is_none() { !structured } else { branches.any(|b| may_be_string(b, root, looks)) }
}
