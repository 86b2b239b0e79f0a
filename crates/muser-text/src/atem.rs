//! Tool calls in ATEM markup, read as they are written.
//!
//! ```text
//! <atem:function_calls>
//! <atem:invoke name="NAME">
//! <atem:parameter name="KEY">VALUE</atem:parameter>
//! </atem:invoke>
//! </atem:function_calls>
//! ```
//!
//! Values are not escaped, so a closing tag may be part of one. A closer counts only where what follows it is the rest of the
//! structure; the last block closer of a message is the real one.

use crate::channels::{CALLS, Event};
use crate::types::{Tools, value_of};
use serde_json::Value;

const CALLS_END: &str = "</atem:function_calls>";
const INVOKE: &str = "<atem:invoke name=\"";
const INVOKE_END: &str = "</atem:invoke>";
const PARAMETER: &str = "<atem:parameter name=\"";
const PARAMETER_END: &str = "</atem:parameter>";
/// Longest name of a tool or parameter that is waited for.
const MAX_NAME: usize = 512;

enum Place {
    /// Outside an invoke: block tags and white space.
    Outside,
    /// Inside an invoke, between parameters.
    Inside,
    /// Inside a parameter's value.
    Value { key: String, streams: bool },
}

/// The calls of one message.
pub(crate) struct CallParser {
    recipient: String,
    tools: Tools,
    index: usize,
    place: Place,
    held: String,
    /// How far `held` is known to begin no tag.
    scanned: usize,
    /// The open call's tool.
    name: String,
    keys: Vec<String>,
    called: bool,
    /// Everything so far was well formed and named offered tools.
    sound: bool,
    ended: bool,
}

/// Whether a closing tag is one.
#[derive(PartialEq)]
enum Close {
    Yes,
    No,
    Unknown,
}

impl CallParser {
    /// `recipient` is the message's; `index` that of its first call.
    pub(crate) fn new(recipient: &str, tools: Tools, index: usize) -> Self {
        CallParser {
            recipient: recipient.to_string(),
            tools,
            index,
            place: Place::Outside,
            held: String::new(),
            scanned: 0,
            name: String::new(),
            keys: vec![],
            called: false,
            sound: true,
            ended: false,
        }
    }

    /// Index for the next message's first call.
    pub(crate) fn next_index(&self) -> usize {
        self.index
    }

    /// Whether the text was nothing but well-formed calls of offered tools.
    pub(crate) fn is_sound(&self) -> bool {
        self.sound && self.called
    }

    pub(crate) fn push(&mut self, text: &str, events: &mut Vec<Event>) {
        self.held.push_str(text);
        while self.advance(events) {}
    }

    /// The message is over: `ended` by a control token, or cut.
    pub(crate) fn end(&mut self, ended: bool, events: &mut Vec<Event>) {
        self.ended = true;
        while self.advance(events) {}
        match std::mem::replace(&mut self.place, Place::Outside) {
            Place::Value { key, streams } => {
                self.sound = false;
                let rest = std::mem::take(&mut self.held);
                self.value(&key, &rest, streams, true, events);
                self.close_call(events);
            }
            Place::Inside => {
                self.sound = false;
                self.close_call(events);
            }
            Place::Outside => {
                let rest = std::mem::take(&mut self.held);
                if !self.called && ended && !self.recipient.is_empty() {
                    self.unmarked(rest.trim(), events);
                } else if !rest.trim().is_empty() {
                    self.sound = false;
                }
            }
        }
    }

    /// A message to a tool without markup: its arguments are a JSON object, or none.
    fn unmarked(&mut self, text: &str, events: &mut Vec<Event>) {
        let arguments = match serde_json::from_str(text) {
            Ok(Value::Object(map)) => Value::Object(map),
            _ if text.is_empty() => Value::Object(Default::default()),
            _ => return,
        };
        self.open_call("", events);
        events.push(Event::ToolArguments { index: self.index, delta: arguments.to_string() });
        events.push(Event::ToolEnd { index: self.index });
        self.index += 1;
    }

    fn advance(&mut self, events: &mut Vec<Event>) -> bool {
        match std::mem::replace(&mut self.place, Place::Outside) {
            Place::Outside => self.outside(events),
            Place::Inside => self.inside(events),
            Place::Value { key, streams } => self.in_value(key, streams, events),
        }
    }

