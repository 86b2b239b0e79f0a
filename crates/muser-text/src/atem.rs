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
//! Values are not escaped, so a tag may be part of one. A closer counts only where what follows it is the rest of the
//! structure, the last block closer of a message is the real one, and calls quoted whole within a value stay in it.
//! Every tag is found once and looked at a few times, so the work is linear in the text.

mod tags;

use crate::channels::{CALLS, Event, MESSAGE};
use crate::types::{Tools, json_of};
use serde_json::Value;
use tags::Tags;

/// The tags, as far as they are fixed. In the order of [`Tag`].
pub(crate) const TAGS: [&str; 6] = [
    CALLS,
    "</atem:function_calls>",
    "<atem:invoke name=\"",
    "</atem:invoke>",
    "<atem:parameter name=\"",
    "</atem:parameter>",
];
/// Longest name of a tool or parameter that is waited for.
const MAX_NAME: usize = 512;
/// Most white space between tags that belong together.
const MAX_BLANK: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Tag {
    Calls,
    CallsEnd,
    Invoke,
    InvokeEnd,
    Parameter,
    ParameterEnd,
}

impl Tag {
    const ALL: [Tag; 6] =
        [Tag::Calls, Tag::CallsEnd, Tag::Invoke, Tag::InvokeEnd, Tag::Parameter, Tag::ParameterEnd];

    fn text(self) -> &'static str {
        TAGS[self as usize]
    }
}

#[derive(Clone)]
enum Place {
    /// Outside an invoke: block tags and white space.
    Outside,
    /// Inside an invoke, between parameters.
    Inside,
    /// Inside a parameter's value, in which `quoted` invokes stand open.
    Value { key: String, streams: bool, quoted: usize },
}

/// What follows a tag.
enum After {
    Tag(Tag),
    Text,
    /// Nothing yet; with `ended`, nothing.
    End,
}

/// Whether a closing tag is one.
#[derive(PartialEq)]
enum Close {
    Yes,
    No,
    Unknown,
}

