//! llama.cpp's `/tokenize` and `/detokenize`.
//!
//! Their answers may be many times as long as the request, so they are written as they are sent.

use crate::app::{App, Caller};
use crate::error::{ApiError, Protocol};
use crate::text::blocking;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use muser_text::{Specials, Tokenizer};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;

/// Tokens that are written at a time.
const PART: usize = 4096;

/// `POST /tokenize`
pub async fn tokenize(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    let read = async {
        let (mut fields, caller) = app.read(request).await?;
        let content =
            fields.string("content")?.ok_or_else(|| ApiError::field("content", "content is missing"))?;
        let specials =
            if fields.flag("parse_special")?.unwrap_or(true) { Specials::Parse } else { Specials::Plain };
        let (start, pieces) =
            (fields.flag("add_special")?.unwrap_or(false), fields.flag("with_pieces")?.unwrap_or(false));
        app.finish(fields)?;
        let tokenizer = &app.generator.text.tokenizer;
        let mut tokens = blocking(|| tokenizer.encode(&content, specials));
        if let Some(bos) = tokenizer.bos().filter(|_| start) {
            tokens.insert(0, bos);
        }
        let text = app.generator.text.clone();
        let mut first = true;
        let write = move |ids: &[u32], last: bool, out: &mut String| {
            for id in ids {
                out.push_str(if std::mem::take(&mut first) { "" } else { "," });
                out.push_str(&if pieces { piece(&text.tokenizer, *id).to_string() } else { id.to_string() });
            }
            out.push_str(if last { "]}" } else { "" });
        };
        Ok(answer("{\"tokens\":[", tokens, caller, write))
    };
    read.await.unwrap_or_else(|e: ApiError| e.response(Protocol::OpenAi))
}

fn piece(tokenizer: &Tokenizer, id: u32) -> Value {
    match std::str::from_utf8(tokenizer.token_bytes(id).unwrap_or_default()) {
        Ok(text) => json!({"id": id, "piece": text}),
        // Half a character is given as its bytes.
        Err(_) => json!({"id": id, "piece": tokenizer.token_bytes(id)}),
    }
}

/// `POST /detokenize`
pub async fn detokenize(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    let read = async {
        let (mut fields, caller) = app.read(request).await?;
        let wrong = || ApiError::field("tokens", "tokens must be an array of token ids");
        let Some(Value::Array(ids)) = fields.take("tokens") else { return Err(wrong()) };
        app.finish(fields)?;
        let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong);
        let ids = ids.iter().map(id).collect::<Result<Vec<_>, _>>()?;
        let text = app.generator.text.clone();
        let mut decoder = text.tokenizer.decoder();
        let write = move |ids: &[u32], last: bool, out: &mut String| {
            let mut content: String = ids.iter().map(|id| decoder.push(&text.tokenizer, *id)).collect();
            if last {
                content.push_str(&decoder.finish());
            }
            let quoted = Value::from(content).to_string();
            out.push_str(&quoted[1..quoted.len() - 1]);
            out.push_str(if last { "\"}" } else { "" });
        };
        Ok(answer("{\"content\":\"", ids, caller, write))
    };
    read.await.unwrap_or_else(|e: ApiError| e.response(Protocol::OpenAi))
}

/// An answer of `begin` and what `write` makes of the tokens, a part at a time; it is told which is the last.
fn answer(
    begin: &'static str,
    tokens: Vec<u32>,
    caller: Caller,
    mut write: impl FnMut(&[u32], bool, &mut String) + Send + 'static,
) -> Response {
    caller.share.settle();
    // The tokens count for as long as they are here.
    let held = (tokens, caller);
    let mut left = Some(0);
    let next = move || {
        let (at, (tokens, _)) = (left?, &held);
        let end = tokens.len().min(at + PART);
        let last = end == tokens.len();
        left = Some(end).filter(|_| !last);
        let mut out = String::from(if at == 0 { begin } else { "" });
        write(&tokens[at..end], last, &mut out);
        Some(Ok::<_, Infallible>(Bytes::from(out)))
    };
    let body = Body::from_stream(tokio_stream::iter(std::iter::from_fn(next)));
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}
