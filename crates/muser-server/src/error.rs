//! What can go wrong with a request, and how each protocol says so: one table.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Kinds of failure; each has one row in [`Kind::row`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong; `param` says where.
    Invalid,
    /// No key, or a wrong one.
    Unauthorized,
    /// No such route or model.
    NotFound,
    /// The route exists for another method.
    Method,
    /// The body is larger than allowed.
    TooLarge,
    /// Prompt and answer do not fit the context.
    Context,
    /// Asked for something that this model or server cannot do.
    Unsupported,
    /// Too many requests wait.
    Busy,
    /// The server is shutting down.
    Closing,
    /// The request's time was up.
    Timeout,
    /// The engine failed.
    Internal,
}

/// The protocols that the server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// OpenAI; llama.cpp's own routes report errors alike.
    OpenAi,
    /// Anthropic.
    Anthropic,
    /// Ollama.
    Ollama,
}

/// A failed request.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// What kind.
    pub kind: Kind,
    /// What is wrong, where, and the mend.
    pub message: String,
    /// The field of the request.
    pub param: Option<String>,
}

impl Kind {
    /// Status, OpenAI's type and code, Anthropic's type.
    fn row(self) -> (StatusCode, &'static str, Option<&'static str>, &'static str) {
        match self {
            Kind::Invalid => {
                (StatusCode::BAD_REQUEST, "invalid_request_error", None, "invalid_request_error")
            }
            Kind::Unauthorized => (
                StatusCode::UNAUTHORIZED,
                "authentication_error",
                Some("invalid_api_key"),
                "authentication_error",
            ),
            Kind::NotFound => {
                (StatusCode::NOT_FOUND, "invalid_request_error", Some("not_found"), "not_found_error")
            }
            Kind::Method => {
                (StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", None, "invalid_request_error")
            }
            Kind::TooLarge => (
                StatusCode::PAYLOAD_TOO_LARGE,
                "invalid_request_error",
                Some("request_too_large"),
                "request_too_large",
            ),
            Kind::Context => (
                StatusCode::BAD_REQUEST,
                "invalid_request_error",
                Some("context_length_exceeded"),
                "invalid_request_error",
            ),
            Kind::Unsupported => (
                StatusCode::NOT_IMPLEMENTED,
                "not_supported_error",
                Some("not_supported"),
                "invalid_request_error",
            ),
            Kind::Busy => {
                (StatusCode::SERVICE_UNAVAILABLE, "overloaded_error", Some("overloaded"), "overloaded_error")
            }
            Kind::Closing => (
                StatusCode::SERVICE_UNAVAILABLE,
                "overloaded_error",
                Some("shutting_down"),
                "overloaded_error",
            ),
            Kind::Timeout => (StatusCode::GATEWAY_TIMEOUT, "timeout_error", Some("timeout"), "timeout_error"),
            Kind::Internal => {
                (StatusCode::INTERNAL_SERVER_ERROR, "server_error", Some("engine"), "api_error")
            }
        }
    }
}

impl ApiError {
    /// An error of a kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        ApiError { kind, message: message.into(), param: None }
    }

    /// A wrong field.
    pub fn field(name: &str, message: impl Into<String>) -> Self {
        ApiError { kind: Kind::Invalid, message: message.into(), param: Some(name.to_string()) }
    }

    /// The status code.
    pub fn status(&self) -> StatusCode {
        self.kind.row().0
    }

    /// The body, as the protocol writes it.
    pub fn body(&self, protocol: Protocol) -> Value {
        let (_, kind, code, anthropic) = self.kind.row();
        match protocol {
            Protocol::OpenAi => {
                json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": code}})
            }
            Protocol::Anthropic => {
                json!({"type": "error", "error": {"type": anthropic, "message": self.message}})
            }
            Protocol::Ollama => json!({"error": self.message}),
        }
    }

    /// The response.
    pub fn response(&self, protocol: Protocol) -> Response {
        let body = (self.status(), axum::Json(self.body(protocol)));
        let mut response = body.into_response();
        if self.kind == Kind::Busy {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<muser_text::TextError> for ApiError {
    fn from(error: muser_text::TextError) -> Self {
        ApiError { kind: Kind::Invalid, message: error.to_string(), param: Some("messages".into()) }
    }
}

impl From<crate::constrain::GrammarError> for ApiError {
    fn from(error: crate::constrain::GrammarError) -> Self {
        let busy = matches!(error, crate::constrain::GrammarError::Busy);
        ApiError::new(if busy { Kind::Busy } else { Kind::Invalid }, error.to_string())
    }
}
