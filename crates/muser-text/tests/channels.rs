//! The channel parser on what models and hostile authors write. Many cases are public reports about other engines.
#![allow(clippy::unwrap_used)]

use muser_text::channels::{ChannelParser, Collector, Event, Message, parse_message};
use proptest::prelude::*;
use serde_json::{Value, json};

fn tools() -> Value {
    let tool = |name: &str, properties: Value| {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties,
            "$defs": {"n": {"type": "integer"}}}}})
    };
    json!([
        tool(
            "get_weather",
            json!({"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}})
        ),
        tool("read", json!({"path": {"type": "string"}})),
        tool(
            "fs.write-file",
            json!({"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": ["string", "null"]}})
        ),
        tool(
            "math.add",
            json!({"a": {"type": "number"}, "b": {"$ref": "#/$defs/n"}, "list": {"type": "array"},
            "any": {}, "or": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "level": {"enum": ["low", "high"]}})
        ),
        tool("get_time", json!({})),
    ])
}

fn call(name: &str, parameters: &[(&str, &str)]) -> String {
    let parameters: String = parameters
        .iter()
        .map(|(k, v)| format!("<atem:parameter name=\"{k}\">{v}</atem:parameter>\n"))
        .collect();
    format!(
        "<atem:function_calls>\n<atem:invoke name=\"{name}\">\n{parameters}</atem:invoke>\n</atem:function_calls>"
    )
}

fn to(name: &str, parameters: &[(&str, &str)]) -> String {
    format!(" to={name}<|message|>{}", call(name, parameters))
}

fn parse(raw: &str) -> Message {
    parse_message(raw, Some(&tools()))
}

/// (name, arguments) of a message's calls.
fn calls(message: &Message) -> Vec<(String, Value)> {
    message.tool_calls.iter().map(|c| (c.name.clone(), c.arguments.clone())).collect()
}

fn one(raw: &str) -> (String, Value) {
    let all = calls(&parse(raw));
    assert_eq!(all.len(), 1, "{raw:?} gave {all:?}");
    all[0].clone()
}

#[test]
fn channels_are_told_apart() {
    let m = parse(" to=self<|message|>Think.<|eom|><|start|>assistant to=user<|message|>Hi!<|eot|>");
    assert_eq!((m.reasoning_content.as_deref(), m.content.as_deref()), (Some("Think."), Some("Hi!")));
    assert!(m.finished && m.tool_calls.is_empty());
    // No recipient is the user; no header at all is an answer.
    assert_eq!(parse("<|message|>Hi<|eot|>").content.as_deref(), Some("Hi"));
    assert_eq!(parse("to be or not").content.as_deref(), Some("to be or not"));
    assert_eq!(parse("Hello").content.as_deref(), Some("Hello"));
    // Several reasoning messages all count, also when the turn is cut.
    let m = parse(" to=self<|message|>a<|eom|><|start|>assistant to=self<|message|>b");
    assert_eq!((m.reasoning_content.as_deref(), m.finished), (Some("a\nb"), false));
    // A lost end of message.
    let m = parse(" to=self<|message|>a<|start|>assistant to=user<|message|>b<|eot|>");
    assert_eq!((m.reasoning_content.as_deref(), m.content.as_deref()), (Some("a"), Some("b")));
    // What follows the end of the turn, and what the model writes for others, is not shown.
    let m = parse(" to=user<|message|>a<|eot|><|start|>user<|message|>b");
    assert_eq!(m.content.as_deref(), Some("a"));
    let m = parse(
        " to=user<|message|>a<|eom|><|start|>tool get_time<|message|>b<|eom|><|start|>assistant<|message|>c",
    );
    assert_eq!(m.content.as_deref(), Some("a\nc"));
}

