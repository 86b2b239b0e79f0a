//! Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

use crate::app::{App, unique};
use crate::constrain::{Answer, Choice};
use crate::error::{ApiError, Kind, Protocol};
use crate::fields::Fields;
use crate::generate::{Finish, Output, Usage};
use crate::request::{Chat, Input, Level, Reasoning, Request, not_text, read_sampling, read_text_format};
use crate::stream::{self, Encoder, event};
use crate::text::blocking;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use muser_text::Event;
use serde_json::{Value, json};
use std::sync::Arc;

/// Fields that say nothing to a local server.
const IGNORED: [&str; 6] =
    ["metadata", "service_tier", "container", "context_management", "mcp_servers", "betas"];

/// `POST /v1/messages`
pub async fn messages(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    answer(app, request).await.unwrap_or_else(|e| e.response(Protocol::Anthropic))
}

/// `POST /v1/messages/count_tokens`
pub async fn count(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    let counted = async {
        let (mut fields, _caller) = app.read(request).await?;
        app.check_model(fields.string("model")?)?;
        let (chat, answer) = blocking(|| read_chat(&mut fields))?;
        let prompt = app.generator.text.prompt(&chat, &answer, true)?;
        Ok(Json(json!({"input_tokens": prompt.tokens.len()})).into_response())
    };
    counted.await.unwrap_or_else(|e: ApiError| e.response(Protocol::Anthropic))
}

async fn answer(app: Arc<App>, request: axum::extract::Request) -> Result<Response, ApiError> {
    let (mut fields, caller) = app.read(request).await?;
    app.check_model(fields.string("model")?)?;
    let (chat, answer) = blocking(|| read_chat(&mut fields))?;
    let mut request = Request::new(Input::Chat(Box::new(chat)));
    request.answer = answer;
    request.caller = Some(caller);
    let missing = || ApiError::field("max_tokens", "max_tokens is missing; it must be at least 1");
    request.max_tokens = Some(fields.count("max_tokens")?.filter(|n| *n > 0).ok_or_else(missing)?);
    request.stop = fields.strings("stop_sequences")?;
    read_sampling(&mut request.sampling, &mut fields)?;
    let stream = fields.flag("stream")?.unwrap_or(false);
    fields.ignore(&IGNORED);
    app.finish(fields)?;
    let mut generation = app.generator.start(request)?;
    let mut blocks = Blocks::new(app.generator.text.name.clone(), generation.prompt_tokens);
    if stream {
        return Ok(stream::response(generation, blocks, stream::SSE));
    }
    while let Some((_, output)) = generation.next().await {
        match output {
            Output::Event(event) => drop(blocks.take(event)),
            Output::Started(cached) => blocks.cached = cached,
            Output::End(Finish::Failed(error), _) => return Err(error),
            Output::End(finish, usage) => return Ok(Json(blocks.body(&finish, &usage)).into_response()),
            Output::Token(_) => {}
        }
    }
    Err(ApiError::new(Kind::Internal, "the generation ended without an end"))
}

/// Everything that decides the prompt.
fn read_chat(fields: &mut Fields) -> Result<(Chat, Answer), ApiError> {
    let mut messages = vec![];
    if let Some(system) = fields.take("system") {
        messages.push(json!({"role": "system", "content": text_of("system", &system)?}));
    }
    match fields.take("messages") {
        Some(Value::Array(all)) => {
            for (i, message) in all.iter().enumerate() {
                read_message(&format!("messages[{i}]"), message, &mut messages)?;
            }
        }
        _ => return Err(ApiError::field("messages", "messages must be an array")),
    }
    let mut reasoning = Reasoning::default();
    if let Some(thinking) = fields.object("thinking")? {
        reasoning.read_thinking(thinking)?;
    }
    let mut answer = Answer::Free;
    if let Some(mut output) = fields.object("output_config")? {
        if let Some(effort) = output.string("effort")? {
            let wrong = || ApiError::field("output_config", format!("output_config.effort is {effort:?}"));
            reasoning.level = reasoning.level.or(Some(Level::named(&effort).ok_or_else(wrong)?));
        }
        if let Some(format) = output.object("format")? {
            answer = read_text_format(format)?;
        }
    }
    let tools = match fields.take("tools") {
        None => None,
        Some(Value::Array(all)) if all.is_empty() => None,
        Some(Value::Array(all)) => Some(Value::Array(all.iter().map(read_tool).collect::<Result<_, _>>()?)),
        Some(_) => return Err(ApiError::field("tools", "tools must be an array")),
    };
    let (mut choice, mut parallel) = (Choice::Auto, true);
    if let Some(mut given) = fields.object("tool_choice")? {
        parallel = !given.flag("disable_parallel_tool_use")?.unwrap_or(false);
        let kind = given.string("type")?.unwrap_or_default();
        let value = match kind.as_str() {
            "tool" => given.string("name")?.map(|name| json!({"name": name})),
            _ => Some(json!(kind)),
        };
        choice = crate::request::read_choice(value, tools.as_ref())?;
    }
    Ok((Chat { messages: messages.into(), tools, choice, parallel, reasoning, ..Chat::default() }, answer))
}

