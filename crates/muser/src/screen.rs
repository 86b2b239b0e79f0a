//! Showing a turn as it streams: the answer on standard output, reasoning dimmed on standard error.

use muser_text::Event;
use serde_json::Value as Json;
use std::io::{IsTerminal, Write};

/// Starts dimmed, coloured, and plain text.
pub const DIM: &str = "\x1b[2m";
pub const CYAN: &str = "\x1b[36m";
pub const PLAIN: &str = "\x1b[0m";

/// Whether styles may be written to standard error; https://no-color.org
pub fn styled() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// Where the output of a turn stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// Nothing was written yet, or a line was ended.
    Start,
    Reasoning,
    Content,
}

/// Writes events as they come.
pub struct Screen {
    reasoning: bool,
    styled: bool,
    at: At,
    /// Whether the last character of the current channel was a line feed.
    ended: bool,
    calls: Vec<(String, String)>,
    broken: Option<std::io::Error>,
}

impl Screen {
    /// `reasoning`: whether it is shown.
    pub fn new(reasoning: bool) -> Self {
        let styled = styled();
        Screen { reasoning, styled, at: At::Start, ended: true, calls: vec![], broken: None }
    }

    /// Writes an event.
    pub fn show(&mut self, event: &Event) {
        match event {
            Event::Reasoning(text) if self.reasoning => {
                self.enter(At::Reasoning);
                self.err(text);
            }
            Event::Reasoning(_) => {}
            Event::Content(text) => {
                self.enter(At::Content);
                self.out(text);
            }
            Event::ToolStart { name, .. } => self.calls.push((name.clone(), String::new())),
            Event::ToolArguments { delta, .. } => {
                if let Some((_, arguments)) = self.calls.last_mut() {
                    arguments.push_str(delta);
                }
            }
            Event::ToolEnd { .. } => {}
        }
    }

    /// Ends the turn: the last line is ended, calls are shown one a line. Fails if standard output failed.
    pub fn finish(mut self, calls_as_json: bool) -> std::io::Result<()> {
        self.enter(At::Start);
        for (name, arguments) in std::mem::take(&mut self.calls) {
            let line = if calls_as_json {
                let arguments: Json = serde_json::from_str(&arguments).unwrap_or_default();
                serde_json::json!({ "name": name, "arguments": arguments }).to_string()
            } else if self.styled {
                format!("{CYAN}-> {name}{arguments}{PLAIN}")
            } else {
                format!("-> {name}{arguments}")
            };
            self.out(&format!("{line}\n"));
        }
        self.broken.map_or(Ok(()), Err)
    }

    /// Moves to a channel: ends the line and the style of the one before.
    fn enter(&mut self, to: At) {
        if self.at == to {
            return;
        }
        let from = std::mem::replace(&mut self.at, to);
        if !self.ended {
            if from == At::Content { self.out("\n") } else { self.err("\n") }
        }
        if self.styled && from == At::Reasoning {
            self.err(PLAIN);
        }
        if self.styled && to == At::Reasoning {
            self.err(DIM);
        }
        self.ended = true;
    }

    fn out(&mut self, text: &str) {
        let mut out = std::io::stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        if let Err(error) = written {
            self.broken.get_or_insert(error);
        }
        self.ended = text.ends_with('\n');
    }

    fn err(&mut self, text: &str) {
        // Nobody is told when standard error itself fails.
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
        self.ended = text.ends_with('\n');
    }

    /// Whether standard output failed, so that going on is in vain.
    pub fn is_broken(&self) -> bool {
        self.broken.is_some()
    }
}
