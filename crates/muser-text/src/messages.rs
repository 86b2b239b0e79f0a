//! Messages and tools of a request, brought into the form that the chat template expects.

use crate::TextError;
use serde_json::{Map, Value, json};

/// Deepest nesting of a request's JSON: the template walks it recursively.
const MAX_DEPTH: usize = 64;

/// Messages and tools as the template takes them:
/// `developer` is `system`; a call's arguments are an object (the API sends JSON text); `image_url` parts are images; tools
/// have a description and parameters; null content is absent; what was said beside calls is a message of its own.
pub fn normalize(messages: &Value, tools: Option<&Value>) -> Result<(Value, Option<Value>), TextError> {
    let list = messages.as_array().ok_or_else(|| bad("messages must be an array".into()))?;
    if list.is_empty() {
        return Err(bad("messages is empty; give at least one message".into()));
    }
    if depth(messages, 0) > MAX_DEPTH || tools.is_some_and(|t| depth(t, 0) > MAX_DEPTH) {
        return Err(bad(format!("messages and tools may nest at most {MAX_DEPTH} levels deep")));
    }
    let messages = list.iter().enumerate().map(|(i, m)| message(i, m)).collect::<Result<Vec<_>, _>>()?;
    let messages: Vec<Value> = messages.into_iter().flat_map(apart).collect();
    let tools = match tools {
        None | Some(Value::Null) => None,
        Some(Value::Array(all)) if all.is_empty() => None,
        Some(Value::Array(all)) => {
            Some(Value::Array(all.iter().enumerate().map(|(i, t)| tool(i, t)).collect::<Result<_, _>>()?))
        }
        Some(_) => return Err(bad("tools must be an array".into())),
    };
    Ok((Value::Array(messages), tools))
}

fn bad(text: String) -> TextError {
    TextError::Messages(text)
}

fn depth(value: &Value, at: usize) -> usize {
    let deeper = |v: &Value| depth(v, at + 1);
    match value {
        _ if at > MAX_DEPTH => at,
        Value::Array(all) => all.iter().map(deeper).max().unwrap_or(at),
        Value::Object(map) => map.values().map(deeper).max().unwrap_or(at),
        _ => at,
    }
}

fn message(i: usize, value: &Value) -> Result<Map<String, Value>, TextError> {
    let map = value.as_object().ok_or_else(|| bad(format!("messages[{i}] must be an object")))?;
    let role = map
        .get("role")
        .and_then(Value::as_str)
        .ok_or_else(|| bad(format!("messages[{i}].role must be a string")))?;
    let role = match role {
        "system" | "developer" => "system",
        "user" | "assistant" | "tool" => role,
        "function" => "tool",
        other => {
            return Err(bad(format!(
                "messages[{i}].role is {other:?}; use system, developer, user, assistant or tool"
            )));
        }
    };
    let mut out = map.clone();
    out.insert("role".into(), role.into());
    let content = match map.get("content") {
        None | Some(Value::Null) => Value::Null,
        Some(Value::String(text)) => Value::String(text.clone()),
        Some(Value::Array(parts)) => Value::Array(
            parts.iter().enumerate().map(|(p, part)| content_part(i, p, part)).collect::<Result<_, _>>()?,
        ),
        Some(_) => {
            return Err(bad(format!("messages[{i}].content must be a string, an array of parts, or null")));
        }
    };
    if content.is_null() && matches!(role, "system" | "user" | "tool") {
        return Err(bad(format!("messages[{i}].content is missing; a {role} message needs it")));
    }
    out.insert("content".into(), content);
    for key in ["reasoning_content", "reasoning", "name", "tool_call_id"] {
        if map.get(key).is_some_and(|v| !v.is_null() && !v.is_string()) {
            return Err(bad(format!("messages[{i}].{key} must be a string")));
        }
    }
    // Both names are in use for what the model reasoned in an earlier turn.
    if let (None, Some(Value::String(text))) = (map.get("reasoning_content"), map.get("reasoning")) {
        out.insert("reasoning_content".into(), Value::String(text.clone()));
    }
    match map.get("tool_calls") {
        None | Some(Value::Null) => {
            out.remove("tool_calls");
        }
        Some(Value::Array(calls)) if calls.is_empty() => {
            out.remove("tool_calls");
        }
        Some(Value::Array(calls)) => {
            let calls =
                calls.iter().enumerate().map(|(c, call)| tool_call(i, c, call)).collect::<Result<_, _>>()?;
            out.insert("tool_calls".into(), Value::Array(calls));
        }
        Some(_) => return Err(bad(format!("messages[{i}].tool_calls must be an array"))),
    }
    Ok(out)
}

