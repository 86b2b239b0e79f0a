//! llama.cpp's own routes.

use super::chat::read_chat;
use super::completions::{encode, read_prompts};
use super::openai::timings;
use crate::app::App;
use crate::error::{ApiError, Kind, Protocol};
use crate::generate::{Finish, Generation, Output, TokenReport, Usage};
use crate::request::{Input, Request, check_logprobs, not_text};
use crate::stream::{self, Encoder, data};
use crate::text::TextModel;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use muser_text::{Event, Specials};
use serde_json::{Value, json};
use std::sync::Arc;

type Reply = Result<Response, ApiError>;

fn reply(result: Reply) -> Response {
    result.unwrap_or_else(|e| e.response(Protocol::OpenAi))
}

/// `POST /completion`
pub async fn completion(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    reply(complete(app, request).await)
}

async fn complete(app: Arc<App>, request: axum::extract::Request) -> Reply {
    let (mut fields, caller) = app.read(request).await?;
    let (prompts, several) = match fields.take("prompt") {
        // Texts and token ids may be mixed in one prompt.
        Some(Value::Array(parts)) if parts.iter().any(Value::is_number) => {
            (vec![mixed(&app.generator.text, &parts)?], false)
        }
        other => {
            let several = matches!(other, Some(Value::Array(_)));
            (read_prompts(&app.generator.text, other)?, several)
        }
    };
    let most = app.generator.max_n;
    if prompts.len() > most {
        return Err(ApiError::field(
            "prompt",
            format!("prompt may be at most {most} prompts in one request"),
        ));
    }
    if fields.take("image_data").is_some_and(|i| i.as_array().is_none_or(|all| !all.is_empty())) {
        return Err(not_text("image_data", "image"));
    }
    let mut request = Request::new(Input::Tokens(vec![]));
    request.read_common(&mut fields, &app.generator.text.tokenizer)?;
    request.caller = Some(caller);
    // -1 is without limit; 0 only fills the cache, which one token does as well.
    let max = fields.integer("n_predict")?.or(fields.integer("max_tokens")?);
    request.max_tokens = max.and_then(|n| usize::try_from(n).ok()).map(|n| n.max(1));
    if let Some(top) = fields.count("n_probs")?.filter(|n| *n > 0) {
        request.sampling.logprobs = Some(check_logprobs("n_probs", top)?);
    }
    request.report_tokens = true;
    let stream = fields.flag("stream")?.unwrap_or(false);
    if stream && prompts.len() > 1 {
        return Err(ApiError::field("prompt", "prompt must be one prompt in a streamed request"));
    }
    let return_tokens = stream || fields.flag("return_tokens")?.unwrap_or(false);
    fields.ignore(&[
        "return_tokens",
        "model",
        "id_slot",
        "n_keep",
        "post_sampling_probs",
        "timings_per_token",
        "samplers",
        "user",
    ]);
    app.finish(fields)?;
    let start = |tokens: Vec<u32>| {
        let text = app.generator.text.clone();
        let pieces = Pieces {
            prompt: String::from_utf8_lossy(&text.tokenizer.decode(&tokens)).into_owned(),
            settings: settings(&request, text.tokenizer.end_ids()),
            text,
            tokens: vec![],
            return_tokens,
            prompt_tokens: tokens.len(),
            new_line: false,
        };
        let request = Request { input: Input::Tokens(tokens), ..request.clone() };
        Ok::<_, ApiError>((app.generator.start(request)?, pieces))
    };
    let mut started = prompts.into_iter().map(start).collect::<Result<Vec<_>, _>>()?;
    drop(request);
    if stream {
        let (generation, pieces) = started.remove(0);
        return Ok(stream::response(generation, pieces, stream::SSE));
    }
    let mut done = vec![];
    for (index, (generation, pieces)) in started.into_iter().enumerate() {
        let mut body = whole(generation, pieces).await?;
        body["index"] = index.into();
        done.push(body);
    }
    Ok(if several { Json(Value::Array(done)) } else { Json(done.remove(0)) }.into_response())
}

