//! The chat template against transformers' renderer.
#![allow(clippy::unwrap_used)]

use muser_text::ChatTemplate;
use serde_json::Value;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/chat/");

fn template() -> ChatTemplate {
    let source = std::fs::read_to_string(format!("{FIXTURES}muse-glimmer.jinja")).unwrap();
    ChatTemplate::new(&source, "<|begin_of_text|>").unwrap()
}

fn cases(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(format!("{FIXTURES}{name}")).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn render(case: &Value) -> Result<String, muser_text::TextError> {
    let tools = Some(&case["tools"]).filter(|t| !t.is_null());
    template().render(&case["messages"], tools, case["kwargs"].as_object().unwrap()).map(|r| r.text())
}

#[test]
fn conversations_are_transformers() {
    for case in cases("conversations.jsonl") {
        assert_eq!(render(&case).unwrap(), case["expected"].as_str().unwrap(), "{}", case["name"]);
    }
}

#[test]
fn refusals_are_transformers() {
    for case in cases("errors.jsonl") {
        let error = render(&case).unwrap_err().to_string();
        assert!(error.contains(case["error_contains"].as_str().unwrap()), "{}: {error}", case["name"]);
    }
}

#[test]
fn the_date_is_today_where_none_is_given() {
    let messages = serde_json::json!([{"role": "user", "content": "x"}]);
    let text = template().render(&messages, None, &serde_json::Map::new()).unwrap().text();
    let date = text.split_once("Current date: ").unwrap().1.split_once('.').unwrap().0;
    assert!(date.len() == 10 && date.starts_with("20") && date.as_bytes()[4] == b'-', "{date}");
}

#[test]
fn a_hostile_template_ends() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}";
    let template = ChatTemplate::new(endless, "").unwrap();
    assert!(template.render(&Value::Null, None, &serde_json::Map::new()).is_err());
    assert!(ChatTemplate::new("{% for %}", "").is_err());
    let long = "{% for a in range(9999) %}{{ 'x' * 99999999 }}{% endfor %}";
    let error = ChatTemplate::new(long, "").unwrap().render(&Value::Null, None, &serde_json::Map::new());
    assert!(error.unwrap_err().to_string().contains("longer than"));
}

#[test]
fn numbers_and_json_are_pythons() {
    let messages: Value =
        serde_json::from_str(r#"{"f": 1e20, "g": [1e-7, 2.0, 3, -0.5], "s": "é \"<>&'\u2028\u0001"}"#)
            .unwrap();
    let template =
        ChatTemplate::new("{{ messages.f }} {{ messages | tojson }} {{ messages.g | tojson(indent=2) }}", "");
    // jinja2 with transformers' tojson.
    let want = "1e+20 {\"f\": 1e+20, \"g\": [1e-07, 2.0, 3, -0.5], \"s\": \"é \\\"<>&'\u{2028}\\u0001\"} [\n  1e-07,\n  2.0,\n  3,\n  -0.5\n]";
    assert_eq!(template.unwrap().render(&messages, None, &serde_json::Map::new()).unwrap().text(), want);
}

const MINI: &str = "<|begin_of_text|><|start|>system<|message|>You are Glimmer Mini.\n\nReasoning strength: low.\n\n\
    # Valid recipients: \"self\", \"user\".<|eot|><|start|>user<|message|>Weather?<|eot|>\
    <|start|>assistant to=self<|message|>Look.<|eom|><|start|>assistant to=get_weather<|message|>\
    <atem:function_calls>\n<atem:invoke name=\"get_weather\">\n<atem:parameter name=\"city\">Oslo</atem:parameter>\n\
    <atem:parameter name=\"days\">2</atem:parameter>\n<atem:parameter name=\"ok\">true</atem:parameter>\n\
    </atem:invoke>\n</atem:function_calls><|eot|><|start|>tool get_weather<|message|>\
    <tool_output name=\"get_weather\">\n21\n</tool_output><|eot|><|start|>assistant";

#[test]
fn the_default_model_brings_its_own_template() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/glimmer-mini-Q8_0.gguf");
    let file = muser_format::Gguf::open(path.as_ref()).unwrap();
    let template =
        ChatTemplate::new(file.str("tokenizer.chat_template").unwrap(), "<|begin_of_text|>").unwrap();
    let messages = serde_json::json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning_content": "Look.", "content": null,
            "tool_calls": [{"id": "c", "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2, "ok": true}}}]},
        {"role": "tool", "tool_call_id": "c", "content": "21"},
    ]);
    let kwargs = serde_json::json!({"add_generation_prompt": true, "reasoning_strength": "low"});
    let text = template.render(&messages, None, kwargs.as_object().unwrap()).unwrap().text();
    // The recipe's chat_template.jinja through transformers' renderer.
    assert_eq!(text, MINI);
}
