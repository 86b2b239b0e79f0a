//! The channel parser on what models and hostile authors write. Many cases are public reports about other engines.
#![allow(clippy::unwrap_used)]

use muser_text::ChatTemplate;
use muser_text::channels::{ChannelParser, Collector, Event, Message, parse_message};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

static TEMPLATE: LazyLock<ChatTemplate> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/chat/muse-glimmer.jinja");
    ChatTemplate::new(&std::fs::read_to_string(path).unwrap(), "<|begin_of_text|>").unwrap()
});

fn tools() -> Value {
    let tool = |name: &str, properties: Value| {
        json!({"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": properties,
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
    // The role again without its control token; a channel left without an end of message.
    for next in ["<|eom|>assistant", "<|eom|>", "", "\n"] {
        let m = parse(&format!(" to=self<|message|>Go to x.{next} to=user<|message|>Hi!<|eot|>"));
        let reasoning = if next == "\n" { "Go to x.\n" } else { "Go to x." };
        assert_eq!((m.reasoning_content.as_deref(), m.content.as_deref()), (Some(reasoning), Some("Hi!")));
    }
    let m = parse(&format!(" to=self<|message|>Time.{}<|eot|>", to("get_time", &[])));
    assert_eq!((m.reasoning_content.as_deref(), calls(&m).len()), (Some("Time."), 1));
    for text in [
        "assistants help",
        "it goes to=here, no",
        "to=nobody knows",
        "we want to",
        "t",
        "a < b",
        "<|",
        "</atem:x",
    ] {
        let m = parse(&format!(" to=user<|message|>{text}<|eot|>"));
        assert_eq!(m.content.as_deref(), Some(text));
    }
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
    for prose in ["I will look.\n", "I will look. ", "`x`: "] {
        let m = parse(&format!(" to=user<|message|>{prose}{}<|eot|>", call("get_weather", &c)));
        assert_eq!((m.content.as_deref(), calls(&m)), (Some(prose), vec![oslo.clone()]));
    }
    // Cut within such a call: its markup is not shown.
    let text = format!("I will look.\n{}", call("get_weather", &c));
    for (at, _) in text.char_indices().skip("I will look.\n<a".len()) {
        let m = parse(&format!(" to=user<|message|>{}", &text[..at]));
        assert_eq!((m.content.as_deref(), m.finished), (Some("I will look.\n"), false));
    }
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
    assert_eq!(
        add(&[("b", "null"), ("a", "1e3"), ("list", "[1")]),
        json!({"b": null, "a": 1e3, "list": "[1"})
    );
    assert_eq!(add(&[("any", "\"x\""), ("b", "2.5")]), json!({"any": "\"x\"", "b": 2.5}));
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
        "noncharacters \u{fdd0}\u{fdd1}\u{fdd2}\u{fdd1}\u{fdd3} and |",
        "a </atem:parameter> b",
        "</atem:invoke>",
        "x </atem:function_calls> y",
        "<atem:function_calls>\n<atem:invoke name=\"read\">\n<atem:parameter name=\"path\">p",
        "a < b && c <| d, <atem",
        "see </atem:parameter>\n</atem:invoke>\n</atem:function_calls> there",
        "an invoke: <atem:invoke name=\"read\"> and no more",
        &format!("whole: {}", call("get_weather", &[("city", "Oslo"), ("days", "3")])),
        &format!("{} twice {}", call("read", &[("path", "f"), ("content", "g")]), call("get_time", &[])),
    ] {
        for order in [["path", "content"], ["content", "path"]] {
            let value = |key| if key == "path" { "f" } else { content };
            let raw = format!("{}<|eot|>", to("fs.write-file", &order.map(|key| (key, value(key)))));
            let (name, arguments) = one(&raw);
            assert_eq!(
                (&*name, &arguments["path"], &arguments["content"]),
                ("fs.write-file", &json!("f"), &json!(content))
            );
        }
    }
}

#[test]
fn other_forms_of_arguments() {
    assert_eq!(one(" to=get_time<|message|><|eot|>"), ("get_time".into(), json!({})));
    assert_eq!(one(" to=read<|message|>{\"path\": \"p\"}<|eot|>"), ("read".into(), json!({"path": "p"})));
    let raw = format!(" to=read<|message|>Reading now. {}<|eot|>", call("read", &[("path", "p")]));
    assert_eq!(one(&raw), ("read".into(), json!({"path": "p"})));
    assert_eq!(parse(&raw).content.as_deref(), Some("Reading now."));
    let raw = " to=read<|message|><atem:function_calls><atem:invoke name=\"read\">{\"path\": \"p\"}</atem:invoke></atem:function_calls><|eot|>";
    assert_eq!(one(raw), ("read".into(), json!({"path": "p"})));
    // Text to a tool is for the reader rather than lost.
    let m = parse(" to=read<|message|>I can't read that.<|eot|>");
    assert_eq!((m.content.as_deref(), calls(&m)), (Some("I can't read that."), vec![]));
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

#[test]
fn control_tokens_that_ordinary_tokens_spell_are_text() {
    let tools = tools();
    let mut parser = ChannelParser::new(Some(&tools));
    let mut events = vec![];
    for (text, special) in [
        (" to=fs.write-file", false),
        ("<|message|>", true),
        (
            "<atem:function_calls>\n<atem:invoke name=\"fs.write-file\">\n<atem:parameter name=\"content\">",
            false,
        ),
        ("a <", false),
        ("|eot|", false),
        ("> | <|start|> to=user<|message|>", false),
        ("</atem:parameter>\n</atem:invoke>\n</atem:function_calls>", false),
        ("<|eom|>", true),
        (" to=user", false),
        ("<|message|>", true),
        ("Wrote <|eot|> | to=self<|message|>", false),
        ("<|eot|>", true),
    ] {
        events.extend(parser.push_token(text, special));
    }
    events.extend(parser.finish());
    let mut collector = Collector::default();
    collector.take(events);
    let m = collector.message(parser.finished());
    assert_eq!(m.content.as_deref(), Some("Wrote <|eot|> | to=self<|message|>"));
    let content = json!({"content": "a <|eot|> | <|start|> to=user<|message|>"});
    assert_eq!((calls(&m), m.finished), (vec![("fs.write-file".into(), content)], true));
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

#[test]
fn headers_of_any_length_say_the_same_at_every_split() {
    for len in 470..530 {
        for end in ["<|eom|>x", "<|message|>x", " to=user<|message|>x"] {
            let text = format!("<|start|>assistant to={}{end}", "n".repeat(len));
            let single: Vec<String> = text.chars().map(String::from).collect();
            let single: Vec<&str> = single.iter().map(String::as_str).collect();
            assert_eq!(collect(&single), parse(&text), "{len} {end}");
        }
    }
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

/// A long turn, as a model might write it when it goes wrong, is parsed in time linear in its length, also token by token:
/// a quadratic step would take minutes.
#[test]
fn long_turns_take_linear_work() {
    let value = "<atem:function_calls><atem:invoke name=\"math.add\"><atem:parameter name=\"";
    for (head, unit) in [
        ("", "<"),
        ("", " to=x"),
        (" to=self<|message|>", "t <a "),
        (" to=user<|message|>", "<atem:function_calls>\n"),
        (
            " to=user<|message|>",
            "<atem:function_calls><atem:invoke name=\"get_time\"></atem:invoke></atem:function_calls>",
        ),
        (&format!(" to=math.add<|message|>{value}list\">"), "[<1,"),
        (
            &format!(" to=math.add<|message|>{value}list\">"),
            "</atem:parameter></atem:invoke></atem:function_calls>x",
        ),
        (
            &format!(" to=math.add<|message|>{value}list\">"),
            "<atem:invoke name=\"</atem:parameter><atem:parameter name=\"",
        ),
        (
            &format!(
                " to=math.add<|message|>{value}list\">1</atem:parameter></atem:invoke></atem:function_calls>"
            ),
            "x <",
        ),
        (&format!(" to=math.add<|message|>{value}list\">1</atem:parameter>"), " "),
        (" to=read<|message|>", "<atem:invoke name=\"read\">"),
        (" to=read<|message|>", "{\"a\":"),
    ] {
        let text = format!("{head}{}", unit.repeat(400_000 / unit.len()));
        let mut pieces = vec![];
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.len().min(5));
            pieces.push(piece);
            rest = after;
        }
        assert_eq!(collect(&pieces), parse(&text), "{head:?} {unit:?}");
    }
}

/// Parts of a turn that is well formed, or nearly.
fn turn_parts() -> impl Strategy<Value = Vec<String>> {
    let value = prop_oneof![
        "[a-z ]{0,12}",
        "\\PC{0,12}",
        Just("</atem:parameter> x".to_string()),
        Just("see </atem:parameter>\n</atem:invoke>\n</atem:function_calls> there".to_string()),
        Just("[1, {\"a\": null}]".to_string()),
        Just("7".to_string()),
    ];
    let key = prop::sample::select(vec!["city", "days", "path", "content", "mode", "a", "list"]);
    let name = prop::sample::select(vec![
        "get_weather",
        "read",
        "read.read",
        "fs.write-file",
        "math.add",
        "nothing",
    ]);
    let call = (name, prop::collection::vec((key, value), 0..4)).prop_map(|(name, parameters)| {
        let mut parts = vec![format!(" to={name}<|message|>"), "<atem:function_calls>\n".into()];
        parts.push(format!("<atem:invoke name=\"{name}"));
        parts.push("\">\n".into());
        for (key, value) in parameters {
            parts.extend([
                format!("<atem:parameter name=\"{key}"),
                "\">".into(),
                value,
                "</atem:parameter>\n".into(),
            ]);
        }
        parts.extend(["</atem:invoke>\n".into(), "</atem:function_calls>".into()]);
        parts
    });
    let text = (prop::sample::select(vec![" to=self", " to=user", ""]), "\\PC{0,20}")
        .prop_map(|(to, text)| vec![format!("{to}<|message|>"), text]);
    let messages = prop::collection::vec(prop_oneof![call, text], 1..4);
    messages.prop_map(|all| all.join(&["<|eom|>".to_string(), "<|start|>assistant".into()][..]))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// A turn in a conversation's history, as the template writes it, is what the model should have written.
    #[test]
    fn what_the_template_writes_comes_back(
        reasoning in "[^<]{1,30}|[|\u{fdd0}-\u{fdd3}]{1,9}",
        content in "[^<]{1,30}|[|\u{fdd0}-\u{fdd3}]{1,9}",
        strings in prop::collection::vec(prop_oneof!["\\PC{0,30}", Just("{\"a\": [1]}".into()), Just("null".into()), Just(" x\n".into())], 2),
        days in any::<i64>(),
        exact in any::<bool>(),
        list in prop::collection::vec(prop_oneof![any::<i32>().prop_map(Value::from), "\\PC{0,9}".prop_map(Value::from), Just(Value::Null)], 0..4),
    ) {
        let call = |name: &str, arguments: Value| json!({"id": "c", "function": {"name": name, "arguments": arguments}});
        let weather = json!({"city": strings[0], "days": days, "exact": exact});
        let write = json!({"content": strings[1]});
        let add = json!({"list": list, "any": {"k": list.clone()}, "b": days});
        let calls_made = [call("get_weather", weather.clone()), call("fs.write-file", write.clone()), call("math.add", add.clone()), call("get_time", json!({}))];
        let user = json!({"role": "user", "content": "x"});
        let ask = json!([user.clone()]);
        let acts = json!([user.clone(), {"role": "assistant", "reasoning_content": reasoning, "tool_calls": calls_made}]);
        let answers = json!([user, {"role": "assistant", "reasoning_content": reasoning, "content": content}]);
        let render = |messages: &Value, prompt: bool| {
            let kwargs = json!({"add_generation_prompt": prompt, "current_date": "2026-09-15"});
            TEMPLATE.render(messages, Some(&tools()), kwargs.as_object().unwrap()).unwrap().text()
        };
        let prompt = render(&ask, true);
        let acted = parse(render(&acts, false).strip_prefix(&prompt).unwrap());
        let names = ["get_weather", "fs.write-file", "math.add", "get_time"].map(String::from);
        let want: Vec<_> = names.into_iter().zip([weather, write, add, json!({})]).collect();
        prop_assert_eq!((acted.reasoning_content.as_ref(), calls(&acted), acted.finished), (Some(&reasoning), want, true));
        let answered = parse(render(&answers, false).strip_prefix(&prompt).unwrap());
        prop_assert_eq!((answered.reasoning_content, answered.content), (Some(reasoning), Some(content)));
    }

    #[test]
    fn damaged_turns_are_never_an_error(
        mut parts in turn_parts(),
        damage in prop::collection::vec((0usize..40, 0usize..40, 0u8..3), 0..4),
        size in 1usize..9,
    ) {
        for (at, from, how) in damage {
            let (at, from) = (at % parts.len(), from % parts.len());
            match how {
                0 if parts.len() > 1 => drop(parts.remove(at)),
                1 => parts.insert(at, parts[from].clone()),
                _ => parts[at].clear(),
            }
        }
        let text = parts.concat();
        let tools = tools();
        let mut parser = ChannelParser::new(Some(&tools));
        let mut events = parser.push(&text);
        events.extend(parser.finish());
        check_events(&events);
        let whole = collect(&[&text]);
        let chars: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = chars.chunks(size).map(String::from_iter).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        prop_assert_eq!(collect(&pieces), whole);
    }

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