    fn skip_blank(&mut self) {
        let blank = self.held.len() - self.held.trim_start().len();
        self.held.drain(..blank);
    }

    fn outside(&mut self, events: &mut Vec<Event>) -> bool {
        // Text before a tag is kept until the tag or the end: without any tag it may be bare JSON.
        let from = self.held.floor_char_boundary(self.scanned);
        let found = [CALLS, CALLS_END, INVOKE]
            .into_iter()
            .filter_map(|tag| Some((self.held[from..].find(tag)?, tag)));
        let Some((at, tag)) = found.min().map(|(at, tag)| (at + from, tag)) else {
            self.scanned = self.held.len().saturating_sub(CALLS_END.len());
            return false;
        };
        self.sound &= self.held[..at].trim().is_empty();
        self.held.drain(..at);
        self.scanned = 0;
        if tag == INVOKE {
            let Some((name, len)) = self.quoted(&self.held[tag.len()..]) else { return false };
            self.held.drain(..tag.len() + len);
            self.open_call(&name, events);
            self.place = Place::Inside;
        } else {
            self.held.drain(..tag.len());
        }
        true
    }

    /// A name up to its closing `">`; `<|message|>` was seen in place of that. None if more is needed.
    fn quoted(&self, text: &str) -> Option<(String, usize)> {
        let ends = ["\">", "\"/>", "<|message|>", ">"];
        let found = ends.iter().filter_map(|end| Some((text.find(end)?, *end))).min_by_key(|(at, _)| *at);
        // What is here may be the beginning of a longer end.
        let (at, end) = match found {
            Some(found) => found,
            None if text.len() > MAX_NAME || self.ended => (text.find(['\n', '<']).unwrap_or(text.len()), ""),
            None => return None,
        };
        let name = text[..at].trim_end_matches('"').to_string();
        let mut len = at + end.len();
        // `name<|message|>">`: the real end follows.
        if end == "<|message|>" {
            let rest = &text[len..];
            if !self.ended && "\">".starts_with(rest) && rest.len() < 2 {
                return None;
            }
            len += ["\">", ">", "\""].iter().find(|e| rest.starts_with(**e)).map_or(0, |e| e.len());
        }
        Some((name, len))
    }

    fn open_call(&mut self, written: &str, events: &mut Vec<Event>) {
        let known = self.tools.resolve(written).or_else(|| self.tools.resolve(&self.recipient));
        self.sound &= self.tools.resolve(written).is_some();
        let fallback = if written.is_empty() { self.recipient.as_str() } else { written };
        self.name = known.unwrap_or(fallback).to_string();
        self.keys.clear();
        self.called = true;
        events.push(Event::ToolStart { index: self.index, name: self.name.clone() });
    }

    fn close_call(&mut self, events: &mut Vec<Event>) {
        let delta = if self.keys.is_empty() { "{}" } else { "}" };
        events.push(Event::ToolArguments { index: self.index, delta: delta.to_string() });
        events.push(Event::ToolEnd { index: self.index });
        self.index += 1;
        self.place = Place::Outside;
    }

    fn inside(&mut self, events: &mut Vec<Event>) -> bool {
        self.skip_blank();
        self.place = Place::Inside;
        if self.held.starts_with(INVOKE_END) {
            self.held.drain(..INVOKE_END.len());
            self.close_call(events);
            return true;
        }
        if let Some(rest) = self.held.strip_prefix(PARAMETER) {
            let Some((key, len)) = self.quoted(rest) else { return false };
            self.held.drain(..PARAMETER.len() + len);
            let repeated = self.keys.contains(&key);
            let streams = !repeated && self.tools.types(&self.name, &key).is_some_and(|t| t.is_string());
            if streams {
                self.key(&key, events);
                events.push(Event::ToolArguments { index: self.index, delta: "\"".into() });
            }
            self.place = Place::Value { key, streams };
            return true;
        }
        // The invoke's end was forgotten.
        if [CALLS_END, CALLS, INVOKE].iter().any(|tag| self.held.starts_with(tag)) {
            self.sound = false;
            self.close_call(events);
            return true;
        }
        let all = [INVOKE_END, PARAMETER, CALLS_END, INVOKE];
        if self.held.is_empty() || (!self.ended && all.iter().any(|tag| tag.starts_with(self.held.as_str())))
        {
            return false;
        }
        self.sound = false;
        let step = self.held.chars().next().map_or(0, char::len_utf8);
        let next = self.held[step..].find('<').map_or(self.held.len(), |at| at + step);
        self.held.drain(..next);
        true
    }