/// A generation's pieces as one.
async fn whole(mut generation: Generation, mut pieces: Pieces) -> Result<Value, ApiError> {
    let mut content = String::new();
    while let Some((_, output)) = generation.next().await {
        match output {
            Output::Token(token) => pieces.tokens.push(token),
            Output::Event(Event::Content(text)) => content.push_str(&text),
            Output::End(Finish::Failed(error), _) => return Err(error),
            Output::End(finish, usage) => return Ok(pieces.last(&content, &finish, &usage)),
            _ => {}
        }
    }
    Err(ApiError::new(Kind::Internal, "the generation ended without an end"))
}

/// What a request asks for, under llama.cpp's names.
fn settings(request: &Request, ends: &[u32]) -> Value {
    let s = &request.sampling;
    // JSON has no infinity: llama.cpp writes null for a token that is forbidden.
    let ends = ends.iter().filter(|_| request.ignore_end).map(|end| (*end, f32::NEG_INFINITY));
    let biases = s.logit_bias.iter().copied().chain(ends);
    let bias: Vec<Value> = biases.map(|(id, bias)| json!({"token": id, "bias": bias})).collect();
    json!({
        "n_predict": request.max_tokens.map_or(-1, |n| n as i64), "seed": s.seed, "temperature": s.temperature,
        "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p, "typical_p": s.typical_p,
        "repeat_penalty": s.repetition_penalty, "repeat_last_n": s.repeat_last_n,
        "presence_penalty": s.presence_penalty, "frequency_penalty": s.frequency_penalty,
        "stop": request.stop, "ignore_eos": request.ignore_end, "logit_bias": bias, "n_probs": s.logprobs.unwrap_or(0),
        "speculative.n_max": request.draft_rows,
    })
}

fn mixed(text: &TextModel, parts: &[Value]) -> Result<Vec<u32>, ApiError> {
    let mut tokens = vec![];
    for (i, part) in parts.iter().enumerate() {
        match part {
            Value::String(piece) if i == 0 => tokens.extend(encode(text, piece)),
            Value::String(piece) => tokens.extend(text.tokenizer.encode(piece, Specials::Parse)),
            other => {
                let id = other.as_u64().and_then(|id| u32::try_from(id).ok());
                tokens.push(
                    id.ok_or_else(|| ApiError::field("prompt", "prompt must hold texts and token ids"))?,
                );
            }
        }
    }
    Ok(tokens)
}

struct Pieces {
    text: Arc<TextModel>,
    tokens: Vec<TokenReport>,
    return_tokens: bool,
    prompt_tokens: usize,
    prompt: String,
    settings: Value,
    new_line: bool,
}

impl Pieces {
    fn piece(&mut self, content: &str) -> Value {
        self.new_line |= content.contains('\n');
        let reported = std::mem::take(&mut self.tokens);
        let ids: Vec<u32> =
            if self.return_tokens { reported.iter().map(|t| t.token).collect() } else { vec![] };
        let probabilities: Vec<Value> = reported.iter().filter_map(|t| self.probability(t)).collect();
        let mut out = json!({"index": 0, "content": content, "tokens": ids, "id_slot": 0, "stop": false});
        if !probabilities.is_empty() {
            out["completion_probabilities"] = probabilities.into();
        }
        out
    }

    fn probability(&self, report: &TokenReport) -> Option<Value> {
        let logprobs = report.logprobs.as_ref()?;
        let entry = |token: u32, logprob: f32| {
            let bytes = self.text.tokenizer.token_bytes(token).unwrap_or_default();
            json!({"id": token, "token": String::from_utf8_lossy(bytes), "bytes": bytes, "logprob": logprob})
        };
        let mut out = entry(report.token, logprobs.logprob);
        out["top_logprobs"] = logprobs.top.iter().map(|t| entry(t.token, t.logprob)).collect();
        Some(out)
    }

