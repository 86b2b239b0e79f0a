//! OpenAI's `/v1/chat/completions`.

use super::openai::{FINGERPRINT, finish_reason, logprob, timings, usage};
use crate::app::{App, now, unique};
use crate::error::{ApiError, Protocol};
use crate::fields::Fields;
use crate::generate::{Collected, Finish, Output, Usage};
use crate::request::{Chat, Input, Reasoning, Request, check_logprobs, read_choice};
use crate::stream::{self, Encoder, data};
use crate::text::{TextModel, blocking};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use muser_text::Event;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Fields of OpenAI's that say nothing to a local server.
const IGNORED: [&str; 14] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
    "modalities",
    "prediction",
    "web_search_options",
    "logprobs_mode",
    "include_reasoning",
    "return_progress",
];

/// `POST /v1/chat/completions`
pub async fn route(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    answer(app, request).await.unwrap_or_else(|e| e.response(Protocol::OpenAi))
}

/// `POST /v1/chat/completions/input_tokens`
pub async fn count(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    let counted = async {
        let (mut fields, _caller) = app.read(request).await?;
        app.check_model(fields.string("model")?)?;
        let (request, _) = blocking(|| read(&app, &mut fields))?;
        app.finish(fields)?;
        let tokens = app.generator.count(&request)?;
        Ok(Json(json!({"object": "chat.completion.input_tokens", "input_tokens": tokens})).into_response())
    };
    counted.await.unwrap_or_else(|e: ApiError| e.response(Protocol::OpenAi))
}

/// How the answer is to be sent.
struct Sending {
    stream: bool,
    usage: bool,
}

async fn answer(app: Arc<App>, request: axum::extract::Request) -> Result<Response, ApiError> {
    let (mut fields, caller) = app.read(request).await?;
    app.check_model(fields.string("model")?)?;
    let (mut request, sending) = blocking(|| read(&app, &mut fields))?;
    app.finish(fields)?;
    request.caller = Some(caller);
    let generation = app.generator.start(request)?;
    let text = app.generator.text.clone();
    if sending.stream {
        return Ok(stream::response(
            generation,
            Chunks::new(text, sending.usage, generation_n(&app)),
            stream::SSE,
        ));
    }
    let done = generation.collect().await?;
    Ok(Json(body(&text, &done)).into_response())
}

fn generation_n(app: &App) -> usize {
    app.generator.max_n
}

/// Reads a chat request; the rest of the fields stays.
fn read(app: &App, fields: &mut Fields) -> Result<(Request, Sending), ApiError> {
    let messages =
        fields.take("messages").ok_or_else(|| ApiError::field("messages", "messages is missing"))?;
    let chat = read_chat(fields, messages)?;
    let mut request = Request::new(Input::Chat(Box::new(chat)));
    request.read_common(fields, &app.generator.text.tokenizer)?;
    request.n = fields.count("n")?.unwrap_or(1);
    request.max_tokens = fields.count("max_completion_tokens")?.or(fields.count("max_tokens")?);
    check_max(request.max_tokens)?;
    let top = fields.count("top_logprobs")?;
    if fields.flag("logprobs")?.unwrap_or(false) {
        request.sampling.logprobs = Some(check_logprobs("top_logprobs", top.unwrap_or(0))?);
    } else if top.is_some_and(|t| t > 0) {
        return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs to be true"));
    }
    let stream = fields.flag("stream")?.unwrap_or(false);
    let usage = match fields.object("stream_options")? {
        Some(mut options) => options.flag("include_usage")?.unwrap_or(false),
        None => false,
    };
    fields.ignore(&IGNORED);
    Ok((request, Sending { stream, usage }))
}

/// A limit of no tokens at all is a mistake of the client's.
pub fn check_max(max: Option<usize>) -> Result<(), ApiError> {
    if max == Some(0) {
        return Err(ApiError::field("max_tokens", "max_tokens must be at least 1"));
    }
    Ok(())
}

/// Tools, their choice, reasoning and the template's variables: shared by all chat routes of OpenAI's kind.
pub fn read_chat(fields: &mut Fields, messages: Value) -> Result<Chat, ApiError> {
    let mut variables = Map::new();
    let mut reasoning = Reasoning::read(fields)?;
    if let Some(mut given) = fields.object("chat_template_kwargs")? {
        let more = Reasoning::read(&mut given)?;
        reasoning.level = reasoning.level.or(more.level);
        reasoning.budget = reasoning.budget.or(more.budget);
        variables = given.into_map();
        // What the server itself decides.
        ["messages", "tools", "add_generation_prompt", "bos_token"]
            .iter()
            .for_each(|k| drop(variables.remove(*k)));
    }
    let tools = match (fields.take("tools"), fields.take("functions")) {
        (Some(tools), _) => Some(tools),
        // The form before tools: bare functions.
        (None, functions) => functions,
    };
    let tools = tools.filter(|t| t.as_array().is_none_or(|all| !all.is_empty()));
    let choice = fields.take("tool_choice").or(fields.take("function_call"));
    let choice = read_choice(choice, tools.as_ref())?;
    let parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true);
    Ok(Chat { messages, tools, choice, parallel, variables, reasoning })
}

