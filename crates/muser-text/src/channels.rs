//! What the model writes, channel by channel: reasoning (`to=self`), answers (`to=user` or no recipient), tool calls.
//!
//! The parser is fed text as it comes, control tokens as their text, split anywhere; it says the same whatever the split. It
//! holds back what may still become a control token or a header, never emits markup, and never fails: where the model's
//! intent is clear it is followed, else the text is shown.

use crate::atem::CallParser;
use crate::types::Tools;
use serde_json::{Map, Value};

/// Something to pass on to a client.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// More reasoning.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// A call begins; calls are counted from 0.
    ToolStart {
        /// Which call.
        index: usize,
        /// The tool, by the name under which it was offered.
        name: String,
    },
    /// More of a call's arguments: JSON text; all deltas of a call together are one object.
    ToolArguments {
        /// Which call.
        index: usize,
        /// JSON text.
        delta: String,
    },
    /// A call is complete.
    ToolEnd {
        /// Which call.
        index: usize,
    },
}

/// Control tokens that may stand in a generation. They are markup: none is ever emitted as text.
const CONTROL: [&str; 12] = [
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
    "<|end_of_text|>",
    "<|begin_of_text|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|video|>",
    "<|patch|>",
    "<|finetune_right_pad|>",
    "<|draft_mask|>",
];
/// Opens a block of calls.
pub(crate) const CALLS: &str = "<atem:function_calls>";
/// Longest header that is waited for; more is text.
const MAX_HEADER: usize = 512;

/// Where the parser stands.
enum State {
    /// Between `<|start|>assistant` and `<|message|>`.
    Header,
    Reasoning,
    Content,
    /// A message to a tool.
    Tool(CallParser),
    /// Text of an answer from a call block on, kept until the message's end shows what it is.
    Doubtful(String),
    /// A message of another role: the model plays someone else; nothing of it is shown.
    Other,
    /// The turn is over; what follows is ignored.
    Done,
}

/// The incremental parser of one assistant turn.
pub struct ChannelParser {
    state: State,
    held: String,
    tools: Tools,
    calls: usize,
    shown_reasoning: bool,
    shown_content: bool,
    /// A message of a channel begins: a line break parts it from an earlier one of that channel.
    gap: bool,
    /// What the answer's current line and code fences look like: decides whether a call block is quoted.
    line: Line,
    finished: bool,
}

impl ChannelParser {
    /// A parser for what follows `<|start|>assistant`. `tools` are the request's tools (OpenAI form or bare functions).
    pub fn new(tools: Option<&Value>) -> Self {
        ChannelParser {
            state: State::Header,
            held: String::new(),
            tools: Tools::new(tools),
            calls: 0,
            shown_reasoning: false,
            shown_content: false,
            gap: false,
            line: Line::default(),
            finished: false,
        }
    }

    /// A parser for a prompt that ends with a committed header, such as ` to=user<|message|>`.
    pub fn committed(tools: Option<&Value>, recipient: &str) -> Self {
        let mut parser = Self::new(tools);
        parser.enter(Some(recipient.to_string()));
        parser
    }

    /// Whether the turn was ended by the model (`<|eot|>` or `<|end_of_text|>`).
    pub fn finished(&self) -> bool {
        self.finished
    }

    /// Whether the parser is in the reasoning channel.
    pub fn reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Whether the parser stands inside a call.
    pub fn in_call(&self) -> bool {
        matches!(self.state, State::Tool(_) | State::Doubtful(_))
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        let mut events = vec![];
        self.held.push_str(text);
        while self.advance(&mut events) {}
        events
    }

    /// Ends the stream, whatever the state: open calls are completed to valid JSON.
    pub fn finish(&mut self) -> Vec<Event> {
        let mut events = vec![];
        let rest = std::mem::take(&mut self.held);
        match self.state {
            // An unfinished header or control token is markup that was cut.
            State::Header => {
                if header(&rest) == Header::No {
                    self.enter(None);
                    self.body(&rest, &mut events);
                }
            }
            _ => {
                let cut = CONTROL.iter().chain([&CALLS]).any(|c| c.starts_with(&rest)) && rest.len() >= 2;
                if !cut {
                    self.body(&rest, &mut events);
                }
            }
        }
        self.end_message(false, &mut events);
        self.state = State::Done;
        events
    }

