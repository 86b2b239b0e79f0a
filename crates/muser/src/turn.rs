//! One turn of the assistant as it streams: channels, stop strings, the finished message.

use muser_core::stop::StopStrings;
use muser_text::channels::{ChannelParser, Collector, Event, Message};
use serde_json::{Value as Json, json};

/// What the model is writing.
pub struct Turn {
    parser: ChannelParser,
    collector: Collector,
    stop: StopStrings,
}

impl Turn {
    /// A turn whose prompt ends with `<|start|>assistant`, or behind a header to `recipient`.
    pub fn new(tools: Option<&Json>, recipient: Option<&str>, stop: StopStrings) -> Self {
        let parser = match recipient {
            None => ChannelParser::new(tools),
            Some(recipient) => ChannelParser::committed(tools, recipient),
        };
        Turn { parser, collector: Collector::default(), stop }
    }

    /// Takes the text of a token: only a special one's is markup. Events go to `show`. False once a stop string was found in
    /// the answer.
    pub fn push(&mut self, text: &str, special: bool, show: &mut dyn FnMut(&Event)) -> bool {
        let events = self.parser.push_token(text, special);
        self.pass_on(events, show);
        self.stop.hit().is_none()
    }

    /// Ends the turn.
    pub fn finish(mut self, show: &mut dyn FnMut(&Event)) -> Message {
        if self.stop.hit().is_none() {
            let events = self.parser.finish();
            self.pass_on(events, show);
            let held = self.stop.release();
            self.pass_on_content(held, show);
        }
        self.collector.message(self.parser.finished())
    }

    fn pass_on(&mut self, events: Vec<Event>, show: &mut dyn FnMut(&Event)) {
        for event in events {
            if self.stop.hit().is_some() {
                return;
            }
            match event {
                Event::Content(text) => {
                    let text = self.stop.push(&text);
                    self.pass_on_content(text, show);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What ordinary tokens spell is no markup: a quoted control token stays in the answer.
    #[test]
    fn only_special_tokens_are_markup() {
        let mut turn = Turn::new(None, Some("user"), StopStrings::default());
        let mut shown = String::new();
        let mut show = |event: &Event| {
            if let Event::Content(text) = event {
                shown += text;
            }
        };
        for (text, special) in [("A turn ends with <|eot", false), ("|>.", false), ("<|eot|>", true)] {
            assert!(turn.push(text, special, &mut show));
        }
        let message = turn.finish(&mut show);
        assert_eq!(message.content.as_deref(), Some("A turn ends with <|eot|>."));
        assert_eq!(shown, "A turn ends with <|eot|>.");
        assert!(message.finished);
    }
}