fn read_tool(tool: &Value) -> Result<Value, ApiError> {
    // Tools that Anthropic's own servers run have a type and no schema.
    if tool.get("type").and_then(Value::as_str).is_some_and(|t| t != "custom") {
        let message =
            format!("the tool {} runs on Anthropic's servers; offer tools with input_schema", tool["type"]);
        return Err(ApiError::field("tools", message));
    }
    Ok(json!({"type": "function", "function": {
        "name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema"),
    }}))
}

/// A string, or the joined texts of blocks.
fn text_of(at: &str, value: &Value) -> Result<String, ApiError> {
    let block = |(i, block): (usize, &Value)| -> Result<String, ApiError> {
        let text = block.get("text").and_then(Value::as_str).map(str::to_string);
        let is_text = block.get("type").and_then(Value::as_str) == Some("text");
        text.filter(|_| is_text).ok_or_else(|| unsupported(&format!("{at}[{i}]"), block))
    };
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => {
            Ok(blocks.iter().enumerate().map(block).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err(ApiError::field(at, format!("{at} must be a string or an array of blocks"))),
    }
}

fn unsupported(at: &str, block: &Value) -> ApiError {
    match block.get("type").and_then(Value::as_str) {
        Some("text") => ApiError::field(at, format!("{at}.text must be a string")),
        Some(kind) => not_text(at, kind),
        None => ApiError::field(at, format!("{at}.type must be text, thinking, tool_use or tool_result")),
    }
}

/// One message of Anthropic's becomes one or more of OpenAI's: tool results are messages of their own.
fn read_message(at: &str, message: &Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
    let content = message.get("content").unwrap_or(&Value::Null);
    let blocks = match content {
        Value::String(text) => vec![json!({"type": "text", "text": text})],
        Value::Array(blocks) => blocks.clone(),
        _ => return Err(ApiError::field(at, format!("{at}.content must be a string or an array of blocks"))),
    };
    let (mut texts, mut thoughts, mut calls) = (vec![], vec![], vec![]);
    let string = |block: &Value, key: &str| block.get(key).and_then(Value::as_str).map(str::to_string);
    for (i, block) in blocks.iter().enumerate() {
        let at = &format!("{at}.content[{i}]");
        match block.get("type").and_then(Value::as_str) {
            Some("text") => texts.push(string(block, "text").ok_or_else(|| unsupported(at, block))?),
            Some("thinking") => thoughts.extend(string(block, "thinking")),
            Some("redacted_thinking") => {}
            Some("tool_use") => calls.push(json!({
                "id": block.get("id"), "type": "function",
                "function": {"name": block.get("name"), "arguments": block.get("input")},
            })),
            Some("tool_result") => {
                let result = block
                    .get("content")
                    .map_or(Ok(String::new()), |c| text_of(&format!("{at}.content"), c))?;
                out.push(
                    json!({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}),
                );
            }
            _ => return Err(unsupported(at, block)),
        }
    }
    let answered = out.last().is_some_and(|m| m["role"] == "tool");
    if texts.is_empty() && calls.is_empty() && thoughts.is_empty() && (answered || role == "assistant") {
        return Ok(());
    }
    let mut converted = json!({"role": role, "content": texts.join("\n")});
    if !thoughts.is_empty() {
        converted["reasoning_content"] = thoughts.join("\n").into();
    }
    if !calls.is_empty() {
        converted["tool_calls"] = calls.into();
    }
    out.push(converted);
    Ok(())
}

/// The blocks of an answer, as a stream or whole.
struct Blocks {
    id: String,
    model: String,
    prompt: usize,
    cached: usize,
    done: Vec<Value>,
    open: Option<Value>,
    arguments: String,
}

/// A step of the stream: its event and data.
type Step = (&'static str, Value);

impl Blocks {
    fn new(model: String, prompt: usize) -> Self {
        Blocks {
            id: unique("msg_"),
            model,
            prompt,
            cached: 0,
            done: vec![],
            open: None,
            arguments: String::new(),
        }
    }

    fn take(&mut self, event: Event) -> Vec<Step> {
        let mut steps = vec![];
        match event {
            Event::Reasoning(text) => self.text("thinking", text, &mut steps),
            Event::Content(text) => self.text("text", text, &mut steps),
            Event::ToolStart { name, .. } => {
                let block = json!({"type": "tool_use", "id": unique("toolu_"), "name": name, "input": {}});
                self.start(block, &mut steps);
            }
            Event::ToolArguments { delta, .. } => {
                self.arguments.push_str(&delta);
                self.delta(json!({"type": "input_json_delta", "partial_json": delta}), &mut steps);
            }
            Event::ToolEnd { .. } => self.stop(&mut steps),
        }
        steps
    }

    fn text(&mut self, kind: &str, text: String, steps: &mut Vec<Step>) {
        if self.open.as_ref().is_none_or(|b| b["type"] != kind) {
            let mut block = json!({"type": kind, kind: ""});
            if kind == "thinking" {
                block["signature"] = "".into();
            }
            self.start(block, steps);
        }
        if let Some(Value::String(so_far)) = self.open.as_mut().and_then(|b| b.get_mut(kind)) {
            so_far.push_str(&text);
        }
        self.delta(json!({"type": format!("{kind}_delta"), kind: text}), steps);
    }

    fn start(&mut self, block: Value, steps: &mut Vec<Step>) {
        self.stop(steps);
        let data = json!({"type": "content_block_start", "index": self.done.len(), "content_block": block});
        steps.push(("content_block_start", data));
        self.open = Some(block);
    }

    fn delta(&self, delta: Value, steps: &mut Vec<Step>) {
        let data = json!({"type": "content_block_delta", "index": self.done.len(), "delta": delta});
        steps.push(("content_block_delta", data));
    }

    fn stop(&mut self, steps: &mut Vec<Step>) {
        let Some(mut block) = self.open.take() else { return };
        if block["type"] == "thinking" {
            // There is none, but clients send thoughts back only with one.
            self.delta(json!({"type": "signature_delta", "signature": ""}), steps);
        }
        if block["type"] == "tool_use" {
            block["input"] =
                serde_json::from_str(&std::mem::take(&mut self.arguments)).unwrap_or_else(|_| json!({}));
        }
        let data = json!({"type": "content_block_stop", "index": self.done.len()});
        steps.push(("content_block_stop", data));
        self.done.push(block);
    }

    /// What was read from the cache is not counted as input.
    fn usage(&self, output: usize) -> Value {
        json!({
            "input_tokens": self.prompt - self.cached,
            "cache_read_input_tokens": self.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": output,
        })
    }

    fn message(&self, content: &[Value], end: (Option<&str>, Option<&str>), output: usize) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": end.0, "stop_sequence": end.1, "usage": self.usage(output),
        })
    }

    fn body(&mut self, finish: &Finish, usage: &Usage) -> Value {
        self.stop(&mut vec![]);
        self.message(&self.done, stop_reason(finish), usage.report.generated)
    }
}

