//! OpenAI's `/v1/models`.

use crate::app::App;
use crate::error::{ApiError, Kind, Protocol};
use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /v1/models`
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model(&app)]}))
}

/// `GET /v1/models/{name}`
pub async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response {
    if name == app.generator.text.name {
        return Json(model(&app)).into_response();
    }
    let why = format!("model {name:?} is not here; this server runs {:?}", app.generator.text.name);
    ApiError::new(Kind::NotFound, why).response(Protocol::OpenAi)
}

fn model(app: &App) -> Value {
    let details = &app.details;
    json!({
        "id": app.generator.text.name,
        "object": "model",
        "created": details.created,
        "owned_by": "muser",
        "meta": {
            "n_vocab": app.generator.text.grammars.vocab(),
            "n_ctx": app.generator.slots.context(),
            "n_ctx_train": details.context,
            "size": details.bytes,
            "n_params": details.parameters,
        },
    })
}
