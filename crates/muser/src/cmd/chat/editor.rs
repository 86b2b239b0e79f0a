//! Reading messages from the terminal.

use anyhow::{Context, Result};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::MemHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Helper};

/// Marks the first and the last line of a message of several.
const FENCE: &str = "\"\"\"";

/// What the user did.
pub enum Line {
    /// A message or a command.
    Text(String),
    /// An empty line, or Ctrl-C.
    Nothing,
    /// Ctrl-D.
    End,
}

/// A line editor with a history that ends with the program.
pub struct Editor(rustyline::Editor<Multiline, MemHistory>);

struct Multiline;

impl Completer for Multiline {
    type Candidate = String;
}
impl Hinter for Multiline {
    type Hint = String;
}
impl Highlighter for Multiline {}
impl Helper for Multiline {}
impl Validator for Multiline {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let more = wants_more(context.input());
        Ok(if more { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Editor {
    /// Takes over the terminal while a line is read.
    pub fn new() -> Result<Self> {
        let config = Config::builder().bracketed_paste(true).auto_add_history(true).build();
        let mut editor = rustyline::Editor::with_history(config.clone(), MemHistory::with_config(&config))
            .context("cannot use the terminal")?;
        editor.set_helper(Some(Multiline));
        Ok(Editor(editor))
    }

    /// Reads a message.
    pub fn read(&mut self, prompt: &str) -> Result<Line> {
        match self.0.readline(prompt) {
            Ok(line) => {
                let text = joined(&line);
                Ok(if text.trim().is_empty() { Line::Nothing } else { Line::Text(text) })
            }
            Err(ReadlineError::Interrupted) => Ok(Line::Nothing),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(error) => Err(error).context("cannot read from the terminal"),
        }
    }
}

/// Whether the input goes on in the next line.
fn wants_more(input: &str) -> bool {
    match input.trim_start().strip_prefix(FENCE) {
        Some(rest) => !rest.trim_end().ends_with(FENCE),
        None => input.ends_with('\\'),
    }
}

/// The message without fences and without the backslashes at the ends of lines.
fn joined(input: &str) -> String {
    let trimmed = input.trim();
    match trimmed.strip_prefix(FENCE).and_then(|rest| rest.strip_suffix(FENCE)) {
        Some(inner) => inner.trim_matches('\n').to_string(),
        None => trimmed.replace("\\\n", "\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_several_lines() {
        assert!(wants_more("one \\"));
        assert!(!wants_more("one"));
        assert!(wants_more("\"\"\"one\ntwo"));
        assert!(wants_more("\"\"\""));
        assert!(!wants_more("\"\"\"one\ntwo\n\"\"\""));
        assert_eq!(joined("one \\\ntwo"), "one \ntwo");
        assert_eq!(joined("\"\"\"\none\n  two\n\"\"\""), "one\n  two");
        assert_eq!(joined(" one "), "one");
    }
}
