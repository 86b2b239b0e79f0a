//! OpenAI's `/v1/responses`, without stored state: each request carries its whole conversation.

use super::chat::{check_max, read_chat};
use crate::app::{App, now, unique};
use crate::error::{ApiError, Kind, Protocol};
use crate::fields::Fields;
use crate::generate::{Finish, Output, Usage};
use crate::request::{Input, Request, only_text, read_sampling, read_text_format};
use crate::stream::{self, Encoder, event};
use crate::text::blocking;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use muser_text::Event;
use serde_json::{Value, json};
use std::sync::Arc;

/// Fields that say nothing to a local server.
const IGNORED: [&str; 12] = [
    "store",
    "metadata",
    "user",
    "include",
    "truncation",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "stream_options",
    "max_tool_calls",
    "top_logprobs",
];

/// `POST /v1/responses`
pub async fn route(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    answer(app, request).await.unwrap_or_else(|e| e.response(Protocol::OpenAi))
}

/// `POST /v1/responses/input_tokens`
pub async fn count(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    let counted = async {
        let (mut fields, _caller) = app.read(request).await?;
        let request = blocking(|| read(&app, &mut fields))?;
        app.finish(fields)?;
        let tokens = app.generator.count(&request)?;
        Ok(Json(json!({"object": "response.input_tokens", "input_tokens": tokens})).into_response())
    };
    counted.await.unwrap_or_else(|e: ApiError| e.response(Protocol::OpenAi))
}

/// Reads everything but how the answer is sent; the rest of the fields stays.
fn read(app: &App, fields: &mut Fields) -> Result<Request, ApiError> {
    app.check_model(fields.string("model")?)?;
    for name in ["previous_response_id", "conversation", "background"] {
        if fields.take(name).is_some_and(|v| v != Value::Bool(false)) {
            let message = format!(
                "{name} needs stored state, which this server has not: send the whole conversation as input"
            );
            return Err(ApiError::field(name, message));
        }
    }
    let messages = read_input(fields)?;
    if let Some(Value::Array(tools)) = fields.take("tools") {
        // The tools that OpenAI runs itself can't be called here.
        let function = |tool: &Value| tool.get("type").and_then(Value::as_str) == Some("function");
        if let Some(other) = tools.iter().find(|t| !function(t)) {
            let message = format!("tools: {} cannot be run by this server; offer functions", other["type"]);
            return Err(ApiError::field("tools", message));
        }
        fields.put("tools", Value::Array(tools));
    }
    let chat = read_chat(fields, messages)?;
    let mut request = Request::new(Input::Chat(Box::new(chat)));
    read_sampling(&mut request.sampling, fields)?;
    request.max_tokens = fields.count("max_output_tokens")?;
    check_max(request.max_tokens)?;
    if let Some(mut text) = fields.object("text")?
        && let Some(format) = text.object("format")?
    {
        request.answer = read_text_format(format)?;
    }
    fields.ignore(&IGNORED);
    Ok(request)
}

async fn answer(app: Arc<App>, request: axum::extract::Request) -> Result<Response, ApiError> {
    let (mut fields, caller) = app.read(request).await?;
    let summary = wants_summary(&mut fields);
    let mut request = blocking(|| read(&app, &mut fields))?;
    request.caller = Some(caller);
    let stream = fields.flag("stream")?.unwrap_or(false);
    app.finish(fields)?;
    let mut generation = app.generator.start(request)?;
    let mut items = Items::new(app.generator.text.name.clone(), summary);
    if stream {
        return Ok(stream::response(generation, items, stream::SSE));
    }
    let mut nowhere = String::new();
    while let Some((_, output)) = generation.next().await {
        match output {
            Output::Event(event) => items.take(event, &mut nowhere),
            Output::End(Finish::Failed(error), _) => return Err(error),
            Output::End(finish, usage) => {
                items.close(&mut nowhere);
                return Ok(Json(items.response(Some((&finish, &usage)))).into_response());
            }
            Output::Started(_) | Output::Token(_) => {}
        }
        nowhere.clear();
    }
    Err(ApiError::new(Kind::Internal, "the generation ended without an end"))
}

/// Whether the client asks for summaries of the reasoning: it then reads nothing else, and is given all of it as one.
fn wants_summary(fields: &mut Fields) -> bool {
    let Some(reasoning) = fields.take("reasoning") else { return false };
    let wanted =
        ["summary", "generate_summary"].iter().any(|k| reasoning.get(k).is_some_and(|s| !s.is_null()));
    fields.put("reasoning", reasoning);
    wanted
}

/// Instructions and input as messages of a chat.
fn read_input(fields: &mut Fields) -> Result<Value, ApiError> {
    let mut messages = vec![];
    if let Some(instructions) = fields.string("instructions")?.filter(|s| !s.is_empty()) {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match fields.take("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for (i, item) in items.iter().enumerate() {
                read_item(&format!("input[{i}]"), item, &mut messages)?;
            }
        }
        _ => return Err(ApiError::field("input", "input must be a string or an array of items")),
    }
    Ok(messages.into())
}

