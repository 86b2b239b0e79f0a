//! One turn of the assistant as it streams: channels, stop strings, the finished message.

use anyhow::Result;
use muser_core::stop::Stops;
use muser_text::channels::{ChannelParser, Collector, Event, Message};
use serde_json::{Value as Json, json};

/// What the model is writing.
pub struct Turn {
    parser: ChannelParser,
    collector: Collector,
    stops: Stops,
    stopped: bool,
}

impl Turn {
    /// A turn whose prompt ends with `<|start|>assistant`, or behind a header to `recipient`.
    pub fn new(tools: Option<&Json>, recipient: Option<&str>, stop: &[String]) -> Result<Self> {
        let parser = match recipient {
            None => ChannelParser::new(tools),
            Some(recipient) => ChannelParser::committed(tools, recipient),
        };
        Ok(Turn { parser, collector: Collector::default(), stops: Stops::new(vec![], stop)?, stopped: false })
    }

    /// Takes text; events go to `show`. False once a stop string was found in the answer.
    pub fn push(&mut self, text: &str, show: &mut dyn FnMut(&Event)) -> bool {
        let events = self.parser.push(text);
        self.pass_on(events, show);
        !self.stopped
    }

    /// Ends the turn.
    pub fn finish(mut self, show: &mut dyn FnMut(&Event)) -> Message {
        if !self.stopped {
            let events = self.parser.finish();
            self.pass_on(events, show);
            let held = self.stops.finish();
            self.pass_on_content(held, show);
        }
        self.collector.message(self.parser.finished())
    }

    fn pass_on(&mut self, events: Vec<Event>, show: &mut dyn FnMut(&Event)) {
        for event in events {
            if self.stopped {
                return;
            }
            match event {
                Event::Content(text) => {
                    let passed = self.stops.push(&text);
                    self.stopped = passed.stop.is_some();
                    self.pass_on_content(passed.text, show);
                }
                event => {
                    show(&event);
                    self.collector.take(vec![event]);
                }
            }
        }
    }

    fn pass_on_content(&mut self, text: String, show: &mut dyn FnMut(&Event)) {
        if !text.is_empty() {
            let event = Event::Content(text);
            show(&event);
            self.collector.take(vec![event]);
        }
    }
}

/// A message in the form that chat templates take, with whether the model ended it.
pub fn message_json(message: &Message) -> Json {
    let call = |call: &muser_text::channels::ToolCall| json!({ "type": "function", "function": { "name": call.name, "arguments": call.arguments } });
    json!({
        "role": "assistant",
        "reasoning_content": message.reasoning_content,
        "content": message.content,
        "tool_calls": message.tool_calls.iter().map(call).collect::<Vec<_>>(),
        "finished": message.finished,
    })
}