/// The template leaves out the text of a message with calls. The model wrote it as a message to the user that did not end
/// its turn, and so it is given back: nothing said is forgotten, and a prefix cache goes on after the whole turn.
fn apart(message: Map<String, Value>) -> Vec<Value> {
    let said = match message.get("content") {
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(parts)) => !parts.is_empty(),
        _ => false,
    };
    if !said || message["role"] != "assistant" || !message.contains_key("tool_calls") {
        return vec![message.into()];
    }
    let (mut text, mut calls) = (message.clone(), message);
    text.remove("tool_calls");
    text.insert("end_turn".into(), false.into());
    calls.remove("reasoning_content");
    calls.insert("content".into(), Value::Null);
    vec![text.into(), calls.into()]
}

fn content_part(i: usize, p: usize, part: &Value) -> Result<Value, TextError> {
    let at = format!("messages[{i}].content[{p}]");
    let kind =
        part.get("type").and_then(Value::as_str).ok_or_else(|| bad(format!("{at}.type must be a string")))?;
    match kind {
        "text" | "input_text" | "output_text" => match part.get("text") {
            Some(Value::String(text)) => Ok(json!({"type": "text", "text": text})),
            _ => Err(bad(format!("{at}.text must be a string"))),
        },
        "image" | "image_url" | "input_image" => {
            let mut image = part.as_object().cloned().unwrap_or_default();
            image.insert("type".into(), "image".into());
            Ok(Value::Object(image))
        }
        other => Err(bad(format!("{at}.type is {other:?}; text and image_url are known"))),
    }
}

fn tool_call(i: usize, c: usize, call: &Value) -> Result<Value, TextError> {
    let at = format!("messages[{i}].tool_calls[{c}]");
    let function = call.get("function").ok_or_else(|| bad(format!("{at}.function is missing")))?;
    let name = function.get("name").and_then(Value::as_str);
    let name = name.ok_or_else(|| bad(format!("{at}.function.name must be a string")))?;
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => serde_json::from_str::<Value>(text)
            .ok()
            .filter(Value::is_object)
            .filter(|v| depth(v, 0) <= MAX_DEPTH)
            .ok_or_else(|| bad(format!("{at}.function.arguments must be the JSON text of an object")))?,
        Some(Value::Object(map)) => Value::Object(map.clone()),
        Some(_) => return Err(bad(format!("{at}.function.arguments must be an object or its JSON text"))),
    };
    let mut out = call.as_object().cloned().unwrap_or_default();
    out.insert("function".into(), json!({"name": name, "arguments": arguments}));
    Ok(Value::Object(out))
}

fn tool(i: usize, tool: &Value) -> Result<Value, TextError> {
    let function = tool.get("function").unwrap_or(tool);
    let name = function.get("name").and_then(Value::as_str).filter(|n| !n.is_empty());
    let name =
        name.ok_or_else(|| bad(format!("tools[{i}].function.name must be a string that is not empty")))?;
    let description = match function.get("description") {
        None | Some(Value::Null) => "",
        Some(Value::String(text)) => text,
        Some(_) => return Err(bad(format!("tools[{i}].function.description must be a string"))),
    };
    // Anthropic's tools call it input_schema.
    let parameters = match function.get("parameters").or(function.get("input_schema")) {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(Value::Object(map)) if map.is_empty() => json!({"type": "object", "properties": {}}),
        Some(Value::Object(map)) => Value::Object(map.clone()),
        Some(_) => {
            return Err(bad(format!("tools[{i}].function.parameters must be a JSON schema, an object")));
        }
    };
    Ok(
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}),
    )
}