fn stop_reason(finish: &Finish) -> (Option<&str>, Option<&str>) {
    match finish {
        Finish::Stop | Finish::Failed(_) => (Some("end_turn"), None),
        Finish::StopText(text) => (Some("stop_sequence"), Some(text)),
        Finish::Length => (Some("max_tokens"), None),
        Finish::ToolCalls => (Some("tool_use"), None),
    }
}

impl Encoder for Blocks {
    fn output(&mut self, _: usize, output: Output, out: &mut String) {
        match output {
            Output::Started(cached) => {
                self.cached = cached;
                let message = self.message(&[], (None, None), 0);
                event(out, "message_start", &json!({"type": "message_start", "message": message}));
            }
            Output::Token(_) => {}
            Output::Event(happened) => {
                self.take(happened).iter().for_each(|(name, data)| event(out, name, data))
            }
            Output::End(Finish::Failed(error), _) => event(out, "error", &error.body(Protocol::Anthropic)),
            Output::End(finish, usage) => {
                let mut steps = vec![];
                self.stop(&mut steps);
                steps.iter().for_each(|(name, data)| event(out, name, data));
                let (reason, text) = stop_reason(&finish);
                let delta = json!({"stop_reason": reason, "stop_sequence": text});
                let usage = self.usage(usage.report.generated);
                event(
                    out,
                    "message_delta",
                    &json!({"type": "message_delta", "delta": delta, "usage": usage}),
                );
                event(out, "message_stop", &json!({"type": "message_stop"}));
            }
        }
    }

    fn ping(&self) -> &'static str {
        "event: ping\ndata: {\"type\": \"ping\"}\n\n"
    }
}
