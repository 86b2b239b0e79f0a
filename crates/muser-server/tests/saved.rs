//! Sessions saved to and restored from disk by llama.cpp's routes.
#![allow(clippy::unwrap_used)]

mod common;

use axum::http::StatusCode;
use common::{Server, Setup, outcome};
use muser_core::{DeviceInfo, Lane};
use muser_server::saved::{SavedSession, SavedSessions};
use muser_server::slots::SlotOptions;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("saved").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn server(folder: &Path) -> Server {
    let slots = SlotOptions { slots: 2, context: 2048, ..SlotOptions::default() };
    let server = Setup { slots, save_path: Some(folder.into()), ..Setup::default() }.start();
    server.script("one", " to=user<|message|>First answer.<|eot|>");
    server.script("two", " to=user<|message|>Second answer.<|eot|>");
    server
}

async fn act(server: &Server, slot: &str, action: &str, name: &str) -> (StatusCode, Value) {
    server.post(&format!("/slots/{slot}?action={action}"), json!({"filename": name})).await
}

fn messages(turns: usize) -> Value {
    let words = "words that fill the prompt ".repeat(100);
    let mut all = vec![json!({"role": "user", "content": format!("{words}[[one]]")})];
    if turns == 2 {
        all.push(json!({"role": "assistant", "content": "First answer."}));
        all.push(json!({"role": "user", "content": "[[two]]"}));
    }
    all.into()
}

