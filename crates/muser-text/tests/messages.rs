//! Requests' messages and tools, made ready for the template.
#![allow(clippy::unwrap_used)]

use muser_text::messages::normalize;
use serde_json::{Value, json};

fn one(message: Value) -> Value {
    normalize(&json!([message]), None).unwrap().0[0].clone()
}

fn refused(messages: Value, tools: Option<Value>, part: &str) {
    let error = normalize(&messages, tools.as_ref()).unwrap_err().to_string();
    assert!(error.contains(part), "{error:?} lacks {part:?}");
}

#[test]
fn messages_take_the_templates_form() {
    assert_eq!(one(json!({"role": "developer", "content": "x"})), json!({"role": "system", "content": "x"}));
    let image = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]});
    let want = json!([{"type": "text", "text": "a"}, {"type": "image", "image_url": {"url": "u"}}]);
    assert_eq!(one(image)["content"], want);
    let call = |arguments: Value| {
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        one(json!({"role": "assistant", "tool_calls": [call]}))["tool_calls"][0]["function"]["arguments"]
            .clone()
    };
    assert_eq!(call(json!("{\"b\": 1, \"a\": [2]}")).to_string(), "{\"b\":1,\"a\":[2]}");
    assert_eq!(
        (call(json!({"a": 1})), call(json!("")), call(Value::Null)),
        (json!({"a": 1}), json!({}), json!({}))
    );
    let assistant = one(json!({"role": "assistant", "content": null, "reasoning": "r", "tool_calls": []}));
    assert_eq!(assistant["reasoning_content"], "r");
    assert!(assistant.get("tool_calls").is_none());
}

#[test]
fn tools_are_completed() {
    let messages = json!([{"role": "user", "content": "x"}]);
    let tools = json!([{"type": "function", "function": {"name": "f"}}, {"name": "g", "description": "d", "input_schema": {"type": "object"}}]);
    let tools = normalize(&messages, Some(&tools)).unwrap().1.unwrap();
    let empty = json!({"type": "object", "properties": {}});
    assert_eq!(tools[0]["function"], json!({"name": "f", "description": "", "parameters": empty}));
    assert_eq!(
        tools[1]["function"],
        json!({"name": "g", "description": "d", "parameters": {"type": "object"}})
    );
    for none in [json!([]), Value::Null] {
        assert_eq!(normalize(&messages, Some(&none)).unwrap().1, None);
    }
}

#[test]
fn bad_requests_name_the_place() {
    let user = json!([{"role": "user", "content": "x"}]);
    refused(json!({}), None, "messages must be an array");
    refused(json!([]), None, "messages is empty");
    refused(json!([1]), None, "messages[0] must be an object");
    refused(json!([{"content": "x"}]), None, "messages[0].role");
    refused(json!([{"role": "robot", "content": "x"}]), None, "\"robot\"");
    refused(json!([{"role": "user", "content": 5}]), None, "messages[0].content");
    refused(json!([{"role": "user"}]), None, "messages[0].content is missing");
    refused(json!([{"role": "user", "content": [{"type": "audio"}]}]), None, "messages[0].content[0].type");
    refused(json!([{"role": "user", "content": [{"type": "text"}]}]), None, "messages[0].content[0].text");
    refused(json!([{"role": "assistant", "reasoning_content": 5}]), None, "messages[0].reasoning_content");
    refused(json!([{"role": "tool", "content": "x", "name": 5}]), None, "messages[0].name");
    let call = |function: Value| json!([{"role": "assistant", "tool_calls": [{"function": function}]}]);
    refused(call(json!({"arguments": "{}"})), None, "messages[0].tool_calls[0].function.name");
    refused(call(json!({"name": "f", "arguments": "[1]"})), None, "must be the JSON text of an object");
    refused(call(json!({"name": "f", "arguments": 3})), None, "messages[0].tool_calls[0].function.arguments");
    refused(user.clone(), Some(json!([{"function": {"name": ""}}])), "tools[0].function.name");
    refused(user.clone(), Some(json!([{"name": "f", "parameters": []}])), "tools[0].function.parameters");
    let mut deep = json!(1);
    for _ in 0..200 {
        deep = json!([deep]);
    }
    refused(user.clone(), Some(json!([{"name": "f", "parameters": {"x": deep}}])), "nest");
    let text = format!("{{\"a\": {}1{}}}", "[".repeat(100), "]".repeat(100));
    refused(
        call(json!({"name": "f", "arguments": text})),
        None,
        "messages[0].tool_calls[0].function.arguments",
    );
}

#[test]
fn what_was_said_beside_calls_is_a_message_of_its_own() {
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}});
    let of = |content: serde_json::Value| {
        let message = json!({"role": "assistant", "reasoning_content": "Hm.", "content": content, "tool_calls": [call]});
        normalize(&json!([message]), None).unwrap().0
    };
    for nothing in [json!(null), json!(""), json!([])] {
        assert_eq!(of(nothing).as_array().unwrap().len(), 1);
    }
    assert_eq!(
        of(json!("I look.")),
        json!([
            {"role": "assistant", "reasoning_content": "Hm.", "content": "I look.", "end_turn": false},
            {"role": "assistant", "content": null, "tool_calls": [call]},
        ])
    );
}
