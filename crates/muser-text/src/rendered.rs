//! A rendered conversation, which knows what the template wrote and what only came through it.
//!
//! The template's control tokens are control tokens. What messages, tools and variables spell is text, wherever it stands,
//! however it got there, and whatever it is joined with: their `|` is hidden from before rendering until the tokens are cut.

use crate::{Tokenizer, bars};
use serde_json::{Map, Value};

/// The text of a prompt, ready for the tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    hidden: String,
}

impl Rendered {
    pub(crate) fn new(hidden: String) -> Self {
        Rendered { hidden }
    }

    /// Adds what the template might have written: control tokens in it are control tokens.
    pub fn push(&mut self, markup: &str) {
        bars::hide(markup, false, &mut self.hidden);
    }

    /// The text, in which a control token and text that spells one look the same.
    pub fn text(&self) -> String {
        let mut text = String::new();
        bars::restore(&self.hidden, &mut text);
        text
    }

    /// Token ids.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let (mut text, mut controls, mut at) = (String::new(), vec![], 0);
        for (found, id) in tokenizer.find_specials(&self.hidden) {
            let spelled = &self.hidden[found.clone()];
            // A special token without a `|` may stand in a message as well.
            if !spelled.contains('|') {
                continue;
            }
            bars::restore(&self.hidden[at..found.start], &mut text);
            let start = text.len();
            text.push_str(spelled);
            controls.push((start..text.len(), id));
            at = found.end;
        }
        bars::restore(&self.hidden[at..], &mut text);
        tokenizer.encode_between(&text, controls)
    }
}

/// A value whose strings and keys the template may write anywhere.
pub(crate) fn hide(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::String(hide_text(text)),
        Value::Array(all) => Value::Array(all.iter().map(hide).collect()),
        Value::Object(map) => Value::Object(hide_map(map)),
        other => other.clone(),
    }
}

/// The same of a map.
pub(crate) fn hide_map(map: &Map<String, Value>) -> Map<String, Value> {
    map.iter().map(|(key, value)| (hide_text(key), hide(value))).collect()
}

fn hide_text(text: &str) -> String {
    if bars::is_same(text) {
        return text.to_string();
    }
    let mut hidden = String::new();
    bars::hide(text, true, &mut hidden);
    hidden
}