/// Text, prompt tokens and cached tokens of a turn.
async fn turn(server: &Server, turns: usize) -> (String, u64, u64) {
    let body = json!({"messages": messages(turns), "temperature": 0});
    let (status, body) = server.post("/v1/chat/completions", body).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    let usage = &body["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (outcome(&body).1, usage["prompt_tokens"].as_u64().unwrap(), cached)
}

async fn tokens(server: &Server) -> Vec<u64> {
    let (_, text) = server.get("/slots").await;
    let slots: Value = serde_json::from_str(&text).unwrap();
    slots.as_array().unwrap().iter().map(|s| s["n_cached"].as_u64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_server_goes_on_where_one_was() {
    let folder = folder("round-trip");
    let first = server(&folder);
    turn(&first, 1).await;
    let held = tokens(&first).await;
    let (status, saved) = act(&first, "0", "save", "a session.bin").await;
    assert_eq!(status, StatusCode::OK, "{saved}");
    assert_eq!((&saved["id_slot"], &saved["n_saved"]), (&json!(0), &json!(held[0])));
    assert_eq!(saved["n_written"], std::fs::metadata(folder.join("a session.bin")).unwrap().len());
    let want = turn(&first, 2).await;
    assert_eq!((want.0.as_str(), want.2), ("Second answer.", held[0]));

    let second = server(&folder);
    let (status, restored) = act(&second, "1", "restore", "a session.bin").await;
    assert_eq!(status, StatusCode::OK, "{restored}");
    assert_eq!((&restored["n_restored"], &restored["n_read"]), (&saved["n_saved"], &saved["n_written"]));
    assert_eq!(tokens(&second).await, [0, held[0]]);
    assert_eq!(turn(&second, 2).await, want);

    // Erased: computed again. (No host memory in this server.)
    let (status, erased) = act(&second, "1", "erase", "").await;
    assert_eq!((status, erased["n_erased"].as_u64().unwrap() > held[0]), (StatusCode::OK, true));
    assert_eq!(tokens(&second).await, [0, 0]);
    assert_eq!(turn(&second, 2).await.2, 0);
    // A session is replaced as a whole, and nothing else is left in the folder.
    act(&second, "0", "save", "a session.bin").await;
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    assert!(*second.stage.open_sequences.lock().unwrap() <= 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_files_change_nothing() {
    let folder = folder("hostile");
    let server = server(&folder);
    turn(&server, 1).await;
    act(&server, "0", "save", "good").await;
    let good = std::fs::read(folder.join("good")).unwrap();
    let mut files: Vec<(String, Vec<u8>)> =
        vec![("empty".into(), vec![]), ("text".into(), b"hello".to_vec())];
    for len in (0..70).chain([good.len() / 2, good.len() - 1]) {
        files.push((format!("cut-{len}"), good[..len].to_vec()));
    }
    for at in (0..70).chain([good.len() / 3, good.len() / 2, good.len() - 33, good.len() - 1]) {
        let mut changed = good.clone();
        changed[at] ^= 0x40;
        files.push((format!("flip-{at}"), changed));
    }
    files.push(("long".into(), [&good[..], b"x"].concat()));
    // Counts that would overflow, or ask for all memory.
    for (name, at) in [("tokens", 44), ("state", 52)] {
        let mut changed = good.clone();
        changed[at..at + 8].fill(0xff);
        files.push((name.into(), changed.clone()));
        changed[at..at + 8].copy_from_slice(&(1u64 << 62).to_le_bytes());
        files.push((format!("{name}-large"), changed));
    }
    let before = tokens(&server).await;
    for (name, bytes) in files {
        std::fs::write(folder.join(&name), bytes).unwrap();
        for slot in ["0", "1"] {
            let (status, body) = act(&server, slot, "restore", &name).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{name}: {body}");
            let why = body["error"]["message"].as_str().unwrap();
            assert!(why.contains(&name) && !why.contains('\n'), "{why}");
        }
        assert_eq!(tokens(&server).await, before, "{name}");
    }
    std::fs::create_dir(folder.join("folder")).unwrap();
    assert_eq!(act(&server, "0", "restore", "folder").await.0, StatusCode::BAD_REQUEST);
    assert_eq!(act(&server, "0", "restore", "missing").await.0, StatusCode::NOT_FOUND);
    let (text, prompt, cached) = turn(&server, 1).await;
    assert_eq!((text.as_str(), cached), ("First answer.", prompt - 1));
}

/// A model's sessions are its own: not those of the same target without its drafter, nor of another kind of device.
#[test]
fn foreign_sessions_are_refused_and_own_ones_are_known_again() {
    let path = |name: &str| Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models")).join(name);
    let (mini, drafter) = (path("glimmer-mini-Q8_0.gguf"), path("glimmer-mini-dflash-Q8_0.gguf"));
    let info = |kind: &str| DeviceInfo {
        kind: String::from(kind),
        name: kind.into(),
        lane: Lane::Strict,
        max_rows: 64,
        step_rows: 64,
        weight_bytes: 0,
    };
    let folder = folder("foreign");
    let open = |draft: bool, kind: &str| {
        let model = muser_core::model::open(&mini, draft.then_some(drafter.as_path())).unwrap().0;
        SavedSessions::new(&folder, &model, &info(kind)).unwrap()
    };
    let session = SavedSession { tokens: vec![1, 2, 3], state: vec![7; 100] };
    let size = open(true, "cpu").write("one", &session).unwrap();
    // Opened again and again: maps are in another order each time.
    for _ in 0..5 {
        let (read, bytes) = open(true, "cpu").read("one", 3).unwrap();
        assert!(read == session && bytes == size);
    }
    for (draft, kind) in [(false, "cpu"), (true, "cuda")] {
        let error = open(draft, kind).read("one", 3).unwrap_err().to_string();
        assert!(error.contains("of another model"), "{error}");
    }
    let error = open(true, "cpu").read("one", 2).unwrap_err().to_string();
    assert!(error.contains("context"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_plain_and_slots_idle() {
    let folder = folder("names");
    let server = server(&folder);
    turn(&server, 1).await;
    let long = "x".repeat(201);
    for name in ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", ".hidden", "a\0b", "a\nb", "C:x", &long]
    {
        for action in ["save", "restore"] {
            let (status, body) = act(&server, "0", action, name).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{name:?}: {body}");
            assert_eq!(body["error"]["param"], "filename", "{name:?}");
        }
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    for (slot, action, status) in [
        ("2", "save", StatusCode::NOT_FOUND),
        ("x", "save", StatusCode::BAD_REQUEST),
        ("-1", "erase", StatusCode::BAD_REQUEST),
        ("1", "save", StatusCode::BAD_REQUEST),
        ("0", "copy", StatusCode::BAD_REQUEST),
    ] {
        let (got, body) = act(&server, slot, action, "x").await;
        assert_eq!(got, status, "{slot} {action}: {body}");
        assert!(body["error"]["message"].is_string());
    }
    assert_eq!(server.post("/slots/0", json!({"filename": "x"})).await.0, StatusCode::BAD_REQUEST);
    assert_eq!(server.post("/slots/0?action=save", json!({})).await.0, StatusCode::BAD_REQUEST);

    server.stage.close_gate();
    let busy = turn(&server, 2);
    let known = server.app.generator.metrics.prompt_tokens.get();
    let tries = async {
        while server.app.generator.metrics.prompt_tokens.get() == known {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        // The engine's thread is inside a pass; the answer comes after it.
        let opener = async {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            server.stage.open_gate();
        };
        tokio::join!(act(&server, "0", "erase", ""), opener).0.0
    };
    let (result, status) = tokio::join!(busy, tries);
    assert_eq!((result.0.as_str(), status), ("Second answer.", StatusCode::SERVICE_UNAVAILABLE));

    let without = Server::new();
    for action in ["save", "restore", "erase"] {
        assert_eq!(act(&without, "0", action, "x").await.0, StatusCode::NOT_IMPLEMENTED);
    }
}
