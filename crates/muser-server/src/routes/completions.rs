//! OpenAI's `/v1/completions`: raw text, no template.

use super::chat::check_max;
use super::openai::{FINGERPRINT, finish_reason, timings, usage};
use crate::app::{App, now, unique};
use crate::error::{ApiError, Protocol};
use crate::fields::Fields;
use crate::generate::{Finish, Generation, Output, TokenReport, Usage};
use crate::request::{Input, Request, check_logprobs, not_text};
use crate::stream::{self, Encoder, data};
use crate::text::{TextModel, blocking};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use muser_text::{Event, Specials};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `POST /v1/completions`
pub async fn route(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    answer(app, request).await.unwrap_or_else(|e| e.response(Protocol::OpenAi))
}

async fn answer(app: Arc<App>, request: axum::extract::Request) -> Result<Response, ApiError> {
    let (mut fields, caller) = app.read(request).await?;
    app.check_model(fields.string("model")?)?;
    let prompts = read_prompts(&app.generator.text, fields.take("prompt"))?;
    let mut request = read(&app, &mut fields)?;
    request.caller = Some(caller);
    let stream = fields.flag("stream")?.unwrap_or(false);
    let include_usage = match fields.object("stream_options")? {
        Some(mut options) => options.flag("include_usage")?.unwrap_or(false),
        None => false,
    };
    let echo = fields.flag("echo")?.unwrap_or(false);
    fields.ignore(&["user", "best_of"]);
    app.finish(fields)?;
    if prompts.len() * request.n > app.generator.max_n || stream && prompts.len() > 1 {
        let most = if stream { 1 } else { app.generator.max_n / request.n.max(1) };
        return Err(ApiError::field(
            "prompt",
            format!("at most {most} prompts can be completed in this request"),
        ));
    }
    let text = app.generator.text.clone();
    let start = |tokens: &Vec<u32>| {
        let mut request = request.clone();
        request.input = Input::Tokens(tokens.clone());
        app.generator.start(request)
    };
    let lead = |tokens: &[u32]| {
        if echo {
            String::from_utf8_lossy(&text.tokenizer.decode(tokens)).into_owned()
        } else {
            String::new()
        }
    };
    if stream {
        let tokens = prompts.first().cloned().unwrap_or_default();
        let chunks = Chunks {
            text: text.clone(),
            id: unique("cmpl-"),
            lead: lead(&tokens),
            include_usage,
            usages: vec![],
            tokens: vec![],
        };
        return Ok(stream::response(start(&tokens)?, chunks, stream::SSE));
    }
    let generations = prompts.iter().map(start).collect::<Result<Vec<Generation>, _>>()?;
    drop(request);
    let (mut choices, mut usages, mut prompt_tokens) = (vec![], vec![], 0);
    for (generation, prompt) in generations.into_iter().zip(&prompts) {
        prompt_tokens += generation.prompt_tokens;
        for done in generation.collect().await? {
            let body = format!("{}{}", lead(prompt), done.message.content.unwrap_or_default());
            choices.push(json!({
                "index": choices.len(),
                "text": body,
                "logprobs": logprobs(&text, &done.tokens),
                "finish_reason": finish_reason(&done.finish),
            }));
            usages.push(done.usage);
        }
    }
    let mut usage = usage(&usages);
    let generated = usage["completion_tokens"].as_u64().unwrap_or(0);
    usage["prompt_tokens"] = prompt_tokens.into();
    usage["total_tokens"] = (prompt_tokens as u64 + generated).into();
    let body = json!({
        "id": unique("cmpl-"),
        "object": "text_completion",
        "created": now(),
        "model": text.name,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
        "usage": usage,
        "timings": usages.first().map(timings),
    });
    Ok(Json(body).into_response())
}

fn read(app: &App, fields: &mut Fields) -> Result<Request, ApiError> {
    let mut request = Request::new(Input::Tokens(vec![]));
    request.read_common(fields, &app.generator.text.tokenizer)?;
    request.n = fields.count("n")?.unwrap_or(1);
    request.max_tokens = Some(fields.count("max_tokens")?.unwrap_or(16));
    check_max(request.max_tokens)?;
    // OpenAI's number, or true as vLLM's and llama.cpp's clients send.
    request.sampling.logprobs = match fields.take("logprobs") {
        None | Some(Value::Bool(false)) => None,
        Some(Value::Bool(true)) => Some(1),
        Some(other) => {
            let top = other.as_u64().and_then(|n| usize::try_from(n).ok());
            let top = top.ok_or_else(|| ApiError::field("logprobs", "logprobs must be a number"))?;
            Some(check_logprobs("logprobs", top)?)
        }
    };
    if fields.string("suffix")?.is_some_and(|s| !s.is_empty()) {
        let why =
            "suffix cannot be used: this model was not trained to fill in the middle; send a prompt alone";
        return Err(ApiError::field("suffix", why));
    }
    Ok(request)
}

