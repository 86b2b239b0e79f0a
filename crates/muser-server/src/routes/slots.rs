//! llama.cpp's routes for looking at slots, and for saving, restoring and erasing their sessions.

use crate::app::App;
use crate::error::{ApiError, Kind, Protocol};
use crate::saved::{SavedError, SavedSessions};
use crate::slots::{SlotFault, SlotStatus};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// `GET /slots`
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let slots = &app.generator.slots;
    let slot = |(id, s): (usize, SlotStatus)| {
        json!({
            "id": id, "n_ctx": slots.context(), "is_processing": s.busy, "is_prefilling": s.prefilling,
            "n_cached": s.tokens, "n_prompt_tokens": s.prompt, "n_decoded": s.generated,
        })
    };
    Json(slots.status().into_iter().enumerate().map(slot).collect())
}

/// `POST /slots/{id}?action=save|restore|erase`
pub async fn act(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    match answer(app, request).await {
        Ok(body) => Json(body).into_response(),
        Err(error) => error.response(Protocol::OpenAi),
    }
}

async fn answer(app: Arc<App>, request: axum::extract::Request) -> Result<Value, ApiError> {
    let why = "sessions are not saved by this server; start it with --slot-save-path";
    let saved = app.saved.clone().ok_or_else(|| ApiError::new(Kind::Unsupported, why))?;
    let slots = &app.generator.slots;
    let id = request.uri().path().rsplit('/').next().and_then(|id| id.parse::<usize>().ok());
    let id = id.ok_or_else(|| ApiError::field("id_slot", "the path must end with a slot's number"))?;
    let query = request.uri().query().unwrap_or_default().to_string();
    let action = query.split('&').find_map(|pair| pair.strip_prefix("action="));
    let start = Instant::now();
    let ms = || start.elapsed().as_secs_f64() * 1e3;
    match action {
        Some("save") => {
            let name = file_name(&app, &saved, request).await?;
            let session = slots.save(id).await?;
            let (tokens, file) = (session.tokens.len(), name.clone());
            let written = blocking(move || saved.write(&file, &session)).await?;
            Ok(json!({
                "id_slot": id, "filename": name, "n_saved": tokens, "n_written": written, "timings": {"save_ms": ms()},
            }))
        }
        Some("restore") => {
            let name = file_name(&app, &saved, request).await?;
            let (file, context) = (name.clone(), slots.context());
            let (session, read) = blocking(move || saved.read(&file, context)).await?;
            let tokens = slots.restore(id, session).await?;
            Ok(json!({
                "id_slot": id, "filename": name, "n_restored": tokens, "n_read": read, "timings": {"restore_ms": ms()},
            }))
        }
        Some("erase") => Ok(json!({"id_slot": id, "n_erased": slots.erase(id).await?})),
        _ => {
            Err(ApiError::field("action", "action must be save, restore or erase: POST /slots/0?action=save"))
        }
    }
}

async fn file_name(
    app: &App,
    saved: &SavedSessions,
    request: axum::extract::Request,
) -> Result<String, ApiError> {
    let (mut fields, _caller) = app.read(request).await?;
    let name =
        fields.string("filename")?.ok_or_else(|| ApiError::field("filename", "filename is missing"))?;
    app.finish(fields)?;
    saved.check(&name)?;
    Ok(name)
}

/// Files are read, written and summed up where nobody else waits.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SavedError> + Send + 'static,
) -> Result<T, ApiError> {
    let joined = tokio::task::spawn_blocking(work).await;
    Ok(joined.map_err(|error| ApiError::new(Kind::Internal, error.to_string()))??)
}

impl From<SavedError> for ApiError {
    fn from(error: SavedError) -> Self {
        let kind = match error {
            SavedError::Missing(_) => Kind::NotFound,
            SavedError::Io { .. } => Kind::Internal,
            SavedError::Name(_) | SavedError::Bad { .. } => Kind::Invalid,
        };
        ApiError { kind, message: error.to_string(), param: Some("filename".into()) }
    }
}

impl From<SlotFault> for ApiError {
    fn from(fault: SlotFault) -> Self {
        let kind = match fault {
            SlotFault::Unknown(_) => Kind::NotFound,
            SlotFault::Busy(_) => Kind::Busy,
            SlotFault::Empty(_) | SlotFault::Refused(_) => Kind::Invalid,
            SlotFault::Closing => Kind::Closing,
        };
        ApiError::new(kind, fault.to_string())
    }
}