    /// One step over `held`; false when more text is needed.
    fn advance(&mut self, events: &mut Vec<Event>) -> bool {
        match self.state {
            State::Done => {
                self.held.clear();
                false
            }
            State::Header => match header(&self.held) {
                Header::Partial if self.held.len() <= MAX_HEADER => false,
                Header::Complete { role, recipient, len } => {
                    self.held.drain(..len);
                    if role.is_empty() || role == "assistant" {
                        self.enter(recipient);
                    } else {
                        self.state = State::Other;
                    }
                    true
                }
                Header::Ended { len, turn } => {
                    self.held.drain(..len);
                    if turn {
                        self.finished = true;
                        self.state = State::Done;
                    }
                    true
                }
                _ => {
                    // A control token that begins no header is dropped, or it would be met again as text.
                    let blank = self.held.len() - self.held.trim_start().len();
                    match CONTROL.iter().find(|c| self.held[blank..].starts_with(**c)) {
                        Some(control) => drop(self.held.drain(..blank + control.len())),
                        None => self.enter(None),
                    }
                    true
                }
            },
            _ => self.advance_body(events),
        }
    }

    fn advance_body(&mut self, events: &mut Vec<Event>) -> bool {
        let Some(at) = self.held.find('<') else {
            let text = std::mem::take(&mut self.held);
            self.body(&text, events);
            return false;
        };
        if at > 0 {
            let text: String = self.held.drain(..at).collect();
            self.body(&text, events);
            return true;
        }
        if let Some(control) = CONTROL.iter().find(|c| self.held.starts_with(**c)) {
            self.control(control, events);
            return true;
        }
        let watch_calls = matches!(self.state, State::Content) && !self.tools.is_empty();
        if watch_calls && self.held.starts_with(CALLS) {
            let text: String = self.held.drain(..CALLS.len()).collect();
            if self.line.may_call() {
                self.state = State::Doubtful(text);
            } else {
                self.body(&text, events);
            }
            return true;
        }
        let may_become = |token: &&str| token.starts_with(self.held.as_str());
        if CONTROL.iter().any(may_become) || (watch_calls && may_become(&CALLS)) {
            return false;
        }
        let first: String = self.held.drain(..1).collect();
        self.body(&first, events);
        true
    }

    fn control(&mut self, control: &str, events: &mut Vec<Event>) {
        match control {
            "<|eot|>" | "<|end_of_text|>" => {
                self.held.drain(..control.len());
                self.end_message(true, events);
                self.finished = true;
                self.state = State::Done;
            }
            "<|eom|>" => {
                self.held.drain(..control.len());
                self.end_message(true, events);
                self.state = State::Header;
            }
            // A new message without an end of the old one: the header parser reads it.
            "<|start|>" => {
                self.end_message(true, events);
                self.state = State::Header;
            }
            _ => {
                self.held.drain(..control.len());
                // Seen in place of an invoke name's end.
                if let ("<|message|>", State::Tool(call)) = (control, &mut self.state) {
                    call.push(control, events);
                }
            }
        }
    }

    fn enter(&mut self, recipient: Option<String>) {
        self.line = Line::default();
        self.gap = true;
        self.state = match recipient.as_deref() {
            Some("self") => State::Reasoning,
            None | Some("user" | "") => State::Content,
            Some(tool) => State::Tool(CallParser::new(tool, self.tools.clone(), self.calls)),
        };
    }

    fn body(&mut self, text: &str, events: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        match &mut self.state {
            State::Reasoning => {
                let gap = if std::mem::take(&mut self.gap) && self.shown_reasoning { "\n" } else { "" };
                self.shown_reasoning = true;
                push_text(events, Event::Reasoning(format!("{gap}{text}")));
            }
            State::Content => {
                self.line.push(text);
                self.show(text.to_string(), events);
            }
            State::Tool(call) => call.push(text, events),
            State::Doubtful(held) => held.push_str(text),
            State::Header | State::Other | State::Done => {}
        }
    }

    /// Ends the current message; `ended` is false where the stream was cut.
    fn end_message(&mut self, ended: bool, events: &mut Vec<Event>) {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Tool(mut call) => {
                call.end(ended, events);
                self.calls = call.next_index();
            }
            State::Doubtful(text) => {
                let mut call = CallParser::new("", self.tools.clone(), self.calls);
                let mut calls = vec![];
                call.push(&text, &mut calls);
                call.end(ended, &mut calls);
                if call.is_sound() {
                    self.calls = call.next_index();
                    events.extend(calls);
                } else {
                    self.show(text, events);
                }
            }
            _ => {}
        }
    }

    fn show(&mut self, text: String, events: &mut Vec<Event>) {
        let gap = if std::mem::take(&mut self.gap) && self.shown_content { "\n" } else { "" };
        self.shown_content = true;
        push_text(events, Event::Content(format!("{gap}{text}")));
    }
}

