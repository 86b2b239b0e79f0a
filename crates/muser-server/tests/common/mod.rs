//! A server over a device that plays scripts, so that a test decides what the model writes.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_docs_in_private_items, missing_docs)]

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use muser_core::device::check_rows;
use muser_core::engine::DraftMode;
use muser_core::{Device, DeviceError, DeviceInfo, Engine, Lane, Model, Observer, Pass, Route, Row, SeqId};
use muser_format::Gguf;
use muser_server::app::{App, ServerOptions};
use muser_server::generate::Generator;
use muser_server::intake::Intake;
use muser_server::metrics::Metrics;
use muser_server::saved::SavedSessions;
use muser_server::slots::{SlotOptions, Slots};
use muser_server::text::TextModel;
use muser_text::{ChatTemplate, Specials, Tokenizer, Vocab};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::Instant;
use tower::ServiceExt;

const MINI: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/glimmer-mini-Q8_0.gguf");

const RELEASE_TEMPLATE: &str = include_str!("../../../../tests/fixtures/chat/muse-glimmer.jinja");

/// glimmer-mini's shape, with a longer context, and its tokenizer; its weights are never read.
pub static MODEL: LazyLock<(Arc<Model>, Tokenizer)> = LazyLock::new(|| {
    let mut model = muser_core::model::open(Path::new(MINI), None).unwrap().0;
    model.plans.target.geometry.context = 1 << 16;
    let model = Arc::new(model);
    let vocab = Vocab::from_gguf(&Gguf::open(Path::new(MINI)).unwrap()).unwrap();
    (model, Tokenizer::new(vocab).unwrap())
});

pub fn encode(text: &str) -> Vec<u32> {
    MODEL.1.encode(text, Specials::Parse)
}

/// What a script device has been told and has seen; shared with the test.
#[derive(Default)]
pub struct Stage {
    /// Outputs by name: a prompt that contains `[[NAME]]` is answered with that script.
    scripts: Mutex<HashMap<String, Vec<u32>>>,
    /// Rows of each target pass, by sequence.
    pub passes: Mutex<Vec<Vec<(SeqId, usize)>>>,
    /// Closed: passes wait. Used to look at a server in the middle of its work.
    gate: Mutex<bool>,
    opened: Condvar,
    /// Passes that have come to a closed gate.
    pub held: AtomicUsize,
    /// Passes fail.
    pub broken: AtomicBool,
    pub open_sequences: Mutex<usize>,
    /// Passes whose logits have been asked for.
    pub read: AtomicUsize,
}

impl Stage {
    pub fn script(&self, name: &str, tokens: Vec<u32>) {
        self.scripts.lock().unwrap().insert(name.into(), tokens);
    }

    pub fn close_gate(&self) {
        *self.gate.lock().unwrap() = true;
    }

    pub fn open_gate(&self) {
        *self.gate.lock().unwrap() = false;
        self.opened.notify_all();
    }

    fn wait(&self) {
        let mut gate = self.gate.lock().unwrap();
        self.held.fetch_add(usize::from(*gate), Ordering::Relaxed);
        while *gate {
            gate = self.opened.wait(gate).unwrap();
        }
    }

    /// The token that follows a history by its script. No script is as long as the part that is looked at.
    fn next(&self, history: &[u32]) -> u32 {
        let history = &history[history.len().saturating_sub(6000)..];
        let tokenizer = &MODEL.1;
        let eot = tokenizer.special("<|eot|>").unwrap();
        let starts: Vec<usize> = history
            .iter()
            .scan(0, |at, t| {
                let start = *at;
                *at += tokenizer.token_bytes(*t).unwrap_or_default().len();
                Some(start)
            })
            .collect();
        let text = tokenizer.decode(history);
        let find = |from: usize, what: &[u8]| {
            text[from..].windows(what.len()).position(|w| w == what).map(|at| from + at)
        };
        let open = text.windows(2).rposition(|w| w == b"[[");
        let Some((open, close)) = open.and_then(|o| Some((o, find(o, b"]]")?))) else { return eot };
        let scripts = self.scripts.lock().unwrap();
        let Some(script) = scripts.get(&*String::from_utf8_lossy(&text[open + 2..close])) else { return eot };
        let header = b"<|start|>assistant";
        let begin = find(close, header).map_or(close + 2, |at| at + header.len());
        let written = starts.iter().filter(|s| **s >= begin).count();
        script.get(written).copied().unwrap_or(eot)
    }
}

struct Sequence {
    tokens: Vec<u32>,
    context: usize,
    /// Rings hold positions from here on.
    held: usize,
    high: usize,
}

pub struct ScriptDevice {
    stage: Arc<Stage>,
    max_rows: usize,
    window: usize,
    sequences: HashMap<SeqId, Sequence>,
    next: u32,
    logits: Vec<Vec<f32>>,
}

impl ScriptDevice {
    pub fn new(stage: Arc<Stage>, max_rows: usize) -> Self {
        let window = MODEL.0.geometry().window;
        ScriptDevice { stage, max_rows, window, sequences: HashMap::new(), next: 0, logits: vec![] }
    }

