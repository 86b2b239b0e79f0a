//! Stop strings in streamed text.
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
    #[error("{count} stop strings were given; at most {MAX_STRINGS} are allowed")]
    TooMany { count: usize },
    /// One that is too long.
    #[error("stop string {index} has {bytes} bytes; at most {MAX_BYTES} are allowed")]
    TooLong { index: usize, bytes: usize },
}

/// Watches one stream for stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    needles: Vec<Needle>,
    held: String,
    hit: Option<usize>,
}

impl StopStrings {
    /// Empty strings are ignored.
    pub fn new(strings: &[String]) -> Result<Self, StopError> {
        if strings.len() > MAX_STRINGS {
            return Err(StopError::TooMany { count: strings.len() });
        }
        if let Some(index) = strings.iter().position(|s| s.len() > MAX_BYTES) {
            return Err(StopError::TooLong { index, bytes: strings[index].len() });
        }
        let needles = strings.iter().filter(|s| !s.is_empty()).map(|s| Needle::new(s)).collect();
        Ok(StopStrings { needles, held: String::new(), hit: None })
    }

    /// The stop string that ended the stream.
    pub fn hit(&self) -> Option<&str> {
        self.hit.map(|index| self.needles[index].string.as_str())
    }

    /// Takes the next piece of text and gives what may be given out: whole characters, none of a stop string. Nothing
    /// passes after a hit.
    pub fn push(&mut self, piece: &str) -> String {
        if self.hit.is_some() {
            return String::new();
        }
        let start = self.held.len();
        self.held.push_str(piece);
        for (i, byte) in piece.bytes().enumerate() {
            let mut longest = 0;
            for (index, needle) in self.needles.iter_mut().enumerate() {
                if needle.step(byte) && needle.string.len() > longest {
                    longest = needle.string.len();
                    self.hit = Some(index);
                }
            }
            if self.hit.is_some() {
                self.held.truncate(start + i + 1 - longest);
                return std::mem::take(&mut self.held);
            }
        }
        // A partial match begins with a string's first byte, so at the beginning of a character.
        let partial = self.needles.iter().map(|needle| needle.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - partial);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back, where the text ends or is interrupted: no stop string reaches across this point.
    pub fn release(&mut self) -> String {
        self.needles.iter_mut().for_each(|needle| needle.matched = 0);
        std::mem::take(&mut self.held)
    }
}

/// One stop string and how much of it the text ends with.
#[derive(Clone, Debug)]
struct Needle {
    string: String,
    /// `borders[n]`: length of the longest proper prefix of the first n bytes that is also their suffix.
    borders: Vec<usize>,
    matched: usize,
}

impl Needle {
    fn new(string: &str) -> Self {
        let mut needle = Needle { string: string.to_string(), borders: vec![0, 0], matched: 0 };
        // The borders are what the automaton has matched after reading the string from its second byte on.
        for i in 1..needle.string.len() {
            needle.step(needle.string.as_bytes()[i]);
            needle.borders.push(needle.matched);
        }
        needle.matched = 0;
        needle
    }

    /// Reads a byte; true when the text now ends with the string.
    fn step(&mut self, byte: u8) -> bool {
        let string = self.string.as_bytes();
        // A whole match or a mismatch goes on with the longest beginning that still fits.
        while self.matched == string.len() || (self.matched > 0 && string[self.matched] != byte) {
            self.matched = self.borders[self.matched];
        }
        self.matched += usize::from(string[self.matched] == byte);
        self.matched == string.len()
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
            let mut stop = StopStrings::new(&strings).unwrap();
            let chars: Vec<char> = text.chars().collect();
            let mut bounds: Vec<usize> =
                cuts.into_iter().filter(|cut| *cut < chars.len()).chain([0, chars.len()]).collect();
            bounds.sort_unstable();
            let (want, hit) = naive(&text, &strings);
            let longest = strings.iter().map(String::len).max().unwrap_or(0);
            let mut got = String::new();
            for piece in bounds.windows(2) {
                got.push_str(&stop.push(&chars[piece[0]..piece[1]].iter().collect::<String>()));
                // Never a byte that would have to be taken back, and no more is held than may be needed.
                prop_assert!(want.starts_with(&got));
                prop_assert!(stop.held.len() < longest.max(1));
            }
            got.push_str(&stop.release());
            prop_assert_eq!((got, stop.hit()), (want, hit.map(|index| strings[index].as_str())));
        }
    }

    fn strings(strings: &[&str]) -> Vec<String> {
        strings.iter().map(|s| s.to_string()).collect()
    }

    #[test]
    fn holds_back_only_what_may_become_a_stop() {
        let mut stop = StopStrings::new(&strings(&["</s>", "", "STOP"])).unwrap();
        assert_eq!(["a <", "b> S", "TO", "STO"].map(|piece| stop.push(piece)), ["a ", "<b> ", "", "STO"]);
        assert_eq!(stop.hit(), None);
        assert_eq!(["P and more", "x"].map(|piece| stop.push(piece)), ["", ""]);
        assert_eq!((stop.release(), stop.hit()), (String::new(), Some("STOP")));
    }

    #[test]
    fn nothing_matches_across_a_release() {
        let mut stop = StopStrings::new(&strings(&["STOP"])).unwrap();
        assert_eq!(
            (stop.push("ST"), stop.release(), stop.push("OP ST")),
            ("".into(), "ST".into(), "OP ".into())
        );
        assert_eq!((stop.push("OP"), stop.hit()), (String::new(), Some("STOP")));
    }

    #[test]
    fn hostile_text_takes_linear_time() {
        let strings: Vec<String> = (1..=MAX_STRINGS).map(|i| "a".repeat(MAX_BYTES - i) + "b").collect();
        let mut stop = StopStrings::new(&strings).unwrap();
        let passed: usize = (0..200).map(|_| stop.push(&"a".repeat(1000)).len()).sum();
        assert_eq!(passed + stop.release().len(), 200_000);
    }

    #[test]
    fn too_much_is_refused() {
        let refused = |strings: &[String]| StopStrings::new(strings).unwrap_err().to_string();
        let long = strings(&["a", &"a".repeat(1025)]);
        assert_eq!(refused(&long), "stop string 1 has 1025 bytes; at most 1024 are allowed");
        assert_eq!(refused(&strings(&["a"; 33])), "33 stop strings were given; at most 32 are allowed");
    }
}