#[test]
fn calls_are_found_wherever_they_stand() {
    let oslo = ("get_weather".to_string(), json!({"city": "Oslo"}));
    let c = [("city", "Oslo")];
    // First thing in the turn.
    assert_eq!(one(&format!("{}<|eot|>", to("get_weather", &c))), oslo);
    // After reasoning, after an answer.
    let m = parse(&format!(" to=self<|message|>r<|eom|><|start|>assistant{}<|eot|>", to("get_weather", &c)));
    assert_eq!((m.reasoning_content.as_deref(), calls(&m)), (Some("r"), vec![oslo.clone()]));
    let m = parse(&format!(
        " to=user<|message|>Let me look.<|eom|><|start|>assistant{}<|eot|>",
        to("get_weather", &c)
    ));
    assert_eq!((m.content.as_deref(), calls(&m)), (Some("Let me look."), vec![oslo.clone()]));
    // Several: as messages, as invokes of one block, as blocks of one message.
    let two = format!("{}<|eom|><|start|>assistant{}<|eot|>", to("get_weather", &c), to("get_time", &[]));
    let both = vec![oslo.clone(), ("get_time".to_string(), json!({}))];
    assert_eq!(calls(&parse(&two)), both);
    let invokes = "<atem:invoke name=\"get_weather\">\n<atem:parameter name=\"city\">Oslo</atem:parameter>\n</atem:invoke>\n\
        <atem:invoke name=\"get_time\">\n</atem:invoke>\n";
    let block =
        format!(" to=get_weather<|message|><atem:function_calls>\n{invokes}</atem:function_calls><|eot|>");
    assert_eq!(calls(&parse(&block)), both);
    let blocks =
        format!(" to=get_weather<|message|>{}\n{}<|eot|>", call("get_weather", &c), call("get_time", &[]));
    assert_eq!(calls(&parse(&blocks)), both);
    // In an answer without a header: a call if that is all that follows and the tool was offered.
    assert_eq!(one(&format!("{}<|eot|>", call("get_weather", &c))), oslo);
    let m = parse(&format!(" to=user<|message|>I will look.\n{}<|eot|>", call("get_weather", &c)));
    assert_eq!((m.content.as_deref(), calls(&m)), (Some("I will look.\n"), vec![oslo]));
}

#[test]
fn quoted_examples_stay_text() {
    let example = call("get_weather", &[("city", "Oslo")]);
    for text in [
        format!("Write this:\n```\n{example}\n```\nDone."),
        format!("Use `{example}` for that."),
        format!("{example}\nis how one calls it."),
        call("unknown_tool", &[("x", "1")]),
    ] {
        let m = parse(&format!(" to=user<|message|>{text}<|eot|>"));
        assert_eq!((m.content.as_deref(), calls(&m)), (Some(text.as_str()), vec![]));
    }
    // Without tools nothing is a call unless it is addressed to one.
    let m = parse_message(&format!(" to=user<|message|>{example}<|eot|>"), None);
    assert_eq!(m.content.as_deref(), Some(example.as_str()));
}

#[test]
fn names_are_understood() {
    let c = [("path", "a b")];
    let want = ("read".to_string(), json!({"path": "a b"}));
    assert_eq!(one(&format!(" to=read.read<|message|>{}<|eot|>", call("read.read", &c))), want);
    assert_eq!(one(&format!(" to=user_tool<|message|>{}<|eot|>", call("read", &c))), want);
    assert_eq!(one(&format!(" to=read<|message|>{}<|eot|>", call("red", &c))), want);
    let (name, _) = one(&format!("{}<|eot|>", to("fs.write-file", &c)));
    assert_eq!(name, "fs.write-file");
    let (name, _) = one(&format!(" to=write-file<|message|>{}<|eot|>", call("write-file", &c)));
    assert_eq!(name, "fs.write-file");
    // The separator's token in place of, or inside, the name's end.
    for end in ["<|message|>", "<|message|>\">", "\"<|message|>", "\">"] {
        let raw = format!(
            " to=read<|message|><atem:function_calls>\n<atem:invoke name=\"read{end}\n\
            <atem:parameter name=\"path\">a b</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>"
        );
        assert_eq!(one(&raw), want, "{end}");
    }
    // A header without its separator.
    assert_eq!(one(&format!(" to=read{}<|eot|>", call("read", &c))), want);
}

