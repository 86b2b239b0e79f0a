//! Health, metrics and the web page.

use crate::app::App;
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::sync::Arc;

/// Failures in a row after which the server calls itself unhealthy.
const SICK: u64 = 3;

/// `GET /health`: whether requests can be served, not whether the process runs.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let failed = app.generator.metrics.failed_in_a_row.get();
    if !app.generator.slots.alive() {
        let body = json!({"status": "error", "reason": "the engine has stopped; restart the server"});
        return (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    }
    if failed >= SICK {
        let reason = format!("the last {failed} generations failed in the engine; see the log");
        return (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "error", "reason": reason})))
            .into_response();
    }
    Json(json!({"status": "ok"})).into_response()
}

/// `GET /metrics`
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let slots = app.generator.slots.status();
    let count = |of: fn(&crate::slots::SlotStatus) -> bool| slots.iter().filter(|s| of(s)).count() as u64;
    let tokens = slots.iter().map(|s| s.tokens as u64).sum();
    let gauges = [
        ("slots", "Slots", slots.len() as u64),
        ("slots_busy", "Slots in which a generation runs", count(|s| s.busy)),
        ("slots_prefilling", "Slots whose prompt is being computed", count(|s| s.prefilling)),
        ("queue_depth", "Generations that wait for a slot", app.generator.slots.waiting() as u64),
        ("cached_session_tokens", "Tokens in the slots' caches", tokens),
        ("host_cache_bytes", "Bytes of saved sessions", app.generator.metrics.host_cache_bytes.get()),
        ("uptime_seconds", "Time since the start", app.started.elapsed().as_secs()),
    ];
    let text = app.generator.metrics.render(&gauges);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// `GET /`
pub async fn page() -> Response {
    let policy = "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";
    let headers =
        [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, policy)];
    (headers, include_str!("../web/index.html")).into_response()
}