/// The calls of one message.
#[derive(Clone)]
pub(crate) struct CallParser {
    recipient: String,
    tools: Tools,
    index: usize,
    place: Place,
    /// Text that came, how much of it is dealt with, and the tags of what is not.
    held: String,
    at: usize,
    tags: Tags,
    /// The open call's tool and the keys it has.
    name: String,
    keys: Vec<String>,
    called: bool,
    /// Everything so far was in its place and named offered tools.
    sound: bool,
    ended: bool,
    /// Text that is no call.
    prose: String,
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
            at: 0,
            tags: Tags::default(),
            name: String::new(),
            keys: vec![],
            called: false,
            sound: true,
            ended: false,
            prose: String::new(),
        }
    }

    /// Index for the next message's first call.
    pub(crate) fn next_index(&self) -> usize {
        self.index
    }

    /// Whether the text so far was nothing but well-formed calls of offered tools.
    pub(crate) fn is_sound(&self) -> bool {
        self.sound
    }

    /// Whether a parameter's value is not closed.
    pub(crate) fn in_value(&self) -> bool {
        matches!(self.place, Place::Value { .. }) && !self.tags.any(Tag::ParameterEnd)
    }

    /// `<|message|>` came: it may stand for the end of a name, and is dropped elsewhere.
    pub(crate) fn separator(&mut self, events: &mut Vec<Event>) {
        if self.open_name().is_some() {
            self.push(MESSAGE, events);
        }
    }

    /// Where the tag stands whose name is not complete yet.
    fn open_name(&self) -> Option<usize> {
        let (at, tag) = self.tags.first()?;
        let waits =
            matches!((&self.place, tag), (Place::Outside, Tag::Invoke) | (Place::Inside, Tag::Parameter));
        waits.then_some(at)
    }

    pub(crate) fn push(&mut self, text: &str, events: &mut Vec<Event>) {
        self.held.push_str(text);
        self.tags.scan(&self.held);
        while self.advance(events) {}
        let done = std::mem::take(&mut self.at);
        if done > 0 {
            self.held.drain(..done);
            self.tags.shift(done);
        }
    }

    /// The message is over: `ended` by a control token, or cut. Returns text that is no call, for the reader.
    pub(crate) fn end(&mut self, ended: bool, events: &mut Vec<Event>) -> String {
        // A tag that was cut is no text; in a value one character is too short to tell.
        let text = ended || matches!(self.place, Place::Value { .. });
        if self.held.len() - self.tags.scanned() > usize::from(text) {
            self.held.truncate(self.tags.scanned());
        }
        if let Some(at) = self.open_name().filter(|_| !ended) {
            self.held.truncate(at);
            self.tags = Tags::default();
        }
        self.ended = true;
        self.tags.close(self.held.len());
        while self.advance(events) {}
        let rest = self.held.split_off(self.at);
        match std::mem::replace(&mut self.place, Place::Outside) {
            Place::Value { key, streams, .. } => {
                self.value(&key, &rest, streams, true, events);
                self.close_call(events);
            }
            Place::Inside => self.close_call(events),
            Place::Outside => {
                if !self.called && ended && !self.recipient.is_empty() && self.unmarked(rest.trim(), events) {
                    return String::new();
                }
                self.prose.push_str(&rest);
            }
        }
        std::mem::take(&mut self.prose).trim().to_string()
    }

    /// A message to a tool without markup: its arguments are a JSON object, or none.
    fn unmarked(&mut self, text: &str, events: &mut Vec<Event>) -> bool {
        if !self.prose.is_empty() || !(text.is_empty() || is_object(text)) {
            return false;
        }
        self.open_call("", events);
        let delta = if text.is_empty() { "{}" } else { text };
        events.push(Event::ToolArguments { index: self.index, delta: delta.to_string() });
        events.push(Event::ToolEnd { index: self.index });
        self.index += 1;
        true
    }

    /// Drops what stands before `to`.
    fn skip_to(&mut self, to: usize) {
        self.at = to;
        while self.tags.first().is_some_and(|(at, _)| at < to) {
            self.tags.pop();
        }
    }

    fn advance(&mut self, events: &mut Vec<Event>) -> bool {
        match std::mem::replace(&mut self.place, Place::Outside) {
            Place::Outside => self.outside(events),
            Place::Inside => self.inside(events),
            Place::Value { key, streams, quoted } => self.in_value_of(key, streams, quoted, events),
        }
    }

    fn outside(&mut self, events: &mut Vec<Event>) -> bool {
        let Some((at, tag)) = self.tags.first() else {
            self.sound &= self.held[self.at..self.tags.scanned()].trim().is_empty();
            return false;
        };
        if tag == Tag::Invoke {
            let Some((name, end)) = self.name_at(at + tag.text().len(), true) else { return false };
            self.keep_prose(at);
            self.skip_to(end);
            self.open_call(&name, events);
            self.place = Place::Inside;
        } else {
            self.sound &= matches!(tag, Tag::Calls | Tag::CallsEnd);
            self.keep_prose(at);
            self.skip_to(at + tag.text().len());
        }
        true
    }

    /// Text before a tag is for the reader.
    fn keep_prose(&mut self, to: usize) {
        let text = &self.held[self.at..to];
        if !text.trim().is_empty() {
            self.sound = false;
            self.prose.push_str(text);
        }
    }

    /// The name from `from` on, and where its tag ends; none if more is needed. `<|message|>` was seen in place of the end,
    /// and within the name of an invoke.
    fn name_at(&self, from: usize, invoke: bool) -> Option<(String, usize)> {
        let mut name = String::new();
        let mut at = from;
        loop {
            let rest = &self.held[at..];
            let near = &rest[..rest.floor_char_boundary(MAX_NAME)];
            let end = near.find(['"', '>', '<', '\n']);
            if end.is_none() && !self.ended && near.len() == rest.len() {
                return None;
            }
            let end = end.unwrap_or(near.len());
            name.push_str(&rest[..end]);
            at += end;
            let Some(after) = self.held[at..].strip_prefix(MESSAGE) else { break };
            at += MESSAGE.len();
            match after.chars().next() {
                None if !self.ended => return None,
                Some(c) if invoke && !c.is_whitespace() && !"\"></".contains(c) => {}
                _ => break,
            }
        }
        for part in ["\"", MESSAGE, "/", ">"] {
            let rest = &self.held[at..];
            if rest.is_empty() && !self.ended {
                return None;
            }
            at += rest.strip_prefix(part).map_or(0, |_| part.len());
        }
        Some((name, at))
    }

    fn open_call(&mut self, written: &str, events: &mut Vec<Event>) {
        let meant = self.tools.resolve(written);
        self.sound &= meant.is_some();
        let known = meant.or_else(|| self.tools.resolve(&self.recipient));
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
        self.place = Place::Inside;
        let Some((at, tag)) = self.tags.first() else { return false };
        let text = self.held[self.at..at].trim();
        match tag {
            Tag::InvokeEnd => {
                // Arguments as one JSON object, without parameters.
                if self.keys.is_empty() && is_object(text) {
                    let delta = text.to_string();
                    events.push(Event::ToolArguments { index: self.index, delta });
                    events.push(Event::ToolEnd { index: self.index });
                    self.index += 1;
                    self.place = Place::Outside;
                } else {
                    self.sound &= text.is_empty();
                    self.close_call(events);
                }
                self.skip_to(at + tag.text().len());
            }
            Tag::Parameter => {
                let Some((key, end)) = self.name_at(at + tag.text().len(), false) else { return false };
                self.sound &= text.is_empty();
                self.skip_to(end);
                let repeated = self.keys.contains(&key);
                let streams = !repeated && self.tools.types(&self.name, &key).is_some_and(|t| t.is_string());
                if streams {
                    self.key(&key, events);
                    events.push(Event::ToolArguments { index: self.index, delta: "\"".into() });
                }
                self.place = Place::Value { key, streams, quoted: 0 };
            }
            Tag::ParameterEnd => {
                self.sound = false;
                self.skip_to(at + tag.text().len());
            }
            // The invoke's end was forgotten.
            Tag::Invoke | Tag::Calls | Tag::CallsEnd => {
                self.sound &= text.is_empty();
                self.skip_to(at);
                self.close_call(events);
            }
        }
        true
    }

    fn in_value_of(
        &mut self,
        key: String,
        streams: bool,
        mut quoted: usize,
        events: &mut Vec<Event>,
    ) -> bool {
        // Up to the next tag that may close it everything is value.
        let (mut safe, mut closed) = (self.tags.scanned(), None);
        while let Some((at, tag)) = self.tags.first() {
            let close = if tag == Tag::ParameterEnd { self.closes(quoted) } else { Close::No };
            if close != Close::No {
                safe = at;
                closed = (close == Close::Yes).then_some(at + tag.text().len());
                break;
            }
            match tag {
                Tag::Invoke => quoted += 1,
                Tag::InvokeEnd => quoted = quoted.saturating_sub(1),
                _ => {}
            }
            self.tags.pop();
        }
        if let Some(end) = closed {
            let text = self.held[self.at..safe].to_string();
            self.skip_to(end);
            self.value(&key, &text, streams, true, events);
            self.place = Place::Inside;
            return true;
        }
        if streams && safe > self.at {
            let text = self.held[self.at..safe].to_string();
            self.at = safe;
            self.value(&key, &text, true, false, events);
        }
        self.place = Place::Value { key, streams, quoted };
        false
    }

    /// What follows the tag with this number.
    fn after(&self, number: usize) -> After {
        let Some((at, tag)) = self.tags.get(number) else { return After::End };
        let from = at + tag.text().len();
        let next = self.tags.get(number + 1);
        let until = next.map_or(self.tags.scanned(), |(at, _)| at);
        if until - from > MAX_BLANK || !self.held[from..until].trim_start().is_empty() {
            return After::Text;
        }
        next.map_or(After::End, |(_, tag)| After::Tag(tag))
    }

    /// Whether the `</atem:parameter>` that stands first ends the value.
    fn closes(&self, quoted: usize) -> Close {
        match self.after(0) {
            After::End => self.at_end(),
            After::Tag(Tag::Parameter) => self.unless_quoted(quoted),
            After::Tag(Tag::Invoke | Tag::Calls) if quoted == 0 => Close::Yes,
            After::Tag(Tag::CallsEnd) => self.block_closes(1),
            After::Tag(Tag::InvokeEnd) => match self.after(1) {
                After::End => self.at_end(),
                After::Tag(Tag::Invoke) => self.unless_quoted(quoted),
                After::Tag(Tag::CallsEnd) => self.block_closes(2),
                _ => Close::No,
            },
            _ => Close::No,
        }
    }

    /// Nothing contradicts a closer once the message is over.
    fn at_end(&self) -> Close {
        if self.ended { Close::Yes } else { Close::Unknown }
    }

    /// A closer within invokes that opened in this value belongs to them if each of them is closed, and the call's own too.
    fn unless_quoted(&self, quoted: usize) -> Close {
        let (opens, ends, _) = self.tags.left();
        match (quoted, self.ended) {
            (0, _) => Close::Yes,
            (_, false) => Close::Unknown,
            _ if ends > opens + quoted => Close::No,
            _ => Close::Yes,
        }
    }

    /// The block closer with this number: the last of a message is the real one, unless another block begins right after it.
    fn block_closes(&self, number: usize) -> Close {
        match self.after(number) {
            After::Tag(Tag::Calls) => Close::Yes,
            _ if self.tags.left().2 > 1 => Close::No,
            _ => self.at_end(),
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
            let delta = json_of(text, self.tools.types(&self.name, key));
            events.push(Event::ToolArguments { index, delta });
        }
    }
}

fn is_object(text: &str) -> bool {
    text.starts_with('{') && serde_json::from_str::<serde_json::Map<String, Value>>(text).is_ok()
}
