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
    template().render(&case["messages"], tools, case["kwargs"].as_object().unwrap())
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
    let text = template().render(&messages, None, &serde_json::Map::new()).unwrap();
    let date = text.split_once("Current date: ").unwrap().1.split_once('.').unwrap().0;
    assert!(date.len() == 10 && date.starts_with("20") && date.as_bytes()[4] == b'-', "{date}");
}

#[test]
fn a_hostile_template_ends() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}";
    let template = ChatTemplate::new(endless, "").unwrap();
    assert!(template.render(&Value::Null, None, &serde_json::Map::new()).is_err());
    assert!(ChatTemplate::new("{% for %}", "").is_err());
}
