//! The routes: thin adapters from each protocol to the one way of generating.

mod anthropic;
mod chat;
mod completions;
mod llamacpp;
mod models;
mod ollama;
mod openai;
mod ops;
mod responses;
mod slots;
mod tokens;

use crate::app::{App, guard, protocol};
use crate::error::{ApiError, Kind};
use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use axum::routing::{get, post};
use std::sync::Arc;

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::route))
        .route("/chat/completions", post(chat::route))
        .route("/v1/chat/completions/input_tokens", post(chat::count))
        .route("/chat/completions/input_tokens", post(chat::count))
        .route("/v1/completions", post(completions::route))
        .route("/v1/responses", post(responses::route))
        .route("/responses", post(responses::route))
        .route("/v1/responses/input_tokens", post(responses::count))
        .route("/v1/embeddings", post(llamacpp::embeddings))
        .route("/embedding", post(llamacpp::embeddings))
        .route("/v1/models", get(models::list))
        .route("/models", get(models::list))
        .route("/v1/models/{name}", get(models::one))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count))
        .route("/completion", post(llamacpp::completion))
        .route("/completions", post(llamacpp::completion))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/apply-template", post(llamacpp::apply_template))
        .route("/props", get(llamacpp::props))
        .route("/slots", get(slots::list))
        .route("/slots/{id}", post(slots::act))
        .route("/infill", post(llamacpp::infill))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::ps))
        .route("/api/show", post(ollama::show))
        .route("/api/version", get(ollama::version))
        .route("/api/embed", post(llamacpp::ollama_embeddings))
        .route("/api/embeddings", post(llamacpp::ollama_embeddings))
        .route("/health", get(ops::health))
        .route("/v1/health", get(ops::health))
        .route("/metrics", get(ops::metrics))
        .route("/", get(ops::page))
        .fallback(unknown)
        .method_not_allowed_fallback(method)
        .layer(axum::middleware::from_fn_with_state(app.clone(), guard))
        .with_state(app)
}

async fn unknown(request: Request) -> Response {
    let path = request.uri().path();
    ApiError::new(Kind::NotFound, format!("there is no route {path}")).response(protocol(path))
}

async fn method(request: Request) -> Response {
    let path = request.uri().path();
    ApiError::new(Kind::Method, format!("{path} does not take {}", request.method())).response(protocol(path))
}