fn body(text: &TextModel, done: &[Collected]) -> Value {
    let usages: Vec<Usage> = done.iter().map(|c| c.usage).collect();
    let choices: Vec<Value> = done.iter().enumerate().map(|(i, c)| choice(text, i, c)).collect();
    json!({
        "id": unique("chatcmpl-"),
        "object": "chat.completion",
        "created": now(),
        "model": text.name,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
        "usage": usage(&usages),
        "timings": usages.first().map(timings),
    })
}

fn choice(text: &TextModel, index: usize, done: &Collected) -> Value {
    let message = &done.message;
    let calls: Vec<Value> =
        message.tool_calls.iter().map(|c| tool_call(&c.name, &c.arguments.to_string())).collect();
    let content = match &message.content {
        None if calls.is_empty() => json!(""),
        other => json!(other),
    };
    let mut out = json!({"role": "assistant", "content": content, "refusal": null});
    if let Some(reasoning) = &message.reasoning_content {
        out["reasoning_content"] = reasoning.as_str().into();
    }
    if !calls.is_empty() {
        out["tool_calls"] = calls.into();
    }
    let logprobs: Vec<Value> =
        done.tokens.iter().filter(|t| t.content).filter_map(|t| logprob(text, t)).collect();
    let logprobs =
        if logprobs.is_empty() { Value::Null } else { json!({"content": logprobs, "refusal": null}) };
    json!({"index": index, "message": out, "logprobs": logprobs, "finish_reason": finish_reason(&done.finish)})
}

fn tool_call(name: &str, arguments: &str) -> Value {
    json!({"id": unique("call_"), "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// Writes the chunks of a stream.
struct Chunks {
    text: Arc<TextModel>,
    id: String,
    created: u64,
    include_usage: bool,
    usages: Vec<Usage>,
    /// Log probabilities that wait for their text, by choice.
    logprobs: Vec<Vec<Value>>,
}

impl Chunks {
    fn new(text: Arc<TextModel>, include_usage: bool, n: usize) -> Self {
        let id = unique("chatcmpl-");
        Chunks { text, id, created: now(), include_usage, usages: vec![], logprobs: vec![vec![]; n] }
    }

    fn chunk(&mut self, choice: usize, delta: Value, finish: Option<&str>) -> Value {
        let waiting =
            self.logprobs.get_mut(choice).filter(|_| delta.get("content").is_some() || finish.is_some());
        let logprobs = waiting.map(std::mem::take).filter(|l| !l.is_empty());
        let logprobs = logprobs.map(|l| json!({"content": l, "refusal": null}));
        let choice = json!({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
        self.frame(json!([choice]))
    }

    fn frame(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.text.name,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        })
    }
}

impl Encoder for Chunks {
    fn output(&mut self, choice: usize, output: Output, out: &mut String) {
        let delta = match output {
            Output::Started(_) => json!({"role": "assistant", "content": ""}),
            Output::Token(token) => {
                let entry = logprob(&self.text, &token).filter(|_| token.content);
                if let Some(waiting) = self.logprobs.get_mut(choice) {
                    waiting.extend(entry);
                }
                return;
            }
            Output::Event(Event::Reasoning(text)) => json!({"reasoning_content": text}),
            Output::Event(Event::Content(text)) => json!({"content": text}),
            Output::Event(Event::ToolStart { index, name }) => {
                let mut call = tool_call(&name, "");
                call["index"] = index.into();
                json!({"tool_calls": [call]})
            }
            Output::Event(Event::ToolArguments { index, delta }) => {
                json!({"tool_calls": [{"index": index, "function": {"arguments": delta}}]})
            }
            Output::Event(Event::ToolEnd { .. }) => return,
            Output::End(Finish::Failed(error), _) => {
                data(out, &error.body(Protocol::OpenAi));
                return;
            }
            Output::End(finish, usage) => {
                self.usages.push(usage);
                let mut chunk = self.chunk(choice, json!({}), Some(finish_reason(&finish)));
                chunk["timings"] = timings(&usage);
                data(out, &chunk);
                return;
            }
        };
        let chunk = self.chunk(choice, delta, None);
        data(out, &chunk);
    }

    fn end(&mut self, out: &mut String) {
        if self.include_usage {
            let mut chunk = self.frame(json!([]));
            chunk["usage"] = usage(&self.usages);
            chunk["timings"] = self.usages.first().map(timings).into();
            data(out, &chunk);
        }
        out.push_str("data: [DONE]\n\n");
    }
}