fn read_item(at: &str, item: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    // Reasoning and calls stand before the rest of their turn, as items of their own.
    let part_of_turn = |messages: &mut Vec<Value>, key: &str| {
        let open = messages.last().is_some_and(|m| m["role"] == "assistant" && m["content"].is_null());
        if !open {
            messages.push(json!({"role": "assistant", "content": null}));
        }
        messages.last_mut().map(|m| m[key].take()).unwrap_or_default()
    };
    if !item.is_object() {
        return Err(ApiError::field(at, format!("{at} must be an object")));
    }
    match item.get("type").and_then(Value::as_str).unwrap_or("message") {
        "message" => {
            only_text(&format!("{at}.content"), item.get("content"))?;
            let role = item.get("role").and_then(Value::as_str).unwrap_or_default();
            let open = messages.last_mut().filter(|m| m["role"] == "assistant" && m["content"].is_null());
            match open.filter(|m| role == "assistant" && m.get("tool_calls").is_none_or(Value::is_null)) {
                Some(message) => message["content"] = item["content"].clone(),
                None => messages.push(json!({"role": role, "content": item["content"]})),
            }
        }
        "reasoning" => {
            let parts = ["content", "summary"].iter().filter_map(|k| item.get(*k)?.as_array());
            let parts = parts.flatten().filter_map(|p| p.get("text")?.as_str());
            let text = parts.collect::<Vec<_>>().join("\n");
            part_of_turn(messages, "reasoning_content");
            if let Some(message) = messages.last_mut() {
                message["reasoning_content"] = text.into();
            }
        }
        "function_call" => {
            let mut calls = match part_of_turn(messages, "tool_calls") {
                Value::Array(calls) => calls,
                _ => vec![],
            };
            calls.push(json!({
                "id": item.get("call_id"), "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }));
            if let Some(message) = messages.last_mut() {
                message["tool_calls"] = calls.into();
            }
        }
        "function_call_output" => {
            let output = match item.get("output") {
                Some(Value::String(text)) => json!(text),
                Some(Value::Array(parts)) => {
                    only_text(&format!("{at}.output"), item.get("output"))?;
                    json!(parts)
                }
                other => json!(other.map(Value::to_string).unwrap_or_default()),
            };
            messages.push(json!({"role": "tool", "tool_call_id": item.get("call_id"), "content": output}));
        }
        "item_reference" => {
            let message = format!(
                "{at} refers to an item by its id, and this server keeps none: send the item itself, which clients do with store set to false"
            );
            return Err(ApiError::field(at, message));
        }
        other => {
            let known = "message, reasoning, function_call and function_call_output";
            return Err(ApiError::field(at, format!("{at}.type is {other:?}; {known} are known")));
        }
    }
    Ok(())
}

/// The items of a response, with the events that tell of them.
struct Items {
    id: String,
    created: u64,
    model: String,
    /// Reasoning goes out as its summary.
    summary: bool,
    done: Vec<Value>,
    /// The open item and its text so far.
    open: Option<(Value, String)>,
    sequence: usize,
}

impl Items {
    fn new(model: String, summary: bool) -> Self {
        Items { id: unique("resp_"), created: now(), model, summary, done: vec![], open: None, sequence: 0 }
    }

    fn emit(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["type"] = name.into();
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        event(out, name, &data);
    }

    fn take(&mut self, happened: Event, out: &mut String) {
        match happened {
            Event::Reasoning(text) => self.text("reasoning", text, out),
            Event::Content(text) => self.text("message", text, out),
            Event::ToolStart { name, .. } => {
                let item = json!({
                    "type": "function_call", "id": unique("fc_"), "call_id": unique("call_"), "name": name,
                    "arguments": "", "status": "in_progress",
                });
                self.start(item, out);
            }
            Event::ToolArguments { delta, .. } => self.delta(delta, out),
            Event::ToolEnd { .. } => self.close(out),
        }
    }

    fn text(&mut self, kind: &str, text: String, out: &mut String) {
        if self.open.as_ref().is_none_or(|(item, _)| item["type"] != kind) {
            let item = match kind {
                "reasoning" => {
                    json!({"type": kind, "id": unique("rs_"), "summary": [], "content": [], "status": "in_progress"})
                }
                _ => {
                    json!({"type": kind, "id": unique("msg_"), "role": "assistant", "content": [], "status": "in_progress"})
                }
            };
            self.start(item, out);
            if let Some(shape) = self.shape() {
                let data = join(self.place(), json!({shape.index: 0, "part": shape.part("")}));
                self.emit(shape.added, data, out);
            }
        }
        self.delta(text, out);
    }

    fn start(&mut self, item: Value, out: &mut String) {
        self.close(out);
        let data = json!({"output_index": self.done.len(), "item": item});
        self.open = Some((item, String::new()));
        self.emit("response.output_item.added", data, out);
    }

    /// Where the open item stands.
    fn place(&self) -> Value {
        let id = self.open.as_ref().map(|(item, _)| item["id"].clone());
        json!({"item_id": id, "output_index": self.done.len()})
    }

    /// The form of the open item's part; calls have none.
    fn shape(&self) -> Option<&'static Shape> {
        match self.open.as_ref()?.0["type"].as_str()? {
            "message" => Some(&TEXT),
            "reasoning" if self.summary => Some(&SUMMARY),
            "reasoning" => Some(&REASONING),
            _ => None,
        }
    }

    fn delta(&mut self, text: String, out: &mut String) {
        let mut data = join(self.place(), json!({"delta": text}));
        let mut name = "response.function_call_arguments.delta";
        if let Some(shape) = self.shape() {
            data[shape.index] = 0.into();
            name = shape.delta;
        }
        if let Some((_, so_far)) = &mut self.open {
            so_far.push_str(&text);
        }
        self.emit(name, data, out);
    }

    fn close(&mut self, out: &mut String) {
        let (place, shape) = (self.place(), self.shape());
        let Some((mut item, text)) = self.open.take() else { return };
        match shape {
            Some(shape) => {
                self.emit(shape.done, join(place.clone(), json!({shape.index: 0, "text": text})), out);
                let part = shape.part(&text);
                self.emit(shape.closed, join(place, json!({shape.index: 0, "part": part})), out);
                item[shape.list] = json!([part]);
            }
            None => {
                let name = "response.function_call_arguments.done";
                self.emit(name, join(place, json!({"arguments": text})), out);
                item["arguments"] = text.into();
            }
        }
        item["status"] = "completed".into();
        self.emit("response.output_item.done", json!({"output_index": self.done.len(), "item": item}), out);
        self.done.push(item);
    }

    fn response(&self, end: Option<(&Finish, &Usage)>) -> Value {
        let cut = end.is_some_and(|(finish, _)| *finish == Finish::Length);
        let status = match end {
            None => "in_progress",
            Some(_) if cut => "incomplete",
            Some(_) => "completed",
        };
        let usage = end.map(|(_, usage)| {
            let r = &usage.report;
            json!({
                "input_tokens": r.prompt,
                "input_tokens_details": {"cached_tokens": r.cached},
                "output_tokens": r.generated,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": r.prompt + r.generated,
            })
        });
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": null,
            "incomplete_details": cut.then(|| json!({"reason": "max_output_tokens"})),
            "model": self.model, "output": self.done, "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
            "store": false, "usage": usage,
        })
    }
}

