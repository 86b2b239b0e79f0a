//! What every route shares: the generator, the server's options, reading a request, guarding a route.

use crate::error::{ApiError, Kind, Protocol};
use crate::fields::Fields;
use crate::generate::Generator;
use crate::intake::{Intake, Share};
use crate::saved::SavedSessions;
use crate::text::blocking;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::collections::hash_map::DefaultHasher;
use std::hash::{BuildHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// How the server meets its clients.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Keys that are accepted; none: everybody is.
    pub keys: Vec<String>,
    /// Origins whose pages may call the server; `*` for all.
    pub cors: Vec<String>,
    /// Refuse unknown fields.
    pub strict: bool,
    /// Longest body in bytes.
    pub body_limit: usize,
    /// Bytes of memory that all bodies may take while they come in, are read, and their requests run.
    pub body_memory: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            keys: vec![],
            cors: vec![],
            strict: false,
            body_limit: 4 << 20,
            body_memory: 512 << 20,
        }
    }
}

/// The server's state.
pub struct App {
    /// Runs requests.
    pub generator: Generator,
    /// How the server meets its clients.
    pub options: ServerOptions,
    /// Receives bodies.
    pub intake: Intake,
    /// When it started.
    pub started: Instant,
    /// What the model's file says of itself: name and value.
    pub details: crate::ModelDetails,
    /// Where slots' sessions are saved, if they may be.
    pub saved: Option<Arc<SavedSessions>>,
}

/// The address at the other end.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// Who sent a request, and the memory that its body has been given.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The same for all requests of a client.
    pub id: u64,
    /// Given back with the last copy.
    pub share: Arc<Share>,
}

impl App {
    /// Reads a request's body as a JSON object. The caller is to be kept for as long as anything of the body is.
    pub async fn read(&self, request: Request) -> Result<(Fields, Caller), ApiError> {
        let id = client(&request);
        let body = self.intake.take(request.into_body()).await?;
        let fields = blocking(|| Fields::parse(&body.bytes))?;
        Ok((fields, Caller { id, share: body.share.clone() }))
    }

    /// Ends the reading of a request's fields.
    pub fn finish(&self, fields: Fields) -> Result<(), ApiError> {
        fields.finish(self.options.strict)
    }

    /// Checks the model that a request names: any is served by the one that is there, unless requests are strict.
    pub fn check_model(&self, name: Option<String>) -> Result<(), ApiError> {
        let served = &self.generator.text.name;
        match name {
            Some(name) if self.options.strict && name != *served => {
                let message = format!("model {name:?} is not here; this server runs {served:?}");
                Err(ApiError { kind: Kind::NotFound, message, param: Some("model".into()) })
            }
            _ => Ok(()),
        }
    }
}

/// Who asks: the key where one is given, else the address.
fn client(request: &Request) -> u64 {
    let mut hasher = DefaultHasher::new();
    match key(request.headers()) {
        Some(key) => key.hash(&mut hasher),
        None => request.extensions().get::<ConnectInfo<Peer>>().map(|peer| peer.0.0.ip()).hash(&mut hasher),
    }
    hasher.finish()
}

fn key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
    let bearer = text("authorization").and_then(|v| v.strip_prefix("Bearer ").or(v.strip_prefix("bearer ")));
    bearer.or(text("x-api-key")).or(text("api-key")).map(str::trim)
}

/// Compares without saying by its time how much was right.
fn same(a: &str, b: &str) -> bool {
    let apart = a.bytes().zip(b.bytes()).fold(0, |apart, (a, b)| apart | (a ^ b));
    a.len() == b.len() && apart == 0
}

/// The protocol in which a path's errors are written.
pub fn protocol(path: &str) -> Protocol {
    match path {
        p if p.starts_with("/v1/messages") => Protocol::Anthropic,
        p if p.starts_with("/api/") => Protocol::Ollama,
        _ => Protocol::OpenAi,
    }
}

/// Paths that need no key: they tell nothing and cost nothing.
const OPEN: [&str; 4] = ["/", "/health", "/v1/health", "/favicon.ico"];

/// Checks keys, and answers browsers' questions about other origins.
pub async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).cloned();
    let allowed =
        origin.filter(|o| app.options.cors.iter().any(|c| c == "*" || c.as_bytes() == o.as_bytes()));
    let path = request.uri().path().to_string();
    let open = OPEN.contains(&path.as_str());
    let known = key(request.headers()).is_some_and(|key| app.options.keys.iter().any(|k| same(k, key)));
    let mut response = if request.method() == Method::OPTIONS {
        StatusCode::NO_CONTENT.into_response()
    } else if app.options.keys.is_empty() || open || known {
        let method = request.method().clone();
        let start = Instant::now();
        let response = next.run(request).await;
        tracing::info!(%method, %path, status = response.status().as_u16(), ms = start.elapsed().as_millis() as u64, "request");
        response
    } else {
        let why = "a valid API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`";
        ApiError::new(Kind::Unauthorized, why).response(protocol(&path))
    };
    if let Some(origin) = allowed {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*, authorization"));
    }
    response
}

/// A name that no other answer has.
pub fn unique(prefix: &str) -> String {
    let random = || std::hash::RandomState::new().build_hasher().finish();
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A time as RFC 3339 writes it, in UTC.
pub fn iso(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years of 365.2425 days that begin in March, so that a leap day ends one (Howard Hinnant's days-to-civil).
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    #[test]
    fn iso_times() {
        // From `date -u -d @N`.
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_827_696, "2000-02-29T12:34:56Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
        ] {
            assert_eq!(super::iso(seconds), text);
        }
    }
}
