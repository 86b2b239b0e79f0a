//! What the model writes, channel by channel: reasoning (`to=self`), answers (`to=user` or no recipient), tool calls.
//!
//! The parser is fed text as it comes, control tokens as their text, split anywhere; it says the same whatever the split. It
//! holds back what may still become a control token or a header, never emits markup, and never fails: where the model's
//! intent is clear it is followed, else the text is shown.

use crate::atem::{CallParser, TAGS};
use crate::bars;
use crate::header::{self, Header, Switch};
use crate::types::Tools;
use serde_json::Value;

pub use crate::turn::{Collector, Message, ToolCall, parse_message};

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

pub(crate) const START: &str = "<|start|>";
pub(crate) const MESSAGE: &str = "<|message|>";
/// Control tokens that may stand in a generation. They are markup: none is ever emitted as text.
pub(crate) const CONTROL: [&str; 12] = [
    START,
    MESSAGE,
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

/// Where the parser stands.
#[derive(Clone)]
enum State {
    /// Between `<|start|>assistant` and `<|message|>`.
    Header,
    Reasoning,
    Content,
    /// A message to a tool.
    Tool(Box<CallParser>),
    /// An answer from a call block on: a call, or an example of one.
    Doubtful(Box<Doubt>),
    /// A message of another role: the model plays someone else; nothing of it is shown.
    Other,
    /// The turn is over; what follows is ignored.
    Done,
}

/// A call block in an answer, kept until it is shown to be text or the message ends.
#[derive(Clone)]
struct Doubt {
    text: String,
    call: CallParser,
    events: Vec<Event>,
}

/// The incremental parser of one assistant turn. Copies share the tools.
#[derive(Clone)]
pub struct ChannelParser {
    state: State,
    /// Text that came, and how much of it is dealt with.
    held: String,
    at: usize,
    tools: Tools,
    calls: usize,
    shown_reasoning: bool,
    shown_content: bool,
    /// A message of a channel begins: a line break parts it from an earlier one of that channel.
    gap: bool,
    /// The message's text so far ends with a letter or digit, so that no ` to=` header can follow.
    after_word: bool,
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
            at: 0,
            tools: Tools::new(tools),
            calls: 0,
            shown_reasoning: false,
            shown_content: false,
            gap: false,
            after_word: false,
            line: Line::default(),
            finished: false,
        }
    }

    /// A parser for a prompt that ends with a committed header, such as ` to=user<|message|>`.
    pub fn committed(tools: Option<&Value>, recipient: &str) -> Self {
        let mut parser = Self::new(tools);
        parser.enter(Some(recipient));
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

    /// Whether the parser is in the answer's text.
    pub fn answering(&self) -> bool {
        matches!(self.state, State::Content)
    }

    /// Whether the parser stands inside a call.
    pub fn in_call(&self) -> bool {
        matches!(self.state, State::Tool(_) | State::Doubtful(_))
    }

    /// Takes more text, in which the text of a control token is that token.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        self.take(text, false)
    }

    /// Takes the text of one token. Only a special token's is markup: what ordinary tokens spell, such as a file about chat
    /// templates, stays text.
    pub fn push_token(&mut self, text: &str, special: bool) -> Vec<Event> {
        self.take(text, !special)
    }

    fn take(&mut self, text: &str, ordinary: bool) -> Vec<Event> {
        let mut events = vec![];
        bars::hide(text, ordinary, &mut self.held);
        while self.advance(&mut events) {}
        self.held.drain(..std::mem::take(&mut self.at));
        events.iter_mut().for_each(restore);
        events
    }

    /// Ends the stream, whatever the state: open calls are completed to valid JSON.
    pub fn finish(&mut self) -> Vec<Event> {
        let mut events = vec![];
        // What is held may be a header or a token that was cut: markup, unless it is too short to tell.
        let rest = std::mem::take(&mut self.held);
        let markup = match self.state {
            State::Header => true,
            _ => rest.trim_start().starts_with("to=") || (rest.starts_with('<') && rest.len() > 1),
        };
        if !markup {
            self.body(&rest, &mut events);
        }
        self.end_message(false, &mut events);
        self.state = State::Done;
        events.iter_mut().for_each(restore);
        events
    }

    fn rest(&self) -> &str {
        &self.held[self.at..]
    }

    /// One step over what is held; false when more text is needed.
    fn advance(&mut self, events: &mut Vec<Event>) -> bool {
        match self.state {
            State::Done => {
                self.at = self.held.len();
                false
            }
            State::Header => self.advance_header(),
            _ => self.advance_body(events),
        }
    }

    fn advance_header(&mut self) -> bool {
        let known = |name: &str| matches!(name, "self" | "user") || self.tools.resolve(name).is_some();
        match header::read(self.rest(), known) {
            Header::Partial => return false,
            Header::Complete { role, recipient, len } => {
                self.at += len;
                if role.is_empty() || role == "assistant" {
                    self.enter(recipient.as_deref());
                } else {
                    self.state = State::Other;
                }
            }
            Header::Ended { len, turn } => {
                self.at += len;
                if turn {
                    self.finished = true;
                    self.state = State::Done;
                }
            }
            Header::No => {
                // A control token that begins no header is dropped, or it would be met again as text.
                let text = self.rest().trim_start();
                match CONTROL.iter().find(|c| text.starts_with(**c)) {
                    Some(control) => self.at = self.held.len() - text.len() + control.len(),
                    None => self.enter(None),
                }
            }
        }
        true
    }

    fn advance_body(&mut self, events: &mut Vec<Event>) -> bool {
        let rest = self.rest();
        if rest.is_empty() {
            return false;
        }
        let stop = rest.find('<').unwrap_or(rest.len());
        if matches!(self.state, State::Reasoning | State::Content | State::Doubtful(_)) {
            match header::switch(rest, &rest[..stop], self.after_word) {
                Switch::Found { recipient, at, end } => {
                    self.emit(at, events);
                    self.at += end - at;
                    self.end_message(true, events);
                    self.enter(Some(&recipient));
                    return true;
                }
                Switch::Partial { at } => {
                    self.emit(at, events);
                    return false;
                }
                Switch::None => {}
            }
        }
        if stop > 0 {
            self.emit(stop, events);
            return true;
        }
        if let Some(control) = CONTROL.iter().find(|c| rest.starts_with(**c)) {
            self.at += control.len();
            self.control(control, events);
            return true;
        }
        let shows = matches!(self.state, State::Reasoning | State::Content);
        if matches!(self.state, State::Content)
            && rest.starts_with(CALLS)
            && self.line.may_call()
            && !self.tools.is_empty()
        {
            let call = CallParser::new("", self.tools.clone(), self.calls);
            self.state = State::Doubtful(Box::new(Doubt { text: String::new(), call, events: vec![] }));
            self.emit(CALLS.len(), events);
            return true;
        }
        // Call markup is text in what is shown, but what was cut within a tag is no text.
        let may_become = |token: &&str| token.starts_with(rest) && token.len() > rest.len();
        if CONTROL.iter().any(may_become) || (shows && TAGS.iter().any(may_become)) {
            return false;
        }
        self.emit(1, events);
        true
    }

    /// Passes on the next `len` bytes as text of the message.
    fn emit(&mut self, len: usize, events: &mut Vec<Event>) {
        let text = self.held[self.at..self.at + len].to_string();
        self.at += len;
        self.body(&text, events);
    }

    fn control(&mut self, control: &str, events: &mut Vec<Event>) {
        match control {
            "<|eot|>" | "<|end_of_text|>" => {
                self.end_message(true, events);
                self.finished = true;
                self.state = State::Done;
            }
            "<|eom|>" => {
                self.end_message(true, events);
                self.state = State::Header;
            }
            // A new message without an end of the old one: the header parser reads it.
            START => {
                self.at -= START.len();
                self.end_message(true, events);
                self.state = State::Header;
            }
            // Seen in place of an invoke name's end.
            MESSAGE => match &mut self.state {
                State::Tool(call) => call.separator(events),
                State::Doubtful(doubt) => doubt.call.separator(&mut doubt.events),
                _ => {}
            },
            _ => {}
        }
    }

    fn enter(&mut self, recipient: Option<&str>) {
        self.line = Line::default();
        self.gap = true;
        self.after_word = false;
        self.state = match recipient {
            Some("self") => State::Reasoning,
            None | Some("user" | "") => State::Content,
            Some(tool) => State::Tool(Box::new(CallParser::new(tool, self.tools.clone(), self.calls))),
        };
    }

    fn body(&mut self, text: &str, events: &mut Vec<Event>) {
        let Some(last) = text.chars().next_back() else { return };
        self.after_word = header::is_word(last);
        match &mut self.state {
            State::Reasoning => {
                let gap = if std::mem::take(&mut self.gap) && self.shown_reasoning { "\n" } else { "" };
                self.shown_reasoning = true;
                push_text(events, Event::Reasoning(format!("{gap}{text}")));
            }
            State::Content => self.show(text, events),
            State::Tool(call) => call.push(text, events),
            State::Doubtful(doubt) => {
                doubt.text.push_str(text);
                doubt.call.push(text, &mut doubt.events);
                if !doubt.call.is_sound() {
                    let text = std::mem::take(&mut doubt.text);
                    self.state = State::Content;
                    self.show(&text, events);
                }
            }
            State::Header | State::Other | State::Done => {}
        }
    }

    /// Ends the current message; `ended` is false where the stream was cut.
    fn end_message(&mut self, ended: bool, events: &mut Vec<Event>) {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Tool(mut call) => {
                let text = call.end(ended, events);
                self.calls = call.next_index();
                if !text.is_empty() {
                    self.show(&text, events);
                }
            }
            State::Doubtful(mut doubt) => {
                let open = doubt.call.in_value();
                let rest = doubt.call.end(ended, &mut doubt.events);
                let called = doubt.call.next_index() > self.calls;
                if rest.is_empty() && doubt.call.is_sound() && if ended { called && !open } else { true } {
                    self.calls = doubt.call.next_index();
                    events.extend(doubt.events);
                } else {
                    self.show(&doubt.text, events);
                }
            }
            _ => {}
        }
    }

    fn show(&mut self, text: &str, events: &mut Vec<Event>) {
        self.line.push(text);
        let gap = if std::mem::take(&mut self.gap) && self.shown_content { "\n" } else { "" };
        self.shown_content = true;
        push_text(events, Event::Content(format!("{gap}{text}")));
    }
}

fn restore(event: &mut Event) {
    let (Event::Reasoning(text)
    | Event::Content(text)
    | Event::ToolStart { name: text, .. }
    | Event::ToolArguments { delta: text, .. }) = event
    else {
        return;
    };
    if !bars::is_same(text) {
        let mut plain = String::new();
        bars::restore(text, &mut plain);
        *text = plain;
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
#[derive(Clone, Default)]
struct Line {
    /// Its first three characters that are not blank.
    lead: String,
    /// Within a code fence, or within backticks.
    fenced: bool,
    ticked: bool,
}

impl Line {
    fn push(&mut self, text: &str) {
        for c in text.chars() {
            if c == '\n' {
                self.fenced ^= matches!(self.lead.as_str(), "```" | "~~~");
                self.lead.clear();
                self.ticked = false;
            } else {
                if self.lead.len() < 3 && !(self.lead.is_empty() && c.is_whitespace()) {
                    self.lead.push(c);
                }
                self.ticked ^= c == '`';
            }
        }
    }

    /// A block that is meant as a call is no code.
    fn may_call(&self) -> bool {
        !self.fenced && !self.ticked
    }
}