/// How an item's text is sent.
struct Shape {
    kind: &'static str,
    /// Where the item lists its parts, and how a part's place there is called.
    list: &'static str,
    index: &'static str,
    /// Events: the part begins, more text, all text, the part ends.
    added: &'static str,
    delta: &'static str,
    done: &'static str,
    closed: &'static str,
}

const TEXT: Shape = Shape {
    kind: "output_text",
    list: "content",
    index: "content_index",
    added: "response.content_part.added",
    delta: "response.output_text.delta",
    done: "response.output_text.done",
    closed: "response.content_part.done",
};
const REASONING: Shape = Shape {
    kind: "reasoning_text",
    delta: "response.reasoning_text.delta",
    done: "response.reasoning_text.done",
    ..TEXT
};
const SUMMARY: Shape = Shape {
    kind: "summary_text",
    list: "summary",
    index: "summary_index",
    added: "response.reasoning_summary_part.added",
    delta: "response.reasoning_summary_text.delta",
    done: "response.reasoning_summary_text.done",
    closed: "response.reasoning_summary_part.done",
};

impl Shape {
    fn part(&self, text: &str) -> Value {
        match self.kind {
            "output_text" => json!({"type": self.kind, "text": text, "annotations": []}),
            kind => json!({"type": kind, "text": text}),
        }
    }
}

fn join(mut a: Value, b: Value) -> Value {
    if let (Some(a), Value::Object(b)) = (a.as_object_mut(), b) {
        a.extend(b);
    }
    a
}

impl Encoder for Items {
    fn output(&mut self, _: usize, output: Output, out: &mut String) {
        match output {
            Output::Started(_) => {
                for name in ["response.created", "response.in_progress"] {
                    let data = json!({"response": self.response(None)});
                    self.emit(name, data, out);
                }
            }
            Output::Token(_) => {}
            Output::Event(happened) => self.take(happened, out),
            Output::End(Finish::Failed(error), _) => {
                let mut response = self.response(None);
                response["status"] = "failed".into();
                response["error"] = json!({"code": "server_error", "message": error.message});
                self.emit("response.failed", json!({"response": response}), out);
            }
            Output::End(finish, usage) => {
                self.close(out);
                let data = json!({"response": self.response(Some((&finish, &usage)))});
                let name =
                    if finish == Finish::Length { "response.incomplete" } else { "response.completed" };
                self.emit(name, data, out);
            }
        }
    }
}
