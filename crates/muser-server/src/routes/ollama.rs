//! Ollama's `/api/...`.

use super::completions::encode;
use crate::app::{App, iso};
use crate::constrain::Answer;
use crate::error::{ApiError, Kind, Protocol};
use crate::fields::Fields;
use crate::generate::{Finish, Generation, Output, Usage};
use crate::request::{Chat, Input, Level, Reasoning, Request, not_text, read_sampling};
use crate::stream::{self, Encoder};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use muser_text::Event;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

/// `POST /api/chat`
pub async fn chat(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    answer(app, request, true).await.unwrap_or_else(|e| e.response(Protocol::Ollama))
}

/// `POST /api/generate`
pub async fn generate(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    answer(app, request, false).await.unwrap_or_else(|e| e.response(Protocol::Ollama))
}

async fn answer(app: Arc<App>, request: axum::extract::Request, chat: bool) -> Result<Response, ApiError> {
    let (mut fields, caller) = app.read(request).await?;
    app.check_model(fields.string("model")?)?;
    let stream = fields.flag("stream")?.unwrap_or(true);
    let input = if chat { read_chat(&mut fields)? } else { read_prompt(&app, &mut fields)? };
    let mut request = Request::new(input.unwrap_or(Input::Tokens(vec![])));
    request.caller = Some(caller);
    request.answer = match fields.take("format") {
        None => Answer::Free,
        Some(Value::String(word)) if word.is_empty() => Answer::Free,
        Some(Value::String(word)) if word == "json" => Answer::JsonObject,
        Some(schema @ Value::Object(_)) => Answer::JsonSchema(schema),
        Some(_) => return Err(ApiError::field("format", "format must be \"json\" or a JSON schema")),
    };
    if let Some(options) = fields.object("options")? {
        read_options(options, &mut request)?;
    }
    fields.ignore(&["keep_alive", "template", "context", "options", "logprobs", "top_logprobs"]);
    app.finish(fields)?;
    let name = app.generator.text.name.clone();
    let empty = matches!(&request.input, Input::Tokens(t) if t.is_empty())
        || matches!(&request.input, Input::Chat(c) if c.messages.as_array().is_some_and(Vec::is_empty));
    let mut lines = Lines { name, chat, arguments: String::new(), called: String::new() };
    if empty {
        // Ollama loads the model then; here it is loaded.
        let mut line = lines.line(json!({"text": ""}));
        line["done"] = true.into();
        line["done_reason"] = "load".into();
        return Ok(Json(line).into_response());
    }
    let generation = app.generator.start(request)?;
    if stream {
        return Ok(stream::response(generation, lines, stream::LINES));
    }
    whole(generation, &mut lines).await
}

/// The lines of a stream joined into one.
async fn whole(mut generation: Generation, lines: &mut Lines) -> Result<Response, ApiError> {
    let (mut text, mut thinking, mut calls) = (String::new(), String::new(), vec![]);
    while let Some((_, output)) = generation.next().await {
        match output {
            Output::Event(Event::Content(more)) => text.push_str(&more),
            Output::Event(Event::Reasoning(more)) => thinking.push_str(&more),
            Output::Event(event) => calls.extend(lines.call(event)),
            Output::End(Finish::Failed(error), _) => return Err(error),
            Output::End(finish, usage) => {
                let mut parts = json!({"text": text});
                if !thinking.is_empty() {
                    parts["thinking"] = thinking.into();
                }
                if !calls.is_empty() {
                    parts["tool_calls"] = calls.into();
                }
                return Ok(Json(lines.last(parts, &finish, &usage)).into_response());
            }
            Output::Started(_) | Output::Token(_) => {}
        }
    }
    Err(ApiError::new(Kind::Internal, "the generation ended without an end"))
}

fn read_think(fields: &mut Fields) -> Result<Reasoning, ApiError> {
    let level = match fields.take("think") {
        None | Some(Value::Bool(true)) => None,
        Some(Value::Bool(false)) => Some(Level::Off),
        Some(Value::String(word)) => {
            let wrong = || {
                ApiError::field(
                    "think",
                    format!("think is {word:?}; true, false, low, medium, high are known"),
                )
            };
            Some(Level::named(&word).ok_or_else(wrong)?)
        }
        Some(_) => return Err(ApiError::field("think", "think must be true, false or a level")),
    };
    Ok(Reasoning { level, budget: None })
}

fn read_chat(fields: &mut Fields) -> Result<Option<Input>, ApiError> {
    let wrong = || ApiError::field("messages", "messages must be an array of messages");
    let Some(Value::Array(mut messages)) = fields.take("messages") else { return Err(wrong()) };
    for (i, message) in messages.iter_mut().enumerate() {
        let map = message.as_object_mut().ok_or_else(wrong)?;
        no_images(&format!("messages[{i}].images"), map.remove("images"))?;
        for (ours, theirs) in [("reasoning_content", "thinking"), ("name", "tool_name")] {
            map.remove(theirs).map(|value| map.insert(ours.into(), value));
        }
    }
    let tools = fields.take("tools").filter(|t| t.as_array().is_none_or(|all| !all.is_empty()));
    let reasoning = read_think(fields)?;
    Ok(Some(Input::Chat(Box::new(Chat {
        messages: messages.into(),
        tools,
        parallel: true,
        reasoning,
        ..Chat::default()
    }))))
}

fn no_images(at: &str, images: Option<Value>) -> Result<(), ApiError> {
    match images {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(all)) if all.is_empty() => Ok(()),
        Some(_) => Err(not_text(at, "image")),
    }
}