    fn last(&mut self, content: &str, finish: &Finish, usage: &Usage) -> Value {
        let mut out = self.piece(content);
        let (kind, word) = match finish {
            Finish::Length => ("limit", ""),
            Finish::StopText(text) => ("word", text.as_str()),
            _ => ("eos", ""),
        };
        out["stop"] = true.into();
        out["stop_type"] = kind.into();
        out["stopping_word"] = word.into();
        out["model"] = self.text.name.as_str().into();
        out["tokens_predicted"] = usage.report.generated.into();
        out["tokens_evaluated"] = self.prompt_tokens.into();
        out["tokens_cached"] = usage.report.cached.into();
        // Nothing of a prompt is ever cut off.
        out["truncated"] = false.into();
        out["has_new_line"] = self.new_line.into();
        out["prompt"] = std::mem::take(&mut self.prompt).into();
        out["generation_settings"] = self.settings.take();
        out["timings"] = timings(usage);
        out
    }
}

impl Encoder for Pieces {
    fn output(&mut self, _: usize, output: Output, out: &mut String) {
        let piece = match output {
            Output::Token(token) => {
                self.tokens.push(token);
                return;
            }
            Output::Event(Event::Content(text)) => self.piece(&text),
            Output::End(Finish::Failed(error), _) => error.body(Protocol::OpenAi),
            Output::End(finish, usage) => self.last("", &finish, &usage),
            _ => return,
        };
        data(out, &piece);
    }
}

/// `POST /apply-template`
pub async fn apply_template(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    let read = async {
        let (mut fields, _caller) = app.read(request).await?;
        let messages =
            fields.take("messages").ok_or_else(|| ApiError::field("messages", "messages is missing"))?;
        let chat = read_chat(&mut fields, messages)?;
        fields.ignore(&["model"]);
        app.finish(fields)?;
        let prompt = app.generator.text.prompt(&chat, &Default::default(), true)?;
        Ok(Json(json!({"prompt": prompt.rendered.text()})).into_response())
    };
    reply(read.await)
}

/// `GET /props`
pub async fn props(State(app): State<Arc<App>>) -> Json<Value> {
    let (text, slots) = (&app.generator.text, &app.generator.slots);
    let defaults = muser_core::sample::SamplerOptions::default();
    Json(json!({
        "default_generation_settings": {
            "n_ctx": slots.context(),
            "params": {
                "temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p, "min_p": defaults.min_p,
                "typical_p": defaults.typical_p, "repeat_penalty": defaults.repetition_penalty,
                "repeat_last_n": defaults.repeat_last_n, "presence_penalty": defaults.presence_penalty,
                "frequency_penalty": defaults.frequency_penalty,
            },
        },
        "total_slots": slots.status().len(),
        "model_path": app.details.path,
        "model_alias": text.name,
        "modalities": {"vision": false, "audio": false},
        "chat_template": text.template.source(),
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot|>",
        "build_info": concat!("muser-", env!("CARGO_PKG_VERSION")),
    }))
}

/// `POST /infill`
pub async fn infill() -> Response {
    let why = "infill is not supported: this model was not trained to fill in the middle; use /completion";
    ApiError::new(Kind::Unsupported, why).response(Protocol::OpenAi)
}

/// `POST /v1/embeddings` and the like.
pub async fn embeddings() -> Response {
    let why = "embeddings are not supported: Muse Glimmer is a generating model, its states make no good vectors; use an embedding model";
    ApiError::new(Kind::Unsupported, why).response(Protocol::OpenAi)
}

/// Ollama's names for the same.
pub async fn ollama_embeddings() -> Response {
    let why = "embeddings are not supported: Muse Glimmer is a generating model; use an embedding model";
    ApiError::new(Kind::Unsupported, why).response(Protocol::Ollama)
}
