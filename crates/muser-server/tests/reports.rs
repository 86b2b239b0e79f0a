//! What users reported of other engines, as cases: the number of each is its place in the list of reports.
#![allow(clippy::unwrap_used)]

mod common;

use axum::http::StatusCode;
use common::{Server, Setup, encode, outcome};
use muser_server::slots::SlotOptions;
use serde_json::{Value, json};

const REASON: &str = " to=self<|message|>I think.<|eom|><|start|>assistant";

fn call(name: &str, parameters: &[(&str, &str)]) -> String {
    let parameter = |(k, v): &(&str, &str)| format!("<atem:parameter name=\"{k}\">{v}</atem:parameter>\n");
    let parameters: String = parameters.iter().map(parameter).collect();
    format!(
        " to={name}<|message|><atem:function_calls>\n<atem:invoke name=\"{name}\">\n{parameters}</atem:invoke>\n</atem:function_calls>"
    )
}

fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}, "required": ["path"]});
    json!({"type": "function", "function": {"name": name, "description": "", "parameters": parameters}})
}

fn calls(body: &Value) -> Vec<(String, Value)> {
    outcome(body).2
}

/// 1 and 2: one call in five was answered with 500 where names had dots, dashes or underscores, or came without reasoning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_tools_fifty_turns() {
    let names: Vec<String> = ["read_file", "fs.read-file", "mcp__git__log", "a", "web.search.v2"]
        .iter()
        .flat_map(|name| ["", "_x", "-y", ".z"].map(|end| format!("{name}{end}")))
        .collect();
    let tools: Value = names.iter().map(|n| tool(n)).collect();
    let server = Server::new();
    for turn in 0..50 {
        let name = &names[turn * 7 % 20];
        let value = format!("/tmp/{turn} <b>&\"'");
        let call = call(name, &[("path", &value), ("n", &turn.to_string())]);
        let reason = if turn % 2 == 0 { "" } else { REASON };
        server.script("t", &format!("{reason}{call}<|eot|>"));
        let ask = json!({"tools": tools, "tool_choice": "auto"});
        let body =
            if turn % 3 == 0 { server.chat_streamed("t", ask).await } else { server.chat("t", ask).await };
        assert_eq!(calls(&body), [(name.clone(), json!({"path": value, "n": turn}))], "turn {turn}");
        assert_eq!(outcome(&body).3, "tool_calls");
    }
}

/// 4: a named tool in OpenAI's or Anthropic's form was served as auto or as any tool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_named_tool_is_called_in_every_protocol() {
    let server = Server::new();
    server.script("talk", " to=user<|message|>I would rather talk.<|eot|>");
    let schema = json!({"type": "object", "properties": {}});
    let messages = json!([{"role": "user", "content": "[[talk]]"}]);
    let anthropic: Vec<Value> =
        ["one", "two"].iter().map(|n| json!({"name": n, "input_schema": schema})).collect();
    let named = json!({"type": "tool", "name": "two"});
    let silent = json!({"type": "disabled"});
    let body = json!({"messages": messages, "tools": anthropic, "tool_choice": named, "thinking": silent, "max_tokens": 300, "temperature": 0});
    let (status, body) = server.post("/v1/messages", body).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    let used: Vec<&Value> =
        body["content"].as_array().unwrap().iter().filter(|b| b["type"] == "tool_use").collect();
    assert!(!used.is_empty() && used.iter().all(|b| b["name"] == "two"), "{body}");

    let flat: Vec<Value> =
        ["one", "two"].iter().map(|n| json!({"type": "function", "name": n, "parameters": schema})).collect();
    let named = json!({"type": "function", "name": "two"});
    let body = json!({"input": messages, "tools": flat, "tool_choice": named, "reasoning": {"effort": "none"}, "max_output_tokens": 300, "temperature": 0});
    let (_, body) = server.post("/v1/responses", body).await;
    let used: Vec<&Value> =
        body["output"].as_array().unwrap().iter().filter(|i| i["type"] == "function_call").collect();
    assert!(!used.is_empty() && used.iter().all(|i| i["name"] == "two"), "{body}");
}

/// 18 and 43: with calls in the history, a forced call leaked as text, and the final answer was an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_in_the_history_change_nothing() {
    let server = Server::new();
    server.script("call", &format!("{REASON}{}<|eot|>", call("read", &[("path", "b")])));
    server.script("talk", &format!("{REASON} to=user<|message|>Both say yes.<|eot|>"));
    let history = |last: &str| {
        let made = |id: &str, path: &str| json!({"id": id, "type": "function", "function": {"name": "read", "arguments": json!({"path": path}).to_string()}});
        json!([
            {"role": "user", "content": "What do a and list say? ".repeat(150)},
            {"role": "assistant", "content": null, "tool_calls": [made("1", "a"), made("2", "list")]},
            {"role": "tool", "tool_call_id": "1", "content": "yes"},
            {"role": "tool", "tool_call_id": "2", "content": format!("yes [[{last}]]")},
        ])
    };
    let tools = json!([tool("read"), tool("list")]);
    for (script, choice) in
        [("call", "auto"), ("call", "required"), ("talk", "required"), ("talk", "auto"), ("talk", "none")]
    {
        for stream in [false, true] {
            let more = json!({"messages": history(script), "tools": tools, "tool_choice": choice, "max_tokens": 300});
            let body =
                if stream { server.chat_streamed("", more).await } else { server.chat("", more).await };
            let (_, content, calls, finish) = outcome(&body);
            assert!(!content.contains("atem") && !content.contains(" to="), "{script} {choice}: {content}");
            if script == "talk" && choice != "required" {
                assert_eq!(
                    (content.as_str(), finish.as_str()),
                    ("Both say yes.", "stop"),
                    "{script} {choice}"
                );
                assert!(calls.is_empty());
            } else {
                assert!(!calls.is_empty() && content.is_empty(), "{script} {choice}: {body}");
            }
        }
    }
}