    fn in_value(&mut self, key: String, streams: bool, events: &mut Vec<Event>) -> bool {
        let mut from = 0;
        let (safe, closed) = loop {
            // Up to the next `<` that may begin a closer everything is value.
            let Some(at) = self.held[from..].find('<').map(|at| at + from) else {
                break (self.held.len(), None);
            };
            let tail = &self.held[at..];
            if let Some(after) = tail.strip_prefix(PARAMETER_END) {
                match self.parameter_closes(after) {
                    Close::Yes => break (at, Some(at + PARAMETER_END.len())),
                    Close::Unknown => break (at, None),
                    Close::No => {}
                }
            } else if !self.ended && PARAMETER_END.starts_with(tail) {
                break (at, None);
            }
            from = at + 1;
        };
        match closed {
            Some(end) => {
                let text = self.held[..safe].to_string();
                self.held.drain(..end);
                self.value(&key, &text, streams, true, events);
                self.place = Place::Inside;
                true
            }
            None => {
                if streams && safe > 0 {
                    let text: String = self.held.drain(..safe).collect();
                    self.value(&key, &text, true, false, events);
                }
                self.place = Place::Value { key, streams };
                false
            }
        }
    }

    /// Whether `</atem:parameter>` followed by `after` ends the value.
    fn parameter_closes(&self, after: &str) -> Close {
        let rest = after.trim_start();
        if rest.starts_with(PARAMETER) {
            return Close::Yes;
        }
        if let Some(after) = rest.strip_prefix(INVOKE_END) {
            return self.invoke_closes(after);
        }
        if let Some(after) = rest.strip_prefix(CALLS_END) {
            return self.block_closes(after);
        }
        self.undecided(rest, &[PARAMETER, INVOKE_END, CALLS_END])
    }

    fn invoke_closes(&self, after: &str) -> Close {
        let rest = after.trim_start();
        if rest.starts_with(INVOKE) {
            return Close::Yes;
        }
        if let Some(after) = rest.strip_prefix(CALLS_END) {
            return self.block_closes(after);
        }
        self.undecided(rest, &[INVOKE, CALLS_END])
    }

    /// The last block closer of a message is the real one, unless another block begins right after it.
    fn block_closes(&self, after: &str) -> Close {
        if after.trim_start().starts_with(CALLS) {
            Close::Yes
        } else if after.contains(CALLS_END) {
            Close::No
        } else if self.ended {
            Close::Yes
        } else {
            Close::Unknown
        }
    }

    fn undecided(&self, rest: &str, tags: &[&str]) -> Close {
        match (tags.iter().any(|tag| tag.starts_with(rest)), self.ended) {
            (true, false) => Close::Unknown,
            // A cut or forgotten tail: nothing contradicts the closer.
            (true, true) => Close::Yes,
            (false, _) => Close::No,
        }
    }

    fn key(&mut self, key: &str, events: &mut Vec<Event>) {
        let open = if self.keys.is_empty() { "{" } else { ", " };
        let delta = format!("{open}{}: ", Value::from(key));
        events.push(Event::ToolArguments { index: self.index, delta });
        self.keys.push(key.to_string());
    }

    /// More of a streamed string, or a whole value once it is complete.
    fn value(&mut self, key: &str, text: &str, streams: bool, complete: bool, events: &mut Vec<Event>) {
        let index = self.index;
        if streams {
            // A JSON string's inside, without its quotes.
            let quoted = Value::from(text).to_string();
            let mut delta = quoted[1..quoted.len() - 1].to_string();
            if complete {
                delta.push('"');
            }
            if !delta.is_empty() {
                events.push(Event::ToolArguments { index, delta });
            }
        } else if !self.keys.iter().any(|k| k == key) {
            // A parameter that comes twice keeps its first value: a JSON object has each key once.
            self.key(key, events);
            let value = value_of(text, self.tools.types(&self.name, key));
            events.push(Event::ToolArguments { index, delta: value.to_string() });
        }
    }
}