    fn get(&mut self, seq: SeqId) -> Result<&mut Sequence, DeviceError> {
        self.sequences.get_mut(&seq).ok_or(DeviceError::NoSequence(seq.0))
    }
}

impl Device for ScriptDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: "script".into(),
            name: "script".into(),
            lane: Lane::Strict,
            max_rows: self.max_rows,
            step_rows: self.max_rows,
            weight_bytes: 0,
        }
    }
    fn open(&mut self, context: usize) -> Result<SeqId, DeviceError> {
        self.next += 1;
        self.sequences.insert(SeqId(self.next), Sequence { tokens: vec![], context, held: 0, high: 0 });
        *self.stage.open_sequences.lock().unwrap() = self.sequences.len();
        Ok(SeqId(self.next))
    }
    fn close(&mut self, seq: SeqId) {
        self.sequences.remove(&seq);
        *self.stage.open_sequences.lock().unwrap() = self.sequences.len();
    }
    fn copy(&mut self, from: SeqId, to: SeqId, len: usize) -> Result<(), DeviceError> {
        let tokens = self.get(from)?.tokens[..len].to_vec();
        let held = len.saturating_sub(self.window);
        let to = self.get(to)?;
        (to.tokens, to.held, to.high) = (tokens, held, len);
        Ok(())
    }
    fn save(&mut self, seq: SeqId, len: usize) -> Result<Vec<u8>, DeviceError> {
        Ok(self.get(seq)?.tokens[..len].iter().flat_map(|t| t.to_le_bytes()).collect())
    }
    fn restore(&mut self, seq: SeqId, len: usize, state: &[u8]) -> Result<(), DeviceError> {
        let held = len.saturating_sub(self.window);
        let s = self.get(seq)?;
        s.tokens = state.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect();
        (s.held, s.high) = (held, len);
        assert_eq!(s.tokens.len(), len);
        Ok(())
    }
    fn run(&mut self, pass: Pass, rows: &[Row], _: Option<&mut dyn Observer>) -> Result<(), DeviceError> {
        self.stage.wait();
        if self.stage.broken.load(Ordering::Relaxed) {
            return Err(DeviceError::Backend("the stage is broken".into()));
        }
        let contexts: HashMap<SeqId, usize> = self.sequences.iter().map(|(id, s)| (*id, s.context)).collect();
        check_rows(&MODEL.0, pass, rows, self.max_rows, |seq| contexts.get(&seq).copied())?;
        let mut record: Vec<(SeqId, usize)> = vec![];
        for row in rows {
            match record.last_mut().filter(|(seq, _)| *seq == row.seq) {
                Some((_, n)) => *n += 1,
                None => record.push((row.seq, 1)),
            }
        }
        self.stage.passes.lock().unwrap().push(record);
        let (window, ring) = (self.window, self.window + self.max_rows);
        let vocab = MODEL.0.geometry().vocab;
        self.logits.clear();
        for row in rows {
            let pos = row.pos as usize;
            let s = self.get(row.seq)?;
            assert!(pos <= s.tokens.len(), "a hole before position {pos}");
            s.tokens.truncate(pos);
            s.tokens.push(row.token);
            s.high = s.high.max(pos + 1);
            s.held = s.held.max(s.high.saturating_sub(ring));
            let sees = (pos + 1).saturating_sub(window);
            assert!(sees >= s.held, "position {pos} sees {sees}, but the ring begins at {}", s.held);
            if row.logits {
                let next = self.stage.next(&self.sequences[&row.seq].tokens);
                let mut logits = vec![0.0; vocab];
                logits[next as usize] = 20.0;
                self.logits.push(logits);
            }
        }
        Ok(())
    }
    fn logits(&mut self, index: usize) -> Result<&[f32], DeviceError> {
        self.stage.read.store(self.stage.passes.lock().unwrap().len(), Ordering::Relaxed);
        Ok(&self.logits[index])
    }
    fn best(&mut self) -> Result<Vec<u32>, DeviceError> {
        Ok(self.logits.iter().map(|l| muser_core::device::argmax(l)).collect())
    }
    fn routes(&self, _: Pass, _: usize, _: usize) -> Vec<Route> {
        vec![]
    }
}

/// A server and the stage of its device.
pub struct Server {
    pub stage: Arc<Stage>,
    pub app: Arc<App>,
}

pub struct Setup {
    pub slots: SlotOptions,
    pub server: ServerOptions,
    pub max_rows: usize,
    pub free_calls: bool,
    /// Muse Glimmer's chat template instead of glimmer-mini's.
    pub release_template: bool,
    pub save_path: Option<PathBuf>,
    pub draft: DraftMode,
}

impl Default for Setup {
    fn default() -> Self {
        let slots = SlotOptions { slots: 4, context: 2048, host_bytes: 1 << 20, ..SlotOptions::default() };
        Setup {
            slots,
            server: ServerOptions::default(),
            max_rows: 64,
            free_calls: false,
            release_template: false,
            save_path: None,
            draft: DraftMode::Off,
        }
    }
}

