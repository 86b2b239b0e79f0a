//! Streams to clients: server-sent events and lines of JSON.

use crate::generate::{Generation, Output};
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::convert::Infallible;
use std::fmt::Write;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};
use tokio_stream::Stream;

/// Silence after which a comment is sent, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Writes a protocol's stream.
pub trait Encoder: Send + Unpin + 'static {
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

/// A generation's frames. Its outputs wait in its own queue while the reader is slow.
struct Frames<E> {
    generation: Generation,
    encoder: E,
    last: Instant,
    silence: Pin<Box<Sleep>>,
    begun: bool,
    ended: bool,
}

impl<E: Encoder> Frames<E> {
    /// Writes what has come; none at the end.
    fn poll_frames(&mut self, cx: &mut Context<'_>) -> Poll<Option<String>> {
        let mut out = String::new();
        if self.ended {
            return Poll::Ready(None);
        }
        if !std::mem::replace(&mut self.begun, true) {
            self.encoder.begin(&mut out);
        }
        // What is ready goes out in one piece.
        loop {
            match self.generation.poll_next(cx) {
                Poll::Ready(Some((choice, output))) => self.encoder.output(choice, output, &mut out),
                Poll::Ready(None) => {
                    self.encoder.end(&mut out);
                    self.ended = true;
                    return Poll::Ready(Some(out).filter(|out| !out.is_empty()));
                }
                Poll::Pending => break,
            }
        }
        // Moving a timer costs more than looking at a clock.
        let now = Instant::now();
        if !out.is_empty() {
            self.last = now;
        }
        while self.silence.as_mut().poll(cx).is_ready() {
            if now >= self.last + KEEP_ALIVE {
                self.last = now;
                out.push_str(self.encoder.ping());
            }
            let next = self.last + KEEP_ALIVE;
            self.silence.as_mut().reset(next);
        }
        if out.is_empty() { Poll::Pending } else { Poll::Ready(Some(out)) }
    }
}

impl<E: Encoder> Stream for Frames<E> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_frames(cx).map(|frames| Some(Ok(Bytes::from(frames?))))
    }
}

/// Streams a generation. Once the client is gone the generation is dropped, which cancels it.
pub fn response(generation: Generation, encoder: impl Encoder, content_type: &'static str) -> Response {
    let last = Instant::now();
    let silence = Box::pin(tokio::time::sleep(KEEP_ALIVE));
    let frames = Frames { generation, encoder, last, silence, begun: false, ended: false };
    let headers = [(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(frames)).into_response()
}
