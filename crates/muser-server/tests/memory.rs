//! What a hostile body costs while it is read, and while its request waits: never more than it is charged.

mod common;

use common::Setup;
use muser_server::app::ServerOptions;
use muser_server::intake::cost;
use muser_server::slots::SlotOptions;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the bytes of this whole program, so it holds one test only.
struct Counting;
static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promises are System's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are System's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

/// Bytes of a body's hostile part.
const BYTES: usize = 64 << 10;
/// What any request costs: the router, the answer, the session and the sampler's tables.
const ANY: usize = 512 << 10;

/// What a byte of a schema or of tools costs besides, while their grammar is compiled; one is compiled at a time.
const GRAMMAR: usize = 1024;

/// What is repeated in a body, between its beginning and its end.
const PARTS: [&str; 11] = [
    "0",
    "\"\"",
    "[]",
    "[0]",
    "{}",
    "{\"\":0}",
    "{\"\":{\"\":[0]}}",
    "{\"role\":\"user\",\"content\":\"\"}",
    "{\"function\":{\"name\":\"a\"}}",
    "{\"type\":\"text\",\"text\":\"\"}",
    "{\"type\":\"function_call\",\"name\":\"a\"}",
];

/// Where it is repeated.
const PLACES: [(&str, &str, &str); 14] = [
    ("/v1/chat/completions", r#"{"messages":["#, "]}"),
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"a","x":["#, "]}]}"),
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":["#, "]}]}"),
    ("/v1/chat/completions", r#"{"messages":[{"role":"assistant","tool_calls":["#, "]}]}"),
    (
        "/v1/chat/completions",
        r#"{"messages":[{"role":"assistant","content":"a","tool_calls":[{"function":{"name":"a","arguments":{"a":["#,
        "]}}}]}]}",
    ),
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"a"}],"tools":["#, "]}"),
    (
        "/v1/chat/completions",
        r#"{"n":8,"messages":[{"role":"user","content":"a"}],"tools":[{"function":{"name":"a","parameters":{"a":["#,
        "]}}}]}",
    ),
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"a"}],"json_schema":{"enum":["#, "]}}"),
    (
        "/v1/chat/completions",
        r#"{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":["#,
        "]}}",
    ),
    ("/v1/responses", r#"{"input":["#, "]}"),
    ("/v1/messages", r#"{"messages":[{"role":"assistant","content":["#, "]}]}"),
    (
        "/v1/messages",
        r#"{"messages":[{"role":"assistant","content":[{"type":"tool_use","name":"a","input":{"a":["#,
        "]}}]}]}",
    ),
    ("/api/chat", r#"{"messages":["#, "]}"),
    ("/completion", r#"{"prompt":["#, "]}"),
];

/// Texts, and where they stand.
const TEXTS: [&str; 6] = ["a", "|", "<|eot|>", "\\u0000", "é", "1 "];
const TEXT_PLACES: [(&str, &str, &str); 5] = [
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":""#, "\"}]}"),
    ("/v1/chat/completions", r#"{"messages":[{"role":"assistant","content":"a","reasoning":""#, "\"}]}"),
    ("/v1/completions", r#"{"prompt":""#, "\"}"),
    ("/tokenize", r#"{"content":""#, "\"}"),
    ("/apply-template", r#"{"messages":[{"role":"user","content":""#, "\"}]}"),
];

fn bodies() -> Vec<(&'static str, String)> {
    let mut all = vec![];
    for (path, begin, end) in PLACES {
        for part in PARTS {
            let parts = vec![part; BYTES / (part.len() + 1)].join(",");
            all.push((path, format!("{begin}{parts}{end}")));
        }
        let keys: Vec<String> = (0..BYTES / 9).map(|i| format!("\"{i:x}\":0")).collect();
        all.push((path, format!("{begin}{{{}}}{end}", keys.join(","))));
    }
    for (path, begin, end) in TEXT_PLACES {
        all.extend(TEXTS.map(|text| (path, format!("{begin}{}{end}", text.repeat(BYTES / text.len())))));
    }
    // JSON within a string, spelled so that no bracket shows.
    let hidden = vec![r#"\u007b\"\":0\u007d"#; BYTES / 19].join(",");
    let begin =
        r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"a","arguments":"{\"a\":["#;
    all.push(("/v1/chat/completions", format!("{begin}{hidden}]}}\"}}}}]}}]}}")));
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn no_body_costs_more_than_it_is_charged() {
    let slots = SlotOptions { slots: 8, context: 1 << 16, ..SlotOptions::default() };
    let options = ServerOptions { body_memory: 4 << 30, ..ServerOptions::default() };
    let server = Setup { slots, server: options, ..Setup::default() }.start();
    for (path, body) in bodies() {
        // Under every route's name for it.
        let body = body.replacen('{', r#"{"max_tokens":4,"max_output_tokens":4,"n_predict":4,"#, 1);
        let start: String = body.chars().take(140).collect();
        let grammar =
            if body.contains("tools") || body.contains("schema") { GRAMMAR * body.len() } else { 0 };
        let (charged, any) = (cost(body.as_bytes()), ANY + grammar);
        // The stage's own record is no part of a request.
        server.stage.passes.lock().unwrap().clear();
        let before = NOW.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let (status, _) = server.post_text(path, &body).await;
        let peak = PEAK.load(Ordering::Relaxed) - before;
        assert!(peak <= charged + any, "{path} {status}: {peak} bytes, charged {charged}: {start}");
        // While the request runs.
        server.stage.passes.lock().unwrap().clear();
        server.stage.close_gate();
        let (held, before) = (server.stage.held.load(Ordering::Relaxed), NOW.load(Ordering::Relaxed));
        let post = server.post_text(path, &body);
        let check = async {
            while server.stage.held.load(Ordering::Relaxed) == held {
                tokio::task::yield_now().await;
            }
            // The request is let go just after its work has been handed over.
            let most = before + charged / 4 + any;
            while NOW.load(Ordering::Relaxed) > most {
                tokio::task::yield_now().await;
            }
            server.stage.open_gate();
            std::future::pending::<()>().await
        };
        tokio::select! {
            _ = post => {}
            () = check => {}
        }
        server.stage.open_gate();
    }
}
