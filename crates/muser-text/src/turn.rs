//! A complete turn, collected from the parser's events.

use crate::channels::{ChannelParser, Event};
use serde_json::{Map, Value};

/// A tool call of a complete message.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// The arguments, an object.
    pub arguments: Value,
}

/// A complete turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// All reasoning, if there was any.
    pub reasoning_content: Option<String>,
    /// The answer, if there was one.
    pub content: Option<String>,
    /// Calls in order.
    pub tool_calls: Vec<ToolCall>,
    /// Whether the model ended the turn.
    pub finished: bool,
}

/// Collects events into a [`Message`].
#[derive(Default)]
pub struct Collector {
    message: Message,
    arguments: String,
    name: String,
}

impl Collector {
    /// Adds events.
    pub fn take(&mut self, events: Vec<Event>) {
        let message = &mut self.message;
        for event in events {
            match event {
                Event::Reasoning(text) => message.reasoning_content.get_or_insert_default().push_str(&text),
                Event::Content(text) => message.content.get_or_insert_default().push_str(&text),
                Event::ToolStart { name, .. } => self.name = name,
                Event::ToolArguments { delta, .. } => self.arguments.push_str(&delta),
                Event::ToolEnd { .. } => {
                    let text = std::mem::take(&mut self.arguments);
                    let arguments = serde_json::from_str(&text).unwrap_or(Value::Object(Map::new()));
                    let name = std::mem::take(&mut self.name);
                    message.tool_calls.push(ToolCall { name, arguments });
                }
            }
        }
    }

    /// The message so far.
    pub fn message(self, finished: bool) -> Message {
        Message { finished, ..self.message }
    }
}

/// Parses a whole turn: what the model wrote after `<|start|>assistant`.
pub fn parse_message(raw: &str, tools: Option<&Value>) -> Message {
    let mut parser = ChannelParser::new(tools);
    let mut collector = Collector::default();
    collector.take(parser.push(raw));
    collector.take(parser.finish());
    collector.message(parser.finished())
}
