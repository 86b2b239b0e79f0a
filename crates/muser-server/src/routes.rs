//! The routes: thin adapters from each protocol to the one way of generating.

mod chat;
mod completions;
mod models;
mod openai;

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
        .route("/v1/completions", post(completions::route))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{name}", get(models::one))
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