impl Setup {
    pub fn start(self) -> Server {
        let stage = Arc::new(Stage::default());
        let (model, _) = &*MODEL;
        let device = Box::new(ScriptDevice::new(stage.clone(), self.max_rows));
        let saved = self.save_path.map(|p| SavedSessions::new(&p, model, &device.info()).unwrap());
        let saved = saved.map(Arc::new);
        let engine = Engine::new(device, model.clone(), self.draft);
        let metrics = Arc::new(Metrics::default());
        let slots = Slots::start(engine, self.slots, metrics.clone()).unwrap();
        let file = Gguf::open(Path::new(MINI)).unwrap();
        let mut text = TextModel::from_gguf(&file, "glimmer-mini".into(), model.geometry().vocab).unwrap();
        if self.release_template {
            text.template = ChatTemplate::new(RELEASE_TEMPLATE, "<|begin_of_text|>").unwrap();
        }
        let generator = Generator {
            text: Arc::new(text),
            slots,
            metrics,
            max_n: 8,
            timeout: None,
            free_calls: self.free_calls,
            post: Default::default(),
        };
        let intake = Intake::new(self.server.body_limit, self.server.body_memory);
        let app = App {
            generator,
            intake,
            options: self.server,
            started: Instant::now(),
            details: Default::default(),
            saved,
        };
        Server { stage, app: Arc::new(app) }
    }
}

impl Server {
    pub fn new() -> Self {
        Setup::default().start()
    }

    /// Scripts an output in the usual tokens.
    pub fn script(&self, name: &str, text: &str) {
        self.stage.script(name, encode(text));
    }

    pub async fn request(&self, request: Request<Body>) -> (StatusCode, String) {
        let response = muser_server::routes::router(self.app.clone()).oneshot(request).await.unwrap();
        let status = response.status();
        let bytes = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    pub async fn get(&self, path: &str) -> (StatusCode, String) {
        self.request(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub async fn post_text(&self, path: &str, body: &str) -> (StatusCode, String) {
        self.request(Request::post(path).body(Body::from(body.to_string())).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        let (status, text) = self.post_text(path, &body.to_string()).await;
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    /// A chat completion whose model writes the script `name`.
    pub async fn chat(&self, name: &str, more: Value) -> Value {
        let (status, body) = self.post("/v1/chat/completions", chat_body(name, more)).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        body
    }

    /// The same as a stream, put together again as a client would.
    pub async fn chat_streamed(&self, name: &str, more: Value) -> Value {
        let mut body = chat_body(name, more);
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let (status, text) = self.post_text("/v1/chat/completions", &body.to_string()).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        assemble(&text)
    }
}

fn chat_body(name: &str, more: Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": format!("[[{name}]]")}], "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
    body
}

/// The frames of an event stream.
pub fn frames(text: &str) -> Vec<Value> {
    let data = text.split("\n\n").filter_map(|f| f.lines().find_map(|l| l.strip_prefix("data: ")));
    data.filter(|d| *d != "[DONE]")
        .map(|d| serde_json::from_str(d).unwrap_or_else(|e| panic!("{e}: {d}")))
        .collect()
}

/// Puts the chunks of a chat stream together: the same body as without streaming.
fn assemble(text: &str) -> Value {
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let mut message = json!({});
    let (mut finish, mut usage, mut calls, mut logprobs) =
        (Value::Null, Value::Null, Vec::<Value>::new(), Vec::<Value>::new());
    let add = |at: &mut Value, text: &Value| {
        let whole = format!("{}{}", at.as_str().unwrap_or_default(), text.as_str().unwrap());
        *at = whole.into();
    };
    for frame in frames(text) {
        if let Some(error) = frame.get("error") {
            return json!({"error": error});
        }
        if !frame["usage"].is_null() {
            usage = frame["usage"].clone();
        }
        let Some(choice) = frame["choices"].get(0) else { continue };
        assert_eq!(choice["index"], 0);
        let delta = &choice["delta"];
        for key in ["content", "reasoning_content"] {
            delta.get(key).into_iter().for_each(|text| add(&mut message[key], text));
        }
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            match calls.get_mut(index) {
                Some(known) => add(&mut known["function"]["arguments"], &call["function"]["arguments"]),
                None => calls.push(json!({"function": call["function"]})),
            }
        }
        logprobs.extend(choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
        if !choice["finish_reason"].is_null() {
            assert!(finish.is_null(), "a second finish reason");
            finish = choice["finish_reason"].clone();
        }
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    json!({"choices": [{"message": message, "finish_reason": finish, "logprobs": {"content": logprobs}}], "usage": usage})
}

/// Reasoning, content, calls (name, arguments) and finish reason of a body's first choice.
pub fn outcome(body: &Value) -> (String, String, Vec<(String, Value)>, String) {
    let choice = &body["choices"][0];
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    let calls = calls.iter().map(|c| {
        let arguments = c["function"]["arguments"].as_str().unwrap();
        let parsed = serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{e}: {arguments}"));
        (text(&c["function"]["name"]), parsed)
    });
    let calls = calls.collect();
    let message = &choice["message"];
    (text(&message["reasoning_content"]), text(&message["content"]), calls, text(&choice["finish_reason"]))
}
