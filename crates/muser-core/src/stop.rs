//! Where generation ends: stop tokens, and stop strings in the streamed text.
//!
//! A stream ends at the first byte at which any stop string is complete; of several that end there, the longest counts.
//! This rule looks at no byte beyond the end, so it gives the same answer however the text is cut into pieces. Text that
//! may still turn out to be the beginning of a stop string is held back, so no part of one is ever given out.
//!
//! Each string is followed by its own Knuth-Morris-Pratt automaton: time is linear in the text for each string.

use thiserror::Error;

/// Most stop strings of one request.
pub const MAX_STRINGS: usize = 32;
/// Longest stop string in bytes.
pub const MAX_BYTES: usize = 1024;

/// Stop strings that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum StopError {
    /// Too many of them.
    #[error("{count} stop strings were given; allowed: 0 to {MAX_STRINGS}")]
    TooMany { count: usize },
    /// One that would end every answer at once, or is too long.
    #[error("stop string {index} has {bytes} bytes; allowed: 1 to {MAX_BYTES}")]
    Length { index: usize, bytes: usize },
}

/// The stop rules of one stream, with what is held back of its text.
#[derive(Clone, Debug)]
pub struct Stops {
    tokens: Vec<u32>,
    needles: Vec<Needle>,
    held: String,
    stopped: bool,
}

/// What one piece of text brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Text that may be given out now: whole characters.
    pub text: String,
    /// Index of the stop string that ended the stream. What follows it in the piece is dropped.
    pub stop: Option<usize>,
}

impl Stops {
    /// Rules from stop tokens and stop strings.
    pub fn new(tokens: Vec<u32>, strings: &[impl AsRef<str>]) -> Result<Self, StopError> {
        if strings.len() > MAX_STRINGS {
            return Err(StopError::TooMany { count: strings.len() });
        }
        let needle = |(index, string): (usize, &str)| match string.len() {
            1..=MAX_BYTES => Ok(Needle::new(string)),
            bytes => Err(StopError::Length { index, bytes }),
        };
        let needles = strings.iter().map(AsRef::as_ref).enumerate().map(needle).collect::<Result<_, _>>()?;
        Ok(Stops { tokens, needles, held: String::new(), stopped: false })
    }

    /// Whether this token ends the stream; its text is not part of the answer.
    pub fn is_stop_token(&self, token: u32) -> bool {
        self.tokens.contains(&token)
    }

    /// Takes the next piece of text. After a stop nothing passes any more.
    pub fn push(&mut self, piece: &str) -> Passed {
        if self.stopped {
            return Passed::default();
        }
        let start = self.held.len();
        self.held.push_str(piece);
        for (i, byte) in piece.bytes().enumerate() {
            let mut longest: Option<(usize, usize)> = None;
            for (index, needle) in self.needles.iter_mut().enumerate() {
                let length = needle.string.len();
                if needle.step(byte) && longest.is_none_or(|(_, best)| length > best) {
                    longest = Some((index, length));
                }
            }
            if let Some((index, length)) = longest {
                self.stopped = true;
                let mut text = std::mem::take(&mut self.held);
                text.truncate(start + i + 1 - length);
                return Passed { text, stop: Some(index) };
            }
        }
        // A partial match begins with a whole string's first byte, so at the beginning of a character.
        let partial = self.needles.iter().map(|needle| needle.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - partial);
        Passed { text: std::mem::replace(&mut self.held, rest), stop: None }
    }

    /// What was held back, at the end of a stream that no stop string ended.
    pub fn finish(&mut self) -> String {
        self.stopped = true;
        std::mem::take(&mut self.held)
    }
}

/// One stop string and how much of it the text ends with.
#[derive(Clone, Debug)]
struct Needle {
    string: Vec<u8>,
    /// `borders[n]`: length of the longest proper prefix of the first n bytes that is also their suffix.
    borders: Vec<usize>,
    matched: usize,
}

impl Needle {
    fn new(string: &str) -> Self {
        let mut needle = Needle { string: string.as_bytes().to_vec(), borders: vec![0, 0], matched: 0 };
        // The borders are what the automaton has matched after reading the string from its second byte on.
        for i in 1..needle.string.len() {
            needle.step(needle.string[i]);
            needle.borders.push(needle.matched);
        }
        needle.matched = 0;
        needle
    }