fn read_prompt(app: &App, fields: &mut Fields) -> Result<Option<Input>, ApiError> {
    let prompt = fields.string("prompt")?.unwrap_or_default();
    no_images("images", fields.take("images"))?;
    if fields.string("suffix")?.is_some_and(|s| !s.is_empty()) {
        let why = "suffix cannot be used: this model does not fill in the middle; send a prompt alone";
        return Err(ApiError::field("suffix", why));
    }
    let (system, reasoning) = (fields.string("system")?, read_think(fields)?);
    if prompt.is_empty() {
        return Ok(None);
    }
    if fields.flag("raw")?.unwrap_or(false) {
        return Ok(Some(Input::Tokens(encode(&app.generator.text, &prompt))));
    }
    let system = system.filter(|s| !s.is_empty()).map(|s| json!({"role": "system", "content": s}));
    let messages: Vec<Value> =
        system.into_iter().chain([json!({"role": "user", "content": prompt})]).collect();
    Ok(Some(Input::Chat(Box::new(Chat {
        messages: messages.into(),
        parallel: true,
        reasoning,
        ..Chat::default()
    }))))
}

fn read_options(mut options: Fields, request: &mut Request) -> Result<(), ApiError> {
    read_sampling(&mut request.sampling, &mut options)?;
    request.stop = options.strings("stop")?;
    // Ollama: -1 is without limit, -2 fills the context.
    request.max_tokens =
        options.integer("num_predict")?.and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
    Ok(())
}

struct Lines {
    name: String,
    chat: bool,
    arguments: String,
    called: String,
}

impl Lines {
    /// Ollama gives a call whole.
    fn call(&mut self, event: Event) -> Option<Value> {
        match event {
            Event::ToolStart { name, .. } => self.called = name,
            Event::ToolArguments { delta, .. } => self.arguments.push_str(&delta),
            Event::ToolEnd { .. } => {
                let text = std::mem::take(&mut self.arguments);
                let arguments: Value = serde_json::from_str(&text).unwrap_or_else(|_| json!({}));
                return Some(json!({"function": {"name": self.called, "arguments": arguments}}));
            }
            Event::Reasoning(_) | Event::Content(_) => {}
        }
        None
    }

    /// A line with text, thinking and calls where the route puts them.
    fn line(&self, mut parts: Value) -> Value {
        let mut line = json!({"model": self.name, "created_at": iso(crate::app::now())});
        let text = parts["text"].take();
        parts.as_object_mut().map(|map| map.remove("text"));
        if self.chat {
            parts["role"] = "assistant".into();
            parts["content"] = text;
            line["message"] = parts;
        } else {
            line["response"] = text;
            if let Some(thinking) = parts.get("thinking") {
                line["thinking"] = thinking.clone();
            }
        }
        line["done"] = false.into();
        line
    }

    fn last(&self, parts: Value, finish: &Finish, usage: &Usage) -> Value {
        let r = &usage.report;
        let nanos = |seconds: f64| (seconds * 1e9) as u64;
        let mut line = self.line(parts);
        line["done"] = true.into();
        line["done_reason"] = if *finish == Finish::Length { "length" } else { "stop" }.into();
        line["total_duration"] = nanos(r.queue_seconds + r.prompt_seconds + r.decode_seconds).into();
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = r.prompt.into();
        line["prompt_eval_duration"] = nanos(r.prompt_seconds).into();
        line["eval_count"] = r.generated.into();
        line["eval_duration"] = nanos(r.decode_seconds).into();
        line
    }
}

impl Encoder for Lines {
    fn output(&mut self, _: usize, output: Output, out: &mut String) {
        let line = match output {
            Output::Started(_) | Output::Token(_) => return,
            Output::Event(Event::Content(text)) => self.line(json!({"text": text})),
            Output::Event(Event::Reasoning(text)) => self.line(json!({"text": "", "thinking": text})),
            Output::Event(event) => match self.call(event) {
                Some(call) => self.line(json!({"text": "", "tool_calls": [call]})),
                None => return,
            },
            Output::End(Finish::Failed(error), _) => error.body(Protocol::Ollama),
            Output::End(finish, usage) => self.last(json!({"text": ""}), &finish, &usage),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{line}");
    }

    fn ping(&self) -> &'static str {
        ""
    }
}

/// `GET /api/tags`
pub async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"models": [model(&app)]}))
}

/// `GET /api/ps`
pub async fn ps(State(app): State<Arc<App>>) -> Json<Value> {
    let mut model = model(&app);
    model["expires_at"] = "9999-12-31T23:59:59Z".into();
    model["size_vram"] = 0.into();
    model["context_length"] = app.generator.slots.context().into();
    Json(json!({"models": [model]}))
}

/// `GET /api/version`
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `POST /api/show`
pub async fn show(State(app): State<Arc<App>>) -> Json<Value> {
    let model = model(&app);
    Json(json!({
        "modelfile": "",
        "parameters": "",
        "template": app.generator.text.template.source(),
        "details": model["details"],
        "modified_at": model["modified_at"],
        "model_info": {
            "general.architecture": "muse-glimmer",
            "general.parameter_count": app.details.parameters,
            "muse-glimmer.context_length": app.details.context,
        },
        "capabilities": ["completion", "tools", "thinking"],
    }))
}

fn model(app: &App) -> Value {
    let (name, details) = (&app.generator.text.name, &app.details);
    json!({
        "name": name,
        "model": name,
        "modified_at": iso(details.created),
        "size": details.bytes,
        "digest": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "muse-glimmer",
            "families": ["muse-glimmer"],
            "parameter_size": match details.parameters as f64 {
                n if n < 1e9 => format!("{:.2}M", n / 1e6),
                n => format!("{:.1}B", n / 1e9),
            },
            "quantization_level": details.quantization,
        },
    })
}
