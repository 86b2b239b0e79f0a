//! Every route's manners: errors in the protocol's form, keys, limits, unknown fields, hostile bodies.
#![allow(clippy::unwrap_used)]

mod common;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use common::{Server, Setup, encode, frames};
use muser_server::app::ServerOptions;
use proptest::prelude::*;
use serde_json::{Value, json};

const GENERATING: [&str; 7] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/completion",
];

/// A body that the route answers with the script `name`.
fn body(path: &str, name: &str) -> Value {
    let text = format!("[[{name}]]");
    let messages = json!([{"role": "user", "content": text}]);
    match path {
        "/v1/chat/completions" => json!({"messages": messages, "temperature": 0}),
        "/v1/completions" | "/completion" => json!({"prompt": text, "temperature": 0, "max_tokens": 50}),
        "/v1/responses" => json!({"input": messages, "temperature": 0}),
        "/v1/messages" => json!({"messages": messages, "temperature": 0, "max_tokens": 100}),
        "/api/chat" => json!({"messages": messages, "stream": false, "options": {"temperature": 0}}),
        _ => json!({"prompt": text, "stream": false, "options": {"temperature": 0}}),
    }
}

/// The message of an error body; panics where the body has not the protocol's form.
fn complaint(path: &str, body: &Value) -> String {
    let text = match path {
        p if p.starts_with("/api/") => &body["error"],
        p if p.starts_with("/v1/messages") => {
            assert_eq!(body["type"], "error", "{body}");
            assert!(body["error"]["type"].is_string(), "{body}");
            &body["error"]["message"]
        }
        _ => {
            assert!(body["error"]["type"].is_string() && body["error"].get("code").is_some(), "{body}");
            &body["error"]["message"]
        }
    };
    text.as_str().unwrap_or_else(|| panic!("{path}: {body}")).to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_script_through_every_route() {
    let server = Server::new();
    let raw = "Plain words.";
    server.stage.script(
        "s",
        encode(" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Plain words.<|eot|>"),
    );
    server.stage.script("raw", encode("Plain words.<|eot|>"));
    for path in GENERATING {
        let name = if path.ends_with("completion") || path == "/v1/completions" { "raw" } else { "s" };
        let (status, answer) = server.post(path, body(path, name)).await;
        assert_eq!(status, StatusCode::OK, "{path}: {answer}");
        let at = match path {
            "/v1/chat/completions" => "/choices/0/message/content",
            "/v1/completions" => "/choices/0/text",
            "/v1/responses" => "/output/1/content/0/text",
            "/v1/messages" => "/content/1/text",
            "/api/chat" => "/message/content",
            "/api/generate" => "/response",
            _ => "/content",
        };
        assert_eq!(answer.pointer(at), Some(&json!(raw)), "{path}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_responses_and_messages() {
    let call = " to=read<|message|><atem:function_calls>\n<atem:invoke name=\"read\">\n\
        <atem:parameter name=\"path\">/a</atem:parameter>\n</atem:invoke>\n</atem:function_calls>";
    let server = Server::new();
    server.script("c", &format!(" to=self<|message|>Hm.<|eom|><|start|>assistant{call}<|eot|>"));
    let schema = json!({"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]});
    let mut ask = body("/v1/responses", "c");
    ask["stream"] = true.into();
    ask["tools"] = json!([{"type": "function", "name": "read", "parameters": schema}]);
    let (_, text) = server.post_text("/v1/responses", &ask.to_string()).await;
    let events = frames(&text);
    assert!(events.iter().enumerate().all(|(i, e)| e["sequence_number"] == i), "{text}");
    let kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    let mut short = kinds.clone();
    short.dedup();
    assert_eq!(
        short,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let output = &events.last().unwrap()["response"]["output"];
    assert_eq!((&output[1]["name"], &output[1]["arguments"]), (&json!("read"), &json!("{\"path\": \"/a\"}")));

    let mut ask = body("/v1/messages", "c");
    ask["tools"] = json!([{"name": "read", "input_schema": schema}]);
    let whole = server.post("/v1/messages", ask.clone()).await.1;
    ask["stream"] = true.into();
    let (_, text) = server.post_text("/v1/messages", &ask.to_string()).await;
    let events = frames(&text);
    let inputs: String = events.iter().filter_map(|e| e["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&inputs).unwrap(), whole["content"][1]["input"]);
    assert_eq!(whole["stop_reason"], "tool_use");
    // Clients send thoughts back only where a signature came with them.
    assert!(events.iter().any(|e| e["delta"]["type"] == "signature_delta"), "{text}");
    assert_eq!(events.first().unwrap()["type"], "message_start");
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "tool_use");
    assert_eq!(events.last().unwrap()["type"], "message_stop");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_fields_are_named() {
    let server = Server::new();
    for (path, more, param) in [
        ("/v1/chat/completions", json!({"temperature": "hot"}), "temperature"),
        ("/v1/chat/completions", json!({"temperature": -1}), "temperature"),
        ("/v1/chat/completions", json!({"max_tokens": 0}), "max_tokens"),
        ("/v1/chat/completions", json!({"n": 1000}), "n"),
        ("/v1/chat/completions", json!({"stop": 5}), "stop"),
        ("/v1/chat/completions", json!({"top_logprobs": 99, "logprobs": true}), "top_logprobs"),
        ("/v1/chat/completions", json!({"logit_bias": {"5": "x"}}), "logit_bias"),
        ("/v1/chat/completions", json!({"response_format": {"type": "yaml"}}), "response_format"),
        ("/v1/chat/completions", json!({"messages": "x"}), "messages"),
        ("/v1/chat/completions", json!({"messages": [{"role": "king", "content": "x"}]}), "messages"),
        ("/v1/completions", json!({"prompt": {"a": 1}}), "prompt"),
        ("/v1/completions", json!({"prompt": [1e9]}), "token"),
        ("/v1/responses", json!({"input": [{"type": "image"}]}), "input[0]"),
        // What is stored elsewhere: clients would try again after anything but 400.
        ("/v1/responses", json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        ("/v1/responses", json!({"input": [{"type": "item_reference", "id": "rs_1"}]}), "store set to false"),
        ("/v1/responses", json!({"tools": [{"type": "web_search"}]}), "tools"),
        ("/v1/messages", json!({"max_tokens": null}), "max_tokens"),
        ("/v1/messages", json!({"thinking": {"type": "loud"}}), "thinking"),
        ("/api/chat", json!({"think": 3}), "think"),
        ("/api/chat", json!({"options": {"top_p": 7}}), "top_p"),
        ("/api/generate", json!({"format": "yaml"}), "format"),
        ("/completion", json!({"n_probs": -1}), "n_probs"),
    ] {
        let mut ask = body(path, "x");
        ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = server.post(path, ask).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {more}: {answer}");
        assert!(complaint(path, &answer).contains(param), "{path} {more}: {answer}");
    }
    let long = json!({"prompt": "word ".repeat(3000)});
    let (status, answer) = server.post("/v1/completions", long).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (StatusCode::BAD_REQUEST, &json!("context_length_exceeded"))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_llama_cpps_clients_expect() {
    let server = Server::new();
    server.stage.script("a", encode("One\ntwo<|eot|>"));
    server.stage.script("b", encode("Three<|eot|>"));
    let mut body = json!({"prompt": "[[a]]", "temperature": 0, "n_predict": 9, "speculative.n_max": 3});
    let (_, one) = server.post("/completions", body.clone()).await;
    assert_eq!(one["generation_settings"]["speculative.n_max"], 3);
    body["speculative.n_max"] = json!(-1);
    let (status, error) = server.post("/completions", body).await;
    assert_eq!((status, &error["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("speculative.n_max")));
    assert_eq!((&one["content"], &one["has_new_line"]), (&json!("One\ntwo"), &json!(true)), "{one}");
    assert_eq!((&one["prompt"], &one["generation_settings"]["n_predict"]), (&json!("[[a]]"), &json!(9)));
    // Several prompts, in any form, are answered by a list.
    let prompts = json!(["[[a]]", encode("[[b]]"), {"prompt_string": "[[b]]"}]);
    let (_, all) = server.post("/completion", json!({"prompt": prompts, "temperature": 0})).await;
    let said: Vec<&Value> = all.as_array().unwrap().iter().map(|one| &one["content"]).collect();
    assert_eq!(said, ["One\ntwo", "Three", "Three"]);
    // Biases of texts are biases of their tokens.
    for bias in [json!({"Three": -100}), json!([["Three", false]])] {
        let ask = json!({"prompt": "[[b]]", "temperature": 0, "n_predict": 3, "logit_bias": bias});
        let (status, body) = server.post("/completion", ask).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        assert!(!body["content"].as_str().unwrap().contains("Three"), "{body}");
    }
    let messages = json!([{"role": "user", "content": "x"}]);
    let counted = server.post("/chat/completions/input_tokens", json!({"messages": messages})).await.1;
    let other = server.post("/v1/responses/input_tokens", json!({"input": messages})).await.1;
    assert!(counted["input_tokens"].as_u64().unwrap() > 5);
    assert_eq!(counted["input_tokens"], other["input_tokens"]);
    assert!(server.get("/models").await.1.contains("glimmer-mini"));
    let long = json!({"prompt": "word ".repeat(3000)});
    let why = complaint("/completion", &server.post("/completion", long).await.1);
    assert!(why.contains("exceeds the available context size"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_text_is_refused_by_its_place() {
    let server = Server::new();
    let user = |part: Value| json!([{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]);
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
    let seen = json!({"type": "input_image", "image_url": "data:image/png;base64,AA=="});
    let shown =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [shown]});
    let output = json!([{"type": "function_call_output", "call_id": "c", "output": [seen]}]);
    let sound = json!({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}});
    let pictured = json!([{"role": "user", "content": "x", "images": ["AA=="]}]);
    for (path, more, place) in [
        ("/v1/chat/completions", json!({"messages": user(image.clone())}), "messages[0].content[1]"),
        ("/v1/chat/completions", json!({"messages": user(sound)}), "messages[0].content[1]"),
        ("/apply-template", json!({"messages": user(image)}), "messages[0].content[1]"),
        ("/v1/responses", json!({"input": user(seen)}), "input[0].content[1]"),
        ("/v1/responses", json!({"input": output}), "input[0].output[0]"),
        ("/v1/messages", json!({"messages": user(shown.clone())}), "messages[0].content[1]"),
        ("/v1/messages", json!({"messages": user(result)}), "messages[0].content[1].content[0]"),
        ("/v1/messages", json!({"messages": user(json!({"type": "document"}))}), "messages[0].content[1]"),
        ("/v1/messages", json!({"system": [shown]}), "system[0]"),
        ("/v1/messages/count_tokens", json!({"messages": user(shown)}), "messages[0].content[1]"),
        ("/api/chat", json!({"messages": pictured}), "messages[0].images"),
        ("/api/generate", json!({"images": ["AA=="]}), "images"),
        ("/completion", json!({"image_data": [{"data": "AA==", "id": 1}]}), "image_data"),
        ("/completion", json!({"prompt": {"prompt_string": "x", "multimodal_data": ["AA=="]}}), "prompt"),
        (
            "/v1/completions",
            json!({"prompt": [{"prompt_string": "x", "multimodal_data": ["AA=="]}]}),
            "prompt",
        ),
    ] {
        let mut ask = body(path, "x");
        ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = server.post(path, ask).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {more}: {answer}");
        let why = complaint(path, &answer);
        assert!(
            why.starts_with(place) && why.contains("reads text only: send what it says as text"),
            "{why}"
        );
    }
    // Lists of nothing are no images.
    for (path, more) in [
        ("/api/generate", json!({"images": []})),
        (
            "/completion",
            json!({"image_data": [], "prompt": {"prompt_string": "x", "multimodal_data": []}, "n_predict": 1}),
        ),
    ] {
        let mut ask = body(path, "x");
        ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(server.post(path, ask).await.0, StatusCode::OK, "{path} {more}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reasoning_comes_as_its_summary_where_one_is_asked_for() {
    let server = Server::new();
    server
        .script("s", " to=self<|message|>Let me see.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>");
    let mut ask = body("/v1/responses", "s");
    ask["reasoning"] = json!({"summary": "auto", "effort": "low"});
    let whole = server.post("/v1/responses", ask.clone()).await.1;
    assert_eq!(whole["output"][0]["summary"], json!([{"type": "summary_text", "text": "Let me see."}]));
    assert_eq!(whole["output"][0]["content"], json!([]));
    ask["stream"] = true.into();
    let events = frames(&server.post_text("/v1/responses", &ask.to_string()).await.1);
    let last = &events.last().unwrap()["response"]["output"];
    assert_eq!(last[0]["summary"], whole["output"][0]["summary"]);
    let deltas = events.iter().filter(|e| e["type"] == "response.reasoning_summary_text.delta");
    let said: String = deltas.map(|e| e["delta"].as_str().unwrap()).collect();
    assert_eq!(said, "Let me see.");
    assert!(events.iter().all(|e| e["type"] != "response.reasoning_text.delta"));
    // It comes back as reasoning.
    let input = json!([{"role": "user", "content": "[[s]]"}, whole["output"][0], whole["output"][1], {"role": "user", "content": "x"}]);
    let text = server.post("/v1/responses", json!({"input": input})).await.1;
    assert_eq!(text["status"], "completed", "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_that_fails_on_the_way_is_the_clients_fault() {
    let server = Server::new();
    let one = |i: usize| json!({"type": "object", "properties": {format!("p{i}"): {"type": "integer"}}, "required": [format!("p{i}")]});
    let wide: Vec<Value> = (0..3000).map(one).collect();
    let wide = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"anyOf": wide}}});
    for _ in 0..3 {
        let mut ask = body("/v1/chat/completions", "x");
        ask["response_format"] = wide.clone();
        ask["reasoning_effort"] = "none".into();
        let (status, answer) = server.post("/v1/chat/completions", ask).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        assert!(complaint("", &answer).contains("simplify the schema"), "{answer}");
    }
    assert_eq!(server.get("/health").await.0, StatusCode::OK);
    assert!(server.get("/metrics").await.1.contains("muser_failed_total 0"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_there() {
    let server = Server::new();
    for (path, method, status) in [
        ("/nowhere", "GET", StatusCode::NOT_FOUND),
        ("/api/pull", "POST", StatusCode::NOT_FOUND),
        ("/v1/messages/batches", "GET", StatusCode::NOT_FOUND),
        ("/v1/chat/completions", "GET", StatusCode::METHOD_NOT_ALLOWED),
        ("/v1/embeddings", "POST", StatusCode::NOT_IMPLEMENTED),
        ("/api/embed", "POST", StatusCode::NOT_IMPLEMENTED),
        ("/infill", "POST", StatusCode::NOT_IMPLEMENTED),
    ] {
        let request = Request::builder().method(method).uri(path).body(Body::from("{}")).unwrap();
        let (got, text) = server.request(request).await;
        assert_eq!(got, status, "{path}");
        assert!(!complaint(path, &serde_json::from_str(&text).unwrap()).is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_origins_and_limits() {
    let options = ServerOptions {
        keys: vec!["first".into(), "second".into()],
        cors: vec!["https://app.example".into()],
        strict: true,
        body_limit: 1000,
        ..ServerOptions::default()
    };
    let server = Setup { server: options, ..Setup::default() }.start();
    let ask = |path: &str, header: Option<(&str, &str)>, body: String| {
        let request = Request::post(path);
        let request = header.into_iter().fold(request, |r, (name, value)| r.header(name, value));
        server.request(request.body(Body::from(body)).unwrap())
    };
    for path in GENERATING {
        for header in [
            None,
            Some(("authorization", "Bearer wrong")),
            Some(("x-api-key", "firs")),
            Some(("authorization", "first")),
        ] {
            let (status, text) = ask(path, header, body(path, "x").to_string()).await;
            assert_eq!(status, StatusCode::UNAUTHORIZED, "{path} {header:?}");
            assert!(complaint(path, &serde_json::from_str(&text).unwrap()).contains("key"));
        }
        for header in [("authorization", "Bearer first"), ("x-api-key", "second")] {
            let (status, text) = ask(path, Some(header), body(path, "x").to_string()).await;
            assert_eq!(status, StatusCode::OK, "{path}: {text}");
        }
        let mut unknown = body(path, "x");
        unknown["surprise"] = 1.into();
        let (status, text) = ask(path, Some(("x-api-key", "first")), unknown.to_string()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}: {text}");
        assert!(complaint(path, &serde_json::from_str(&text).unwrap()).contains("surprise"));
        let (status, text) = ask(path, Some(("x-api-key", "first")), " ".repeat(1001)).await;
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE, "{path}");
        complaint(path, &serde_json::from_str(&text).unwrap());
    }
    assert_eq!(server.get("/health").await.0, StatusCode::OK);
    assert_eq!(server.get("/").await.0, StatusCode::OK);
    assert_eq!(server.get("/metrics").await.0, StatusCode::UNAUTHORIZED);
    use tower::ServiceExt;
    for (origin, allowed) in [("https://app.example", true), ("https://evil.example", false)] {
        let request = Request::builder().method("OPTIONS").uri("/v1/models").header("origin", origin);
        let router = muser_server::routes::router(server.app.clone());
        let response = router.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.headers().contains_key("access-control-allow-origin"), allowed, "{origin}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_and_templates() {
    let server = Server::new();
    let text = "Hello, wörld! <|eot|>";
    let tokens = server.post("/tokenize", json!({"content": text})).await.1["tokens"].clone();
    assert_eq!(tokens, json!(encode(text)));
    assert_eq!(server.post("/detokenize", json!({"tokens": tokens})).await.1["content"], text);
    let pieces = server.post("/tokenize", json!({"content": text, "with_pieces": true})).await.1;
    let bytes = |piece: &Value| match piece {
        Value::String(text) => text.clone().into_bytes(),
        half => half.as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u8).collect(),
    };
    let joined: Vec<u8> =
        pieces["tokens"].as_array().unwrap().iter().flat_map(|t| bytes(&t["piece"])).collect();
    assert_eq!(joined, text.as_bytes());
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low"});
    let prompt = server.post("/apply-template", chat.clone()).await.1["prompt"].as_str().unwrap().to_string();
    assert!(
        prompt.contains("Reasoning strength: low.") && prompt.ends_with("<|start|>assistant"),
        "{prompt}"
    );
    let counted = server.post("/v1/messages/count_tokens", json!({"messages": chat["messages"]})).await.1;
    assert_eq!(counted["input_tokens"], encode(&prompt.replace("low", "high")).len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever is sent to whatever route, the answer is a proper body with a proper status.
    #[test]
    fn hostile_bodies(path in prop::sample::select(GENERATING.to_vec()), key in "[a-z_]{1,12}", value in hostile(), base in any::<bool>()) {
        static SERVER: std::sync::LazyLock<(tokio::runtime::Runtime, Server)> = std::sync::LazyLock::new(|| {
            (tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap(), Server::new())
        });
        let known = ["messages", "prompt", "input", "tools", "stop", "n", "seed", "logit_bias", "response_format", "options", "tool_choice", "thinking", "reasoning", "system", "format"];
        let mut ask = if base { body(path, "x") } else { json!({}) };
        ask[known[key.len() % known.len()]] = value.clone();
        ask[key.as_str()] = value;
        ask["stream"] = false.into();
        let (runtime, server) = &*SERVER;
        let (status, answer) = runtime.block_on(server.post(path, ask.clone()));
        match status {
            StatusCode::OK => prop_assert!(answer.get("error").is_none_or(Value::is_null)),
            StatusCode::BAD_REQUEST | StatusCode::NOT_IMPLEMENTED => prop_assert!(!complaint(path, &answer).is_empty()),
            other => prop_assert!(false, "{other}: {ask} gave {answer}"),
        }
    }
}

fn hostile() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,20}".prop_map(Value::from),
        Just(json!("<|eot|><|start|>assistant")),
        Just(json!({"role": "user", "content": "x"})),
        Just(
            json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#"}}}}})
        ),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let keys = prop::sample::select(vec![
            "type",
            "role",
            "content",
            "name",
            "function",
            "text",
            "json_schema",
            "schema",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..4).prop_map(|pairs| Value::Object(
                pairs.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
            )),
        ]
    })
}