/// 20 and 40: at the end of the context, or of a tight limit, there was no answer and no word about it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_context_is_told_in_every_protocol() {
    let slots = SlotOptions { slots: 1, context: 256, ..SlotOptions::default() };
    let server = Setup { slots, ..Setup::default() }.start();
    server.script("long", &format!(" to=self<|message|>{}", "word ".repeat(400)));
    let messages = json!([{"role": "user", "content": "[[long]]"}]);
    for (path, at, said) in [
        ("/v1/chat/completions", "/choices/0/finish_reason", "length"),
        ("/v1/responses", "/status", "incomplete"),
        ("/v1/messages", "/stop_reason", "max_tokens"),
        ("/api/chat", "/done_reason", "length"),
    ] {
        let mut body = json!({"temperature": 0, "stream": false});
        body[if path == "/v1/responses" { "input" } else { "messages" }] = messages.clone();
        if path == "/v1/messages" {
            body["max_tokens"] = 5000.into();
        }
        let (status, answer) = server.post(path, body).await;
        assert_eq!((status, answer.pointer(at)), (StatusCode::OK, Some(&json!(said))), "{path}: {answer}");
    }
    let body = json!({"prompt": "[[long]]", "temperature": 0});
    let (_, answer) = server.post("/completion", body).await;
    assert_eq!((&answer["stop_type"], &answer["truncated"]), (&json!("limit"), &json!(false)));
    let prompt = encode("[[long]]").len() as u64;
    assert_eq!(answer["tokens_predicted"].as_u64().unwrap() + prompt, 256);
}

/// 38 and 54: the effort was dropped, so the model always thought hard.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn efforts_reach_the_prompt() {
    let server = Setup { release_template: true, ..Setup::default() }.start();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for (effort, strength) in [
        ("minimal", "low"),
        ("low", "low"),
        ("medium", "medium"),
        ("high", "high"),
        ("xhigh", "xhigh"),
        ("max", "xhigh"),
    ] {
        for more in [
            json!({"reasoning_effort": effort}),
            json!({"reasoning_strength": effort}),
            json!({"reasoning": {"effort": effort}}),
            json!({"chat_template_kwargs": {"reasoning_effort": effort}}),
            json!({"chat_template_kwargs": {"reasoning_strength": effort}}),
        ] {
            let mut body = more.clone();
            body["messages"] = messages.clone();
            let prompt = server.post("/apply-template", body).await.1["prompt"].to_string();
            assert!(prompt.contains(&format!("Reasoning strength: {strength}.")), "{more}: {prompt}");
        }
    }
}

/// 28, 44 and 58: damaged calls gave an error, text, or no call at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_calls_are_calls() {
    let server = Setup { free_calls: true, ..Setup::default() }.start();
    let good = call("read", &[("path", "a b")]);
    let closers = "</atem:invoke>\n</atem:function_calls>";
    for (name, output) in [
        ("unclosed block", good.replace("\n</atem:function_calls>", "")),
        ("unclosed invoke", good.replace(closers, "")),
        ("unclosed value", good.replace(&format!("</atem:parameter>\n{closers}"), "")),
        ("another recipient", good.replace("to=read", "to=list")),
        ("doubled recipient", good.replace("to=read", "to=read.read")),
        ("no recipient", good.replace(" to=read<|message|>", "<|message|>")),
        ("control token in the name", good.replace("name=\"read\"", "name=\"read<|message|>")),
        ("control token after the name", good.replace("name=\"read\"", "name=\"read<|message|>\"")),
        ("to the user", good.replace("to=read", "to=user")),
    ] {
        assert_ne!(output, good, "{name}");
        for reason in ["", REASON] {
            server.script("d", &format!("{reason}{output}<|eot|>"));
            let ask = || json!({"tools": [tool("read"), tool("list")]});
            for body in [server.chat("d", ask()).await, server.chat_streamed("d", ask()).await] {
                assert_eq!(calls(&body), [("read".to_string(), json!({"path": "a b"}))], "{name}: {body}");
                assert_eq!(outcome(&body).1, "", "{name}");
            }
        }
    }
}

/// 36: reasoning tokens were always 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_count_reasoning_too() {
    let server = Server::new();
    server.script("r", &format!("{REASON} to=user<|message|>Yes.<|eot|>"));
    let (_, body) = server.post("/v1/responses", json!({"input": "[[r]]", "temperature": 0})).await;
    let counted = body.pointer("/usage/output_tokens_details/reasoning_tokens");
    assert_eq!(counted, Some(&json!(encode("<|message|>I think.<|eom|>").len())), "{body}");
}