/// A text, token ids, llama.cpp's object with a text, or several of these.
pub fn read_prompts(text: &TextModel, value: Option<Value>) -> Result<Vec<Vec<u32>>, ApiError> {
    let wrong =
        || ApiError::field("prompt", "prompt must be a string, an array of token ids, or an array of these");
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    let one = |v: &Value| match v {
        Value::String(prompt) => Some(encode(text, prompt)),
        Value::Array(ids) => ids.iter().map(id).collect(),
        Value::Object(parts) => parts.get("prompt_string")?.as_str().map(|prompt| encode(text, prompt)),
        _ => None,
    };
    let media = |v: &Value| {
        let data = v.get("multimodal_data").filter(|m| !m.is_null());
        data.is_some_and(|m| m.as_array().is_none_or(|all| !all.is_empty()))
    };
    let list = value.as_ref().and_then(Value::as_array).into_iter().flatten();
    if value.iter().chain(list).any(media) {
        return Err(not_text("prompt.multimodal_data", "image"));
    }
    match value.ok_or_else(|| ApiError::field("prompt", "prompt is missing"))? {
        Value::Array(all) if all.iter().any(|v| !v.is_number()) => {
            all.iter().map(|v| one(v).ok_or_else(wrong)).collect()
        }
        single => Ok(vec![one(&single).ok_or_else(wrong)?]),
    }
}

/// A raw prompt's tokens: control tokens are recognised, and the text begins where the file says that texts begin.
pub fn encode(text: &TextModel, prompt: &str) -> Vec<u32> {
    let tokens = blocking(|| text.tokenizer.encode(prompt, Specials::Parse));
    let bos = text.tokenizer.bos().filter(|bos| tokens.first() != Some(bos));
    bos.into_iter().chain(tokens).collect()
}

/// The four lists of the old form.
fn logprobs(text: &TextModel, tokens: &[TokenReport]) -> Value {
    let piece =
        |id: u32| String::from_utf8_lossy(text.tokenizer.token_bytes(id).unwrap_or_default()).into_owned();
    let reported: Vec<_> = tokens.iter().filter_map(|t| Some((t.token, t.logprobs.as_ref()?))).collect();
    if reported.is_empty() {
        return Value::Null;
    }
    let top = |l: &muser_core::sample::Logprobs| -> Map<String, Value> {
        l.top.iter().map(|t| (piece(t.token), t.logprob.into())).collect()
    };
    let mut offset = 0;
    let mut offsets = vec![];
    for (token, _) in &reported {
        offsets.push(offset);
        offset += piece(*token).chars().count();
    }
    json!({
        "tokens": reported.iter().map(|(t, _)| piece(*t)).collect::<Vec<_>>(),
        "token_logprobs": reported.iter().map(|(_, l)| l.logprob).collect::<Vec<_>>(),
        "top_logprobs": reported.iter().map(|(_, l)| top(l)).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

struct Chunks {
    text: Arc<TextModel>,
    id: String,
    lead: String,
    include_usage: bool,
    usages: Vec<Usage>,
    tokens: Vec<TokenReport>,
}

impl Chunks {
    fn chunk(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": now(),
            "model": self.text.name,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        })
    }
}

impl Encoder for Chunks {
    fn output(&mut self, choice: usize, output: Output, out: &mut String) {
        let piece = match output {
            Output::Started(_) if !self.lead.is_empty() => self.lead.clone(),
            Output::Token(token) => {
                self.tokens.push(token);
                return;
            }
            Output::Event(Event::Content(text)) => text,
            Output::End(Finish::Failed(error), _) => {
                data(out, &error.body(Protocol::OpenAi));
                return;
            }
            Output::End(finish, usage) => {
                self.usages.push(usage);
                let finish = finish_reason(&finish);
                let last = json!({"index": choice, "text": "", "logprobs": null, "finish_reason": finish});
                let mut chunk = self.chunk(json!([last]));
                chunk["timings"] = timings(&usage);
                data(out, &chunk);
                return;
            }
            _ => return,
        };
        let logprobs = logprobs(&self.text, &std::mem::take(&mut self.tokens));
        let part = json!({"index": choice, "text": piece, "logprobs": logprobs, "finish_reason": null});
        data(out, &self.chunk(json!([part])));
    }

    fn end(&mut self, out: &mut String) {
        if self.include_usage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = usage(&self.usages);
            data(out, &chunk);
        }
        out.push_str("data: [DONE]\n\n");
    }
}
