//! The `llama4` (o200k-style) split of text into pieces that BPE works on, by hand: one pass, linear in the text.
//!
//! The pattern, alternatives in this order (first that matches wins, each greedy):
//! 1. `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?`
//! 2. `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:...)?`
//! 3. `\p{N}{1,3}`
//! 4. ` ?[^\s\p{L}\p{N}]+[\r\n/]*`
//! 5. `\s*[\r\n]+`, then `\s+(?!\S)`, then `\s+`
//!
//! A backtracking engine runs the last line in quadratic time on a long run of spaces, and no crate that we know is both
//! linear there and exact.

use unicode_general_category::{GeneralCategory as C, get_general_category};

/// What the pattern asks of a character.
#[derive(Clone, Copy, PartialEq)]
enum Class {
    /// Lu, Lt: may stand before lower-case letters.
    Upper,
    /// Ll.
    Lower,
    /// Lm, Lo: letters that count as both.
    Both,
    /// M: counts as both, but is no letter, so it may also be the leading character.
    Mark,
    Number,
    Newline,
    Space,
    Other,
}

impl Class {
    fn of(c: char) -> Self {
        match c {
            'a'..='z' => Class::Lower,
            'A'..='Z' => Class::Upper,
            '0'..='9' => Class::Number,
            '\r' | '\n' => Class::Newline,
            ' ' | '\t' | '\x0b' | '\x0c' => Class::Space,
            '\0'..='\x7f' => Class::Other,
            _ if c.is_whitespace() => Class::Space,
            _ => match get_general_category(c) {
                C::UppercaseLetter | C::TitlecaseLetter => Class::Upper,
                C::LowercaseLetter => Class::Lower,
                C::ModifierLetter | C::OtherLetter => Class::Both,
                C::NonspacingMark | C::SpacingMark | C::EnclosingMark => Class::Mark,
                C::DecimalNumber | C::LetterNumber | C::OtherNumber => Class::Number,
                _ => Class::Other,
            },
        }
    }

    fn upper_run(self) -> bool {
        matches!(self, Class::Upper | Class::Both | Class::Mark)
    }

    fn lower_run(self) -> bool {
        matches!(self, Class::Lower | Class::Both | Class::Mark)
    }

    /// `[^\r\n\p{L}\p{N}]`.
    fn leads(self) -> bool {
        matches!(self, Class::Mark | Class::Space | Class::Other)
    }

    /// `[^\s\p{L}\p{N}]`.
    fn punctuates(self) -> bool {
        matches!(self, Class::Mark | Class::Other)
    }

    fn white(self) -> bool {
        matches!(self, Class::Space | Class::Newline)
    }
}

/// Iterates over the pieces of a text; together they are the text.
pub struct Split<'a> {
    rest: &'a str,
}

/// Splits `text`.
pub fn split(text: &str) -> Split<'_> {
    Split { rest: text }
}

impl<'a> Iterator for Split<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (piece, rest) = self.rest.split_at(piece_end(self.rest));
        self.rest = rest;
        Some(piece)
    }
}

/// Class of the character at byte `at` and the byte after it.
fn class_at(text: &str, at: usize) -> Option<(Class, usize)> {
    let byte = *text.as_bytes().get(at)?;
    if byte < 0x80 {
        return Some((Class::of(byte as char), at + 1));
    }
    let c = text[at..].chars().next()?;
    Some((Class::of(c), at + c.len_utf8()))
}

/// Byte after the run of characters from `at` for which `wanted` holds.
fn run(text: &str, mut at: usize, wanted: impl Fn(Class) -> bool) -> usize {
    while let Some((class, next)) = class_at(text, at) {
        if !wanted(class) {
            break;
        }
        at = next;
    }
    at
}

/// End of the first piece of a text that is not empty.
fn piece_end(text: &str) -> usize {
    let Some((first, next)) = class_at(text, 0) else { return 0 };
    if let Some(end) = word(text, first, next) {
        return contraction(text, end);
    }
    if first == Class::Number {
        let two = class_at(text, next).filter(|(c, _)| *c == Class::Number);
        let three = two.and_then(|(_, at)| class_at(text, at)).filter(|(c, _)| *c == Class::Number);
        return three.or(two).map_or(next, |(_, at)| at);
    }
    let body = if text.starts_with(' ') { next } else { 0 };
    let end = run(text, body, Class::punctuates);
    if end > body {
        let tail = text.as_bytes()[end..].iter().take_while(|b| matches!(b, b'\r' | b'\n' | b'/')).count();
        return end + tail;
    }
    white_end(text)
}

/// Alternatives 1 and 2, without the contraction.
fn word(text: &str, first: Class, next: usize) -> Option<usize> {
    let starts = [first.leads().then_some(next), Some(0)];
    let starts = starts.into_iter().flatten();
    starts.clone().find_map(|at| lower_word(text, at)).or_else(|| {
        starts.clone().find_map(|at| {
            let upper = run(text, at, Class::upper_run);
            (upper > at).then(|| run(text, upper, Class::lower_run))
        })
    })
}

/// `[upper]*[lower]+`: where nothing lower follows the upper run, the run gives back up to its last character that is both.
fn lower_word(text: &str, start: usize) -> Option<usize> {
    let mut at = start;
    let mut last_both = None;
    while let Some((class, next)) = class_at(text, at).filter(|(class, _)| class.upper_run()) {
        if class.lower_run() {
            last_both = Some(next);
        }
        at = next;
    }
    let end = run(text, at, Class::lower_run);
    if end > at { Some(end) } else { last_both }
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)?`; case-insensitive s is also U+017F.
fn contraction(text: &str, at: usize) -> usize {
    let Some(rest) = text[at..].strip_prefix('\'') else { return at };
    let mut chars = rest.chars();
    let fold = |c: Option<char>| c.map(|c| if c == '\u{17f}' { 's' } else { c.to_ascii_lowercase() });
    let (a, b) = (chars.next(), chars.next());
    match (fold(a), fold(b)) {
        (Some('s' | 't' | 'm' | 'd'), _) => at + 1 + a.map_or(0, char::len_utf8),
        (Some('r' | 'v'), Some('e')) | (Some('l'), Some('l')) => at + 3,
        _ => at,
    }
}

/// A run of white space: up to its last newline; else without its last character if text follows; else whole.
fn white_end(text: &str) -> usize {
    let (mut at, mut last_newline, mut last_start) = (0, None, 0);
    while let Some((class, next)) = class_at(text, at).filter(|(class, _)| class.white()) {
        if class == Class::Newline {
            last_newline = Some(next);
        }
        last_start = at;
        at = next;
    }
    match last_newline {
        Some(end) => end,
        None if at < text.len() && last_start > 0 => last_start,
        None => at,
    }
}
