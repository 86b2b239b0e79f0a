//! The header of a message: `[<|start|>ROLE][ to=RECIPIENT]<|message|>`.

use crate::channels::{CALLS, CONTROL, MESSAGE, START};

/// Longest header that is waited for; more is text.
const MAX_HEADER: usize = 512;

/// What a text begins with.
#[derive(Debug, PartialEq)]
pub(crate) enum Header {
    /// A header of `len` bytes.
    Complete { role: String, recipient: Option<String>, len: usize },
    /// The message ended before it began.
    Ended { len: usize, turn: bool },
    /// May still become a header.
    Partial,
    /// Is none.
    No,
}

/// Reads a header from the start of `text`; `known` tells the recipients that exist.
pub(crate) fn read(text: &str, known: impl Fn(&str) -> bool) -> Header {
    let (header, rest) = read_any(text, known);
    // Only what stands before the undecided or last token counts, so that the cap falls the same however the text is split.
    if text.len() - rest > MAX_HEADER { Header::No } else { header }
}

/// The header, and the length of the text from its last token on.
fn read_any(text: &str, known: impl Fn(&str) -> bool) -> (Header, usize) {
    let mut rest = text.trim_start();
    for (end, turn) in [("<|eot|>", true), ("<|end_of_text|>", true), ("<|eom|>", false)] {
        if let Some(after) = rest.strip_prefix(end) {
            return (Header::Ended { len: text.len() - after.len(), turn }, rest.len());
        }
    }
    let mut role = String::new();
    if let Some(after) = rest.strip_prefix(START) {
        let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
        role = after[..end].to_string();
        rest = after[end..].trim_start();
    } else if let Some(after) = rest.strip_prefix("assistant") {
        // The role was written again, without its control token.
        rest = after.trim_start();
        if !rest.starts_with("to=") && !rest.starts_with(MESSAGE) {
            let partial = "to=".starts_with(rest) || MESSAGE.starts_with(rest);
            return (if partial { Header::Partial } else { Header::No }, rest.len());
        }
    } else if "assistant".starts_with(rest) {
        return (Header::Partial, rest.len());
    }
    let mut recipient = None;
    if let Some(after) = rest.strip_prefix("to=") {
        let end = after.find(|c: char| c == '<' || c.is_whitespace()).unwrap_or(after.len());
        recipient = Some(after[..end].trim_matches('"').to_string());
        rest = after[end..].trim_start();
    } else if role == "tool" {
        // `<|start|>tool NAME<|message|>`: the name is no recipient.
        rest = &rest[rest.find('<').unwrap_or(rest.len())..];
    }
    if let Some(after) = rest.strip_prefix(MESSAGE) {
        return (Header::Complete { role, recipient, len: text.len() - after.len() }, rest.len());
    }
    let partial = |token: &&str| token.starts_with(rest);
    if CONTROL.iter().chain([&CALLS, &"to="]).any(partial) {
        return (Header::Partial, rest.len());
    }
    // A role or a recipient, then something else: the separator was forgotten.
    let forgotten = match &recipient {
        Some(name) => rest.starts_with(CALLS) || !role.is_empty() || known(name),
        None => !role.is_empty(),
    };
    let complete = Header::Complete { role, recipient, len: text.len() - rest.len() };
    (if forgotten { complete } else { Header::No }, rest.len())
}

/// A header within a message that was not ended: ` to=RECIPIENT<|message|>`.
#[derive(Debug, PartialEq)]
pub(crate) enum Switch {
    /// Begins at `at` and ends before `end`.
    Found {
        recipient: String,
        at: usize,
        end: usize,
    },
    /// From `at` on there may be one.
    Partial {
        at: usize,
    },
    None,
}

/// Looks for ` to=RECIPIENT<|message|>` in a text that ends where its first `<` stands in `whole`, or with `whole` itself.
/// `after_word` tells whether a letter or digit came before the text.
pub(crate) fn switch(whole: &str, text: &str, after_word: bool) -> Switch {
    let begins = |at: usize| match text[..at].chars().next_back() {
        Some(c) => !is_word(c),
        None => !after_word,
    };
    // Only the last ` to=` can stand before the control token.
    let last = text.rfind("to=").filter(|at| begins(*at));
    if let Some(at) = last {
        let name = &text[at + 3..];
        let start = at - usize::from(text[..at].ends_with(' '));
        if name.len() <= MAX_HEADER && !name.contains(char::is_whitespace) {
            let rest = &whole[text.len()..];
            if rest.starts_with(MESSAGE) {
                let end = text.len() + MESSAGE.len();
                return Switch::Found { recipient: name.to_string(), at: start, end };
            }
            if MESSAGE.starts_with(rest) {
                return Switch::Partial { at: start };
            }
        }
    }
    if whole.len() == text.len() {
        for tail in [" to", " t", " ", "to", "t"] {
            let at = text.len() - tail.len().min(text.len());
            if text.ends_with(tail) && (tail.starts_with(' ') || begins(at)) {
                return Switch::Partial { at };
            }
        }
    }
    Switch::None
}

/// Whether a `to=` right after this character is part of a word.
pub(crate) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