    /// Reads a byte; true when the text now ends with the string.
    fn step(&mut self, byte: u8) -> bool {
        if self.matched == self.string.len() {
            self.matched = self.borders[self.matched];
        }
        while self.matched > 0 && self.string[self.matched] != byte {
            self.matched = self.borders[self.matched];
        }
        self.matched += usize::from(self.string[self.matched] == byte);
        self.matched == self.string.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What passes before the stream ends, and the string that ended it.
    fn naive(text: &str, strings: &[String]) -> (String, Option<usize>) {
        for end in 1..=text.len() {
            let ending =
                strings.iter().enumerate().filter(|(_, s)| text.as_bytes()[..end].ends_with(s.as_bytes()));
            if let Some((index, string)) = ending.max_by_key(|(index, s)| (s.len(), usize::MAX - index)) {
                return (text[..end - string.len()].into(), Some(index));
            }
        }
        (text.into(), None)
    }

    proptest! {
        #[test]
        fn equals_naive_search_at_every_cut(
            text in "[abé日]{0,40}",
            strings in proptest::collection::vec("[abé日]{1,5}", 0..4),
            cuts in proptest::collection::vec(0usize..41, 0..12),
        ) {
            let mut stops = Stops::new(vec![], &strings).unwrap();
            let chars: Vec<char> = text.chars().collect();
            let mut bounds: Vec<usize> = cuts.into_iter().filter(|cut| *cut < chars.len()).chain([0, chars.len()]).collect();
            bounds.sort_unstable();
            let (want, want_stop) = naive(&text, &strings);
            let (mut got, mut stop) = (String::new(), None);
            for piece in bounds.windows(2) {
                let passed = stops.push(&chars[piece[0]..piece[1]].iter().collect::<String>());
                got.push_str(&passed.text);
                // Never a byte that would have to be taken back; and no more is held than may be needed.
                prop_assert!(want.starts_with(&got));
                let longest = strings.iter().map(String::len).max().unwrap_or(0);
                prop_assert!(stops.held.len() < longest.max(1));
                stop = stop.or(passed.stop);
            }
            got.push_str(&stops.finish());
            prop_assert_eq!((got, stop), (want, want_stop));
            prop_assert_eq!(stops.push("more"), Passed::default());
        }
    }

    #[test]
    fn holds_back_only_what_may_become_a_stop() {
        let mut stops = Stops::new(vec![7], &["</s>", "STOP"]).unwrap();
        assert!(stops.is_stop_token(7) && !stops.is_stop_token(8));
        let mut push = |piece: &str| stops.push(piece);
        let passes = |text: &str| Passed { text: text.into(), stop: None };
        assert_eq!(push("a <"), passes("a "));
        assert_eq!(push("b> S"), passes("<b> "));
        assert_eq!(push("TO"), passes(""));
        assert_eq!(push("STO"), passes("STO"));
        assert_eq!(push("P and more"), Passed { text: String::new(), stop: Some(1) });
        assert_eq!((push("x"), stops.finish()), (Passed::default(), String::new()));
    }

    #[test]
    fn hostile_text_takes_linear_time() {
        let strings: Vec<String> = (1..=MAX_STRINGS).map(|i| "a".repeat(MAX_BYTES - i) + "b").collect();
        let mut stops = Stops::new(vec![], &strings).unwrap();
        let passed: usize = (0..200).map(|_| stops.push(&"a".repeat(1000)).text.len()).sum();
        assert_eq!(passed + stops.finish().len(), 200_000);
    }

    #[test]
    fn useless_strings_are_refused() {
        let refused = |strings: &[&str]| Stops::new(vec![], strings).unwrap_err().to_string();
        assert_eq!(refused(&["a", ""]), "stop string 1 has 0 bytes; allowed: 1 to 1024");
        assert_eq!(refused(&[&"a".repeat(1025)]), "stop string 0 has 1025 bytes; allowed: 1 to 1024");
        assert_eq!(refused(&["a"; 33]), "33 stop strings were given; allowed: 0 to 32");
    }
}
