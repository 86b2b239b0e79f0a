//! `logits` and `run` beside transformers and PyTorch.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Temp, lines, muser, muser_with, tiny};
use muser_testkit::fixtures::{Arrays, ids};
use muser_testkit::max_difference;
use serde_json::{Value, json};

/// Values of a NumPy file of two dimensions of f32, with the dimensions.
fn npy(path: &str) -> (Vec<f32>, String) {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let start = 10 + u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
    assert_eq!(start % 64, 0);
    let header = String::from_utf8(bytes[10..start].to_vec()).unwrap();
    assert!(header.contains("'descr': '<f4'") && header.contains("'fortran_order': False"), "{header}");
    let values = bytes[start..].chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
    (values, header)
}

fn list(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn logits_of_the_reference_are_transformers() {
    let goldens = Arrays::open("goldens/hf-logits.safetensors");
    let file = Temp::new("reference.npy");
    for (name, tokens) in muser_testkit::prompts().into_iter().take(2) {
        let list = list(&tokens);
        let device = ["--device", "reference", "--kv", "f32"];
        let args = ["logits", "-m", &tiny(), "--tokens", &list, "-o", file.path()];
        muser(&[&args[..], &device].concat()).ok();
        let (values, header) = npy(file.path());
        assert!(header.contains(&format!("'shape': ({}, 1024)", tokens.len())), "{header}");
        let apart = max_difference(&goldens.get(name), &values);
        assert!(apart <= 1e-3, "{name}: {apart} apart");
    }
}

#[test]
fn strict_logits_are_the_same_bits_however_they_are_computed() {
    let (_, tokens) = &muser_testkit::prompts()[1];
    let list = list(tokens);
    let file = Temp::new("strict.npy");
    let bits = |extra: &[&str]| {
        let args = ["logits", "-m", &tiny(), "--tokens", &list, "-o", file.path(), "--lane", "strict"];
        muser(&[&args[..], extra].concat()).ok();
        std::fs::read(&file.0).unwrap()
    };
    let first = bits(&[]);
    for extra in [
        &["--chunk", "7"][..],
        &["--chunk", "1", "--threads", "1"],
        &["--isa", "scalar"],
        &["--device", "reference"],
    ] {
        assert!(bits(extra) == first, "{extra:?}");
    }
}

#[test]
fn serving_logits_of_the_cpu_depend_on_the_model_and_the_tokens_alone() {
    let (_, tokens) = &muser_testkit::prompts()[1];
    let list = list(tokens);
    let file = Temp::new("serving.npy");
    let model = common::fixture("gguf/tiny-Q4_K_M-scalar.gguf");
    let bits = |extra: &[&str]| {
        let args = ["logits", "-m", &model, "--tokens", &list, "-o", file.path(), "--device", "cpu"];
        muser(&[&args[..], extra].concat()).ok();
        std::fs::read(&file.0).unwrap()
    };
    let first = bits(&[]);
    for extra in
        [&["--chunk", "7"][..], &["--threads", "1", "--chunk", "64"], &["--isa", "scalar"], &["--mapped"]]
    {
        assert!(bits(extra) == first, "{extra:?}");
    }
    assert!(bits(&["--lane", "strict"]) != first);
}

/// Runs a golden's prompt greedily.
fn continued(golden: &Value, extra: &[&str]) -> Value {
    let prompt = golden["prompt"].as_str().unwrap();
    let args = ["run", "--raw", "--temp", "0", "-n", "64", "--json", "-"];
    muser_with(prompt.as_bytes(), &[&args[..], extra].concat()).json()
}

#[test]
fn greedy_answers_are_pytorchs_where_the_margin_allows() {
    // Q8_0 weights and 8-bit activations move a logit by up to 0.6 each (the model's card: 0.58 for the weights), so a
    // step with a margin over 1.2 cannot change.
    let goldens = lines("mini/goldens.jsonl");
    let sure: Vec<&Value> = goldens.iter().filter(|g| g["margin"].as_f64().unwrap() > 1.2).collect();
    assert_eq!(sure.len(), 21);
    for golden in sure {
        let ran = continued(golden, &[]);
        assert_eq!(ran["prompt_ids"], golden["ids_in"], "{}", golden["name"]);
        assert_eq!(ran["ids"], golden["ids_out"], "{}", golden["name"]);
        assert_eq!(ran["text"], golden["text_out"], "{}", golden["name"]);
        let ended = ran["ids"].as_array().unwrap().last() == Some(&json!(6152));
        assert_eq!(ran["finish"], if ended { "end" } else { "length" });
    }
}

#[test]
fn drafts_change_nothing_in_the_strict_lane() {
    for golden in lines("mini/goldens.jsonl")
        .iter()
        .filter(|g| ["story", "prose-3"].contains(&g["name"].as_str().unwrap()))
    {
        let plain = continued(golden, &["--lane", "strict", "--draft", "off"]);
        assert_eq!(plain["stats"]["drafted"], 0);
        for source in ["auto", "lookup"] {
            let drafted = continued(golden, &["--lane", "strict", "--draft", source, "--draft-rows", "7"]);
            let stats = &drafted["stats"];
            assert_eq!(plain["ids"], drafted["ids"], "{source}");
            assert!(stats["accepted"].as_u64().unwrap() > 0, "{stats}");
            assert!(stats["steps"].as_u64() < plain["stats"]["steps"].as_u64());
            let looked_up = if source == "lookup" { &stats["accepted"] } else { &json!(0) };
            assert_eq!(&stats["lookup_accepted"], looked_up);
        }
    }
}

#[test]
fn the_answer_goes_to_standard_output_and_statistics_to_standard_error() {
    // A fixed number of rows: whether drafts pay, which is what is asked otherwise, depends on the machine's other work.
    let ran = muser(&["run", "What is 417 + 286?", "--temp", "0", "--think", "low", "--draft-rows", "4"]);
    assert_eq!(ran.out, "417 + 286 = 703\n");
    assert_eq!(ran.code, 0);
    assert!(ran.err.contains("prompt tokens") && ran.err.contains("new tokens"), "{}", ran.err);
    assert!(ran.err.contains("accepted") && ran.err.contains("tokens a pass"), "{}", ran.err);
}

#[test]
fn prompts_come_from_arguments_files_and_standard_input() {
    let answer = |input: &str, args: &[&str]| {
        muser_with(input.as_bytes(), &[args, &["--temp", "0", "--think", "low", "--json"]].concat()).json()
    };
    let wanted = answer("", &["run", "Repeat after me: the quick brown fox"]);
    assert_eq!(wanted["message"]["content"], "the quick brown fox");
    for (input, args) in [
        ("", &["run", "Repeat", "after", "me:", "the quick brown fox"][..]),
        ("Repeat after me: the quick brown fox", &["run"]),
        ("the quick brown fox", &["run", "Repeat after me:", "-"]),
    ] {
        assert_eq!(answer(input, args)["prompt_ids"], wanted["prompt_ids"], "{args:?}");
    }
    let file = Temp::with("prompt.txt", "the quick brown fox");
    let from_file = answer("", &["run", "Repeat after me:", "--file", file.path()]);
    assert_eq!(from_file["message"]["content"], "the quick brown fox");
    // Without a command and without a terminal standard input is the prompt.
    let alone = muser_with(b"Repeat after me: the quick brown fox", &["--temp", "0", "--think", "low"]).ok();
    assert_eq!(alone, "the quick brown fox\n");
}

#[test]
fn a_tool_call_is_one_line_of_json() {
    let tools = json!([{ "type": "function", "function": {
        "name": "get_weather", "description": "Get the weather for a city.",
        "parameters": { "type": "object", "properties": {
            "city": { "type": "string", "description": "City name" },
            "unit": { "type": "string", "enum": ["celsius", "fahrenheit"] } }, "required": ["city"] } } }]);
    let file = Temp::with("weather.json", tools.to_string());
    let args =
        ["run", "What is the weather in Oslo?", "--temp", "0", "--think", "low", "--tools", file.path()];
    assert_eq!(muser(&args).json(), json!({ "name": "get_weather", "arguments": { "city": "Oslo" } }));
    let whole = muser(&[&args[..], &["--json"]].concat()).json();
    let golden = lines("mini/goldens.jsonl").into_iter().find(|g| g["name"] == "tool").unwrap();
    assert_eq!(whole["prompt_ids"], golden["ids_in"]);
    assert_eq!(whole["text"], golden["text_out"]);
    assert_eq!(whole["message"]["tool_calls"][0]["function"]["name"], "get_weather");
}

#[test]
fn limits_and_stop_strings_end_an_answer() {
    let run = |extra: &[&str]| {
        let args = ["run", "Repeat after me: the quick brown fox", "--temp", "0", "--json"];
        muser(&[&args[..], extra].concat()).json()
    };
    let short = run(&["-n", "5", "--think", "low"]);
    assert_eq!((ids(&short["ids"]).len(), &short["finish"]), (5, &json!("length")));
    let stopped = run(&["--stop", "own f", "--think", "low"]);
    assert_eq!(
        (&stopped["message"]["content"], &stopped["finish"]),
        (&json!("the quick br"), &json!("stop"))
    );
    let direct = run(&["--think", "off"]);
    assert_eq!(direct["message"]["reasoning_content"], Value::Null);
    assert!(direct["message"]["content"].as_str().is_some_and(|text| !text.is_empty()));
    let prompt = ids(&short["prompt_ids"]).len();
    let context = (prompt + 3).to_string();
    let full = run(&["--context", &context, "--draft", "off", "--think", "low"]);
    assert_eq!(full["finish"], "context");
}

#[test]
fn a_seed_means_the_same_text() {
    let text = |seed: &str| {
        let args =
            ["run", "--raw", "Once upon a time", "-n", "24", "--json", "--lane", "strict", "--seed", seed];
        let ran = muser(&args).json();
        assert_eq!(ran["seed"].to_string(), seed);
        ran["text"].clone()
    };
    assert_eq!(text("7"), text("7"));
    assert_ne!(text("7"), text("8"));
}