#[test]
fn arguments_have_the_types_of_the_schema() {
    let add = |parameters: &[(&str, &str)]| one(&format!("{}<|eot|>", to("math.add", parameters))).1;
    assert_eq!(add(&[("a", "1"), ("b", "2.0")]), json!({"a": 1, "b": 2}));
    assert_eq!(add(&[("a", "x"), ("list", "[1, \"a\"]")]), json!({"a": "x", "list": [1, "a"]}));
    assert_eq!(add(&[("any", "true"), ("or", "5")]), json!({"any": true, "or": 5}));
    assert_eq!(
        add(&[("any", "word"), ("or", "five"), ("level", "low")]),
        json!({"any": "word", "or": "five", "level": "low"})
    );
    assert_eq!(add(&[("unknown", "{\"k\": null}")]), json!({"unknown": {"k": null}}));
    let weather = |parameters: &[(&str, &str)]| one(&format!("{}<|eot|>", to("get_weather", parameters))).1;
    // Strings stay what they are, JSON or not, spaces and quotes included.
    assert_eq!(weather(&[("city", " {\"a\": 1} ")]), json!({"city": " {\"a\": 1} "}));
    assert_eq!(
        weather(&[("city", "007"), ("days", "3"), ("exact", "True")]),
        json!({"city": "007", "days": 3, "exact": true})
    );
    assert_eq!(weather(&[("city", "a\"b\\c\n\td")]), json!({"city": "a\"b\\c\n\td"}));
    let write = |mode: &str| one(&format!("{}<|eot|>", to("fs.write-file", &[("mode", mode)]))).1;
    assert_eq!((write("null"), write("rw")), (json!({"mode": null}), json!({"mode": "rw"})));
    // A key that comes twice keeps its first value.
    assert_eq!(weather(&[("days", "1"), ("days", "2")]), json!({"days": 1}));
}

#[test]
fn closers_inside_values_are_text() {
    for content in [
        "a </atem:parameter> b",
        "</atem:invoke>",
        "x </atem:function_calls> y",
        "<atem:function_calls>\n<atem:invoke name=\"read\">\n<atem:parameter name=\"path\">p",
        "a < b && c <| d, <atem",
        "see </atem:parameter>\n</atem:invoke>\n</atem:function_calls> there",
    ] {
        let raw = format!("{}<|eot|>", to("fs.write-file", &[("path", "f"), ("content", content)]));
        assert_eq!(one(&raw), ("fs.write-file".into(), json!({"path": "f", "content": content})));
    }
}

#[test]
fn other_forms_of_arguments() {
    assert_eq!(one(" to=get_time<|message|><|eot|>"), ("get_time".into(), json!({})));
    assert_eq!(one(" to=read<|message|>{\"path\": \"p\"}<|eot|>"), ("read".into(), json!({"path": "p"})));
    let raw = format!(" to=read<|message|>Reading now. {}<|eot|>", call("read", &[("path", "p")]));
    assert_eq!(one(&raw), ("read".into(), json!({"path": "p"})));
    // Forgotten closers.
    let open = " to=read<|message|><atem:function_calls>\n<atem:invoke name=\"read\">\n<atem:parameter name=\"path\">p";
    for rest in [
        "",
        "</atem:parameter>",
        "</atem:parameter>\n</atem:invoke>",
        "</atem:parameter>\n</atem:function_calls>",
    ] {
        assert_eq!(one(&format!("{open}{rest}<|eot|>")), ("read".into(), json!({"path": "p"})), "{rest}");
    }
}

