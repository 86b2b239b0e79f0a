//! Streams to clients: server-sent events and lines of JSON.

use crate::generate::{Generation, Output};
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::convert::Infallible;
use std::fmt::Write;
use std::time::Duration;
use tokio::sync::mpsc::channel;
use tokio_stream::wrappers::ReceiverStream;

/// Silence after which a comment is sent, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Chunks that may wait for a slow reader; its tokens then wait in the generation's own queue.
const CHUNKS: usize = 16;

/// Writes a protocol's stream.
pub trait Encoder: Send + 'static {
    /// The frames of one output.
    fn output(&mut self, choice: usize, output: Output, out: &mut String);
    /// The frames before the first output.
    fn begin(&mut self, _out: &mut String) {}
    /// The frames after the last output.
    fn end(&mut self, _out: &mut String) {}
    /// What is sent in silence.
    fn ping(&self) -> &'static str {
        ": waiting\n\n"
    }
}

/// Content type of server-sent events.
pub const SSE: &str = "text/event-stream";
/// Content type of lines of JSON.
pub const LINES: &str = "application/x-ndjson";

/// Adds a frame without a name.
pub fn data(out: &mut String, value: &Value) {
    // Writing to a String cannot fail.
    let _ = write!(out, "data: {value}\n\n");
}

/// Adds a frame with the name of its event.
pub fn event(out: &mut String, name: &str, value: &Value) {
    let _ = write!(out, "event: {name}\ndata: {value}\n\n");
}

/// Streams a generation. Once the client is gone the generation is dropped, which cancels it.
pub fn response(
    mut generation: Generation,
    mut encoder: impl Encoder,
    content_type: &'static str,
) -> Response {
    let (sender, receiver) = channel::<Result<Bytes, Infallible>>(CHUNKS);
    tokio::spawn(async move {
        let mut out = String::new();
        encoder.begin(&mut out);
        loop {
            if !out.is_empty() && sender.send(Ok(Bytes::from(std::mem::take(&mut out)))).await.is_err() {
                return;
            }
            let next = tokio::select! {
                next = tokio::time::timeout(KEEP_ALIVE, generation.next()) => next,
                () = sender.closed() => return,
            };
            match next {
                Err(_) => out.push_str(encoder.ping()),
                Ok(None) => break,
                Ok(Some((choice, output))) => {
                    encoder.output(choice, output, &mut out);
                    // What is ready goes out in one piece.
                    while let Some((choice, output)) = generation.ready() {
                        encoder.output(choice, output, &mut out);
                    }
                }
            }
        }
        encoder.end(&mut out);
        if !out.is_empty() {
            let _ = sender.send(Ok(Bytes::from(out))).await;
        }
    });
    let headers = [(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(ReceiverStream::new(receiver))).into_response()
}
