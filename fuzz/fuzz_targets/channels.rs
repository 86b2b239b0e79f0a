//! Any text as a model's turn: whole and in pieces (sizes from the first byte) it gives the same message, and every call's
//! arguments are a JSON object.

#![no_main]

use libfuzzer_sys::fuzz_target;
use muser_text::channels::{ChannelParser, Collector, Event, Message};
use serde_json::{Value, json};
use std::sync::LazyLock;

static TOOLS: LazyLock<Value> = LazyLock::new(|| {
    let tool =
        |name: &str, properties: Value| json!({"name": name, "parameters": {"properties": properties}});
    json!([
        tool(
            "f",
            json!({"s": {"type": "string"}, "i": {"type": "integer"}, "o": {"type": "object"}, "x": {}})
        ),
        tool("n.g-h", json!({"s": {"type": ["string", "null"]}})),
    ])
});

fn parse(pieces: impl Iterator<Item = String>) -> Message {
    let mut parser = ChannelParser::new(Some(&TOOLS));
    let mut events: Vec<Event> = pieces.flat_map(|piece| parser.push(&piece)).collect();
    events.extend(parser.finish());
    let mut arguments = String::new();
    for event in &events {
        match event {
            Event::ToolArguments { delta, .. } => arguments.push_str(delta),
            Event::ToolEnd { .. } => {
                let value: Value = serde_json::from_str(&std::mem::take(&mut arguments)).expect("JSON");
                assert!(value.is_object());
            }
            _ => {}
        }
    }
    assert!(arguments.is_empty());
    let mut collector = Collector::default();
    collector.take(events);
    collector.message(parser.finished())
}

fuzz_target!(|bytes: &[u8]| {
    let Some((seed, bytes)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(bytes);
    let chars: Vec<char> = text.chars().collect();
    let mut seed = u32::from(*seed);
    let mut rest = &chars[..];
    let pieces = std::iter::from_fn(|| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (piece, after) = rest.split_at(rest.len().min(1 + (seed >> 28) as usize));
        rest = after;
        (!piece.is_empty()).then(|| piece.iter().collect())
    });
    assert_eq!(parse(std::iter::once(text.to_string())), parse(pieces));
});