/// Texts for the properties below.
fn corpus() -> Vec<String> {
    let c = [("city", "Os\u{301}lo \"x\" </atem:p"), ("days", "3")];
    vec![
        format!(" to=self<|message|>Hm <b> <|x|> é.<|eom|><|start|>assistant{}<|eot|>", to("get_weather", &c)),
        format!(" to=user<|message|>Look:\n{}<|eot|>", call("get_weather", &c)),
        format!(" to=user<|message|>```\n{}\n```\n<atem:x<|eot|>", call("get_weather", &c)),
        format!("{}\n{}<|eom|><|start|>assistant to=user<|message|>k<|eot|>", to("get_time", &[]), call("read", &[("path", "</atem:function_calls>")])),
        " to=read<|message|>{\"path\": [1]}<|eot|>tail".into(),
        "to the <|start|>assistant<|message|>x<|message|>y<|end_of_text|>".into(),
        " to=read<|message|><atem:function_calls>\n<atem:invoke name=\"read<|message|>\">\n<atem:parameter name=\"q\">1</atem:parameter>".into(),
        " to=math.add<|message|><atem:function_calls><atem:invoke name=\"math.add\"><atem:parameter name=\"a\">1<|eom|> to=self<|message|>z".into(),
    ]
}

fn collect(pieces: &[&str]) -> Message {
    let tools = tools();
    let mut parser = ChannelParser::new(Some(&tools));
    let mut collector = Collector::default();
    pieces.iter().for_each(|p| collector.take(parser.push(p)));
    collector.take(parser.finish());
    collector.message(parser.finished())
}

/// Starts, arguments and ends stand in order, and a call's deltas are one JSON object.
fn check_events(events: &[Event]) {
    let mut open: Option<(usize, String)> = None;
    let mut next = 0;
    for event in events {
        match event {
            Event::ToolStart { index, .. } => {
                assert!(open.is_none() && *index == next, "{events:?}");
                open = Some((*index, String::new()));
            }
            Event::ToolArguments { index, delta } => {
                let (current, text) = open.as_mut().unwrap();
                assert_eq!(current, index);
                text.push_str(delta);
            }
            Event::ToolEnd { index } => {
                let (current, text) = open.take().unwrap();
                assert_eq!(current, *index);
                assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text:?}");
                next += 1;
            }
            Event::Reasoning(text) | Event::Content(text) => {
                assert!(open.is_none() && !text.is_empty());
                for control in ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|end_of_text|>"] {
                    assert!(!text.contains(control), "{text:?}");
                }
            }
        }
    }
    assert!(open.is_none(), "a call is left open: {events:?}");
}

#[test]
fn every_split_says_the_same() {
    for text in corpus() {
        let whole = parse(&text);
        for (at, _) in text.char_indices() {
            let (a, b) = text.split_at(at);
            assert_eq!(collect(&[a, b]), whole, "split at {at}: {a:?} | {b:?}");
        }
        let single: Vec<String> = text.chars().map(String::from).collect();
        let single: Vec<&str> = single.iter().map(String::as_str).collect();
        assert_eq!(collect(&single), whole, "{text:?}");
    }
}

#[test]
fn every_cut_is_valid() {
    for text in corpus() {
        for (at, _) in text.char_indices() {
            let tools = tools();
            let mut parser = ChannelParser::new(Some(&tools));
            let mut events = parser.push(&text[..at]);
            events.extend(parser.finish());
            check_events(&events);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn hostile_text_is_never_an_error(parts in prop::collection::vec(prop::sample::select(vec![
        "<|start|>", "assistant", "<|message|>", "<|eom|>", "<|eot|>", " to=", "self", "user", "read", "get_weather", "x",
        "<atem:function_calls>", "</atem:function_calls>", "<atem:invoke name=\"", "\">", "</atem:invoke>", "\n", "```", "<", "<|",
        "<atem:parameter name=\"", "city", "days", "</atem:parameter>", "é", "{", "}", "\"", "3", "</atem:", " ",
    ]), 0..24)) {
        let text = parts.concat();
        let tools = tools();
        let mut parser = ChannelParser::new(Some(&tools));
        let mut events = parser.push(&text);
        events.extend(parser.finish());
        check_events(&events);
        let pieces: Vec<&str> = parts.to_vec();
        prop_assert_eq!(collect(&pieces), collect(&[&text]));
        let single: Vec<String> = text.chars().map(String::from).collect();
        let single: Vec<&str> = single.iter().map(String::as_str).collect();
        prop_assert_eq!(collect(&single), collect(&[&text]));
    }
}