/// Joins neighbouring text of one channel, so that a push gives few events.
fn push_text(events: &mut Vec<Event>, event: Event) {
    match (events.last_mut(), event) {
        (Some(Event::Reasoning(a)), Event::Reasoning(b)) => a.push_str(&b),
        (Some(Event::Content(a)), Event::Content(b)) => a.push_str(&b),
        (_, event) => events.push(event),
    }
}

/// The current line of an answer.
#[derive(Default)]
struct Line {
    /// Its first three characters that are not blank.
    lead: String,
    fenced: bool,
}

impl Line {
    fn push(&mut self, text: &str) {
        for c in text.chars() {
            if c == '\n' {
                self.fenced ^= self.lead == "```";
                self.lead.clear();
            } else if self.lead.len() < 3 && !(self.lead.is_empty() && c.is_whitespace()) {
                self.lead.push(c);
            }
        }
    }

    /// A block that is meant as a call begins a line outside code fences.
    fn may_call(&self) -> bool {
        !self.fenced && self.lead.is_empty()
    }
}

#[derive(Debug, PartialEq)]
enum Header {
    /// `[<|start|>ROLE][ to=RECIPIENT]<|message|>` of `len` bytes.
    Complete { role: String, recipient: Option<String>, len: usize },
    /// The message ended before it began.
    Ended { len: usize, turn: bool },
    /// May still become a header.
    Partial,
    /// Is none.
    No,
}

/// Reads a header from the start of `text`.
fn header(text: &str) -> Header {
    let mut rest = text.trim_start();
    let mut role = String::new();
    let blank = |rest: &str| rest.is_empty();
    if blank(rest) {
        return Header::Partial;
    }
    for (end, turn) in [("<|eot|>", true), ("<|end_of_text|>", true), ("<|eom|>", false)] {
        if let Some(after) = rest.strip_prefix(end) {
            return Header::Ended { len: text.len() - after.len(), turn };
        }
    }
    if let Some(after) = rest.strip_prefix("<|start|>") {
        let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
        role = after[..end].to_string();
        rest = after[end..].trim_start();
        if blank(rest) {
            return Header::Partial;
        }
    }
    let mut recipient = None;
    if let Some(after) = rest.strip_prefix("to=") {
        let end = after.find(|c: char| c == '<' || c.is_whitespace()).unwrap_or(after.len());
        recipient = Some(after[..end].trim_matches('"').to_string());
        rest = after[end..].trim_start();
        if blank(rest) {
            return Header::Partial;
        }
        // The separator was forgotten before a call block.
        if rest.starts_with(CALLS) {
            return Header::Complete { role, recipient, len: text.len() - rest.len() };
        }
    } else if "to=".starts_with(rest) {
        return Header::Partial;
    } else if role == "tool" {
        // `<|start|>tool NAME<|message|>`: the name is no recipient.
        rest = &rest[rest.find('<').unwrap_or(rest.len())..];
    }
    if let Some(after) = rest.strip_prefix("<|message|>") {
        return Header::Complete { role, recipient, len: text.len() - after.len() };
    }
    if CONTROL.iter().any(|c| c.starts_with(rest)) || CALLS.starts_with(rest) {
        return Header::Partial;
    }
    if role.is_empty() && recipient.is_none() {
        return Header::No;
    }
    // A role or a recipient, then text: the separator was forgotten.
    Header::Complete { role, recipient, len: text.len() - rest.len() }
}

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
        for event in events {
            match event {
                Event::Reasoning(text) => {
                    self.message.reasoning_content.get_or_insert_default().push_str(&text)
                }
                Event::Content(text) => self.message.content.get_or_insert_default().push_str(&text),
                Event::ToolStart { name, .. } => self.name = name,
                Event::ToolArguments { delta, .. } => self.arguments.push_str(&delta),
                Event::ToolEnd { .. } => {
                    let text = std::mem::take(&mut self.arguments);
                    let arguments = serde_json::from_str(&text).unwrap_or(Value::Object(Map::new()));
                    self.message
                        .tool_calls
                        .push(ToolCall { name: std::mem::take(&mut self.name), arguments });
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
