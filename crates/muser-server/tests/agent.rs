//! A long transcript of an agent with tools: every turn computes only what is new.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, Setup, encode, outcome};
use muser_server::slots::SlotOptions;
use serde_json::{Value, json};

const TURNS: usize = 20;
/// Tokens of a tool's result, about.
const RESULT: usize = 1500;

/// Words, numbers, code, JSON and markup that looks like the model's own, always the same for a seed.
fn text(seed: u64, tokens: usize) -> String {
    let pieces = [
        "fn main() {\n    let total = 0;\n}\n",
        "error[E0308]: mismatched types",
        "{\"status\": \"ok\", \"items\": [1, 2, null]}",
        "</atem:function_calls>",
        " to=user<|message|>not a header",
        "<|eot|>",
        "The quick brown fox",
        "naïve façade, 数据, 🦀",
        "\t\tindented\n\n",
        "/usr/share/doc/readme.txt",
        "<atem:parameter name=\"path\">",
    ];
    let mut random = seed.wrapping_mul(2654435761) + 1;
    let mut out = String::new();
    let mut size = 0;
    while size < tokens {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let at = (random >> 33) as usize;
        let piece = format!("{} {} ", pieces[at % pieces.len()], at % 1000);
        size += encode(&piece).len();
        out.push_str(&piece);
    }
    out
}

fn tools() -> Value {
    let tool = |name: &str, properties: Value, required: Value| json!({"type": "function", "function": {"name": name, "description": text(9, 60), "parameters": {"type": "object", "properties": properties, "required": required}}});
    json!([
        tool(
            "fs.read-file",
            json!({"path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "integer"}}}),
            json!(["path"])
        ),
        tool(
            "run_command",
            json!({"command": {"type": "string"}, "timeout": {"type": "integer"}}),
            json!(["command"])
        ),
        tool("list.all", json!({}), json!([])),
    ])
}

/// What the model writes in a turn: reasoning, sometimes an announcement, a call; in the last turn an answer.
fn output(turn: usize) -> (String, Option<(&'static str, Value)>) {
    let next = "<|eom|><|start|>assistant";
    let reasoning = format!(" to=self<|message|>Step {turn}: I look at the result and go on.{next}");
    if turn + 1 == TURNS {
        return (format!("{reasoning} to=user<|message|>All {TURNS} steps are done.<|eot|>"), None);
    }
    let (name, arguments): (&str, Vec<(&str, Value)>) = match turn % 3 {
        0 => (
            "fs.read-file",
            vec![("path", json!(format!("src/part {turn}.rs"))), ("lines", json!([turn, turn + 80]))],
        ),
        1 => (
            "run_command",
            vec![("command", json!(format!("grep '<b>' \"{turn}\" | wc -l"))), ("timeout", json!(turn))],
        ),
        _ => ("list.all", vec![]),
    };
    let parameter = |(key, value): &(&str, Value)| {
        // Lists as the template writes them in the model's training: with a blank after the comma.
        let value = value.as_str().map_or_else(|| value.to_string().replace(',', ", "), String::from);
        format!("<atem:parameter name=\"{key}\">{value}</atem:parameter>\n")
    };
    let parameters: String = arguments.iter().map(parameter).collect();
    let said = if turn.is_multiple_of(4) {
        format!(" to=user<|message|>I take step {turn}.{next}")
    } else {
        String::new()
    };
    let call = format!(
        " to={name}<|message|><atem:function_calls>\n<atem:invoke name=\"{name}\">\n{parameters}</atem:invoke>\n</atem:function_calls><|eot|>"
    );
    let arguments = arguments.into_iter().map(|(k, v)| (k.to_string(), v)).collect();
    (format!("{reasoning}{said}{call}"), Some((name, Value::Object(arguments))))
}

/// A turn's outcome and its counts: prompt, cached, generated.
type Turn = ((String, String, Vec<(String, Value)>, String), [usize; 3]);

/// Plays the transcript. `keep`: the client sends the reasoning back.
async fn play(server: &Server, stream: bool, keep: bool) -> Vec<Turn> {
    let mut messages = vec![json!({"role": "system", "content": text(1, 800)})];
    messages.push(json!({"role": "user", "content": "Do all the steps. [[0]]"}));
    let mut turns: Vec<Turn> = vec![];
    for turn in 0..TURNS {
        let (script, call) = output(turn);
        server.script(&turn.to_string(), &script);
        let before = server.stage.passes.lock().unwrap().len();
        let ask = json!({"messages": messages, "tools": tools()});
        let body = if stream { server.chat_streamed("", ask).await } else { server.chat("", ask).await };
        let usage = &body["usage"];
        let count = |at: &str| usage.pointer(at).unwrap().as_u64().unwrap() as usize;
        let counts = [
            count("/prompt_tokens"),
            count("/prompt_tokens_details/cached_tokens"),
            count("/completion_tokens"),
        ];
        // The device has computed the rest of the prompt and the answer but for its last token, and no row more.
        let passes = server.stage.passes.lock().unwrap()[before..].concat();
        let rows: usize = passes.iter().map(|(_, rows)| rows).sum();
        assert_eq!(rows, counts[0] - counts[1] + counts[2] - 1, "turn {turn}: {counts:?}");

        let result = outcome(&body);
        let wanted: Vec<(String, Value)> = call.into_iter().map(|(n, a)| (n.to_string(), a)).collect();
        assert_eq!(result.2, wanted, "turn {turn}");
        assert_eq!(result.0, format!("Step {turn}: I look at the result and go on."));
        assert_eq!(result.3, if turn + 1 == TURNS { "stop" } else { "tool_calls" });

        let mut message = body["choices"][0]["message"].clone();
        message["role"] = "assistant".into();
        if !keep {
            message.as_object_mut().unwrap().remove("reasoning_content");
        }
        if let Some(calls) = message["tool_calls"].as_array_mut() {
            calls
                .iter_mut()
                .for_each(|c| (c["id"], c["type"]) = (format!("call_{turn}").into(), "function".into()));
            messages.push(message);
            let content = format!("{}[[{}]]", text(turn as u64 + 10, RESULT), turn + 1);
            messages
                .push(json!({"role": "tool", "tool_call_id": format!("call_{turn}"), "content": content}));
        }
        turns.push((result, counts));
    }
    turns
}

fn start() -> Server {
    let slots = SlotOptions { slots: 2, context: 40_000, host_bytes: 64 << 20, ..SlotOptions::default() };
    // The release's own template, which gives back what was said before a call.
    Setup { slots, max_rows: 512, release_template: true, ..Setup::default() }.start()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_new_tokens_are_computed() {
    for keep in [true, false] {
        let (whole, streamed) = (start(), start());
        let (whole, streamed) = tokio::join!(play(&whole, false, keep), play(&streamed, true, keep));
        assert_eq!(whole, streamed);
        assert!(whole[TURNS - 1].1[0] > 28_000, "{:?}", whole[TURNS - 1].1);
        assert_eq!(whole[0].1[1], 0);
        for (turn, pair) in whole.windows(2).enumerate() {
            let ([prompt, _, generated], [_, cached, _]) = (pair[0].1, pair[1].1);
            // What comes back is what was written, so even the answer is known, but for its end, which was never computed.
            // Where the client drops the reasoning, the turns part after the header's first tokens, ` to=`.
            let known =
                if keep { prompt + generated - 1..=prompt + generated - 1 } else { prompt..=prompt + 2 };
            assert!(known.contains(&cached), "turn {}: {cached} of {known:?}, keep {keep}", turn + 1);
        }
    }
}
